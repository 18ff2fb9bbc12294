// Role blocks: 32 activations as an f16 block in y, for linear_matrix and linear_skinny: 16 words, of which word 4j + p holds the values p and
// p + 4 of the eight that the j-th of four neighbouring invocations brings, lo and hi. block_word(token, b, blocks) is the first
// word of block b of a token.
// Values are divided by X_UNIT and cut at the largest f16, that is, beyond a million. Parts: f16.
const X_UNIT: f32 = 16.0;  // as in linear_matrix
@group(0) @binding(0) var<storage, read_write> y: array<u32>;
fn block_word(token: u32, b: u32, blocks: u32) -> u32 { return 16u * (token * blocks + b); }
fn store_block(first: u32, blocks: u32, lo: vec4<f32>, hi: vec4<f32>, index: u32, live: bool) {
  if (!live) { return; }
  for (var p = 0u; p < 4u; p++) { y[first + index % 4u * 4u + p] = pack_f16(vec2<f32>(lo[p], hi[p]) / X_UNIT); }
}
