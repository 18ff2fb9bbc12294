// Role weight: q8 weights [N, K] int8, of each 32 the 16 even ones first, then the 16 odd ones: value * scale (+ offset
// with HAS_OFFSET). weight(n, k) is one weight; weight8(n, k8), 8 consecutive k of a row, needs GROUP % 8 == 0.
// load_weight8 loads them as they are stored, unpack_weight8 unpacks them after the loads have arrived.
// Needs K % 32 == 0 (all formats have it). Parts: scales.
const K: u32 = 32u;
const GROUP: u32 = 32u;
struct RawWeight8 { even: u32, odd: u32, scale: vec2<u32> }
@group(0) @binding(6) var<storage, read> w: array<u32>;
fn weight(n: u32, k: u32) -> f32 {
  let byte = n * K + (k / 32u) * 32u + (k & 1u) * 16u + (k % 32u) / 2u;
  let s = scale_at(n, k / GROUP);
  return f32(extractBits(bitcast<i32>(w[byte >> 2u]), 8u * (byte & 3u), 8u)) * s.x + s.y;
}
fn load_weight8(n: u32, k8: u32) -> RawWeight8 {
  let i = (n * (K / 32u) + k8 / 4u) * 8u + k8 % 4u;
  return RawWeight8(w[i], w[i + 4u], load_scale(n, k8 * 8u / GROUP));
}
fn unpack_weight8(raw: RawWeight8, n: u32, k8: u32) -> mat2x4<f32> {
  let s = unpack_scale(raw.scale, n, k8 * 8u / GROUP);
  let even = vec4<f32>(unpack4xI8(raw.even)) * s.x + s.y;
  let odd = vec4<f32>(unpack4xI8(raw.odd)) * s.x + s.y;
  return mat2x4<f32>(even.x, odd.x, even.y, odd.y, even.z, odd.z, even.w, odd.w);
}
fn weight8(n: u32, k8: u32) -> mat2x4<f32> { return unpack_weight8(load_weight8(n, k8), n, k8); }
