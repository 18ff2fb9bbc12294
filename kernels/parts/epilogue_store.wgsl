// Role epilogue: y[token, row] = v (+ bias). Rows come in pairs: row is even, v = (row, row + 1).
const N: u32 = 1u;      // rows of this shard
const ROW0: u32 = 0u;   // the shard's first row in the matrix
const WIDTH: u32 = 1u;  // rows of the matrix
const BIAS: bool = false;
@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(4) var<storage, read> bias: array<f32>;
fn epilogue_prefetch(token: u32, row: u32) {}
fn epilogue(token: u32, row: u32, v: vec2<f32>) {
  let i = token * WIDTH + ROW0 + row;
  var b = vec2<f32>();
  if (BIAS) { b = vec2<f32>(bias[min(ROW0 + row, WIDTH - 1u)], bias[min(ROW0 + row + 1u, WIDTH - 1u)]); }
  if (row < N) { y[i] = v.x + b.x; }
  if (row + 1u < N) { y[i + 1u] = v.y + b.y; }
}
fn workgroup_epilogue(workgroup: u32, token0: u32, end: u32, index: u32) {}

fn residual_at(token: u32, row: u32) -> vec2<f32> { return vec2<f32>(); }
fn store_result(token: u32, row: u32, v: vec2<f32>) { epilogue(token, row, v); }
