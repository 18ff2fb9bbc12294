// y[row] = v, and of each workgroup the largest logit with its index: the first half of a greedy choice.
// Of equal logits the lowest index wins. v = (row, row + 1), row even.
const N: u32 = 1u;       // rows of this part of the matrix
const ROW0: u32 = 0u;    // its first row in the whole matrix
const BEST0: u32 = 0u;   // where this part's candidates begin
const LANES: u32 = 64u;
const PAIRS: u32 = 1u;
const WORKGROUP: u32 = 64u;
const SLOTS: u32 = WORKGROUP / LANES * PAIRS;
@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(1) var<storage, read_write> best: array<vec2<u32>>;  // (bits of the f32 logit, index)
var<private> top: f32 = -3.4e38;
var<private> place: u32 = 0xFFFFFFFFu;
var<workgroup> tops: array<f32, SLOTS>;
var<workgroup> places: array<u32, SLOTS>;
fn begin(token: u32, row: u32) {}
fn emit(token: u32, row: u32, v: vec2<f32>) {
  if (row < N) { y[ROW0 + row] = v.x; if (v.x > top) { top = v.x; place = ROW0 + row; } }
  if (row + 1u < N) { y[ROW0 + row + 1u] = v.y; if (v.y > top) { top = v.y; place = ROW0 + row + 1u; } }
}
fn finish(group: u32, token0: u32, index: u32) {
  if (index % LANES < PAIRS) {
    tops[index / LANES * PAIRS + index % LANES] = top;
    places[index / LANES * PAIRS + index % LANES] = place;
  }
  workgroupBarrier();
  if (index > 0u) { return; }
  for (var i = 1u; i < SLOTS; i++) {  // slots are in row order: the first of equals stays
    if (tops[i] > top) { top = tops[i]; place = places[i]; }
  }
  best[BEST0 + group] = vec2<u32>(bitcast<u32>(top), place);
}
