// Role weight: f16 weights [N, K], rows padded to an even number of values. weight(n, k) fits every K; weight8(n, k8),
// 8 consecutive k of a row, needs K % 8 == 0. Parts: f16.
const K: u32 = 32u;
@group(0) @binding(6) var<storage, read> w: array<u32>;
fn weight(n: u32, k: u32) -> f32 {
  let two = unpack_f16(w[n * ((K + 1u) / 2u) + k / 2u]);
  return select(two.x, two.y, (k & 1u) == 1u);
}
fn weight8(n: u32, k8: u32) -> mat2x4<f32> {
  let i = (n * (K / 8u) + k8) * 4u;
  return mat2x4<f32>(vec4<f32>(unpack_f16(w[i]), unpack_f16(w[i + 1u])), vec4<f32>(unpack_f16(w[i + 2u]), unpack_f16(w[i + 3u])));
}
