// Role prologue, storage of its results: the inputs of a linear of TOKENS tokens in workgroup memory, as int8 blocks
// (see inputs_int8).
// store_inputs(a, b, octet, index, in_range) quantises and stores the eight values from 8 * octet on; every invocation
// must call it. inputs(token, b) = block b.
// Needs INPUT_WIDTH % 32 == 0. Parts: a prologue_*, int8_block_*.
const K: u32 = 32u;
const INPUT_WIDTH: u32 = K;  // more than a row of the weights where several experts have inputs, less for a piece of them
const TOKENS: u32 = 1u;
const HALF_SUMS: bool = true;  // keep the sums of 16 values too, for groups of 16
const SCALE_VEC2: u32 = select(1u, 2u, HALF_SUMS);
struct Inputs { even: vec4<u32>, odd: vec4<u32>, scale: vec4<f32> }
const PLANE: u32 = TOKENS * INPUT_WIDTH / 32u;
var<workgroup> blocks: array<vec4<u32>, 2u * PLANE>;  // [even, odd][TOKENS * INPUT_WIDTH / 32]: adjacent lanes read adjacent 16 bytes
var<workgroup> input_scales: array<vec2<f32>, SCALE_VEC2 * PLANE>;  // (d, d * sum), then (d * sum of the first 16, of the last 16)
fn inputs(token: u32, b: u32) -> Inputs {
  let i = token * (INPUT_WIDTH / 32u) + b;
  let whole = input_scales[i];
  var halves = vec2<f32>();
  if (HALF_SUMS) { halves = input_scales[PLANE + i]; }
  return Inputs(blocks[i], blocks[PLANE + i], vec4<f32>(whole.x, halves, whole.y));
}
fn store_inputs(a: vec4<f32>, b: vec4<f32>, octet: u32, index: u32, in_range: bool) {
  let block = quantise_block(a, b, index);
  let i = octet / 4u;
  let j = octet % 4u;
  let half = j == 1u || j == 2u;
  if (in_range) { blocks[i][j] = block.even; blocks[PLANE + i][j] = block.odd; }
  if (in_range && !half) { input_scales[i][j / 3u] = bitcast<f32>(block.scale); }
  if (in_range && half && HALF_SUMS) { input_scales[PLANE + i][j - 1u] = bitcast<f32>(block.scale); }
}
