// y[m, WIDTH] = x / rms(x) * weight, row by row, texture backend (CPU adapters).
// One workgroup per row. With LAST_ROWS row i of y is the last row of segment i. Needs WIDTH % 4 == 0. Parts: reduce_*.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const WIDTH: u32 = 4u;
const EPS: f32 = 1e-5;
const LAST_ROWS: bool = false;
const WORKGROUP: u32 = 8u;
@group(0) @binding(0) var y: texture_storage_2d<rgba32float, write>;
@group(0) @binding(5) var x: texture_storage_2d<rgba32float, read>;
@group(0) @binding(6) var w: texture_storage_2d<rgba32float, read>;  // [1, WIDTH/4]
@group(0) @binding(8) var<uniform> step: Step;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let source = select(workgroup.x, step.segment[workgroup.x].x + step.segment[workgroup.x].y - 1u, LAST_ROWS);
  var squares = 0.0;
  for (var i = index; i < WIDTH / 4u; i += WORKGROUP) { let v = textureLoad(x, vec2<u32>(i, source)); squares += dot(v, v); }
  let scale = inverseSqrt(sum_workgroup(squares, index) / f32(WIDTH) + EPS);
  for (var i = index; i < WIDTH / 4u; i += WORKGROUP) {
    textureStore(y, vec2<u32>(i, workgroup.x), textureLoad(x, vec2<u32>(i, source)) * scale * textureLoad(w, vec2<u32>(i, 0u)));
  }
}
