// Role epilogue: as epilogue_glu, of the experts that a token has chosen, which have biases:
// y[layer, row / 2] = weight of the expert * glu(gate, up), v + bias = (gate, up).
// Before the choice epilogue_prefetch loads a bias of an expert that the layer before has chosen, if there is one;
// choose_experts calls it again.
// Parts: activation_*, rows_experts_biased, choose_experts.
const N: u32 = 2u;                // rows of this shard, which is the matrix
const ROW0: u32 = 0u;
const WIDTH: u32 = 2u;            // rows of the matrix
const EXPERT_ROWS: u32 = 2u;
const INTERLEAVED: bool = false;  // in the order of inputs_interleaved; needs WIDTH % 64 == 0
@group(0) @binding(0) var<storage, read_write> y: array<f32>;
var<private> row_bias: vec2<f32>;
fn epilogue_prefetch(token: u32, row: u32) {
  first_row = row;
  if (has_chosen) { row_bias = expert_bias(rank_of(row), min(row, N - 2u) % EXPERT_ROWS); }
}
fn epilogue(token: u32, row: u32, v: vec2<f32>) {
  if (row >= N) { return; }
  let gate_up = v + row_bias;
  var i = (ROW0 + row) / 2u;
  if (INTERLEAVED) { i = (i % 32u / 4u * (WIDTH / 64u) + i / 32u) * 4u + i % 4u; }
  y[layer() * LINE_PADDING + layer() * (WIDTH / 2u) + i] = expert_weights[rank_of(row)] * glu(gate_up.x, gate_up.y);
}
fn workgroup_epilogue(workgroup: u32, token0: u32, end: u32, index: u32) {}
