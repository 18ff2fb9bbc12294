// Role weight: f16 or BF16 weights [N, K], rows padded to an even number of values. weight(n, k) fits every K; weight8(n, k8),
// 8 consecutive k of a row, needs K % 8 == 0. load_weight8 loads them as they are stored, unpack_weight8 unpacks them
// after the loads have arrived. Parts: pair_*.
const K: u32 = 32u;
const W_UNIT: f32 = 1.0;  // all f16 weights stay in range (tile_f32)
struct RawWeight8 { q: vec4<u32> }
@group(0) @binding(6) var<storage, read> w: array<u32>;
fn weight(n: u32, k: u32) -> f32 {
  let two = weight_pair(w[n * ((K + 1u) / 2u) + k / 2u]);
  return select(two.x, two.y, (k & 1u) == 1u);
}
fn load_weight8(n: u32, k8: u32) -> RawWeight8 {
  let i = (n * (K / 8u) + k8) * 4u;
  return RawWeight8(vec4<u32>(w[i], w[i + 1u], w[i + 2u], w[i + 3u]));
}
fn unpack_weight8(raw: RawWeight8, n: u32, k8: u32) -> mat2x4<f32> {
  return mat2x4<f32>(vec4<f32>(weight_pair(raw.q.x), weight_pair(raw.q.y)), vec4<f32>(weight_pair(raw.q.z), weight_pair(raw.q.w)));
}
fn weight8(n: u32, k8: u32) -> mat2x4<f32> { return unpack_weight8(load_weight8(n, k8), n, k8); }
