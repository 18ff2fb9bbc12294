// Role epilogue: y[row] = v. The workgroup epilogue writes the largest logit of the workgroup and its index as a
// candidate, the first half of sampling. Among equal logits the lowest index wins. Rows come in pairs: row is even,
// v = (row, row + 1).
const N: u32 = 1u;                                           // rows of this shard
const ROW0: u32 = 0u;                                        // the shard's first row in the matrix
const FIRST_CANDIDATE: u32 = 0u;                             // the shard's first candidate
const LANES: u32 = 64u;
const ROW_PAIRS: u32 = 1u;
const WORKGROUP: u32 = 64u;
const WORKGROUP_PAIRS: u32 = WORKGROUP / LANES * ROW_PAIRS;  // row pairs of a workgroup
@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(1) var<storage, read_write> candidates: array<vec2<u32>>;  // (bits of the f32 logit, index)
var<private> top: f32 = -3.4e38;
var<private> top_index: u32 = 0xFFFFFFFFu;
var<workgroup> tops: array<f32, WORKGROUP_PAIRS>;
var<workgroup> top_indices: array<u32, WORKGROUP_PAIRS>;
fn epilogue_prefetch(token: u32, row: u32) {}
fn epilogue(token: u32, row: u32, v: vec2<f32>) {
  if (row < N) { y[ROW0 + row] = v.x; if (v.x > top) { top = v.x; top_index = ROW0 + row; } }
  if (row + 1u < N) { y[ROW0 + row + 1u] = v.y; if (v.y > top) { top = v.y; top_index = ROW0 + row + 1u; } }
}
fn workgroup_epilogue(workgroup: u32, token0: u32, end: u32, index: u32) {
  if (index % LANES < ROW_PAIRS) {
    tops[index / LANES * ROW_PAIRS + index % LANES] = top;
    top_indices[index / LANES * ROW_PAIRS + index % LANES] = top_index;
  }
  workgroupBarrier();
  if (index > 0u) { return; }
  for (var i = 1u; i < WORKGROUP_PAIRS; i++) {  // in row order: among equal logits the first wins
    if (tops[i] > top) { top = tops[i]; top_index = top_indices[i]; }
  }
  candidates[FIRST_CANDIDATE + workgroup] = vec2<u32>(bitcast<u32>(top), top_index);
}
