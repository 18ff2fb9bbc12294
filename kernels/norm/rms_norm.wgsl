// y[m, WIDTH] = x / rms(x) * weight, row by row, for every width: the scalar fallback.
// One workgroup per row. With LAST_ROWS row i of y is the last row of segment i. Needs nothing. Parts: reduce_*.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const WIDTH: u32 = 1u;
const EPS: f32 = 1e-5;
const LAST_ROWS: bool = false;
const WORKGROUP: u32 = 64u;
@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(5) var<storage, read> x: array<f32>;
@group(0) @binding(6) var<storage, read> w: array<f32>;
@group(0) @binding(8) var<uniform> step: Step;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let source = select(workgroup.x, max(step.segment[workgroup.x].x + step.segment[workgroup.x].y, 1u) - 1u, LAST_ROWS) * WIDTH;
  let into = workgroup.x * WIDTH;
  var squares = 0.0;
  for (var i = index; i < WIDTH; i += WORKGROUP) { let v = x[source + i]; squares += v * v; }
  let scale = inverseSqrt(sum_workgroup(squares, index) / f32(WIDTH) + EPS);
  for (var i = index; i < WIDTH; i += WORKGROUP) { y[into + i] = x[source + i] * scale * w[i]; }
}
