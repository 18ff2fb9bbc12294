// Role inputs: inputs(token, b) = int8 block b of x[m, K/32], quantised by its producer (see int8_block_subgroup). No
// prologue.
// A block is 3 vec4, each in a plane of its own: the 16 even values, the 16 odd ones, then (d, d * sum of the first 16,
// d * sum of the last 16, d * sum).
// Needs K % 32 == 0. Parts: grid_barrier (or unfused).
const K: u32 = 32u;
const TOKENS: u32 = 1u;
struct Inputs { even: vec4<u32>, odd: vec4<u32>, scale: vec4<f32> }
@group(0) @binding(5) var<storage, read> x: array<vec4<u32>>;  // [layers or 1][TOKENS or m] planes, padded after each layer
fn inputs(token: u32, b: u32) -> Inputs {
  let i = opaque_zero() + layer() * (TOKENS * 3u * (K / 32u) + LINE_PADDING / 4u) + 3u * token * (K / 32u) + b;
  return Inputs(x[i], x[i + K / 32u], bitcast<vec4<f32>>(x[i + 2u * (K / 32u)]));
}
fn run_prologue(index: u32) { wait(index); }
fn copy_piece(first: u32, index: u32) -> u32 { return 0u; }  // no pieces: see prologue_blocks
fn output_scale(token: u32) -> f32 { return 1.0; }  // factor of the results
