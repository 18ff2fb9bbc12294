// Role halves (see halves_q4) of q8 weights: a lane has a block, two 16-byte loads. Words j of the even and of the odd weights make an
// eight. A byte + 128 is the last bits of 1024.
// Needs K % 64 == 0. Parts: half2; tile_f16.
const K: u32 = 64u;
const ROW_LANES: u32 = 2u;
struct Raw { even: vec4<u32>, odd: vec4<u32> }
@group(0) @binding(6) var<storage, read> w: array<vec4<u32>>;
fn load_lane(row: u32, first: u32, lane: u32) -> Raw {
  let i = 2u * (row * (K / 32u) + first + lane);
  return Raw(w[i], w[i + 1u]);
}
fn eight(even: u32, odd: u32, s: vec2<f16>) -> vec4<u32> {
  let bits = (vec4<u32>(even, odd, even >> 8u, odd >> 8u) & vec4<u32>(0x00FF00FFu)) ^ vec4<u32>(0x64806480u);
  return vec4<u32>(half2(bits.x, 1152.0h, s), half2(bits.y, 1152.0h, s), half2(bits.z, 1152.0h, s), half2(bits.w, 1152.0h, s));
}
fn halves(r: Raw, scale: vec4<f32>, lane: u32) -> Halves {
  let s = vec4<f16>(scale);
  return Halves(eight(r.even.x, r.odd.x, s.xy),
                eight(r.even.y, r.odd.y, s.xy),
                eight(r.even.z, r.odd.z, s.zw),
                eight(r.even.w, r.odd.w, s.zw));
}
