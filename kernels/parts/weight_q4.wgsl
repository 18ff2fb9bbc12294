// Role weight: q4 weights [N, K/2] bytes, low nibble = even k. Symmetric: (nibble - 8) * scale; with HAS_OFFSET:
// nibble * scale + offset. weight(n, k) fits every even K; weight8(n, k8), 8 consecutive k of a row, needs K % 8 == 0
// and GROUP % 8 == 0.
// Parts: scales.
const K: u32 = 32u;
const GROUP: u32 = 32u;
const HAS_OFFSET: bool = false;
const ZERO: f32 = select(8.0, 0.0, HAS_OFFSET);
@group(0) @binding(6) var<storage, read> w: array<u32>;
fn weight(n: u32, k: u32) -> f32 {
  let byte = n * (K / 2u) + k / 2u;
  let nibble = (w[byte >> 2u] >> (8u * (byte & 3u) + 4u * (k & 1u))) & 15u;
  let s = scale_at(n, k / GROUP);
  return (f32(nibble) - ZERO) * s.x + s.y;
}
fn weight8(n: u32, k8: u32) -> mat2x4<f32> {
  let word = w[n * (K / 8u) + k8];
  let s = scale_at(n, k8 * 8u / GROUP);
  let even = (vec4<f32>(unpack4xU8(word & 0x0F0F0F0Fu)) - ZERO) * s.x + s.y;
  let odd = (vec4<f32>(unpack4xU8((word >> 4u) & 0x0F0F0F0Fu)) - ZERO) * s.x + s.y;
  return mat2x4<f32>(even.x, odd.x, even.y, odd.y, even.z, odd.z, even.w, odd.w);
}
