// Role planes: load_raw(row, b) loads 32 q8 weights of a row, two 16-byte loads: the 16 even weights and the 16 odd
// ones, as they are stored, which is signed_planes too. Needs K % 32 == 0.
const K: u32 = 32u;
const ZERO: f32 = 0.0;
const UNIT: f32 = 1.0;
const SIGNS: u32 = 0x80808080u;  // sign bits: bytes are signed
const OWN_SCALE: bool = false;  // the scales are stored beside the weights
struct Raw { even: vec4<u32>, odd: vec4<u32> }
struct Planes { even: vec4<u32>, odd: vec4<u32> }
@group(0) @binding(6) var<storage, read> w: array<vec4<u32>>;
fn load_raw(row: u32, b: u32) -> Raw {
  let i = 2u * (row * (K / 32u) + b);
  return Raw(w[i], w[i + 1u]);
}
fn planes(r: Raw) -> Planes { return Planes(r.even, r.odd); }
fn signed_planes(r: Raw) -> Planes { return planes(r); }
fn raw_scale(r: Raw) -> f32 { return 1.0; }
