// Role inputs: inputs(token, b) = values 32b .. 32b + 31 of x[m, K], f32. No prologue. Needs K % 32 == 0.
const K: u32 = 32u;
struct Inputs { x0: vec4<f32>, x1: vec4<f32>, x2: vec4<f32>, x3: vec4<f32>, x4: vec4<f32>, x5: vec4<f32>, x6: vec4<f32>, x7: vec4<f32> }
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;
fn inputs(token: u32, b: u32) -> Inputs {
  let i = 8u * (token * (K / 32u) + b);
  return Inputs(x[i], x[i + 1u], x[i + 2u], x[i + 3u], x[i + 4u], x[i + 5u], x[i + 6u], x[i + 7u]);
}
fn run_prologue(index: u32) {}
fn output_scale(token: u32) -> f32 { return 1.0; }  // factor of the results
