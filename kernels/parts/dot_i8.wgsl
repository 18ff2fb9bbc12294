// fetch, dot32: 32 inputs times 32 weights of one row, integers times integers (dot4I8Packed), then the scales of both.
// Parts: scales, planes, inputs_i8 or inputs_norm. Needs GROUP % 32 == 0 or GROUP == 16.
const K: u32 = 32u;
const GROUP: u32 = 32u;
const PAIR: bool = false;
struct Weights { raw: Raw, s: vec2<f32>, t: vec2<f32> }  // t: the second scale of the block, groups of 16 only
fn fetch(row: u32, b: u32) -> Weights {
  if (GROUP == 16u) { return Weights(load_raw(row, b), scale_at(row * (K / 16u) + 2u * b), scale_at(row * (K / 16u) + 2u * b + 1u)); }
  return Weights(load_raw(row, b), scale_at(row * (K / GROUP) + b * 32u / GROUP), vec2<f32>());
}
fn dot32(v: Inputs, w: Weights) -> f32 {
  let p = planes(w.raw);
  let low = dot4I8Packed(p.even.x, v.even.x) + dot4I8Packed(p.even.y, v.even.y)
          + dot4I8Packed(p.odd.x, v.odd.x) + dot4I8Packed(p.odd.y, v.odd.y);
  let high = dot4I8Packed(p.even.z, v.even.z) + dot4I8Packed(p.even.w, v.even.w)
           + dot4I8Packed(p.odd.z, v.odd.z) + dot4I8Packed(p.odd.w, v.odd.w);
  if (GROUP == 16u) {
    let sum = w.s.x * (v.scale.x * f32(low) - ZERO * v.scale.y) + w.t.x * (v.scale.x * f32(high) - ZERO * v.scale.z);
    if (PAIR) { return sum + w.s.y * v.scale.y + w.t.y * v.scale.z; }
    return sum;
  }
  let sum = w.s.x * (v.scale.x * f32(low + high) - ZERO * v.scale.w);
  if (PAIR) { return sum + w.s.y * v.scale.w; }
  return sum;
}
