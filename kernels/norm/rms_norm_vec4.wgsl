// y[m, WIDTH] = x / rms(x) * weight, row by row, four values at a time (dot(v, v)).
// One workgroup per row. With LAST_ROWS row i of y is the last row of segment i. Needs WIDTH % 4 == 0. Parts: reduce_*.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const WIDTH: u32 = 4u;
const EPS: f32 = 1e-5;
const LAST_ROWS: bool = false;
const WORKGROUP: u32 = 256u;
const ITERATIONS: u32 = (WIDTH / 4u + WORKGROUP - 1u) / WORKGROUP;  // an invocation takes four values in each
@group(0) @binding(0) var<storage, read_write> y: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> w: array<vec4<f32>>;
@group(0) @binding(8) var<uniform> step: Step;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let source = select(workgroup.x, max(step.segment[workgroup.x].x + step.segment[workgroup.x].y, 1u) - 1u, LAST_ROWS) * (WIDTH / 4u);
  let into = workgroup.x * (WIDTH / 4u);
  var v: array<vec4<f32>, ITERATIONS>;
  var weight: array<vec4<f32>, ITERATIONS>;  // loaded with x, not after the sum: one wait for memory instead of two
  var squares = 0.0;
  for (var r = 0u; r < ITERATIONS; r++) {
    let i = min(index + r * WORKGROUP, WIDTH / 4u - 1u);
    v[r] = x[source + i];
    weight[r] = w[i];
    if (index + r * WORKGROUP < WIDTH / 4u) { squares += dot(v[r], v[r]); }
  }
  let scale = inverseSqrt(sum_workgroup(squares, index) / f32(WIDTH) + EPS);
  for (var r = 0u; r < ITERATIONS; r++) {
    let i = index + r * WORKGROUP;
    if (i < WIDTH / 4u) { y[into + i] = v[r] * scale * weight[r]; }
  }
}
