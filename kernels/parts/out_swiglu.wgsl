// y[layer + token, row / 2] = silu(gate) * up, the rows of gate and up being interleaved: v = (gate, up) (+ bias).
const N: u32 = 2u;       // rows of this part of the matrix
const ROW0: u32 = 0u;    // its first row in the whole matrix
const WIDTH: u32 = 2u;   // rows of the whole matrix
const BIAS: bool = false;
const QUADS: bool = false;  // in the order of inputs_quads; needs WIDTH % 64 == 0
@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(4) var<storage, read> bias: array<f32>;
fn begin(token: u32, row: u32) {}
fn emit(token: u32, row: u32, v: vec2<f32>) {
  if (row >= N) { return; }
  var gu = v;
  if (BIAS) { let i = slot() * WIDTH + ROW0 + row; gu += vec2<f32>(bias[i], bias[i + 1u]); }
  var i = (ROW0 + row) / 2u;
  if (QUADS) { i = (i % 32u / 4u * (WIDTH / 64u) + i / 32u) * 4u + i % 4u; }
  y[layer() * GAP + (layer() + token) * (WIDTH / 2u) + i] = gu.x / (1.0 + exp(-gu.x)) * gu.y;
}
fn finish(group: u32, token0: u32, index: u32) {}
