// Role strip (see strip_q4), q6 weights: a lane has two neighbouring blocks of every eighth row, whose high bits are 16 bytes and whose
// four sub-scales are a word. With one block of every fourth row it would load twice as many words of both.
// Nibbles and high bits lie as planes_q6 says. A pair of weights v becomes the last bits of 1024 + v or, where nibbles need no
// shift, of 1024 + 16 v.
// Needs GROUP 16, super-blocks of int8 sub-scales without offsets, K % 256 == 0; linear_skinny.
const K: u32 = 1024u;
const ROW_LANES: u32 = 4u;  // lanes that share a row
@group(0) @binding(6) var<storage, read_write> w: array<vec4<u32>>;  // q6 [N][nibbles K/32, high bits K/64]
@group(0) @binding(7) var<storage, read_write> scales: array<u32>;   // [N][K/256][5]: the f16 super-block scale, 16 int8 sub-scales
struct Loads { q0: vec4<u32>, q1: vec4<u32>, q2: vec4<u32>, q3: vec4<u32>, h0: vec4<u32>, h1: vec4<u32>, scales: vec4<u32> }  // two blocks of a row and of the eighth after it
struct StripScales { s0: vec4<f16>, s1: vec4<f16> }  // of both rows: of the first 16 weights of each block, of the last 16
fn lane_block(lane: u32) -> u32 { return lane % 4u * 2u; }
fn scale_skip(b: u32) -> u32 { return 0u; }
fn load_strip(row: u32, b: u32) -> Loads {  // blocks b and b + 1 of rows row and row + 8
  const EIGHT = 3u * K / 8u;  // vec4s of eight rows
  const EIGHT_SCALES = 5u * K / 32u;  // words
  let i = row * (3u * K / 64u) + b;
  let h = row * (3u * K / 64u) + K / 32u + b / 2u;
  let super_block = (row * (K / 256u) + b / 8u) * 5u;
  let sub_scales = super_block + 1u + b % 8u / 2u;
  let s = vec4<u32>(scales[super_block], scales[sub_scales], scales[super_block + EIGHT_SCALES], scales[sub_scales + EIGHT_SCALES]);
  return Loads(w[i], w[i + 1u], w[i + EIGHT], w[i + EIGHT + 1u], w[h], w[h + EIGHT], s);
}
fn row_scales(super_block: u32, sub_scales: u32) -> vec4<f16> {  // a sub-scale + 128 is the last bits of 1024
  let bytes = sub_scales ^ 0x80808080u;
  let first = bitcast<vec2<f16>>((bytes & 0x00FF00FFu) | magic) - vec2<f16>(1152.0h);
  let last = bitcast<vec2<f16>>(((bytes >> 8u) & 0x00FF00FFu) | magic) - vec2<f16>(1152.0h);
  return vec4<f16>(first, last) * (bitcast<vec2<f16>>(super_block).x * W_UNIT);  // W_UNIT first: the scale is often subnormal
}
fn strip_scales(loads: Loads, skip: u32) -> StripScales {
  return StripScales(row_scales(loads.scales.x, loads.scales.y), row_scales(loads.scales.z, loads.scales.w));
}
fn high_bits(h: vec2<u32>, p: u32) -> vec4<u32> {  // of the pairs of the four eights, above their nibbles; h: of even and of odd weights
  if (p == 0u) { return vec4<u32>(h.x << 4u, h.x >> 4u, h.x << 2u, h.x >> 6u) & vec4<u32>(0x00300030u); }
  if (p == 1u) { return vec4<u32>(h.y << 8u, h.y, h.y << 6u, h.y >> 2u) & vec4<u32>(0x03000300u); }
  if (p == 2u) { return vec4<u32>(h.x, h.x >> 8u, h.x >> 2u, h.x >> 10u) & vec4<u32>(0x00300030u); }
  return vec4<u32>(h.y << 4u, h.y >> 4u, h.y << 2u, h.y >> 6u) & vec4<u32>(0x03000300u);
}
fn quarter(q: vec4<u32>, h: vec2<u32>, p: u32, first: f16, last: f16) -> vec4<u32> {
  let high = p % 2u == 1u;
  let two = select(q.xy, q.zw, p >= 2u);
  let nibbles = (vec4<u32>(two.x, two.x >> 8u, two.y, two.y >> 8u) & vec4<u32>(select(0x000F000Fu, 0x00F000F0u, high))) | vec4<u32>(magic);
  let v = nibbles | high_bits(h, p);
  let zero = select(1056.0h, 1536.0h, high);
  let scale = select(first, last, p >= 2u);
  let s = select(scale, scale * 0.0625h, high);
  return vec4<u32>(scaled(v.x, zero, s), scaled(v.y, zero, s), scaled(v.z, zero, s), scaled(v.w, zero, s));
}
fn stage(at: u32, l: Loads, p: u32, s: StripScales) {
  store_quarter(at, quarter(l.q0, l.h0.xy, p, s.s0.x, s.s0.z));
  store_quarter(at + 2u, quarter(l.q1, l.h0.zw, p, s.s0.y, s.s0.w));
  store_quarter(at + 8u * PITCH, quarter(l.q2, l.h1.xy, p, s.s1.x, s.s1.z));
  store_quarter(at + 8u * PITCH + 2u, quarter(l.q3, l.h1.zw, p, s.s1.y, s.s1.w));
}
