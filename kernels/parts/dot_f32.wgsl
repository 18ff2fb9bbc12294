// fetch, dot32: 32 f32 inputs times 32 weights of one row. Parts: scales, planes, inputs_f32.
// Needs GROUP % 32 == 0 or GROUP == 16.
const K: u32 = 32u;
const GROUP: u32 = 32u;
const PAIR: bool = false;
struct Weights { raw: Raw, s: Scales }
fn fetch(row: u32, b: u32) -> Weights { return Weights(load_raw(row, b), load_scales(row, b)); }
fn dot8(even: u32, odd: u32, a: vec4<f32>, b: vec4<f32>) -> f32 {
  return dot(vec4<f32>(unpack4xI8(even)) - ZERO, vec4<f32>(a.xz, b.xz))
       + dot(vec4<f32>(unpack4xI8(odd)) - ZERO, vec4<f32>(a.yw, b.yw));
}
fn dot32(v: Inputs, w: Weights) -> f32 {
  let p = planes(w.raw);
  let s = block_scales(w.s);
  let low = dot8(p.even.x, p.odd.x, v.x0, v.x1) + dot8(p.even.y, p.odd.y, v.x2, v.x3);
  let high = dot8(p.even.z, p.odd.z, v.x4, v.x5) + dot8(p.even.w, p.odd.w, v.x6, v.x7);
  let first = dot(v.x0 + v.x1 + v.x2 + v.x3, vec4<f32>(1.0));
  let last = dot(v.x4 + v.x5 + v.x6 + v.x7, vec4<f32>(1.0));
  if (GROUP == 16u) { return s.x * low + s.z * high + s.y * first + s.w * last; }
  if (PAIR) { return s.x * (low + high) + s.y * (first + last); }
  return s.x * (low + high);
}
