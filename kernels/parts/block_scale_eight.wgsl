// Role block_scale (see block_scale_one): the scales of eight blocks of a row are loaded at once, 16 bytes, and then used two by
// two. The rows that a subgroup loads are far apart, so that a load of two bytes takes the cache as long as one of 16.
// Needs f16 scales without offsets, GROUP 32, K % 256 == 0, and rounds that begin with a multiple of 8. Parts: f16.
const K: u32 = 256u;
const GROUP: u32 = 32u;
const SCALE_BITS: u32 = 16u;
struct BlockScale { words: vec4<u32> }
@group(0) @binding(7) var<storage, read> scales: array<vec4<u32>>;
fn load_block_scale(before: BlockScale, row: u32, first: u32, place: u32, next: u32) -> BlockScale {
  if (place == 0u) { return BlockScale(scales[row * (K / 256u) + first / 8u]); }
  return BlockScale(before.words.yzwx);
}
fn block_scale(s: BlockScale, next: u32) -> vec4<f32> {
  let scale = unpack_f16(s.words.x >> (16u * next)).x;
  return vec4<f32>(scale, 0.0, scale, 0.0);
}
