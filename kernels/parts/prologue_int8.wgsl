// Role prologue, storage of its results: the inputs of a linear of one token in workgroup memory, as int8 blocks (see
// inputs_int8).
// store_inputs(a, b, octet, index, in_range) quantises and stores the eight values from 8 * octet on; every invocation
// must call it. inputs(token, b) = block b.
// Needs K % 32 == 0. Parts: prologue_norm or prologue_merge, int8_block_*.
const K: u32 = 32u;
struct Inputs { even: vec4<u32>, odd: vec4<u32>, scale: vec4<f32> }
var<workgroup> blocks: array<vec4<u32>, 3u * K / 32u>;
fn inputs(token: u32, b: u32) -> Inputs {
  return Inputs(blocks[3u * b], blocks[3u * b + 1u], bitcast<vec4<f32>>(blocks[3u * b + 2u]));
}
fn store_inputs(a: vec4<f32>, b: vec4<f32>, octet: u32, index: u32, in_range: bool) {
  let block = quantise_block(a, b, index);
  let i = 3u * (octet / 4u);
  let j = octet % 4u;
  if (in_range) { blocks[i][j] = block.even; blocks[i + 1u][j] = block.odd; blocks[i + 2u][j] = block.scale; }
}
