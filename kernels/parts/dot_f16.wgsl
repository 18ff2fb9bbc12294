// Role dot, float weights, f32 inputs: fetch(row, b) loads 32 weights of a row (four 16-byte loads), dot32 multiplies.
// Needs K % 32 == 0. Parts: pair_*, inputs_f32, inputs_interleaved or prologue_f32.
const K: u32 = 32u;
struct Weights { a: vec4<u32>, b: vec4<u32>, c: vec4<u32>, d: vec4<u32> }
@group(0) @binding(6) var<storage, read> w: array<vec4<u32>>;
fn fetch(row: u32, b: u32) -> Weights {
  let i = 4u * (row * (K / 32u) + b);
  return Weights(w[i], w[i + 1u], w[i + 2u], w[i + 3u]);
}
fn dot8(q: vec4<u32>, a: vec4<f32>, b: vec4<f32>) -> f32 {
  return dot(vec4<f32>(weight_pair(q.x), weight_pair(q.y)), a) + dot(vec4<f32>(weight_pair(q.z), weight_pair(q.w)), b);
}
fn dot32(v: Inputs, w: Weights) -> f32 {
  return dot8(w.a, v.x0, v.x1) + dot8(w.b, v.x2, v.x3) + dot8(w.c, v.x4, v.x5) + dot8(w.d, v.x6, v.x7);
}
alias Unpacked = Weights;
fn unpack(w: Weights) -> Unpacked { return w; }
fn add_dot(sum: f32, v: Inputs, u: Unpacked) -> f32 { return sum + dot32(v, u); }
