// Role rows: a stage's rows are those of the experts that the token has chosen.
// Result `row` is made of row slab_row(row, b) + row of the slab, whose block row_block(b) belongs to block b of the
// inputs.
// Gate and up, with CHOOSES: the rows of the chosen experts, one expert after another. choose_experts(index) waits for
// the logits and chooses, weigh_experts(index) computes the weights of the experts, and weigh_results multiplies up.
// Down: the inputs are those of one expert after another, and the choice is still in workgroup memory. So all workgroups
// must run the stage that chooses, and no stage between the two may choose.
// Needs an even EXPERT_ROWS. Parts: choose_experts; grid_barrier.
const K: u32 = 32u;           // width of a row of the slab
const N: u32 = 2u;
const EXPERTS: u32 = 8u;
const EXPERT_ROWS: u32 = 2u;  // of the matrix of one expert
const CHOOSES: bool = false;
const WORKGROUP: u32 = 64u;
@group(0) @binding(3) var<storage, read> logits: array<f32>;  // [layers, EXPERTS], padded after each layer
fn rank_of(row: u32) -> u32 { return min(row, N - 1u) / EXPERT_ROWS; }
fn slab_row(row: u32, b: u32) -> u32 {
  let rank = select(b / (K / 32u), rank_of(row), CHOOSES);
  return (slab_index() * EXPERTS + chosen[rank] - select(0u, rank, CHOOSES)) * EXPERT_ROWS;
}
fn row_block(b: u32) -> u32 { return select(b % (K / 32u), b, CHOOSES); }
fn choose_experts(index: u32) {
  wait(index);
  let first = opaque_zero() + layer() * (EXPERTS + LINE_PADDING);
  for (var i = index; i < EXPERTS; i += WORKGROUP) { expert_logits[i] = logits[first + i]; }
  rank_experts(index);
}
fn weigh_results(row: u32, v: vec2<f32>) -> vec2<f32> {
  if (CHOOSES) { return v * vec2<f32>(1.0, expert_weights[rank_of(row)]); }
  return v;
}
