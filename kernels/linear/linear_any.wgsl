// y[m, N] = x[m, K] @ W[N, K]^T for every shape: the slow, simple fallback.
// One invocation computes two rows of one token. The grid is folded over x and y; z is the token.
// Needs nothing. Parts: f16, (scales,) weight_*, epilogue_* (without a workgroup epilogue).
const K: u32 = 32u;
const N: u32 = 2u;
const WORKGROUP: u32 = 64u;
@group(0) @binding(5) var<storage, read> x: array<f32>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>) {
  let row = 2u * (id.x + id.y * workgroups.x * WORKGROUP);
  if (row >= N) { return; }
  let row1 = min(row + 1u, N - 1u);
  var sum = vec2<f32>();
  for (var k = 0u; k < K; k++) { sum += x[id.z * K + k] * vec2<f32>(weight(row, k), weight(row1, k)); }
  epilogue(id.z, row, sum);
}
