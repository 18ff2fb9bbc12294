// y[m, USED, N] = x @ W[expert, N, K]^T for the experts of many tokens, in tiles of up to 8 choices of one expert (see
// group_experts): an expert's weights are read once for a tile.
// LANES invocations share a row pair and split K by blocks of 32. The grid is folded over x and y; z is the tile.
// Experts of other shards are left out. Sums have names: an array that a loop indexes may be kept in memory.
// Needs TOKENS == 8, K % 32 == 0 (q6: 64), GROUP % 32 == 0 or GROUP == 16.
// Parts: f16, (scales, planes_*,) inputs_*, dot_*, expert_bias, epilogue_* (without a workgroup epilogue), reduce_*.
const K: u32 = 32u;
const N: u32 = 2u;
const USED: u32 = 2u;
const OWN_INPUTS: bool = false;    // x[m, USED, K], else x[m, K]
const FIRST_EXPERT: u32 = 0u;      // of this shard
const SHARD_EXPERTS: u32 = 1u;
const TILES: u32 = 8u;
const TOKENS: u32 = 8u;
const LANES: u32 = 32u;
const WORKGROUP: u32 = 256u;
const BLOCKS: u32 = K / 32u;
const ITERATIONS: u32 = (BLOCKS + LANES - 1u) / LANES;
@group(0) @binding(9) var<storage, read> groups: array<u32>;  // TILES tiles (expert, first, count, 0), then choices
fn choice_at(tile: u32, i: u32) -> u32 {  // past the last one it is the last one, and nobody uses the result
  return groups[4u * TILES + groups[4u * tile + 1u] + min(i, groups[4u * tile + 2u] - 1u)];
}
fn input_row(tile: u32, i: u32) -> u32 {
  let choice = choice_at(tile, i);
  return select(choice / USED, choice, OWN_INPUTS);
}
fn add_dots(s: vec2<f32>, v: Inputs, w0: Unpacked, w1: Unpacked) -> vec2<f32> {
  return vec2<f32>(add_dot(s.x, v, w0), add_dot(s.y, v, w1));
}
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) index: u32) {
  let tile = workgroup.z;
  let count = groups[4u * tile + 2u];
  let expert = groups[4u * tile] - FIRST_EXPERT;  // wraps around to a large number for those before
  if (count == 0u || expert >= SHARD_EXPERTS) { return; }
  let lane = index % LANES;
  let row = 2u * ((workgroup.x + workgroup.y * workgroups.x) * (WORKGROUP / LANES) + index / LANES);
  let row0 = expert * N + min(row, N - 1u);  // past the last row loads are clamped and the epilogue guards the store
  let row1 = expert * N + min(row + 1u, N - 1u);
  let x0 = input_row(tile, 0u); let x1 = input_row(tile, 1u); let x2 = input_row(tile, 2u); let x3 = input_row(tile, 3u);
  let x4 = input_row(tile, 4u); let x5 = input_row(tile, 5u); let x6 = input_row(tile, 6u); let x7 = input_row(tile, 7u);
  var s0 = vec2<f32>(); var s1 = vec2<f32>(); var s2 = vec2<f32>(); var s3 = vec2<f32>();
  var s4 = vec2<f32>(); var s5 = vec2<f32>(); var s6 = vec2<f32>(); var s7 = vec2<f32>();
  for (var i = 0u; i < ITERATIONS; i++) {
    let b = lane + i * LANES;
    if (BLOCKS % LANES == 0u || b < BLOCKS) {
      let w0 = unpack(fetch(row0, b));
      let w1 = unpack(fetch(row1, b));
      s0 = add_dots(s0, inputs(x0, b), w0, w1);
      if (count > 1u) { s1 = add_dots(s1, inputs(x1, b), w0, w1); }
      if (count > 2u) { s2 = add_dots(s2, inputs(x2, b), w0, w1); s3 = add_dots(s3, inputs(x3, b), w0, w1); }
      if (count > 4u) {
        s4 = add_dots(s4, inputs(x4, b), w0, w1); s5 = add_dots(s5, inputs(x5, b), w0, w1);
        s6 = add_dots(s6, inputs(x6, b), w0, w1); s7 = add_dots(s7, inputs(x7, b), w0, w1);
      }
    }
  }
  var sums = array<vec2<f32>, SUMS>(s0, s1, s2, s3, s4, s5, s6, s7);
  sum_each(&sums, index);
  for (var i = 0u; i < HELD; i++) {
    let token = lane * HELD + i;
    if (token < count) { epilogue(choice_at(tile, token), row, sums[i] + expert_bias(expert, row)); }
  }
}
