// Role blocks: 32 activations as an int8 block (see int8_block_subgroup) in y.
// In global memory the even, odd and scale words of all blocks of a token are three planes, so that adjacent lanes read
// adjacent 16 bytes: block_word(token, b, blocks) is the first word of block b in plane 0, of `blocks` blocks in each
// plane; planes are 4 * blocks words apart.
// Four neighbouring invocations bring eight values each, lo and hi; every invocation must call store_block. Parts: int8_block_*.
@group(0) @binding(0) var<storage, read_write> y: array<u32>;
fn block_word(token: u32, b: u32, blocks: u32) -> u32 { return 4u * (3u * token * blocks + b); }
fn store_block(first: u32, blocks: u32, lo: vec4<f32>, hi: vec4<f32>, index: u32, live: bool) {
  let block = quantise_block(lo, hi, index);
  let at = first + index % 4u;
  if (live) { y[at] = block.even; y[at + 4u * blocks] = block.odd; y[at + 8u * blocks] = block.scale; }
}
