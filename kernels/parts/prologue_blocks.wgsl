// Role prologue: the inputs of a linear of TOKENS tokens are int8 blocks that an earlier stage has left (see inputs_int8). Every
// workgroup copies them to workgroup memory, all at once or in pieces of INPUT_WIDTH inputs of each token. While a piece is used, the
// next one is loaded: it is in registers until all have read the piece before.
// Every invocation must call run_prologue, and copy_piece for each piece of a row, in their order, before it reads it. Needs K % 32 == 0.
// Parts: prologue_int8, input_rms or input_rms_none; grid_barrier (or unfused).
const K: u32 = 32u;
const INPUT_WIDTH: u32 = K;
const TOKENS: u32 = 1u;
const INPUTS_READY: bool = false;  // the inputs are still in workgroup memory from an earlier stage
const WORKGROUP: u32 = 64u;
const INPUT_BLOCKS: u32 = INPUT_WIDTH / 32u;
const COPIES: u32 = (PLANE + WORKGROUP - 1u) / WORKGROUP;  // blocks of a piece that an invocation copies
@group(0) @binding(5) var<storage, read> x: array<vec4<u32>>;  // [layers or 1][TOKENS] planes, padded after each layer
struct Copied { even: vec4<u32>, odd: vec4<u32>, scale: vec4<u32> }
var<private> copied: array<Copied, COPIES>;
fn load_piece(first: u32, index: u32) {  // from block `first` on
  let layer_start = opaque_zero() + layer() * (3u * TOKENS * (K / 32u) + LINE_PADDING / 4u);
  for (var j = 0u; j < COPIES; j++) {
    let i = min(j * WORKGROUP + index, PLANE - 1u);
    let at = layer_start + 3u * (K / 32u) * (i / INPUT_BLOCKS) + min(first + i % INPUT_BLOCKS, K / 32u - 1u);
    copied[j] = Copied(x[at], x[at + K / 32u], x[at + 2u * (K / 32u)]);
  }
}
fn store_piece(index: u32) {
  for (var j = 0u; j < COPIES; j++) {
    let i = j * WORKGROUP + index;
    if (i < PLANE) {
      let scale = bitcast<vec4<f32>>(copied[j].scale);
      blocks[i] = copied[j].even;
      blocks[PLANE + i] = copied[j].odd;
      input_scales[i] = scale.xw;
      if (HALF_SUMS) { input_scales[PLANE + i] = scale.yz; }
    }
  }
  workgroupBarrier();
}
fn run_prologue(index: u32) {
  if (INPUTS_READY) { return; }
  wait(index);
  load_piece(0u, index);
  load_input_rms(index);
  if (INPUT_WIDTH == K) { store_piece(index); } else { workgroupBarrier(); }
}
fn copy_piece(first: u32, index: u32) -> u32 {  // the block that is the first one of inputs(), from block `first` on
  if (INPUT_WIDTH == K) { return 0u; }
  workgroupBarrier();  // the piece before has been read
  store_piece(index);
  load_piece(select(first + INPUT_BLOCKS, 0u, first + INPUT_BLOCKS >= K / 32u), index);  // after the last piece of a row the first one
  return first;
}
