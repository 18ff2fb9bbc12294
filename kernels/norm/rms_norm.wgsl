// y[row] = x[row] / rms(x[row]) * weight for every width: the scalar kernel. One workgroup per row.
// With LAST only the last of step.m rows is normalised, into row 0 of y. Parts: reduce. Needs nothing.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
const WIDTH: u32 = 1u;
const EPS: f32 = 1e-5;
const LAST: bool = false;
const WORKGROUP: u32 = 64u;
@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(5) var<storage, read> x: array<f32>;
@group(0) @binding(6) var<storage, read> w: array<f32>;
@group(0) @binding(8) var<uniform> step: Step;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let source = select(group.x, step.m - 1u, LAST) * WIDTH;
  let into = select(group.x, 0u, LAST) * WIDTH;
  var squares = 0.0;
  for (var i = index; i < WIDTH; i += WORKGROUP) { let v = x[source + i]; squares += v * v; }
  let scale = inverseSqrt(sum_workgroup(squares, index) / f32(WIDTH) + EPS);
  for (var i = index; i < WIDTH; i += WORKGROUP) { y[into + i] = x[source + i] * scale * w[i]; }
}
