// y[m, N] = x[m, K] @ W[N, K]^T, a few tokens (m <= TOKENS <= 16): GEMV of a small batch.
// LANES invocations share one or two row pairs and split K by blocks of 32. Weights are unpacked once for all tokens, so
// that a token more costs its dot products and no weights. With PREFETCH the next block's weights are in flight
// meanwhile. With STAGED, which needs PREFETCH, the tokens' x is read from workgroup memory. TOKEN_TEAMS teams of
// invocations take the same rows and share the tokens: fewer sums leave registers for more workgroups at a time.
// Sums have names: an array that a loop indexes may be kept in memory.
// Needs K % 32 == 0 (q6: 64), GROUP % 32 == 0 or GROUP == 16, TOKENS / TOKEN_TEAMS 2, 4, 8 or 16.
// Parts: f16, (scales, planes_*,) inputs_*, dot_*, stage_*, epilogue_*, reduce_*.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const K: u32 = 32u;
const N: u32 = 2u;
const TOKENS: u32 = 4u;     // 2, 4, 8 or 16
const TOKEN_TEAMS: u32 = 1u;
const OWN_TOKENS: u32 = TOKENS / TOKEN_TEAMS;
const LANES: u32 = 32u;
const ROW_PAIRS: u32 = 1u;  // 1 or 2
const WORKGROUP: u32 = 128u;
const ROWS: u32 = 2u * ROW_PAIRS;
const BLOCKS: u32 = K / 32u;
const ITERATIONS: u32 = (BLOCKS + LANES - 1u) / LANES;
const STAGED: u32 = 0u;     // 1: with stage_int8; 0: with stage_none
const PREFETCH: u32 = 0u;   // 1: on
const NO_TAIL: bool = BLOCKS % LANES == 0u;  // every lane has a block in every iteration
struct FourRows { a: Weights, b: Weights, c: Weights, d: Weights }
struct Totals {  // of the four rows, by token
  t0: vec4<f32>, t1: vec4<f32>, t2: vec4<f32>, t3: vec4<f32>, t4: vec4<f32>, t5: vec4<f32>, t6: vec4<f32>, t7: vec4<f32>,
  t8: vec4<f32>, t9: vec4<f32>, t10: vec4<f32>, t11: vec4<f32>, t12: vec4<f32>, t13: vec4<f32>, t14: vec4<f32>, t15: vec4<f32>,
}
@group(0) @binding(8) var<uniform> step: Step;
fn fetch_row(row: u32, b: u32) -> Weights {  // past the last row or block loads are clamped, and nobody uses them
  return fetch(min(row, N - 1u), min(b, BLOCKS - 1u));
}
fn fetch_rows(row: u32, b: u32) -> FourRows {
  let first = fetch_row(row, b);
  let second = fetch_row(row + 1u, b);
  if (ROW_PAIRS == 1u) { return FourRows(first, second, first, second); }
  return FourRows(first, second, fetch_row(row + 2u, b), fetch_row(row + 3u, b));
}
fn add_dots(s: vec4<f32>, v: Inputs, w0: Unpacked, w1: Unpacked, w2: Unpacked, w3: Unpacked) -> vec4<f32> {
  if (ROW_PAIRS == 1u) { return vec4<f32>(add_dot(s.x, v, w0), add_dot(s.y, v, w1), 0.0, 0.0); }
  return vec4<f32>(add_dot(s.x, v, w0), add_dot(s.y, v, w1), add_dot(s.z, v, w2), add_dot(s.w, v, w3));
}
fn add_block(s: ptr<function, Totals>, b: u32, w: FourRows, buffer: u32, token0: u32) {
  let w0 = unpack(w.a); let w1 = unpack(w.b); let w2 = unpack(w.c); let w3 = unpack(w.d);
  (*s).t0 = add_dots((*s).t0, staged_inputs(token0, b, buffer), w0, w1, w2, w3); (*s).t1 = add_dots((*s).t1, staged_inputs(token0 + 1u, b, buffer), w0, w1, w2, w3);
  if (OWN_TOKENS > 2u) { (*s).t2 = add_dots((*s).t2, staged_inputs(token0 + 2u, b, buffer), w0, w1, w2, w3); (*s).t3 = add_dots((*s).t3, staged_inputs(token0 + 3u, b, buffer), w0, w1, w2, w3); }
  if (OWN_TOKENS > 4u) {
    (*s).t4 = add_dots((*s).t4, staged_inputs(token0 + 4u, b, buffer), w0, w1, w2, w3); (*s).t5 = add_dots((*s).t5, staged_inputs(token0 + 5u, b, buffer), w0, w1, w2, w3);
    (*s).t6 = add_dots((*s).t6, staged_inputs(token0 + 6u, b, buffer), w0, w1, w2, w3); (*s).t7 = add_dots((*s).t7, staged_inputs(token0 + 7u, b, buffer), w0, w1, w2, w3);
  }
  if (OWN_TOKENS > 8u) {
    (*s).t8 = add_dots((*s).t8, staged_inputs(token0 + 8u, b, buffer), w0, w1, w2, w3); (*s).t9 = add_dots((*s).t9, staged_inputs(token0 + 9u, b, buffer), w0, w1, w2, w3);
    (*s).t10 = add_dots((*s).t10, staged_inputs(token0 + 10u, b, buffer), w0, w1, w2, w3); (*s).t11 = add_dots((*s).t11, staged_inputs(token0 + 11u, b, buffer), w0, w1, w2, w3);
    (*s).t12 = add_dots((*s).t12, staged_inputs(token0 + 12u, b, buffer), w0, w1, w2, w3); (*s).t13 = add_dots((*s).t13, staged_inputs(token0 + 13u, b, buffer), w0, w1, w2, w3);
    (*s).t14 = add_dots((*s).t14, staged_inputs(token0 + 14u, b, buffer), w0, w1, w2, w3); (*s).t15 = add_dots((*s).t15, staged_inputs(token0 + 15u, b, buffer), w0, w1, w2, w3);
  }
}
fn set_sums(sums: ptr<function, array<vec2<f32>, SUMS>>, token: u32, s: vec4<f32>) {
  (*sums)[min(token, OWN_TOKENS - 1u) * ROW_PAIRS] = s.xy;
  if (ROW_PAIRS > 1u) { (*sums)[min(token, OWN_TOKENS - 1u) * ROW_PAIRS + ROW_PAIRS - 1u] = s.zw; }
}
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) index: u32) {
  let lane = index % LANES;
  let workgroup_index = workgroup.x + workgroup.y * workgroups.x;
  const TEAM = WORKGROUP / TOKEN_TEAMS;
  let row = ROWS * (workgroup_index * (TEAM / LANES) + index % TEAM / LANES);
  let token0 = index / TEAM * OWN_TOKENS;
  var s = Totals();
  load_inputs(0u, index);
  var w: FourRows;
  if (PREFETCH == 1u) { w = fetch_rows(row, lane); }
  stage_inputs(0u, index);
  if (STAGED == 1u) { workgroupBarrier(); }
  for (var i = 0u; i < ITERATIONS; i++) {
    let b = lane + i * LANES;
    if (PREFETCH == 0u) { w = fetch_rows(row, b); }
    let current = w;
    load_inputs((i + 1u) * LANES, index);
    if (PREFETCH == 1u) { w = fetch_rows(row, b + LANES); }
    if (NO_TAIL || b < BLOCKS) { add_block(&s, b, current, i % 2u, token0); }
    stage_inputs((i + 1u) % 2u, index);
    if (STAGED == 1u) { workgroupBarrier(); }
  }
  var sums: array<vec2<f32>, SUMS>;
  set_sums(&sums, 0u, s.t0); set_sums(&sums, 1u, s.t1);
  if (OWN_TOKENS > 2u) { set_sums(&sums, 2u, s.t2); set_sums(&sums, 3u, s.t3); }
  if (OWN_TOKENS > 4u) { set_sums(&sums, 4u, s.t4); set_sums(&sums, 5u, s.t5); set_sums(&sums, 6u, s.t6); set_sums(&sums, 7u, s.t7); }
  if (OWN_TOKENS > 8u) {
    set_sums(&sums, 8u, s.t8); set_sums(&sums, 9u, s.t9); set_sums(&sums, 10u, s.t10); set_sums(&sums, 11u, s.t11);
    set_sums(&sums, 12u, s.t12); set_sums(&sums, 13u, s.t13); set_sums(&sums, 14u, s.t14); set_sums(&sums, 15u, s.t15);
  }
  if (HELD == 1u && lane < SUMS) {  // the epilogue's loads are in flight while sums are added up
    epilogue_prefetch(min(token0 + lane / ROW_PAIRS, step.rows - 1u), row + 2u * (lane % ROW_PAIRS));
  }
  sum_each(&sums, index);
  for (var i = 0u; i < HELD; i++) {
    let number = lane * HELD + i;
    if (number < SUMS && token0 + number / ROW_PAIRS < step.rows) {
      epilogue(token0 + number / ROW_PAIRS, row + 2u * (number % ROW_PAIRS), sums[i]);
    }
  }
  workgroup_epilogue(workgroup_index, 0u, step.rows, index);
}
