// The inputs of a linear of one token in workgroup memory, for parts that make them there: as f32. Quad q of block b is at
// q * K / 32 + b, so that lanes side by side read side by side. keep takes eight values from 8 * eighth on.
const K: u32 = 32u;
struct Inputs { x0: vec4<f32>, x1: vec4<f32>, x2: vec4<f32>, x3: vec4<f32>, x4: vec4<f32>, x5: vec4<f32>, x6: vec4<f32>, x7: vec4<f32> }
var<workgroup> quads: array<vec4<f32>, K / 4u>;
fn quad(q: u32, b: u32) -> vec4<f32> { return quads[q * (K / 32u) + b]; }
fn inputs(token: u32, b: u32) -> Inputs {
  return Inputs(quad(0u, b), quad(1u, b), quad(2u, b), quad(3u, b), quad(4u, b), quad(5u, b), quad(6u, b), quad(7u, b));
}
fn keep(a: vec4<f32>, b: vec4<f32>, eighth: u32, index: u32, inside: bool) {
  let i = 2u * (eighth % 4u) * (K / 32u) + eighth / 4u;
  if (inside) { quads[i] = a; quads[i + K / 32u] = b; }
}
