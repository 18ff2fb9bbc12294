// Role block: dot_block(row0, row1, b) = 32 inputs times 32 q4 weights of two rows, one 16-byte load for each row.
// Needs K % 32 == 0 and GROUP % 32 == 0. Parts: f16, scales.
const K: u32 = 32u;
const GROUP: u32 = 32u;
const HAS_OFFSET: bool = false;
const BLOCK: u32 = 32u;
const ZERO: f32 = select(8.0, 0.0, HAS_OFFSET);
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> w: array<vec4<u32>>;
fn dot8(word: u32, a: vec4<f32>, b: vec4<f32>) -> f32 {
  let even = vec4<f32>(unpack4xU8(word & 0x0F0F0F0Fu)) - ZERO;
  let odd = vec4<f32>(unpack4xU8((word >> 4u) & 0x0F0F0F0Fu)) - ZERO;
  return dot(even, vec4<f32>(a.xz, b.xz)) + dot(odd, vec4<f32>(a.yw, b.yw));
}
fn dot_block(row0: u32, row1: u32, b: u32) -> vec2<f32> {
  let x0 = x[8u * b];      let x1 = x[8u * b + 1u];
  let x2 = x[8u * b + 2u]; let x3 = x[8u * b + 3u];
  let x4 = x[8u * b + 4u]; let x5 = x[8u * b + 5u];
  let x6 = x[8u * b + 6u]; let x7 = x[8u * b + 7u];
  let p = w[row0 * (K / 32u) + b];
  let q = w[row1 * (K / 32u) + b];
  let s0 = scale_at(row0, b * 32u / GROUP);
  let s1 = scale_at(row1, b * 32u / GROUP);
  var sum = vec2<f32>(
    s0.x * (dot8(p.x, x0, x1) + dot8(p.y, x2, x3) + dot8(p.z, x4, x5) + dot8(p.w, x6, x7)),
    s1.x * (dot8(q.x, x0, x1) + dot8(q.y, x2, x3) + dot8(q.z, x4, x5) + dot8(q.w, x6, x7)));
  if (HAS_OFFSET) { sum += vec2<f32>(s0.y, s1.y) * dot(x0 + x1 + x2 + x3 + x4 + x5 + x6 + x7, vec4<f32>(1.0)); }
  return sum;
}
