// Role epilogue: y[layer + LAYER_OFFSET, token, row] = residual[layer, token, row] + v (+ bias), the residual stream
// from one buffer to another.
// In a fused kernel no cache line may be written that was read before: a workgroup may still have it in its cache.
// Rows come in pairs: row is even, v = (row, row + 1). epilogue_prefetch may be called before epilogue, to load residual
// and bias early. late_residual, repair_residual: see parts/late_stores.wgsl.
// Needs m <= TOKENS and an even WIDTH.
const N: u32 = 2u;      // rows of this shard
const ROW0: u32 = 0u;   // the shard's first row in the matrix
const WIDTH: u32 = 2u;  // rows of the matrix
const LAYER_OFFSET: u32 = 0u;
const TOKENS: u32 = 1u;
const BIAS: bool = false;
@group(0) @binding(0) var<storage, read_write> y: array<vec2<f32>>;  // [layers + LAYER_OFFSET, TOKENS, WIDTH], padded after each layer
@group(0) @binding(1) var<storage, read> residual: array<vec2<f32>>;  // [layers, TOKENS, WIDTH], padded after each layer
@group(0) @binding(4) var<storage, read> bias: array<f32>;
var<private> prefetched: vec2<f32>;  // residual of this pair of rows
var<private> prefetched_from: u32;
var<private> row_bias: vec2<f32>;
fn late_residual(v: vec2<f32>) -> bool { return false; }
fn repair_residual(i: u32) {}
fn epilogue_prefetch(token: u32, row: u32) {
  let i = ROW0 + min(row, N - 2u);
  prefetched_from = opaque_zero() + (layer() * (TOKENS * WIDTH + LINE_PADDING) + token * WIDTH + i) / 2u;
  prefetched = residual[prefetched_from];
  if (BIAS) { row_bias = vec2<f32>(bias[slab_index() * WIDTH + i], bias[slab_index() * WIDTH + i + 1u]); }
}
fn epilogue(token: u32, row: u32, v: vec2<f32>) {
  if (row >= N) { return; }
  if (late_residual(prefetched)) { repair_residual(prefetched_from); prefetched = residual[prefetched_from]; }
  let sum = prefetched + v;
  y[((layer() + LAYER_OFFSET) * (TOKENS * WIDTH + LINE_PADDING) + token * WIDTH + ROW0 + row) / 2u] = select(sum, sum + row_bias, BIAS);
}
fn workgroup_epilogue(workgroup: u32, token0: u32, end: u32, index: u32) {}
