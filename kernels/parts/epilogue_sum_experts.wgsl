// Role epilogue: as epilogue_sum, of the down projection of the experts that a token has chosen, which have biases:
// y[layer + LAYER_OFFSET, row] = residual[layer, row] + v + the sum of weight * bias of the experts.
// late_residual, repair_residual: see parts/late_stores.wgsl.
// Needs an even WIDTH. Parts: rows_experts_biased, choose_experts.
const N: u32 = 2u;      // rows of this shard, which is the matrix
const ROW0: u32 = 0u;
const WIDTH: u32 = 2u;  // rows of the matrix
const USED: u32 = 2u;
const LAYER_OFFSET: u32 = 0u;
@group(0) @binding(0) var<storage, read_write> y: array<vec2<f32>>;  // [layers + LAYER_OFFSET, WIDTH], padded after each layer
@group(0) @binding(1) var<storage, read> residual: array<vec2<f32>>;  // [layers, WIDTH], padded after each layer
var<private> prefetched: vec2<f32>;  // residual of this pair of rows
var<private> prefetched_from: u32;
var<private> row_bias: vec2<f32>;
fn late_residual(v: vec2<f32>) -> bool { return false; }
fn repair_residual(i: u32) {}
fn epilogue_prefetch(token: u32, row: u32) {
  let i = ROW0 + min(row, N - 2u);
  prefetched_from = opaque_zero() + (layer() * (WIDTH + LINE_PADDING) + i) / 2u;
  prefetched = residual[prefetched_from];
  row_bias = vec2<f32>();
  for (var rank = 0u; rank < USED; rank++) { row_bias += expert_weights[rank] * expert_bias(rank, i); }
}
fn epilogue(token: u32, row: u32, v: vec2<f32>) {
  if (row >= N) { return; }
  if (late_residual(prefetched)) { repair_residual(prefetched_from); prefetched = residual[prefetched_from]; }
  y[((layer() + LAYER_OFFSET) * (WIDTH + LINE_PADDING) + ROW0 + row) / 2u] = prefetched + v + row_bias;
}
fn workgroup_epilogue(workgroup: u32, token0: u32, end: u32, index: u32) {}
