// Group scales of q4 and q8 weights: scale_at(i) = (scale, offset) of group i, rows of K / GROUP groups.
const PAIR: bool = false;       // an offset follows each scale (asymmetric formats)
const SCALE_F32: bool = false;  // f32, else f16
@group(0) @binding(7) var<storage, read> scales: array<u32>;
fn scale_at(i: u32) -> vec2<f32> {
  if (PAIR) {
    if (SCALE_F32) { return vec2<f32>(bitcast<f32>(scales[2u * i]), bitcast<f32>(scales[2u * i + 1u])); }
    return halves(scales[i]);
  }
  if (SCALE_F32) { return vec2<f32>(bitcast<f32>(scales[i]), 0.0); }
  let two = halves(scales[i >> 1u]);
  return vec2<f32>(select(two.x, two.y, (i & 1u) == 1u), 0.0);
}
