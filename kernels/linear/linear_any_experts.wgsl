// y[m, USED, N] = x @ W[expert, N, K]^T for the experts of each token, for every shape: the slow, simple fallback.
// One invocation computes two rows of one choice, token * USED + rank. The grid is folded over x and y; z is the choice.
// Experts of other shards are left out. Needs nothing. Parts: f16, (scales,) weight_*, expert_bias, epilogue_* (without a workgroup epilogue).
const K: u32 = 32u;
const N: u32 = 2u;
const USED: u32 = 2u;
const OWN_INPUTS: bool = false;   // x[m, USED, K], else x[m, K]
const FIRST_EXPERT: u32 = 0u;     // of this shard
const SHARD_EXPERTS: u32 = 1u;
const WORKGROUP: u32 = 64u;
@group(0) @binding(5) var<storage, read> x: array<f32>;
@group(0) @binding(9) var<storage, read> chosen: array<vec2<u32>>;  // [m, USED] (expert, f32 weight)
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>) {
  let row = 2u * (id.x + id.y * workgroups.x * WORKGROUP);
  let expert = chosen[id.z].x - FIRST_EXPERT;  // wraps around to a large number for those before
  if (row >= N || expert >= SHARD_EXPERTS) { return; }
  let first = expert * N + row;
  let second = expert * N + min(row + 1u, N - 1u);
  let input_row = select(id.z / USED, id.z, OWN_INPUTS);
  var sum = vec2<f32>();
  for (var k = 0u; k < K; k++) { sum += x[input_row * K + k] * vec2<f32>(weight(first, k), weight(second, k)); }
  epilogue(id.z, row, sum + expert_bias(expert, row));
}
