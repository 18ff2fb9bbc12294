// Role epilogue: stream[layer + LAYER_OFFSET, token, row] = residual[layer, token, row] + v (+ bias), as epilogue_sum, and y = the same
// times next_norm as int8 blocks (see blocks_int8), for the linear after the next norm. 1 / rms is left to that linear:
// squares[layer + LAYER_OFFSET, token, block] is the sum of squares of a block (see input_rms). Rows come in pairs: row is even, v = (row, row + 1).
// late_residual, repair_residual: see parts/late_stores.wgsl.
// Needs m <= TOKENS, a workgroup that covers 32 consecutive rows, and N % 32 == 0. Parts: blocks_int8, hidden; grid_barrier (or unfused).
const N: u32 = 32u;     // rows of the matrix, which has one shard
const ROW0: u32 = 0u;   // its first row
const LAYER_OFFSET: u32 = 0u;
const NORMS: u32 = 1u;  // layers of next_norm
const TOKENS: u32 = 1u;
const BIAS: bool = false;
const WORKGROUP: u32 = 64u;
@group(0) @binding(0) var<storage, read_write> y: array<u32>;  // [layers + LAYER_OFFSET][TOKENS] blocks, padded after each layer
@group(0) @binding(1) var<storage, read> residual: array<vec2<f32>>;  // [layers, TOKENS, N], padded after each layer
@group(0) @binding(2) var<storage, read_write> stream: array<vec2<f32>>;  // [layers + LAYER_OFFSET, TOKENS, N], padded after each layer
@group(0) @binding(3) var<storage, read_write> squares: array<f32>;  // [layers + LAYER_OFFSET, TOKENS, N / 32], padded after each layer
@group(0) @binding(4) var<storage, read> bias: array<f32>;
@group(0) @binding(10) var<storage, read> next_norm: array<vec2<f32>>;  // [NORMS, N]: the last layer has no next one
var<private> prefetched: vec2<f32>;  // residual of this pair of rows
var<private> prefetched_from: u32;
var<private> row_bias: vec2<f32>;
var<private> row_weight: vec2<f32>;
var<workgroup> pair_squares: array<f32, TOKENS * 16u>;
fn late_residual(v: vec2<f32>) -> bool { return false; }
fn repair_residual(i: u32) {}
fn epilogue_prefetch(token: u32, row: u32) {
  let i = min(row, N - 2u);
  prefetched_from = opaque_zero() + (layer() * (TOKENS * N + LINE_PADDING) + token * N + i) / 2u;
  prefetched = residual[prefetched_from];
  row_weight = next_norm[(min(layer() + LAYER_OFFSET, NORMS - 1u) * N + i) / 2u];
  if (BIAS) { row_bias = vec2<f32>(bias[slab_index() * N + i], bias[slab_index() * N + i + 1u]); }
}
fn epilogue(token: u32, row: u32, v: vec2<f32>) {
  if (row >= N) { return; }
  if (late_residual(prefetched)) { repair_residual(prefetched_from); prefetched = residual[prefetched_from]; }
  let sum = prefetched + select(v, v + row_bias, BIAS);
  stream[((layer() + LAYER_OFFSET) * (TOKENS * N + LINE_PADDING) + token * N + row) / 2u] = sum;
  store_hidden(token * 32u + row % 32u, sum.x * row_weight.x);
  store_hidden(token * 32u + row % 32u + 1u, sum.y * row_weight.y);
  pair_squares[token * 16u + row % 32u / 2u] = dot(sum, sum);
}
fn workgroup_epilogue(workgroup: u32, token0: u32, end: u32, index: u32) {
  workgroupBarrier();
  for (var i0 = 0u; i0 < 4u * TOKENS; i0 += WORKGROUP) {  // a quarter of a block each; the same iterations for all invocations
    let i = min(i0 + index, 4u * TOKENS - 1u);
    let first = (layer() + LAYER_OFFSET) * (block_word(TOKENS, 0u, N / 32u) + LINE_PADDING) + block_word(i / 4u, workgroup, N / 32u);
    let live = i0 + index == i && workgroup < N / 32u && i / 4u >= token0 && i / 4u < end;
    store_block(first, N / 32u, load_hidden(8u * i), load_hidden(8u * i + 4u), index, live);
  }
  if (index >= token0 && index < end && workgroup < N / 32u) {
    var sum = 0.0;
    for (var i = 0u; i < 16u; i++) { sum += pair_squares[index * 16u + i]; }
    squares[(layer() + LAYER_OFFSET) * (TOKENS * (N / 32u) + LINE_PADDING) + index * (N / 32u) + workgroup] = sum;
  }
  workgroupBarrier();
}
