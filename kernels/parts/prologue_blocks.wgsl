// Role prologue: the inputs of a linear of TOKENS tokens are int8 blocks that an earlier stage has left (see inputs_int8). Every
// workgroup copies them to workgroup memory, all at once or in pieces of INPUT_WIDTH inputs of each token. While a piece is used, the
// next one is loaded: it is in registers until all have read the piece before.
// Every invocation must call run_prologue, and copy_piece for each piece of a row, in their order, before it reads it. late_x, repair_x:
// see parts/late_stores.wgsl. Needs K % 32 == 0.
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
var<private> copied_first: u32;
fn late_x(v: vec4<u32>) -> bool { return false; }
fn repair_x(i: u32) {}
fn layer_place() -> u32 { return layer() * (3u * TOKENS * (K / 32u) + LINE_PADDING / 4u); }
fn place_of(first: u32, j: u32, index: u32) -> u32 {  // in the layer, of the j-th block that an invocation copies; nobody stores rows that the step has not
  let i = min(j * WORKGROUP + index, PLANE - 1u);
  return 3u * (K / 32u) * min(i / INPUT_BLOCKS, step.rows - 1u) + min(first + i % INPUT_BLOCKS, K / 32u - 1u);
}
fn load_piece(first: u32, index: u32) {  // from block `first` on
  copied_first = first;
  let layer_start = opaque_zero() + layer_place();
  for (var j = 0u; j < COPIES; j++) {
    let at = layer_start + place_of(first, j, index);
    copied[j] = Copied(x[at], x[at + K / 32u], x[at + 2u * (K / 32u)]);
  }
}
fn store_piece(index: u32) {
  var late = false;  // of all: with a repair in the loop below drivers keep `copied` in memory
  for (var j = 0u; j < COPIES; j++) { late = late || late_x(copied[j].even) || late_x(copied[j].odd) || late_x(copied[j].scale); }
  if (late) {
    for (var j = 0u; j < 3u * COPIES + uniform_zero(); j++) { repair_x(layer_place() + place_of(copied_first, j / 3u, index) + j % 3u * (K / 32u)); }
    load_piece(copied_first, index);
  }
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
