// y[N] = x[K] @ W[N, K]^T, one token: GEMV.
// LANES invocations share ROW_PAIRS row pairs and split K by blocks of 32, with 16-byte loads of weights (32 weights of
// q4 each). Loads that do not depend on x (the first weights, the epilogue's prefetch) are issued before the prologue
// runs.
// Needs m == 1, K % 32 == 0 (q6: 64), GROUP % 32 == 0 or GROUP == 16.
// Parts: f16, (scales, planes_*,) inputs_* or prologue_*, dot_*, epilogue_*, reduce_*.
const K: u32 = 32u;
const N: u32 = 2u;
const LANES: u32 = 64u;
const ROW_PAIRS: u32 = 1u;                              // 1, 2 or 4
const WORKGROUP: u32 = 64u;
const BLOCKS: u32 = K / 32u;
const ITERATIONS: u32 = (BLOCKS + LANES - 1u) / LANES;  // a constant, so that the driver unrolls the loop and issues loads early
struct WeightPair { a: Weights, b: Weights }
fn fetch_pair(row: u32, b: u32) -> WeightPair {  // past the last row loads are clamped and the epilogue guards the store
  return WeightPair(fetch(min(row, N - 1u), b), fetch(min(row + 1u, N - 1u), b));
}
fn dot_pair(v: Inputs, w: WeightPair) -> vec2<f32> { return vec2<f32>(dot32(v, w.a), dot32(v, w.b)); }
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) index: u32) {
  let lane = index % LANES;
  let workgroup_index = workgroup.x + workgroup.y * workgroups.x;
  let row = 2u * ROW_PAIRS * (workgroup_index * (WORKGROUP / LANES) + index / LANES);
  if (lane < ROW_PAIRS) { epilogue_prefetch(0u, row + 2u * lane); }
  let first = min(lane, BLOCKS - 1u);
  let w0 = fetch_pair(row, first);
  var w1 = w0;
  if (ROW_PAIRS > 1u) { w1 = fetch_pair(row + 2u, first); }
  run_prologue(index);
  var s0 = vec2<f32>();
  var s1 = vec2<f32>();
  var s2 = vec2<f32>();
  var s3 = vec2<f32>();
  if (lane < BLOCKS) {
    let v = inputs(0u, lane);
    s0 = dot_pair(v, w0);
    if (ROW_PAIRS > 1u) { s1 = dot_pair(v, w1); }
    if (ROW_PAIRS > 2u) { s2 = dot_pair(v, fetch_pair(row + 4u, lane)); s3 = dot_pair(v, fetch_pair(row + 6u, lane)); }
  }
  for (var i = 1u; i < ITERATIONS; i++) {
    let b = lane + i * LANES;
    if (BLOCKS % LANES == 0u || b < BLOCKS) {
      let v = inputs(0u, b);
      s0 += dot_pair(v, fetch_pair(row, b));
      if (ROW_PAIRS > 1u) { s1 += dot_pair(v, fetch_pair(row + 2u, b)); }
      if (ROW_PAIRS > 2u) { s2 += dot_pair(v, fetch_pair(row + 4u, b)); s3 += dot_pair(v, fetch_pair(row + 6u, b)); }
    }
  }
  var sum = sum_lanes(s0, index);
  if (ROW_PAIRS > 1u) { s1 = sum_lanes(s1, index); sum = select(sum, s1, lane == 1u); }
  if (ROW_PAIRS > 2u) {
    s2 = sum_lanes(s2, index); sum = select(sum, s2, lane == 2u);
    s3 = sum_lanes(s3, index); sum = select(sum, s3, lane == 3u);
  }
  if (lane < ROW_PAIRS) { epilogue(0u, row + 2u * lane, sum * output_scale(0u)); }  // lane i stores row pair i
  workgroup_epilogue(workgroup_index, 0u, 1u, index);
}
