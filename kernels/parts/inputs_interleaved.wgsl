// Role inputs: inputs(token, b) = values 32b .. 32b + 31 of one token, f32, read from global memory: for a stage whose
// inputs do not fit into workgroup memory.
// Interleaved by 4: vec4 i of block b is at i * INPUT_WIDTH / 32 + b (epilogue_glu stores it there), so that adjacent
// lanes read adjacent vec4s.
// Needs INPUT_WIDTH % 32 == 0. Parts: grid_barrier (or unfused).
const K: u32 = 32u;
const INPUT_WIDTH: u32 = K;  // more than a row of the weights where several experts have inputs
struct Inputs { x0: vec4<f32>, x1: vec4<f32>, x2: vec4<f32>, x3: vec4<f32>, x4: vec4<f32>, x5: vec4<f32>, x6: vec4<f32>, x7: vec4<f32> }
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;  // [layers, INPUT_WIDTH], padded after each layer
fn input4(i: u32, b: u32) -> vec4<f32> { return x[opaque_zero() + layer() * ((INPUT_WIDTH + LINE_PADDING) / 4u) + i * (INPUT_WIDTH / 32u) + b]; }
fn inputs(token: u32, b: u32) -> Inputs {
  return Inputs(input4(0u, b), input4(1u, b), input4(2u, b), input4(3u, b), input4(4u, b), input4(5u, b), input4(6u, b), input4(7u, b));
}
fn run_prologue(index: u32) { wait(index); }
fn output_scale(token: u32) -> f32 { return 1.0; }
