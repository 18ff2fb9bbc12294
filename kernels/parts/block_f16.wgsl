// Role block: dot_block(row0, row1, b) = 8 inputs times 8 float weights of two rows, one 16-byte load for each row.
// Needs K % 8 == 0. Parts: pair_*.
const K: u32 = 32u;
const BLOCK: u32 = 8u;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> w: array<vec4<u32>>;
fn dot8(q: vec4<u32>, a: vec4<f32>, b: vec4<f32>) -> f32 {
  return dot(vec4<f32>(weight_pair(q.x), weight_pair(q.y)), a) + dot(vec4<f32>(weight_pair(q.z), weight_pair(q.w)), b);
}
fn dot_block(row0: u32, row1: u32, b: u32) -> vec2<f32> {
  let x0 = x[2u * b];
  let x1 = x[2u * b + 1u];
  return vec2<f32>(dot8(w[row0 * (K / 8u) + b], x0, x1), dot8(w[row1 * (K / 8u) + b], x0, x1));
}
