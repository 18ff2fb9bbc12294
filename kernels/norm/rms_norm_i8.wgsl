// y[row] = x[row] / rms(x[row]) * weight as int8 records (see make_record). One workgroup per row.
// With LAST only the last of step.m rows is normalised, into row 0 of y. Parts: record, reduce. Needs WIDTH % 32 == 0.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
const WIDTH: u32 = 32u;
const EPS: f32 = 1e-5;
const LAST: bool = false;
const WORKGROUP: u32 = 256u;
@group(0) @binding(0) var<storage, read_write> y: array<u32>;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> w: array<vec4<f32>>;
@group(0) @binding(8) var<uniform> step: Step;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let source = select(group.x, step.m - 1u, LAST) * (WIDTH / 4u);
  let into = select(group.x, 0u, LAST) * (WIDTH / 32u);
  var squares = 0.0;
  for (var i = index; i < WIDTH / 4u; i += WORKGROUP) { let v = x[source + i]; squares += dot(v, v); }
  let scale = inverseSqrt(sum_workgroup(squares, index) / f32(WIDTH) + EPS);
  for (var u = 0u; u < WIDTH / 8u; u += WORKGROUP) {  // eight values each; the same rounds for all
    let i = 2u * min(u + index, WIDTH / 8u - 1u);
    let r = make_record(x[source + i] * scale * w[i], x[source + i + 1u] * scale * w[i + 1u], index);
    let at = 12u * (into + i / 8u) + index % 4u;
    if (u + index < WIDTH / 8u) { y[at] = r.even; y[at + 4u] = r.odd; y[at + 8u] = r.scale; }
  }
}
