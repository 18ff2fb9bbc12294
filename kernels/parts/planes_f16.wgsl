// Role planes: load_raw(row, b) loads 32 float weights of a row, 64 bytes; planes rounds them to int8, the 16 even weights
// and the 16 odd ones, with raw_scale as their scale. It stands for `scales` as well: floats have none.
// Needs K % 32 == 0. Parts: pair_*.
const K: u32 = 32u;
const ZERO: f32 = 0.0;
const UNIT: f32 = 1.0;
const SIGNS: u32 = 0x80808080u;  // sign bits: bytes are signed
const OWN_SCALE: bool = true;    // the scale is computed from the weights
const HAS_OFFSET: bool = false;
struct Raw { a: vec4<u32>, b: vec4<u32>, c: vec4<u32>, d: vec4<u32> }
struct Planes { even: vec4<u32>, odd: vec4<u32> }
@group(0) @binding(6) var<storage, read> w: array<vec4<u32>>;

fn load_raw(row: u32, b: u32) -> Raw {
  let i = 4u * (row * (K / 32u) + b);
  return Raw(w[i], w[i + 1u], w[i + 2u], w[i + 3u]);
}

fn top_weight(r: Raw) -> f32 {
  let low = vec4<u32>(0x7FFFu);
  let pairs = max(max(r.a & low, r.b & low), max(r.c & low, r.d & low));
  let high = max(max((r.a >> vec4<u32>(16u)) & low, (r.b >> vec4<u32>(16u)) & low), max((r.c >> vec4<u32>(16u)) & low, (r.d >> vec4<u32>(16u)) & low));
  let top = max(pairs, high);
  return weight_pair(max(max(top.x, top.y), max(top.z, top.w))).x;
}
fn raw_scale(r: Raw) -> f32 { return top_weight(r) / 127.0; }

fn rounded(v: vec4<f32>) -> u32 {  // adding 1.5 * 2^23 rounds and leaves the integer in the last byte
  let b = bitcast<vec4<u32>>(v + 12582912.0) & vec4<u32>(255u);
  return b.x | (b.y << 8u) | (b.z << 16u) | (b.w << 24u);
}
fn word_pair(v: vec4<u32>, inverse: f32) -> vec2<u32> {  // 8 weights: 4 even ones, 4 odd ones
  let a = weight_pair(v.x); let b = weight_pair(v.y); let c = weight_pair(v.z); let d = weight_pair(v.w);
  return vec2<u32>(rounded(vec4<f32>(a.x, b.x, c.x, d.x) * inverse), rounded(vec4<f32>(a.y, b.y, c.y, d.y) * inverse));
}
fn planes(r: Raw) -> Planes {
  let top = top_weight(r);
  let inverse = select(0.0, 127.0 / top, top > 0.0);
  let a = word_pair(r.a, inverse); let b = word_pair(r.b, inverse); let c = word_pair(r.c, inverse); let d = word_pair(r.d, inverse);
  return Planes(vec4<u32>(a.x, b.x, c.x, d.x), vec4<u32>(a.y, b.y, c.y, d.y));
}
fn signed_planes(r: Raw) -> Planes { return planes(r); }
fn scale_at(row: u32, g: u32) -> vec2<f32> { return vec2<f32>(); }
