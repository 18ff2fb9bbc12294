// Role epilogue: y[layer, token, row] = v (+ bias), for a stage that reads whole rows. Rows come in pairs: row is even,
// v = (row, row + 1). Needs an even WIDTH.
const N: u32 = 2u;      // rows of this shard
const ROW0: u32 = 0u;   // the shard's first row in the matrix
const WIDTH: u32 = 2u;  // rows of the matrix
const TOKENS: u32 = 1u;
const BIAS: bool = false;
@group(0) @binding(0) var<storage, read_write> y: array<vec2<f32>>;  // [layers, TOKENS or m, WIDTH], padded after each layer
@group(0) @binding(4) var<storage, read> bias: array<f32>;
fn epilogue_prefetch(token: u32, row: u32) {}
fn epilogue(token: u32, row: u32, v: vec2<f32>) {
  if (row >= N) { return; }
  var b = vec2<f32>();
  if (BIAS) { let i = slab_index() * WIDTH + ROW0 + row; b = vec2<f32>(bias[i], bias[i + 1u]); }
  y[(layer() * (TOKENS * WIDTH + LINE_PADDING) + token * WIDTH + ROW0 + row) / 2u] = v + b;
}
fn workgroup_epilogue(workgroup: u32, token0: u32, end: u32, index: u32) {}

fn residual_at(token: u32, row: u32) -> vec2<f32> { return vec2<f32>(); }
fn store_result(token: u32, row: u32, v: vec2<f32>) { epilogue(token, row, v); }
