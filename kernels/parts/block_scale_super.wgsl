// Role block_scale (see block_scale_one): the super-block scale, with that of the offsets, is loaded once in a round of eight blocks, the
// sub-scales of two blocks, a word, with these blocks. The rows that a subgroup loads are far apart: each load takes the cache a while.
// Needs SCALE_BITS 8, super-blocks of five words (see scales): GROUP 32 with offsets, GROUP 16 without, K % 256 == 0, and rounds
// that begin with a multiple of 8. Parts: f16.
const K: u32 = 256u;
const GROUP: u32 = 16u;
const SCALE_BITS: u32 = 8u;
const HAS_OFFSET: bool = false;
struct BlockScale { super_block: u32, blocks: u32 }
@group(0) @binding(7) var<storage, read> scales: array<u32>;
fn load_block_scale(before: BlockScale, row: u32, first: u32, place: u32, next: u32) -> BlockScale {
  let i = (row * (K / 256u) + first / 8u) * 5u;
  var s = before;
  if (place == 0u) { s.super_block = scales[i]; }
  s.blocks = scales[i + 1u + place / 2u];
  return s;
}
fn block_scale(s: BlockScale, next: u32) -> vec4<f32> {
  let of_super_block = unpack_f16(s.super_block);
  let of_block = vec2<f32>(unpack4xI8(s.blocks >> (16u * next)).xy);
  if (HAS_OFFSET) { return (of_super_block * of_block).xyxy; }
  return vec4<f32>(of_super_block.x * of_block.x, 0.0, of_super_block.x * of_block.y, 0.0);
}
