// y[m, N] = x[m, K] @ W[N, K]^T, a few tokens (m <= TOKENS <= 8), as a stage of a fused kernel (gpu/fuse.py): GEMV of a
// small batch in a grid-stride loop over rows.
// LANES invocations share one or two row pairs and split K by blocks of 32. Weights are unpacked once for all tokens.
// Loads of IN_FLIGHT iterations are always in flight, the first ones before the prologue waits for x.
// A workgroup takes WORKGROUP_ROWS adjacent rows, or PASSES times as many one after the other, for an epilogue that needs
// the results of more rows. Sums have names: an array that a loop indexes may be kept in memory.
// Needs TOKENS * ROW_PAIRS <= SUBGROUP, K % 32 == 0 (q6: 64), GROUP % 32 == 0 or GROUP == 16.
// Parts: f16, (scales, planes_*,) inputs_int8 or prologue_*, dot_*, epilogue_*, reduce_*.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const K: u32 = 32u;
const N: u32 = 2u;
const TOKENS: u32 = 4u;     // 2, 4 or 8
const LANES: u32 = 32u;
const ROW_PAIRS: u32 = 1u;  // 1 or 2
const WORKGROUP: u32 = 64u;
const ROWS: u32 = 2u * ROW_PAIRS;
const BLOCKS: u32 = K / 32u;
const ITERATIONS: u32 = (BLOCKS + LANES - 1u) / LANES;
const PREFETCH: u32 = 1u;                                  // prefetch depth: iterations in flight, as many as registers hold
const IN_FLIGHT: u32 = min(ITERATIONS, PREFETCH);
const NO_TAIL: bool = BLOCKS % (LANES * IN_FLIGHT) == 0u;  // every lane has a block in every iteration
const WORKGROUP_ROWS: u32 = ROWS * (WORKGROUP / LANES);
const PASSES: u32 = 1u;
struct FourRows { a: Weights, b: Weights, c: Weights, d: Weights }
@group(0) @binding(8) var<uniform> step: Step;
fn fetch_row(row: u32, b: u32) -> Weights {  // past the last row loads are clamped and the epilogue guards the store
  return fetch(slab_index() * N + min(row, N - 1u), select(min(b, BLOCKS - 1u), b, NO_TAIL));
}
fn fetch_rows(row: u32, b: u32) -> FourRows {
  let first = fetch_row(row, b);
  let second = fetch_row(row + 1u, b);
  if (ROW_PAIRS == 1u) { return FourRows(first, second, first, second); }
  return FourRows(first, second, fetch_row(row + 2u, b), fetch_row(row + 3u, b));
}
fn add_dots(sums: vec4<f32>, v: Inputs, a: Unpacked, b: Unpacked, c: Unpacked, d: Unpacked) -> vec4<f32> {
  if (ROW_PAIRS == 1u) { return vec4<f32>(add_dot(sums.x, v, a), add_dot(sums.y, v, b), 0.0, 0.0); }
  return vec4<f32>(add_dot(sums.x, v, a), add_dot(sums.y, v, b), add_dot(sums.z, v, c), add_dot(sums.w, v, d));
}
fn set_sums(sums: ptr<function, array<vec2<f32>, SUMS>>, token: u32, s: vec4<f32>) {
  (*sums)[min(token, TOKENS - 1u) * ROW_PAIRS] = s.xy;
  if (ROW_PAIRS > 1u) { (*sums)[min(token, TOKENS - 1u) * ROW_PAIRS + ROW_PAIRS - 1u] = s.zw; }
}
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) index: u32) {
  let lane = index % LANES;
  let stride = (workgroups.x * workgroups.y - 1u) * PASSES * WORKGROUP_ROWS + WORKGROUP_ROWS;  // from the last pass to the next first
  var first_row = (workgroup.x + workgroup.y * workgroups.x) * PASSES * WORKGROUP_ROWS;
  var pass_number = 1u;
  var row = first_row + ROWS * (index / LANES);
  let token = lane / ROW_PAIRS;  // whose results of a row pair this lane stores
  let pair = 2u * (lane % ROW_PAIRS);
  let stores = lane < SUMS && token < step.rows;
  if (stores) { epilogue_prefetch(token, row + pair); }
  var w: array<FourRows, IN_FLIGHT>;
  for (var j = 0u; j < IN_FLIGHT; j++) { w[j] = fetch_rows(row, lane + j * LANES); }
  run_prologue(index);
  let scale = output_scale(min(token, TOKENS - 1u));
  let iterations = ITERATIONS + opaque_zero();  // not a constant: a driver that unrolls the loop runs out of registers
  loop {
    var s0 = vec4<f32>(); var s1 = vec4<f32>(); var s2 = vec4<f32>(); var s3 = vec4<f32>();
    var s4 = vec4<f32>(); var s5 = vec4<f32>(); var s6 = vec4<f32>(); var s7 = vec4<f32>();
    let ends = pass_number == PASSES;
    let to_next = select(WORKGROUP_ROWS, stride, ends);
    let has_next = first_row + to_next < N;
    var i = 0u;
    loop {
      let last = IN_FLIGHT == ITERATIONS || i + IN_FLIGHT >= iterations;
      let next_row = select(row, row + to_next, last);
      let next_block = select(lane + (i + IN_FLIGHT) * LANES, lane, last);
      for (var j = 0u; j < IN_FLIGHT; j++) {
        let a = unpack(w[j].a); let b = unpack(w[j].b); let c = unpack(w[j].c); let d = unpack(w[j].d);
        if (!last || has_next) { w[j] = fetch_rows(next_row, next_block + j * LANES); }
        let block = lane + (i + j) * LANES;
        if (NO_TAIL || block < BLOCKS) {
          s0 = add_dots(s0, inputs(0u, block), a, b, c, d); s1 = add_dots(s1, inputs(1u, block), a, b, c, d);
          if (TOKENS > 2u) { s2 = add_dots(s2, inputs(2u, block), a, b, c, d); s3 = add_dots(s3, inputs(3u, block), a, b, c, d); }
          if (TOKENS > 4u) {
            s4 = add_dots(s4, inputs(4u, block), a, b, c, d); s5 = add_dots(s5, inputs(5u, block), a, b, c, d);
            s6 = add_dots(s6, inputs(6u, block), a, b, c, d); s7 = add_dots(s7, inputs(7u, block), a, b, c, d);
          }
        }
      }
      if (last) { break; }
      i += IN_FLIGHT;
    }
    var sums: array<vec2<f32>, SUMS>;
    set_sums(&sums, 0u, s0); set_sums(&sums, 1u, s1);
    if (TOKENS > 2u) { set_sums(&sums, 2u, s2); set_sums(&sums, 3u, s3); }
    if (TOKENS > 4u) { set_sums(&sums, 4u, s4); set_sums(&sums, 5u, s5); set_sums(&sums, 6u, s6); set_sums(&sums, 7u, s7); }
    sum_each(&sums, index);
    if (stores) { epilogue(token, row + pair, sums[0] * scale); }
    if (ends) { workgroup_epilogue(first_row / (PASSES * WORKGROUP_ROWS), 0u, index); }
    if (!has_next) { break; }
    pass_number = select(pass_number + 1u, 1u, ends);
    first_row += to_next;
    row += to_next;
    if (stores) { epilogue_prefetch(token, row + pair); }
  }
}
