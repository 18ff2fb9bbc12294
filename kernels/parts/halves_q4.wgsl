// Role halves: ROW_LANES invocations stage the 64 k of a row from block `first` on. load_lane(row, first, lane) loads a lane's share,
// and halves makes it f16, times its scale: a vec4 for every eight weights, the pairs (0, 4), (1, 5), (2, 6) and (3, 7), as blocks_f16
// has them. scale is (scale, offset) of the first and of the last 16 of a block.
// A lane has a block of q4 weights, 16 bytes. A nibble is the last bits of 1024 or, without a shift, the four before.
// Needs K % 64 == 0. Parts: half2; tile_f16.
const K: u32 = 64u;
const ROW_LANES: u32 = 2u;
const HAS_OFFSET: bool = false;
const ZERO: f16 = select(8.0h, 0.0h, HAS_OFFSET);
struct Raw { q: vec4<u32> }
@group(0) @binding(6) var<storage, read> w: array<vec4<u32>>;
fn load_lane(row: u32, first: u32, lane: u32) -> Raw { return Raw(w[row * (K / 32u) + first + lane]); }
fn eight(q: u32, low: vec2<f16>, high: vec2<f16>) -> vec4<u32> {
  const LOW_ZERO = 1024.0h + ZERO;
  const HIGH_ZERO = 1024.0h + 16.0h * ZERO;
  let bits = (vec4<u32>(q, q, q >> 8u, q >> 8u) & vec4<u32>(0x000F000Fu, 0x00F000F0u, 0x000F000Fu, 0x00F000F0u)) ^ vec4<u32>(0x64006400u);
  return vec4<u32>(half2(bits.x, LOW_ZERO, low), half2(bits.y, HIGH_ZERO, high), half2(bits.z, LOW_ZERO, low), half2(bits.w, HIGH_ZERO, high));
}
fn halves(r: Raw, scale: vec4<f32>, lane: u32) -> Halves {
  let low = vec4<f16>(scale);
  let high = vec4<f16>(scale * vec4<f32>(0.0625, 1.0, 0.0625, 1.0));
  return Halves(eight(r.q.x, low.xy, high.xy),
                eight(r.q.y, low.xy, high.xy),
                eight(r.q.z, low.zw, high.zw),
                eight(r.q.w, low.zw, high.zw));
}
