// Role planes: load_raw(row, b) loads 32 q4 weights of a row, one 16-byte load; planes unpacks them into bytes, the 16
// even weights and the 16 odd ones; signed_planes into signed bytes, which are the weights divided by UNIT.
// Needs K % 32 == 0.
const K: u32 = 32u;
const HAS_OFFSET: bool = false;
const ZERO: f32 = select(8.0, 0.0, HAS_OFFSET);
const UNIT: f32 = select(0.0625, 1.0, HAS_OFFSET);
const SIGNS: u32 = 0u;  // bytes are unsigned
const OWN_SCALE: bool = false;  // the scales are stored beside the weights
struct Raw { q: vec4<u32> }
struct Planes { even: vec4<u32>, odd: vec4<u32> }
@group(0) @binding(6) var<storage, read> w: array<vec4<u32>>;
fn load_raw(row: u32, b: u32) -> Raw { return Raw(w[row * (K / 32u) + b]); }
fn planes(r: Raw) -> Planes {
  return Planes(r.q & vec4<u32>(0x0F0F0F0Fu), (r.q >> vec4<u32>(4u)) & vec4<u32>(0x0F0F0F0Fu));
}
fn signed_planes(r: Raw) -> Planes {  // 16 * (nibble - 8): a nibble in the upper half of a byte needs no subtraction
  if (HAS_OFFSET) { return planes(r); }
  let high = vec4<u32>(0xF0F0F0F0u); let sign = vec4<u32>(0x80808080u);
  return Planes(((r.q << vec4<u32>(4u)) & high) ^ sign, (r.q & high) ^ sign);
}
fn raw_scale(r: Raw) -> f32 { return 1.0; }
