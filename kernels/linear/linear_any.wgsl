// y[m, N] = x[m, K] @ W[N, K]^T for every shape: the slow, obvious kernel. One invocation = one token x two rows.
// Parts: half, (scales,) weight, out. Needs nothing.
const K: u32 = 32u;
const N: u32 = 2u;
const WORKGROUP: u32 = 64u;
@group(0) @binding(5) var<storage, read> x: array<f32>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
  let row = 2u * (id.x + id.y * groups.x * WORKGROUP);
  if (row >= N) { return; }
  let row1 = min(row + 1u, N - 1u);
  var sum = vec2<f32>();
  for (var k = 0u; k < K; k++) { sum += x[id.z * K + k] * vec2<f32>(weight(row, k), weight(row1, k)); }
  emit(id.z, row, sum);
}
