// Role block: dot_block(row0, row1, b) = 32 inputs times 32 q8 weights of two rows, two 16-byte loads for each row: 16
// even weights, 16 odd ones.
// Needs K % 32 == 0 and GROUP % 32 == 0 or GROUP == 16. Parts: f16, scales.
const K: u32 = 32u;
const GROUP: u32 = 32u;
const HAS_OFFSET: bool = false;
const BLOCK: u32 = 32u;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> w: array<vec4<u32>>;
fn dot8(even: u32, odd: u32, a: vec4<f32>, b: vec4<f32>) -> f32 {
  return dot(vec4<f32>(unpack4xI8(even)), vec4<f32>(a.xz, b.xz)) + dot(vec4<f32>(unpack4xI8(odd)), vec4<f32>(a.yw, b.yw));
}
fn dot_block(row0: u32, row1: u32, b: u32) -> vec2<f32> {
  let x0 = x[8u * b];      let x1 = x[8u * b + 1u];
  let x2 = x[8u * b + 2u]; let x3 = x[8u * b + 3u];
  let x4 = x[8u * b + 4u]; let x5 = x[8u * b + 5u];
  let x6 = x[8u * b + 6u]; let x7 = x[8u * b + 7u];
  let e0 = w[2u * (row0 * (K / 32u) + b)];
  let o0 = w[2u * (row0 * (K / 32u) + b) + 1u];
  let e1 = w[2u * (row1 * (K / 32u) + b)];
  let o1 = w[2u * (row1 * (K / 32u) + b) + 1u];
  let low = vec2<f32>(dot8(e0.x, o0.x, x0, x1) + dot8(e0.y, o0.y, x2, x3), dot8(e1.x, o1.x, x0, x1) + dot8(e1.y, o1.y, x2, x3));
  let high = vec2<f32>(dot8(e0.z, o0.z, x4, x5) + dot8(e0.w, o0.w, x6, x7), dot8(e1.z, o1.z, x4, x5) + dot8(e1.w, o1.w, x6, x7));
  let s0 = scale_at(row0, b * 32u / GROUP);
  let s1 = scale_at(row1, b * 32u / GROUP);
  if (GROUP == 16u) {
    let t0 = scale_at(row0, 2u * b + 1u);
    let t1 = scale_at(row1, 2u * b + 1u);
    return vec2<f32>(s0.x, s1.x) * low + vec2<f32>(t0.x, t1.x) * high;
  }
  var sum = vec2<f32>(s0.x, s1.x) * (low + high);
  if (HAS_OFFSET) { sum += vec2<f32>(s0.y, s1.y) * dot(x0 + x1 + x2 + x3 + x4 + x5 + x6 + x7, vec4<f32>(1.0)); }
  return sum;
}
