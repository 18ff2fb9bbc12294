// Role epilogue: y[layer + token, row / 2] = glu(gate, up). The rows of gate and up are interleaved: v = (gate, up)
// (+ bias). Parts: activation_*.
const N: u32 = 2u;                // rows of this shard
const ROW0: u32 = 0u;             // the shard's first row in the matrix
const WIDTH: u32 = 2u;            // rows of the matrix
const BIAS: bool = false;
const INTERLEAVED: bool = false;  // in the order of inputs_interleaved; needs WIDTH % 64 == 0
@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(4) var<storage, read> bias: array<f32>;
fn epilogue_prefetch(token: u32, row: u32) {}
fn epilogue(token: u32, row: u32, v: vec2<f32>) {
  if (row >= N) { return; }
  var gate_up = v;
  if (BIAS) { let i = slab_index() * WIDTH + ROW0 + row; gate_up += vec2<f32>(bias[i], bias[i + 1u]); }
  var i = (ROW0 + row) / 2u;
  if (INTERLEAVED) { i = (i % 32u / 4u * (WIDTH / 64u) + i / 32u) * 4u + i % 4u; }
  y[layer() * LINE_PADDING + (layer() + token) * (WIDTH / 2u) + i] = glu(gate_up.x, gate_up.y);
}
fn workgroup_epilogue(workgroup: u32, token0: u32, end: u32, index: u32) {}

fn residual_at(token: u32, row: u32) -> vec2<f32> { return vec2<f32>(); }
fn store_result(token: u32, row: u32, v: vec2<f32>) { epilogue(token, row, v); }
