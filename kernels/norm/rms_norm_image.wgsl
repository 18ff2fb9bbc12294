// y[row] = x[row] / rms(x[row]) * weight, image to image, for adapters that are a CPU. SPLIT workgroups per row: every
// invocation sums the whole row, which is cheaper than sharing the sum, and writes some of it. With LAST only the last of
// step.m rows is normalised, into row 0 of y. Needs WIDTH % 4 == 0.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
const WIDTH: u32 = 4u;
const EPS: f32 = 1e-5;
const LAST: bool = false;
const WORKGROUP: u32 = 8u;
const SPLIT: u32 = 2u;
@group(0) @binding(0) var y: texture_storage_2d<rgba32float, write>;
@group(0) @binding(5) var x: texture_storage_2d<rgba32float, read>;
@group(0) @binding(6) var w: texture_storage_2d<rgba32float, read>;  // one row
@group(0) @binding(8) var<uniform> step: Step;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let source = select(group.x, step.m - 1u, LAST);
  var squares = vec4<f32>();
  for (var i = 0u; i < WIDTH / 4u; i++) {
    let v = textureLoad(x, vec2<u32>(i, source));
    squares += v * v;
  }
  let scale = inverseSqrt(dot(squares, vec4<f32>(1.0)) / f32(WIDTH) + EPS);
  for (var i = index + group.y * WORKGROUP; i < WIDTH / 4u; i += SPLIT * WORKGROUP) {
    textureStore(y, vec2<u32>(i, group.x), textureLoad(x, vec2<u32>(i, source)) * scale * textureLoad(w, vec2<u32>(i, 0u)));
  }
}
