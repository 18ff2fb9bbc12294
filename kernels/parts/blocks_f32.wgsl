// Role blocks: 32 activations as f32 in y, of which four neighbouring invocations bring eight each, lo and hi. block_word(token, b, blocks)
// is the first vec4 of block b of a token.
@group(0) @binding(0) var<storage, read_write> y: array<vec4<f32>>;
fn block_word(token: u32, b: u32, blocks: u32) -> u32 { return 8u * (token * blocks + b); }
fn store_block(first: u32, blocks: u32, lo: vec4<f32>, hi: vec4<f32>, index: u32, live: bool) {
  if (!live) { return; }
  y[first + index % 4u * 2u] = lo;
  y[first + index % 4u * 2u + 1u] = hi;
}
