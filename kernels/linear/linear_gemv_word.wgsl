// y[N] = x[K] @ W[N, K]^T, one token: GEMV by u32 words.
// LANES invocations share a row pair and split K by u32 words (8 weights of q4 each).
// Needs m == 1, K % 8 == 0 and GROUP % 8 == 0: the weights of a word share one scale.
// Parts: f16, (scales,) weight_*, epilogue_* (without a workgroup epilogue), reduce_*.
const K: u32 = 32u;
const N: u32 = 2u;
const LANES: u32 = 64u;
const WORKGROUP: u32 = 64u;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) index: u32) {
  let row = 2u * ((workgroup.x + workgroup.y * workgroups.x) * (WORKGROUP / LANES) + index / LANES);
  let row0 = min(row, N - 1u);  // past the last row loads are clamped and the epilogue guards the store
  let row1 = min(row + 1u, N - 1u);
  var sum = vec2<f32>();
  for (var k8 = index % LANES; k8 < K / 8u; k8 += LANES) {
    let a = x[2u * k8];
    let b = x[2u * k8 + 1u];
    let w0 = weight8(row0, k8);
    let w1 = weight8(row1, k8);
    sum += vec2<f32>(dot(w0[0], a) + dot(w0[1], b), dot(w1[0], a) + dot(w1[1], b));
  }
  sum = sum_lanes(sum, index);
  if (index % LANES == 0u) { epilogue(0u, row, sum); }
}
