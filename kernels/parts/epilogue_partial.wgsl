// Role epilogue: y[split * SPLIT_ROWS + token, row] = v, the results of a split over K, for linear_sum. Rows come in pairs:
// row is even, v = (row, row + 1). Needs an even N.
const N: u32 = 2u;  // rows of this shard
@group(0) @binding(0) var<storage, read_write> y: array<vec2<f32>>;

fn epilogue_prefetch(token: u32, row: u32) {}

fn epilogue(token: u32, row: u32, v: vec2<f32>) {
  if (row < N) { y[(token * N + row) / 2u] = v; }
}

fn workgroup_epilogue(workgroup: u32, token0: u32, end: u32, index: u32) {}

fn residual_at(token: u32, row: u32) -> vec2<f32> { return vec2<f32>(); }
fn store_result(token: u32, row: u32, v: vec2<f32>) { epilogue(token, row, v); }
