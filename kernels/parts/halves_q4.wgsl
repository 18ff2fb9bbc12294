// Role halves: load_raw(row, b) loads 32 q4 weights of a row, one 16-byte load; halves makes them f16, times their scale: of every
// eight the pairs (0, 4), (1, 5), (2, 6) and (3, 7). A nibble is the last bits of 1024 or, without a shift, the four before.
// Needs K % 32 == 0. Parts: half2.
const K: u32 = 32u;
const HAS_OFFSET: bool = false;
const ZERO: f16 = select(8.0h, 0.0h, HAS_OFFSET);
const OWN_SCALE: bool = false;  // the scales are stored beside the weights
struct Raw { q: vec4<u32> }
@group(0) @binding(6) var<storage, read> w: array<vec4<u32>>;
fn load_raw(row: u32, b: u32) -> Raw { return Raw(w[row * (K / 32u) + b]); }
fn raw_scale(r: Raw) -> f32 { return 1.0; }
fn nibble_plane(v: vec4<u32>, zero: f16, s: vec4<f16>) -> vec4<u32> {
  let bits = v ^ vec4<u32>(0x64006400u);
  return vec4<u32>(half2(bits.x, zero, s.xy), half2(bits.y, zero, s.xy), half2(bits.z, zero, s.zw), half2(bits.w, zero, s.zw));
}
fn halves(r: Raw, scale: vec4<f32>) -> Halves {  // (scale, offset) of the first and of the last 16
  let low = vec4<f16>(scale);
  let high = vec4<f16>(scale * vec4<f32>(0.0625, 1.0, 0.0625, 1.0));
  let q = r.q >> vec4<u32>(8u);
  return Halves(nibble_plane(r.q & vec4<u32>(0x000F000Fu), 1024.0h + ZERO, low), nibble_plane(r.q & vec4<u32>(0x00F000F0u), 1024.0h + 16.0h * ZERO, high),
                nibble_plane(q & vec4<u32>(0x000F000Fu), 1024.0h + ZERO, low), nibble_plane(q & vec4<u32>(0x00F000F0u), 1024.0h + 16.0h * ZERO, high));
}
