// Role stage: int8 inputs through workgroup memory, LANES blocks of every token at a time, in two buffers by turns.
// load_inputs(first, index) loads them, beginning with block `first`; stage_inputs(buffer, index) stores what was loaded;
// staged_inputs(token, b, buffer) is block b of a token, after a barrier. Parts: inputs_int8.
const K: u32 = 32u;
const TOKENS: u32 = 4u;
const LANES: u32 = 16u;
const WORKGROUP: u32 = 256u;
const STAGED_VEC4S: u32 = 3u * TOKENS * LANES;  // of a buffer
const X_LOADS: u32 = (STAGED_VEC4S + WORKGROUP - 1u) / WORKGROUP;
var<workgroup> staged: array<vec4<u32>, 2u * STAGED_VEC4S>;  // [buffer][token][even, odd, scale][lane]
var<private> loaded: array<vec4<u32>, X_LOADS>;
fn load_inputs(first: u32, index: u32) {
  for (var i = 0u; i < X_LOADS; i++) {
    let n = index + i * WORKGROUP;
    let token = min(n / (3u * LANES), step.rows - 1u);
    loaded[i] = x[(3u * token + n / LANES % 3u) * (K / 32u) + min(first + n % LANES, K / 32u - 1u)];
  }
}
fn stage_inputs(buffer: u32, index: u32) {
  for (var i = 0u; i < X_LOADS; i++) {
    let n = index + i * WORKGROUP;
    if (STAGED_VEC4S % WORKGROUP == 0u || n < STAGED_VEC4S) { staged[buffer * STAGED_VEC4S + n] = loaded[i]; }
  }
}
fn staged_inputs(token: u32, b: u32, buffer: u32) -> Inputs {
  let i = 3u * LANES * (buffer * TOKENS + token) + b % LANES;
  return Inputs(staged[i], staged[i + LANES], bitcast<vec4<f32>>(staged[i + 2u * LANES]));
}
