// y[m, USED, N] = x @ W[expert, N, K]^T for the experts of each token: a GEMV for each choice, token * USED + rank.
// As linear_gemv: LANES invocations share ROW_PAIRS row pairs and split K by blocks of 32. The grid is folded over x and
// y; z is the choice. Experts of other shards are left out.
// Needs K % 32 == 0 (q6: 64), GROUP % 32 == 0 or GROUP == 16.
// Parts: f16, (scales, planes_*,) inputs_*, dot_*, expert_bias, epilogue_*, reduce_*.
const K: u32 = 32u;
const N: u32 = 2u;
const USED: u32 = 2u;
const OWN_INPUTS: bool = false;                         // x[m, USED, K], else x[m, K]
const FIRST_EXPERT: u32 = 0u;                           // of this shard
const SHARD_EXPERTS: u32 = 1u;
const LANES: u32 = 64u;
const ROW_PAIRS: u32 = 1u;                              // 1, 2 or 4
const WORKGROUP: u32 = 64u;
const BLOCKS: u32 = K / 32u;
const ITERATIONS: u32 = (BLOCKS + LANES - 1u) / LANES;  // a constant, so that the driver unrolls the loop and issues loads early
@group(0) @binding(9) var<storage, read> chosen: array<vec2<u32>>;  // [m, USED] (expert, f32 weight)
fn dot_pair(v: Inputs, first: u32, row: u32, b: u32) -> vec2<f32> {  // past the last row loads are clamped and the epilogue guards the store
  return vec2<f32>(dot32(v, fetch(first + min(row, N - 1u), b)), dot32(v, fetch(first + min(row + 1u, N - 1u), b)));
}
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) index: u32) {
  let choice = workgroup.z;
  let expert = chosen[choice].x - FIRST_EXPERT;  // wraps around to a large number for those before
  if (expert >= SHARD_EXPERTS) { return; }
  let first = expert * N;
  let input_row = select(choice / USED, choice, OWN_INPUTS);
  let lane = index % LANES;
  let workgroup_index = workgroup.x + workgroup.y * workgroups.x;
  let row = 2u * ROW_PAIRS * (workgroup_index * (WORKGROUP / LANES) + index / LANES);
  var s0 = vec2<f32>();
  var s1 = vec2<f32>();
  var s2 = vec2<f32>();
  var s3 = vec2<f32>();
  for (var i = 0u; i < ITERATIONS; i++) {
    let b = lane + i * LANES;
    if (BLOCKS % LANES == 0u || b < BLOCKS) {
      let v = inputs(input_row, b);
      s0 += dot_pair(v, first, row, b);
      if (ROW_PAIRS > 1u) { s1 += dot_pair(v, first, row + 2u, b); }
      if (ROW_PAIRS > 2u) { s2 += dot_pair(v, first, row + 4u, b); s3 += dot_pair(v, first, row + 6u, b); }
    }
  }
  var sum = sum_lanes(s0, index);
  if (ROW_PAIRS > 1u) { s1 = sum_lanes(s1, index); sum = select(sum, s1, lane == 1u); }
  if (ROW_PAIRS > 2u) {
    s2 = sum_lanes(s2, index); sum = select(sum, s2, lane == 2u);
    s3 = sum_lanes(s3, index); sum = select(sum, s3, lane == 3u);
  }
  if (lane < ROW_PAIRS) { epilogue(choice, row + 2u * lane, sum + expert_bias(expert, row + 2u * lane)); }  // lane i stores row pair i
  workgroup_epilogue(workgroup_index, choice, choice + 1u, index);
}
