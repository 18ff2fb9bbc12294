// Role epilogue: y[layer + token, row / 2] = gate sigmoid(1.702 gate) (up + 1) of gate and up between bounds, as gpt-oss has
// it; otherwise epilogue_swiglu. The rows of gate and up are interleaved: v = (gate, up) (+ bias).
const N: u32 = 2u;                // rows of this shard
const ROW0: u32 = 0u;             // the shard's first row in the matrix
const WIDTH: u32 = 2u;            // rows of the matrix
const BIAS: bool = false;
const INTERLEAVED: bool = false;  // in the order of inputs_interleaved; needs WIDTH % 64 == 0
@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(4) var<storage, read> bias: array<f32>;
fn swiglu_oai(gate_up: vec2<f32>) -> f32 {
  let gate = min(gate_up.x, 7.0);
  return gate / (1.0 + exp(-1.702 * gate)) * (clamp(gate_up.y, -7.0, 7.0) + 1.0);
}
fn epilogue_prefetch(token: u32, row: u32) {}
fn epilogue(token: u32, row: u32, v: vec2<f32>) {
  if (row >= N) { return; }
  var gate_up = v;
  if (BIAS) { let i = slab_index() * WIDTH + ROW0 + row; gate_up += vec2<f32>(bias[i], bias[i + 1u]); }
  var i = (ROW0 + row) / 2u;
  if (INTERLEAVED) { i = (i % 32u / 4u * (WIDTH / 64u) + i / 32u) * 4u + i % 4u; }
  y[layer() * LINE_PADDING + (layer() + token) * (WIDTH / 2u) + i] = swiglu_oai(gate_up);
}
fn workgroup_epilogue(workgroup: u32, token0: u32, index: u32) {}

fn residual_at(token: u32, row: u32) -> vec2<f32> { return vec2<f32>(); }
fn store_result(token: u32, row: u32, v: vec2<f32>) { epilogue(token, row, v); }
