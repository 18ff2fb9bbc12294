// y[row] = x[row] / rms(x[row]) * weight, four values at a time (dot(v, v)). One workgroup per row.
// With LAST only the last of step.m rows is normalised, into row 0 of y. Parts: reduce. Needs WIDTH % 4 == 0.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
const WIDTH: u32 = 4u;
const EPS: f32 = 1e-5;
const LAST: bool = false;
const WORKGROUP: u32 = 256u;
const ROUNDS: u32 = (WIDTH / 4u + WORKGROUP - 1u) / WORKGROUP;  // of four values for each invocation
@group(0) @binding(0) var<storage, read_write> y: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> w: array<vec4<f32>>;
@group(0) @binding(8) var<uniform> step: Step;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let source = select(group.x, step.m - 1u, LAST) * (WIDTH / 4u);
  let into = select(group.x, 0u, LAST) * (WIDTH / 4u);
  var v: array<vec4<f32>, ROUNDS>;
  var weight: array<vec4<f32>, ROUNDS>;  // loaded with x, not after the sum: both wait for memory once
  var squares = 0.0;
  for (var r = 0u; r < ROUNDS; r++) {
    let i = min(index + r * WORKGROUP, WIDTH / 4u - 1u);
    v[r] = x[source + i];
    weight[r] = w[i];
    if (index + r * WORKGROUP < WIDTH / 4u) { squares += dot(v[r], v[r]); }
  }
  let scale = inverseSqrt(sum_workgroup(squares, index) / f32(WIDTH) + EPS);
  for (var r = 0u; r < ROUNDS; r++) {
    let i = index + r * WORKGROUP;
    if (i < WIDTH / 4u) { y[into + i] = v[r] * scale * weight[r]; }
  }
}
