// Role planes: load_raw(row, b) loads 32 q4 weights of a row, one 16-byte load; planes unpacks them into bytes, the 16
// even weights and the 16 odd ones. Needs K % 32 == 0.
const K: u32 = 32u;
const HAS_OFFSET: bool = false;
const ZERO: f32 = select(8.0, 0.0, HAS_OFFSET);
const SIGNS: u32 = 0u;  // bytes are unsigned
const OWN_SCALE: bool = false;  // the scales are stored beside the weights
struct Raw { q: vec4<u32> }
struct Planes { even: vec4<u32>, odd: vec4<u32> }
@group(0) @binding(6) var<storage, read> w: array<vec4<u32>>;
fn load_raw(row: u32, b: u32) -> Raw { return Raw(w[row * (K / 32u) + b]); }
fn planes(r: Raw) -> Planes {
  return Planes(r.q & vec4<u32>(0x0F0F0F0Fu), (r.q >> vec4<u32>(4u)) & vec4<u32>(0x0F0F0F0Fu));
}
fn raw_scale(r: Raw) -> f32 { return 1.0; }
