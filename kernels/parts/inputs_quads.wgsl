// The inputs of a linear of one token as f32 where they lie: for a stage whose inputs do not fit into workgroup memory.
// Quad q of block b is at q * K / 32 + b (out_swiglu puts it there), so that lanes side by side read side by side.
// Needs K % 32 == 0.
const K: u32 = 32u;
struct Inputs { x0: vec4<f32>, x1: vec4<f32>, x2: vec4<f32>, x3: vec4<f32>, x4: vec4<f32>, x5: vec4<f32>, x6: vec4<f32>, x7: vec4<f32> }
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;  // [layers, K], gaps between layers
fn quad(q: u32, b: u32) -> vec4<f32> { return x[later() + layer() * ((K + GAP) / 4u) + q * (K / 32u) + b]; }
fn inputs(token: u32, b: u32) -> Inputs {
  return Inputs(quad(0u, b), quad(1u, b), quad(2u, b), quad(3u, b), quad(4u, b), quad(5u, b), quad(6u, b), quad(7u, b));
}
fn prepare(index: u32) { wait(index); }
fn factor() -> f32 { return 1.0; }
