// The residual stream from one buffer to another: y[layer + UP, row] = old[layer, row] + v (+ bias). No line of
// memory is written that was read in the same kernel: a workgroup may still have it in its cache. v = (row, row + 1), row even.
// begin may be called before emit, to have the old values there in time. Needs m == 1, an even WIDTH.
const N: u32 = 2u;       // rows of this part of the matrix
const ROW0: u32 = 0u;    // its first row in the whole matrix
const WIDTH: u32 = 2u;   // rows of the whole matrix
const UP: u32 = 0u;
const BIAS: bool = false;
@group(0) @binding(0) var<storage, read_write> y: array<vec2<f32>>;  // [layers + UP, WIDTH], gaps between layers
@group(0) @binding(1) var<storage, read> old: array<vec2<f32>>;      // [layers, WIDTH], likewise
@group(0) @binding(4) var<storage, read> bias: array<f32>;
var<private> before: vec2<f32>;
fn begin(token: u32, row: u32) {
  let i = ROW0 + min(row, N - 2u);
  before = old[later() + (layer() * (WIDTH + GAP) + i) / 2u];
  if (BIAS) { before += vec2<f32>(bias[slot() * WIDTH + i], bias[slot() * WIDTH + i + 1u]); }
}
fn emit(token: u32, row: u32, v: vec2<f32>) {
  if (row < N) { y[((layer() + UP) * (WIDTH + GAP) + ROW0 + row) / 2u] = before + v; }
}
fn finish(group: u32, token0: u32, index: u32) {}
