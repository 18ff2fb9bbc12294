// Role residual: residual(row, i) = vec4 i of a row of the residual stream, with the results of the linear before it added,
// which GRID_SPLIT splits over K have left (epilogue_partial). keep_residual(row, i, v) stores it. Load all of a row first:
// loads do not pass a store to the same buffer.
const WIDTH: u32 = 4u;
const GRID_SPLIT: u32 = 1u;
const SPLIT_ROWS: u32 = 1u;  // token rows of a split's results
@group(0) @binding(5) var<storage, read_write> x: array<vec4<f32>>;
@group(0) @binding(7) var<storage, read> partial_sums: array<vec4<f32>>;  // [splits, SPLIT_ROWS, WIDTH]

fn residual(row: u32, i: u32) -> vec4<f32> {
  var v = x[row * (WIDTH / 4u) + i];
  for (var split = 0u; split < GRID_SPLIT; split++) { v += partial_sums[(split * SPLIT_ROWS + row) * (WIDTH / 4u) + i]; }
  return v;
}
fn keep_residual(row: u32, i: u32, v: vec4<f32>) { x[row * (WIDTH / 4u) + i] = v; }
