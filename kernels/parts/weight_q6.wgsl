// Role weight: q6 weights [N, 3K/4] bytes (see planes_q6): (value - 32) * scale. weight(n, k) is one weight,
// weight8(n, k8) 8 consecutive k of a row. load_weight8 loads them as they are stored, unpack_weight8 unpacks them after
// the loads have arrived. Needs K % 64 == 0 and GROUP % 8 == 0. Parts: scales.
const K: u32 = 64u;
const GROUP: u32 = 16u;
struct RawWeight8 { q: u32, even: u32, odd: u32, scale: vec2<u32> }  // 4 low bits of 8 weights; 2 high bits of 16 even and 16 odd ones
@group(0) @binding(6) var<storage, read> w: array<u32>;
fn load_weight8(n: u32, k8: u32) -> RawWeight8 {
  let row = n * (3u * K / 16u);
  let high = row + K / 8u + k8 / 4u * 2u;
  return RawWeight8(w[row + k8], w[high], w[high + 1u], load_scale(n, k8 * 8u / GROUP));
}
fn unpack_weight8(raw: RawWeight8, n: u32, k8: u32) -> mat2x4<f32> {
  let s = unpack_scale(raw.scale, n, k8 * 8u / GROUP).x;
  let shift = 2u * (k8 % 4u);
  let even = (raw.q & 0x0F0F0F0Fu) | (((raw.even >> shift) & 0x03030303u) << 4u);
  let odd = ((raw.q >> 4u) & 0x0F0F0F0Fu) | (((raw.odd >> shift) & 0x03030303u) << 4u);
  let e = (vec4<f32>(unpack4xU8(even)) - 32.0) * s;
  let o = (vec4<f32>(unpack4xU8(odd)) - 32.0) * s;
  return mat2x4<f32>(e.x, o.x, e.y, o.y, e.z, o.z, e.w, o.w);
}
fn weight8(n: u32, k8: u32) -> mat2x4<f32> { return unpack_weight8(load_weight8(n, k8), n, k8); }
fn weight(n: u32, k: u32) -> f32 { return weight8(n, k / 8u)[k % 8u / 4u][k % 4u]; }
