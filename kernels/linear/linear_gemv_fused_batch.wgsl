// y[m, N] = x[m, K] @ W[N, K]^T, a few tokens (m <= TOKENS <= 16), as a stage of a fused kernel (gpu/fuse.py): GEMV of a
// small batch in a grid-stride loop over rows.
// LANES invocations share a row pair and split K by blocks of 32. Weights are unpacked once for all tokens. If LANES is half a
// subgroup, both halves read the same inputs at once.
// Loads of IN_FLIGHT iterations are always in flight, the first ones before the prologue waits for x.
// A unit is WORKGROUP_ROWS adjacent rows, or PASSES times as many one after the other, for an epilogue that needs the results of more
// rows. With SHARED_UNITS the last ones, for which there are twice as many workgroups, are computed by two: each takes half the tokens.
// Sums have names: an array that a loop indexes may be kept in memory.
// Needs TOKENS <= min(LANES, SUBGROUP), K % 32 == 0 (q6: 64), GROUP % 32 == 0 or GROUP == 16; with SHARED_UNITS TOKENS > 2,
// 2 * SHARED_UNITS <= workgroups, (UNITS - SHARED_UNITS) % workgroups == 0, UNITS > SHARED_UNITS.
// Parts: f16, (scales, planes_*,) inputs_int8 or prologue_norm, _merge or _blocks, dot_*, epilogue_*, reduce_*.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const K: u32 = 32u;
const N: u32 = 2u;
const TOKENS: u32 = 4u;     // 2, 4, 8 or 16
const LANES: u32 = 32u;
const WORKGROUP: u32 = 64u;
const BLOCKS: u32 = K / 32u;
const ITERATIONS: u32 = (BLOCKS + LANES - 1u) / LANES;
const PREFETCH: u32 = 1u;                                  // prefetch depth: iterations in flight, as many as registers hold
const IN_FLIGHT: u32 = min(ITERATIONS, PREFETCH);
const NO_TAIL: bool = BLOCKS % (LANES * IN_FLIGHT) == 0u;  // every lane has a block in every iteration
const WORKGROUP_ROWS: u32 = 2u * (WORKGROUP / LANES);
const PASSES: u32 = 1u;
const UNIT_ROWS: u32 = PASSES * WORKGROUP_ROWS;
const UNITS: u32 = (N + UNIT_ROWS - 1u) / UNIT_ROWS;
const SHARED_UNITS: u32 = 0u;
const SHARES: u32 = max(SHARED_UNITS, 1u);
struct WeightPair { a: Weights, b: Weights }
@group(0) @binding(8) var<uniform> step: Step;
fn fetch_pair(row: u32, b: u32) -> WeightPair {  // past the last row loads are clamped and the epilogue guards the store
  let first = slab_index() * N;
  let i = select(min(b, BLOCKS - 1u), b, NO_TAIL);
  return WeightPair(fetch(first + min(row, N - 1u), i), fetch(first + min(row + 1u, N - 1u), i));
}
fn add_dots(sums: vec2<f32>, v: Inputs, a: Unpacked, b: Unpacked) -> vec2<f32> {
  return vec2<f32>(add_dot(sums.x, v, a), add_dot(sums.y, v, b));
}
fn set_sum(sums: ptr<function, array<vec2<f32>, SUMS>>, token: u32, s: vec2<f32>) { (*sums)[min(token, TOKENS - 1u)] = s; }
fn first_token(half: u32) -> u32 { return select(0u, TOKENS / 2u, half == 2u); }
fn end_token(half: u32) -> u32 { return min(step.rows, select(TOKENS, TOKENS / 2u, half == 1u)); }
fn stores_token(token: u32, half: u32) -> bool { return token >= first_token(half) && token < end_token(half); }
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) index: u32) {
  let lane = index % LANES;  // and the token whose results this lane stores
  let stride = workgroups.x * workgroups.y;
  let number = workgroup.x + workgroup.y * workgroups.x;
  var unit = number;
  var pass_number = 1u;
  var row = unit * UNIT_ROWS + 2u * (index / LANES);
  var half = 0u;  // 1, 2: this workgroup takes the first, the second half of the tokens
  if (stores_token(lane, half)) { epilogue_prefetch(lane, row); }
  var w: array<WeightPair, IN_FLIGHT>;
  for (var j = 0u; j < IN_FLIGHT; j++) { w[j] = fetch_pair(row, lane + j * LANES); }
  run_prologue(index);
  let scale = output_scale(min(lane, TOKENS - 1u));
  let iterations = ITERATIONS + uniform_zero();  // not a constant: a driver that unrolls the loop runs out of registers
  loop {
    var s0 = vec2<f32>(); var s1 = vec2<f32>(); var s2 = vec2<f32>(); var s3 = vec2<f32>();
    var s4 = vec2<f32>(); var s5 = vec2<f32>(); var s6 = vec2<f32>(); var s7 = vec2<f32>();
    var s8 = vec2<f32>(); var s9 = vec2<f32>(); var s10 = vec2<f32>(); var s11 = vec2<f32>();
    var s12 = vec2<f32>(); var s13 = vec2<f32>(); var s14 = vec2<f32>(); var s15 = vec2<f32>();
    let ends = pass_number == PASSES;
    var next_unit = select(unit, unit + stride, ends);
    var next_half = half;
    if (SHARED_UNITS > 0u && ends && next_unit >= UNITS - SHARED_UNITS) {
      next_unit = select(UNITS, UNITS - SHARED_UNITS + number % SHARES, half == 0u && number < 2u * SHARED_UNITS);
      next_half = 1u + number / SHARES;
    }
    let has_next = next_unit < UNITS;
    let row_after = select(row + WORKGROUP_ROWS, next_unit * UNIT_ROWS + 2u * (index / LANES), ends);
    let lower = half != 2u;
    let upper = half != 1u;
    var i = 0u;
    loop {
      let last = IN_FLIGHT == ITERATIONS || i + IN_FLIGHT >= iterations;
      let next_row = select(row, row_after, last);
      let next_block = select(lane + (i + IN_FLIGHT) * LANES, lane, last);
      let first_input = copy_piece(i * LANES, index);
      for (var j = 0u; j < IN_FLIGHT; j++) {
        let a = unpack(w[j].a); let b = unpack(w[j].b);
        if (!last || has_next) { w[j] = fetch_pair(next_row, next_block + j * LANES); }
        let block = lane + (i + j) * LANES;
        if (NO_TAIL || block < BLOCKS) {
          let at = block - first_input;
          if (lower) { s0 = add_dots(s0, inputs(0u, at), a, b); s1 = add_dots(s1, inputs(1u, at), a, b); }
          if (TOKENS > 2u && select(lower, upper, TOKENS == 4u)) { s2 = add_dots(s2, inputs(2u, at), a, b); s3 = add_dots(s3, inputs(3u, at), a, b); }
          if (TOKENS > 4u && select(lower, upper, TOKENS == 8u)) {
            s4 = add_dots(s4, inputs(4u, at), a, b); s5 = add_dots(s5, inputs(5u, at), a, b);
            s6 = add_dots(s6, inputs(6u, at), a, b); s7 = add_dots(s7, inputs(7u, at), a, b);
          }
          if (TOKENS > 8u && upper) {
            s8 = add_dots(s8, inputs(8u, at), a, b); s9 = add_dots(s9, inputs(9u, at), a, b);
            s10 = add_dots(s10, inputs(10u, at), a, b); s11 = add_dots(s11, inputs(11u, at), a, b);
            s12 = add_dots(s12, inputs(12u, at), a, b); s13 = add_dots(s13, inputs(13u, at), a, b);
            s14 = add_dots(s14, inputs(14u, at), a, b); s15 = add_dots(s15, inputs(15u, at), a, b);
          }
        }
      }
      if (last) { break; }
      i += IN_FLIGHT;
    }
    var sums: array<vec2<f32>, SUMS>;
    set_sum(&sums, 0u, s0); set_sum(&sums, 1u, s1);
    if (TOKENS > 2u) { set_sum(&sums, 2u, s2); set_sum(&sums, 3u, s3); }
    if (TOKENS > 4u) { set_sum(&sums, 4u, s4); set_sum(&sums, 5u, s5); set_sum(&sums, 6u, s6); set_sum(&sums, 7u, s7); }
    if (TOKENS > 8u) {
      set_sum(&sums, 8u, s8); set_sum(&sums, 9u, s9); set_sum(&sums, 10u, s10); set_sum(&sums, 11u, s11);
      set_sum(&sums, 12u, s12); set_sum(&sums, 13u, s13); set_sum(&sums, 14u, s14); set_sum(&sums, 15u, s15);
    }
    sum_each(&sums, index);
    if (stores_token(lane, half)) { epilogue(lane, row, sums[0] * scale); }
    if (ends) { workgroup_epilogue(unit, first_token(half), end_token(half), index); }
    if (!has_next) { break; }
    pass_number = select(pass_number + 1u, 1u, ends);
    unit = next_unit;
    half = next_half;
    row = row_after;
    if (stores_token(lane, half)) { epilogue_prefetch(lane, row); }
  }
}
