// Role prologue: the inputs of a linear of TOKENS tokens are int8 blocks that an earlier stage has left (see inputs_int8). Every
// workgroup copies them to workgroup memory, all at once or in pieces of INPUT_WIDTH inputs of each token.
// Every invocation must call run_prologue, and copy_piece before it reads a piece. Needs K % 32 == 0.
// Parts: prologue_int8; grid_barrier (or unfused).
const K: u32 = 32u;
const INPUT_WIDTH: u32 = K;
const TOKENS: u32 = 1u;
const INPUTS_READY: bool = false;  // the inputs are still in workgroup memory from an earlier stage
const WORKGROUP: u32 = 64u;
const INPUT_BLOCKS: u32 = INPUT_WIDTH / 32u;
@group(0) @binding(5) var<storage, read> x: array<vec4<u32>>;  // [layers or 1][TOKENS] planes, padded after each layer
fn copy_inputs(first: u32, index: u32) {
  let layer_start = opaque_zero() + layer() * (3u * TOKENS * (K / 32u) + LINE_PADDING / 4u);
  for (var i = index; i < PLANE; i += WORKGROUP) {
    let at = layer_start + 3u * (K / 32u) * (i / INPUT_BLOCKS) + min(first + i % INPUT_BLOCKS, K / 32u - 1u);
    let scale = bitcast<vec4<f32>>(x[at + 2u * (K / 32u)]);
    blocks[i] = x[at];
    blocks[PLANE + i] = x[at + K / 32u];
    input_scales[i] = scale.xw;
    if (HALF_SUMS) { input_scales[PLANE + i] = scale.yz; }
  }
  workgroupBarrier();
}
fn run_prologue(index: u32) {
  if (INPUTS_READY) { return; }
  wait(index);
  if (INPUT_WIDTH == K) { copy_inputs(0u, index); }
}
fn copy_piece(first: u32, index: u32) -> u32 {  // the block that is the first one of inputs(), from block `first` on
  if (INPUT_WIDTH == K) { return 0u; }
  workgroupBarrier();  // the piece before has been read
  copy_inputs(first, index);
  return first;
}
fn output_scale(token: u32) -> f32 { return 1.0; }
