// y[row] = x[row] / rms(x[row]) * weight, image to image, for adapters that are a CPU. One workgroup per row; with LAST
// only the last of step.m rows, into row 0 of y. Parts: reduce. Needs WIDTH % 4 == 0.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
const WIDTH: u32 = 4u;
const EPS: f32 = 1e-5;
const LAST: bool = false;
const WORKGROUP: u32 = 8u;
@group(0) @binding(0) var y: texture_storage_2d<rgba32float, write>;
@group(0) @binding(5) var x: texture_storage_2d<rgba32float, read>;
@group(0) @binding(6) var w: texture_storage_2d<rgba32float, read>;  // one row
@group(0) @binding(8) var<uniform> step: Step;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let source = select(group.x, step.m - 1u, LAST);
  var squares = 0.0;
  for (var i = index; i < WIDTH / 4u; i += WORKGROUP) { let v = textureLoad(x, vec2<u32>(i, source)); squares += dot(v, v); }
  let scale = inverseSqrt(sum_workgroup(squares, index) / f32(WIDTH) + EPS);
  for (var i = index; i < WIDTH / 4u; i += WORKGROUP) {
    textureStore(y, vec2<u32>(i, group.x), textureLoad(x, vec2<u32>(i, source)) * scale * textureLoad(w, vec2<u32>(i, 0u)));
  }
}
