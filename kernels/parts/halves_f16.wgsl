// Role halves (see halves_q4) of f16 weights: a lane has an eight, 16 bytes, and neighbouring lanes load whole sectors of memory.
// It stands for `block_scale` as well: floats have none.
// Needs K % 64 == 0 and f16, not BF16. Parts: tile_f16.
const K: u32 = 64u;
const ROW_LANES: u32 = 8u;
const W_UNIT: f32 = 1.0;  // all f16 weights stay in range
struct Raw { q: vec4<u32> }
struct BlockScale { none: u32 }
@group(0) @binding(6) var<storage, read> w: array<vec4<u32>>;
fn load_block_scale(before: BlockScale, row: u32, first: u32, place: u32, next: u32) -> BlockScale { return before; }
fn block_scale(s: BlockScale, next: u32) -> vec4<f32> { return vec4<f32>(); }
fn load_lane(row: u32, first: u32, lane: u32) -> Raw { return Raw(w[row * (K / 8u) + 4u * first + lane]); }
fn halves(r: Raw, scale: vec4<f32>, lane: u32) -> Halves {
  let low = vec2<u32>(0xFFFFu);
  let even = (r.q.xy & low) | (r.q.zw << vec2<u32>(16u));
  let odd = (r.q.xy >> vec2<u32>(16u)) | (r.q.zw & ~low);
  return Halves(vec4<u32>(even.x, odd.x, even.y, odd.y), vec4<u32>(), vec4<u32>(), vec4<u32>());
}
