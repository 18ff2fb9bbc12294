// Role prologue, storage of its results: the inputs of a linear of one token in workgroup memory, as f32.
// store_inputs(a, b, octet, index, in_range) stores the eight values from 8 * octet on. inputs(token, b) = values
// 32b .. 32b + 31.
// Interleaved by 4: vec4 i of block b is at i * INPUT_WIDTH / 32 + b, so that adjacent lanes read adjacent vec4s.
// Needs INPUT_WIDTH % 32 == 0. Parts: prologue_norm, prologue_sum_norm or prologue_merge.
const K: u32 = 32u;
const INPUT_WIDTH: u32 = K;  // more than a row of the weights where several experts have inputs
struct Inputs { x0: vec4<f32>, x1: vec4<f32>, x2: vec4<f32>, x3: vec4<f32>, x4: vec4<f32>, x5: vec4<f32>, x6: vec4<f32>, x7: vec4<f32> }
var<workgroup> shared_inputs: array<vec4<f32>, INPUT_WIDTH / 4u>;
fn input4(i: u32, b: u32) -> vec4<f32> { return shared_inputs[i * (INPUT_WIDTH / 32u) + b]; }
fn inputs(token: u32, b: u32) -> Inputs {
  return Inputs(input4(0u, b), input4(1u, b), input4(2u, b), input4(3u, b), input4(4u, b), input4(5u, b), input4(6u, b), input4(7u, b));
}
fn store_inputs(a: vec4<f32>, b: vec4<f32>, octet: u32, index: u32, in_range: bool) {
  let i = 2u * (octet % 4u) * (INPUT_WIDTH / 32u) + octet / 4u;
  if (in_range) { shared_inputs[i] = a; shared_inputs[i + INPUT_WIDTH / 32u] = b; }
}
