// Role halves (see halves_q4) of q6 weights: a lane has a block, 24 bytes, which lie as planes_q6 says. It loads the high bits of both
// blocks and takes its own in halves: a choice directly after the load would wait for it (512 tokens of 1B on an H200: 158 TFLOP/s instead of 172).
// A weight is the last bits of 1024.
// Needs K % 64 == 0. Parts: half2; tile_f16.
const K: u32 = 64u;
const ROW_LANES: u32 = 2u;
struct Raw { q: vec4<u32>, high: vec4<u32> }
@group(0) @binding(6) var<storage, read> w: array<vec4<u32>>;
fn load_lane(row: u32, first: u32, lane: u32) -> Raw {
  let i = row * (3u * K / 64u);
  return Raw(w[i + first + lane], w[i + K / 32u + first / 2u]);
}
fn eight(q: u32, even_high: u32, odd_high: u32, s: vec2<f16>) -> vec4<u32> {  // high bits from bit 4 of each byte on; what follows them is cut
  const NIBBLES = 0x0F0F0F0Fu;
  let even = (q & NIBBLES) | (even_high & ~NIBBLES);
  let odd = ((q >> 4u) & NIBBLES) | (odd_high & ~NIBBLES);
  let bits = (vec4<u32>(even, odd, even >> 8u, odd >> 8u) & vec4<u32>(0x003F003Fu)) | vec4<u32>(0x64006400u);
  return vec4<u32>(half2(bits.x, 1056.0h, s), half2(bits.y, 1056.0h, s), half2(bits.z, 1056.0h, s), half2(bits.w, 1056.0h, s));
}
fn halves(r: Raw, scale: vec4<f32>, lane: u32) -> Halves {
  let s = vec4<f16>(scale);
  let h = select(r.high.xy, r.high.zw, lane == 1u);
  return Halves(eight(r.q.x, h.x << 4u, h.y << 4u, s.xy),
                eight(r.q.y, h.x << 2u, h.y << 2u, s.xy),
                eight(r.q.z, h.x, h.y, s.zw),
                eight(r.q.w, h.x >> 2u, h.y >> 2u, s.zw));
}
