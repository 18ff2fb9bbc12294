// Role weight: q4 weights [N, K/2] bytes, low nibble = even k. Symmetric: (nibble - 8) * scale; with HAS_OFFSET:
// nibble * scale + offset. weight(n, k) fits every even K; weight8(n, k8), 8 consecutive k of a row, needs K % 8 == 0
// and GROUP % 8 == 0. load_weight8 loads them as they are stored, unpack_weight8 unpacks them after the loads have arrived.
// Parts: scales.
const K: u32 = 32u;
const GROUP: u32 = 32u;
const HAS_OFFSET: bool = false;
const ZERO: f32 = select(8.0, 0.0, HAS_OFFSET);
struct RawWeight8 { q: u32, scale: vec2<u32> }
@group(0) @binding(6) var<storage, read> w: array<u32>;
fn weight(n: u32, k: u32) -> f32 {
  let byte = n * (K / 2u) + k / 2u;
  let nibble = (w[byte >> 2u] >> (8u * (byte & 3u) + 4u * (k & 1u))) & 15u;
  let s = scale_at(n, k / GROUP);
  return (f32(nibble) - ZERO) * s.x + s.y;
}
fn load_weight8(n: u32, k8: u32) -> RawWeight8 { return RawWeight8(w[n * (K / 8u) + k8], load_scale(n, k8 * 8u / GROUP)); }
fn nibbles(q: vec4<u32>) -> vec4<f32> {  // as the last bits of 2^23: converting integers is slower
  return bitcast<vec4<f32>>((q & vec4<u32>(15u)) | vec4<u32>(0x4B000000u)) - (8388608.0 + ZERO);
}
fn unpack_weight8(raw: RawWeight8, n: u32, k8: u32) -> mat2x4<f32> {
  let s = unpack_scale(raw.scale, n, k8 * 8u / GROUP);
  let low = nibbles(vec4<u32>(raw.q) >> vec4<u32>(0u, 4u, 8u, 12u));
  let high = nibbles(vec4<u32>(raw.q) >> vec4<u32>(16u, 20u, 24u, 28u));
  return mat2x4<f32>(low * s.x + s.y, high * s.x + s.y);
}
fn weight8(n: u32, k8: u32) -> mat2x4<f32> { return unpack_weight8(load_weight8(n, k8), n, k8); }
