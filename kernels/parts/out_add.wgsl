// y[token, row] += v (+ bias): the residual stream. Rows come in pairs: row is even, v = (row, row + 1).
// begin may be called before emit, to have the old values there in time.
const N: u32 = 1u;       // rows of this part of the matrix
const ROW0: u32 = 0u;    // its first row in the whole matrix
const WIDTH: u32 = 1u;   // rows of the whole matrix
const BIAS: bool = false;
@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(4) var<storage, read> bias: array<f32>;
var<private> begun: bool = false;
var<private> old: vec2<f32>;
fn begin(token: u32, row: u32) {
  let i = token * WIDTH + min(ROW0 + row, WIDTH - 1u);
  old = vec2<f32>(y[i], y[min(i + 1u, token * WIDTH + WIDTH - 1u)]);
  if (BIAS) { old += vec2<f32>(bias[min(ROW0 + row, WIDTH - 1u)], bias[min(ROW0 + row + 1u, WIDTH - 1u)]); }
  begun = true;
}
fn emit(token: u32, row: u32, v: vec2<f32>) {
  if (!begun) { begin(token, row); }
  begun = false;
  let i = token * WIDTH + ROW0 + row;
  if (row < N) { y[i] = old.x + v.x; }
  if (row + 1u < N) { y[i + 1u] = old.y + v.y; }
}
fn finish(group: u32, token0: u32, index: u32) {}
