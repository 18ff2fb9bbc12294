// Role epilogue: y[token, row] += v (+ bias), the residual stream. Rows come in pairs: row is even, v = (row, row + 1).
// epilogue_prefetch may be called before epilogue, to load y and bias early; residual_at and store_result are its halves.
const N: u32 = 1u;      // rows of this shard
const ROW0: u32 = 0u;   // the shard's first row in the matrix
const WIDTH: u32 = 1u;  // rows of the matrix
const BIAS: bool = false;
@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(4) var<storage, read> bias: array<f32>;
var<private> prefetched: bool = false;
var<private> residual: vec2<f32>;
fn residual_at(token: u32, row: u32) -> vec2<f32> {
  let i = token * WIDTH + min(ROW0 + row, WIDTH - 1u);
  var v = vec2<f32>(y[i], y[min(i + 1u, token * WIDTH + WIDTH - 1u)]);
  if (BIAS) { v += vec2<f32>(bias[min(ROW0 + row, WIDTH - 1u)], bias[min(ROW0 + row + 1u, WIDTH - 1u)]); }
  return v;
}
fn store_result(token: u32, row: u32, v: vec2<f32>) {
  let i = token * WIDTH + ROW0 + row;
  if (row < N) { y[i] = v.x; }
  if (row + 1u < N) { y[i + 1u] = v.y; }
}

fn epilogue_prefetch(token: u32, row: u32) {
  residual = residual_at(token, row);
  prefetched = true;
}

fn epilogue(token: u32, row: u32, v: vec2<f32>) {
  if (!prefetched) { epilogue_prefetch(token, row); }
  prefetched = false;
  store_result(token, row, residual + v);
}

fn workgroup_epilogue(workgroup: u32, token0: u32, end: u32, index: u32) {}
