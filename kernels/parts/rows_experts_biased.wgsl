// Role rows: as rows_experts, where the router and the experts have biases. Gate and up choose by logits with the
// router's bias, which it does not add itself: its bias of a layer takes ROUTER_STRIDE words. Their results are weighed after the
// activation (epilogue_glu_experts), and so are the biases of down (epilogue_sum_experts): expert_bias(rank, row) is the
// bias of rows row and row + 1 of a chosen expert.
// choose_experts ends with the epilogue_prefetch of the first row, whose bias nobody could load before.
// Needs an even EXPERT_ROWS. Parts: choose_experts, epilogue_glu_experts or epilogue_sum_experts; grid_barrier.
const K: u32 = 32u;           // width of a row of the slab
const N: u32 = 2u;
const EXPERTS: u32 = 8u;
const EXPERT_ROWS: u32 = 2u;  // of the matrix of one expert
const ROUTER_STRIDE: u32 = 64u;
const CHOOSES: bool = false;
const WORKGROUP: u32 = 64u;
@group(0) @binding(3) var<storage, read> logits: array<f32>;        // [layers, EXPERTS], padded after each layer
@group(0) @binding(4) var<storage, read> bias: array<vec2<f32>>;    // [layers of the slab, EXPERTS, EXPERT_ROWS / 2]
@group(0) @binding(10) var<storage, read> router_bias: array<f32>;  // [layers, ROUTER_STRIDE]
var<private> first_row: u32;  // of this invocation, where the stage chooses
var<private> has_chosen: bool = false;  // in this layer or one before: `chosen` begins undefined
fn rank_of(row: u32) -> u32 { return min(row, N - 1u) / EXPERT_ROWS; }
fn slab_row(row: u32, b: u32) -> u32 {
  let rank = select(b / (K / 32u), rank_of(row), CHOOSES);
  return (slab_index() * EXPERTS + chosen[rank] - select(0u, rank, CHOOSES)) * EXPERT_ROWS;
}
fn row_block(b: u32) -> u32 { return select(b % (K / 32u), b, CHOOSES); }
fn expert_bias(rank: u32, row: u32) -> vec2<f32> { return bias[((slab_index() * EXPERTS + chosen[rank]) * EXPERT_ROWS + row) / 2u]; }
fn choose_experts(index: u32) {
  for (var i = index; i < EXPERTS; i += WORKGROUP) { expert_logits[i] = router_bias[layer() * ROUTER_STRIDE + i]; }
  wait(index);
  let first = opaque_zero() + layer() * (EXPERTS + LINE_PADDING);
  for (var i = index; i < EXPERTS; i += WORKGROUP) { expert_logits[i] += logits[first + i]; }
  rank_experts(index);
  has_chosen = true;
  epilogue_prefetch(0u, first_row);
}
fn weigh_results(row: u32, v: vec2<f32>) -> vec2<f32> { return v; }
