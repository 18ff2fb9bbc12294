// y[m, N] = x[m, K] @ W[N, K]^T, many tokens, without tiles.
// One workgroup per token and row pair; its lanes split K by 8 weights. Every token reads all weights again.
// The baseline of linear_gemm; no route selects it.
// Needs K % 8 == 0 and GROUP % 8 == 0.
// Parts: f16, (scales,) weight_*, epilogue_* (without a workgroup epilogue), reduce_*.
const K: u32 = 32u;
const N: u32 = 2u;
const LANES: u32 = 64u;
const WORKGROUP: u32 = 64u;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;  // [m, K/4]
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) index: u32) {
  let row = 2u * (workgroup.x + workgroup.y * workgroups.x);
  let row0 = min(row, N - 1u);  // past the last row loads are clamped and the epilogue guards the store
  let row1 = min(row + 1u, N - 1u);
  let x0 = workgroup.z * (K / 4u);
  var sum = vec2<f32>();
  for (var k8 = index; k8 < K / 8u; k8 += LANES) {
    let a = x[x0 + 2u * k8];
    let b = x[x0 + 2u * k8 + 1u];
    let w0 = weight8(row0, k8);
    let w1 = weight8(row1, k8);
    sum += vec2<f32>(dot(w0[0], a) + dot(w0[1], b), dot(w1[0], a) + dot(w1[1], b));
  }
  sum = sum_lanes(sum, index);
  if (index == 0u) { epilogue(workgroup.z, row, sum); }
}
