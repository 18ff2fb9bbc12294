// Role dot, quantised weights, f32 inputs: fetch(row, b) loads 32 weights of a row and their scales, dot32 multiplies.
// Needs GROUP % 32 == 0 or GROUP == 16. Parts: scales, planes_*, inputs_f32, inputs_interleaved or prologue_f32.
const K: u32 = 32u;
const GROUP: u32 = 32u;
const HAS_OFFSET: bool = false;
const ZERO_BYTE: f32 = ZERO + f32(SIGNS & 0xFFu);  // the byte of a weight of 0
struct Weights { raw: Raw, s: Scales }
fn fetch(row: u32, b: u32) -> Weights { return Weights(load_raw(row, b), load_scales(row, b)); }
// Four bytes as weights: each becomes the last bits of 2^23. Converting integers is slower (13 to 15 % of layers on an H200).
fn floats(bytes: u32) -> vec4<f32> {
  let b = vec4<u32>(bytes, bytes >> 8u, bytes >> 16u, bytes >> 24u) & vec4<u32>(0xFFu);
  return bitcast<vec4<f32>>(b | vec4<u32>(0x4B000000u)) - (8388608.0 + ZERO_BYTE);
}
fn dot8(even: u32, odd: u32, a: vec4<f32>, b: vec4<f32>) -> f32 {
  return dot(floats(even), vec4<f32>(a.xz, b.xz)) + dot(floats(odd), vec4<f32>(a.yw, b.yw));
}
fn dot32(v: Inputs, w: Weights) -> f32 {
  let p = planes(w.raw);
  let s = block_scales(w.s);
  let even = p.even ^ vec4<u32>(SIGNS);
  let odd = p.odd ^ vec4<u32>(SIGNS);
  let low = dot8(even.x, odd.x, v.x0, v.x1) + dot8(even.y, odd.y, v.x2, v.x3);
  let high = dot8(even.z, odd.z, v.x4, v.x5) + dot8(even.w, odd.w, v.x6, v.x7);
  let first = dot(v.x0 + v.x1 + v.x2 + v.x3, vec4<f32>(1.0));
  let last = dot(v.x4 + v.x5 + v.x6 + v.x7, vec4<f32>(1.0));
  if (GROUP == 16u) { return s.x * low + s.z * high + s.y * first + s.w * last; }
  if (HAS_OFFSET) { return s.x * (low + high) + s.y * (first + last); }
  return s.x * (low + high);
}
alias Unpacked = Weights;
fn unpack(w: Weights) -> Unpacked { return w; }
fn add_dot(sum: f32, v: Inputs, u: Unpacked) -> f32 { return sum + dot32(v, u); }
