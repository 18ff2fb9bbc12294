// Role weight: q6 weights [N, 3K/4] bytes (see planes_q6): (value - 32) * scale. weight(n, k) is one weight,
// weight8(n, k8) 8 consecutive k of a row. Needs K % 64 == 0 and GROUP % 8 == 0. Parts: scales.
const K: u32 = 64u;
const GROUP: u32 = 16u;
@group(0) @binding(6) var<storage, read> w: array<u32>;
fn weight8(n: u32, k8: u32) -> mat2x4<f32> {
  let row = n * (3u * K / 16u);
  let q = w[row + k8];
  let h = row + K / 8u + k8 / 4u * 2u;
  let s = scale_at(n, k8 * 8u / GROUP).x;
  let shift = 2u * (k8 % 4u);
  let even = (q & 0x0F0F0F0Fu) | (((w[h] >> shift) & 0x03030303u) << 4u);
  let odd = ((q >> 4u) & 0x0F0F0F0Fu) | (((w[h + 1u] >> shift) & 0x03030303u) << 4u);
  let e = (vec4<f32>(unpack4xU8(even)) - 32.0) * s;
  let o = (vec4<f32>(unpack4xU8(odd)) - 32.0) * s;
  return mat2x4<f32>(e.x, o.x, e.y, o.y, e.z, o.z, e.w, o.w);
}
fn weight(n: u32, k: u32) -> f32 { return weight8(n, k / 8u)[k % 8u / 4u][k % 4u]; }
