// y[m, WIDTH / 32] = x / rms(x) * weight, row by row, as blocks (see blocks_*).
// One workgroup per row. With LAST_ROWS row i of y is the last row of segment i. Needs WIDTH % 32 == 0. Parts:
// blocks_*, reduce_*, residual or residual_split; grid_barrier (or unfused).
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const WIDTH: u32 = 32u;
const EPS: f32 = 1e-5;
const LAST_ROWS: bool = false;
const TOKENS: u32 = 1u;  // rows of a layer in a fused kernel
const PREFETCHED: bool = false;  // a fused kernel calls stage_prefetch before it waits for x
const BLOCKS: u32 = WIDTH / 32u;
const WORKGROUP: u32 = 256u;
const ITERATIONS: u32 = (WIDTH / 8u + WORKGROUP - 1u) / WORKGROUP;  // an invocation takes eight values in each
@group(0) @binding(0) var<storage, read_write> y: array<u32>;       // [layers or 1][TOKENS or m] blocks, padded after each layer
@group(0) @binding(6) var<storage, read> w: array<vec4<f32>>;  // [layers, WIDTH]
@group(0) @binding(8) var<uniform> step: Step;
var<private> weight: array<mat2x4<f32>, ITERATIONS>;
fn stage_prefetch(index: u32) {
  for (var r = 0u; r < ITERATIONS; r++) {
    let i = layer() * (WIDTH / 4u) + 2u * min(index + r * WORKGROUP, WIDTH / 8u - 1u);
    weight[r] = mat2x4<f32>(w[i], w[i + 1u]);
  }
}
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let row = select(workgroup.x, max(step.segment[workgroup.x].x + step.segment[workgroup.x].y, 1u) - 1u, LAST_ROWS);
  var v: array<mat2x4<f32>, ITERATIONS>;
  if (!PREFETCHED) { stage_prefetch(index); }  // with x, not after the sum: one wait for memory instead of two
  var squares = 0.0;
  for (var r = 0u; r < ITERATIONS; r++) {
    let i = 2u * min(index + r * WORKGROUP, WIDTH / 8u - 1u);
    let in_range = index + r * WORKGROUP < WIDTH / 8u;
    v[r] = mat2x4<f32>(residual(row, i), residual(row, i + 1u));
    if (in_range) { squares += dot(v[r][0], v[r][0]) + dot(v[r][1], v[r][1]); }
  }
  for (var r = 0u; r < ITERATIONS; r++) {
    let i = index + r * WORKGROUP;
    if (i < WIDTH / 8u) {
      keep_residual(row, 2u * i, v[r][0]);
      keep_residual(row, 2u * i + 1u, v[r][1]);
    }
  }
  let scale = inverseSqrt(sum_workgroup(squares, index) / f32(WIDTH) + EPS);
  for (var r = 0u; r < ITERATIONS; r++) {
    let i = index + r * WORKGROUP;
    let first = layer() * (block_word(TOKENS, 0u, BLOCKS) + LINE_PADDING) + block_word(workgroup.x, i / 4u, BLOCKS);
    store_block(first, BLOCKS, v[r][0] * scale * weight[r][0], v[r][1] * scale * weight[r][1], index, i < WIDTH / 8u);
  }
  workgroupBarrier();  // a fused stage may take another row: this one's sum has been read
}
