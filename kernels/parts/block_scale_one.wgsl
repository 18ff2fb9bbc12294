// Role block_scale: load_block_scale(before, row, first, place, next) loads the scale of block first + next of a row, next 0 or 1.
// `before` is what it loaded for first - 2, and `place` counts the blocks since the beginning of a round of eight.
// block_scale(s, next) is then (scale, offset) of the first and of the second 16 k.
// Needs GROUP % 32 == 0 or GROUP == 16. Parts: scales.
const GROUP: u32 = 32u;
struct BlockScale { v: vec4<f32> }
fn load_block_scale(before: BlockScale, row: u32, first: u32, place: u32, next: u32) -> BlockScale {
  let b = first + next;
  let s = scale_at(row, b * 32u / GROUP);
  if (GROUP == 16u) { return BlockScale(vec4<f32>(s, scale_at(row, b * 2u + 1u))); }
  return BlockScale(vec4<f32>(s, s));
}
fn block_scale(s: BlockScale, next: u32) -> vec4<f32> { return s.v; }
