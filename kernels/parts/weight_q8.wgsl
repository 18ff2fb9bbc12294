// Role weight: q8 weights [N, K] int8, of each 32 the 16 even ones first, then the 16 odd ones: value * scale (+ offset
// with HAS_OFFSET). weight(n, k) is one weight; weight8(n, k8), 8 consecutive k of a row, needs GROUP % 8 == 0.
// Needs K % 32 == 0 (all formats have it). Parts: scales.
const K: u32 = 32u;
const GROUP: u32 = 32u;
@group(0) @binding(6) var<storage, read> w: array<u32>;
fn weight(n: u32, k: u32) -> f32 {
  let byte = n * K + (k / 32u) * 32u + (k & 1u) * 16u + (k % 32u) / 2u;
  let s = scale_at(n, k / GROUP);
  return f32(extractBits(bitcast<i32>(w[byte >> 2u]), 8u * (byte & 3u), 8u)) * s.x + s.y;
}
fn weight8(n: u32, k8: u32) -> mat2x4<f32> {
  let i = (n * (K / 32u) + k8 / 4u) * 8u + k8 % 4u;
  let s = scale_at(n, k8 * 8u / GROUP);
  let even = vec4<f32>(unpack4xI8(w[i])) * s.x + s.y;
  let odd = vec4<f32>(unpack4xI8(w[i + 4u])) * s.x + s.y;
  return mat2x4<f32>(even.x, odd.x, even.y, odd.y, even.z, odd.z, even.w, odd.w);
}
