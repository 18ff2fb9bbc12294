// Role planes: load_raw(row, b) loads 32 q6 weights of a row, 24 bytes; planes unpacks them into bytes, the 16 even
// weights and the 16 odd ones; signed_planes into signed bytes, which are the weights divided by UNIT.
// The low nibbles lie as in q4. After all nibbles of the row come 8 bytes of high bits for each block: word 0 of the
// even weights, word 1 of the odd ones; bits 2j and 2j + 1 of a byte belong to word j of the plane.
// Needs K % 64 == 0.
const K: u32 = 64u;
const ZERO: f32 = 32.0;
const UNIT: f32 = 0.25;
const SIGNS: u32 = 0u;  // bytes are unsigned
const OWN_SCALE: bool = false;  // the scales are stored beside the weights
struct Raw { q: vec4<u32>, h: vec2<u32> }
struct Planes { even: vec4<u32>, odd: vec4<u32> }
@group(0) @binding(6) var<storage, read> w: array<vec4<u32>>;
fn load_raw(row: u32, b: u32) -> Raw {
  let i = row * (3u * K / 64u);
  let high = w[i + K / 32u + b / 2u];
  return Raw(w[i + b], select(high.xy, high.zw, (b & 1u) == 1u));
}
fn high_bits(h: u32) -> vec4<u32> {
  return vec4<u32>(h << 4u, h << 2u, h, h >> 2u) & vec4<u32>(0x30303030u);
}
fn planes(r: Raw) -> Planes {
  return Planes((r.q & vec4<u32>(0x0F0F0F0Fu)) | high_bits(r.h.x),
                ((r.q >> vec4<u32>(4u)) & vec4<u32>(0x0F0F0F0Fu)) | high_bits(r.h.y));
}
fn top_bits(h: u32) -> vec4<u32> {
  return (vec4<u32>(h << 6u, h << 4u, h << 2u, h) & vec4<u32>(0xC0C0C0C0u)) ^ vec4<u32>(0x80808080u);
}
fn signed_planes(r: Raw) -> Planes {  // 4 * (weight - 32): in the upper bits of a byte it needs no subtraction
  return Planes(((r.q << vec4<u32>(2u)) & vec4<u32>(0x3C3C3C3Cu)) | top_bits(r.h.x),
                ((r.q >> vec4<u32>(2u)) & vec4<u32>(0x3C3C3C3Cu)) | top_bits(r.h.y));
}
fn raw_scale(r: Raw) -> f32 { return 1.0; }
