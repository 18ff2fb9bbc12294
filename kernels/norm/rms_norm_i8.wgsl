// y[row] = x[row] / rms(x[row]) * weight as int8 records (see make_record). One workgroup per row.
// With LAST only the last of step.m rows is normalised, into row 0 of y. Parts: record, reduce. Needs WIDTH % 32 == 0.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
const WIDTH: u32 = 32u;
const EPS: f32 = 1e-5;
const LAST: bool = false;
const WORKGROUP: u32 = 256u;
const ROUNDS: u32 = (WIDTH / 8u + WORKGROUP - 1u) / WORKGROUP;  // of eight values for each invocation
@group(0) @binding(0) var<storage, read_write> y: array<u32>;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> w: array<vec4<f32>>;
@group(0) @binding(8) var<uniform> step: Step;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let source = select(group.x, step.m - 1u, LAST) * (WIDTH / 4u);
  let into = select(group.x, 0u, LAST) * (WIDTH / 32u);
  var v: array<mat2x4<f32>, ROUNDS>;
  var weight: array<mat2x4<f32>, ROUNDS>;  // loaded with x, not after the sum: both wait for memory once
  var squares = 0.0;
  for (var r = 0u; r < ROUNDS; r++) {
    let i = 2u * min(index + r * WORKGROUP, WIDTH / 8u - 1u);
    v[r] = mat2x4<f32>(x[source + i], x[source + i + 1u]);
    weight[r] = mat2x4<f32>(w[i], w[i + 1u]);
    if (index + r * WORKGROUP < WIDTH / 8u) { squares += dot(v[r][0], v[r][0]) + dot(v[r][1], v[r][1]); }
  }
  let scale = inverseSqrt(sum_workgroup(squares, index) / f32(WIDTH) + EPS);
  for (var r = 0u; r < ROUNDS; r++) {
    let i = index + r * WORKGROUP;
    let made = make_record(v[r][0] * scale * weight[r][0], v[r][1] * scale * weight[r][1], index);
    let at = 12u * (into + i / 4u) + index % 4u;
    if (i < WIDTH / 8u) { y[at] = made.even; y[at + 4u] = made.odd; y[at + 8u] = made.scale; }
  }
}
