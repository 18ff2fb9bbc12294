// The inputs of a linear of one token, made in the kernel itself: x / rms(x) * weight, quantised to int8 records in
// workgroup memory by every workgroup for itself (see make_record). Saves the norm's own dispatch.
// prepare must be called by every invocation. Parts: inputs_made, record, reduce. Needs K % 32 == 0, WORKGROUP % 4 == 0.
const K: u32 = 32u;
const EPS: f32 = 1e-5;
const WORKGROUP: u32 = 64u;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(9) var<storage, read> norm: array<vec4<f32>>;
const ROUNDS_IN: u32 = (K / 8u + WORKGROUP - 1u) / WORKGROUP;  // of eight values for each invocation
fn prepare(index: u32) {
  var v: array<mat2x4<f32>, ROUNDS_IN>;
  var w: array<mat2x4<f32>, ROUNDS_IN>;  // loaded with x, not after the sum: both wait for memory once
  var sum = 0.0;
  for (var r = 0u; r < ROUNDS_IN; r++) {
    let i = 2u * min(index + r * WORKGROUP, K / 8u - 1u);
    v[r] = mat2x4<f32>(x[i], x[i + 1u]);
    w[r] = mat2x4<f32>(norm[i], norm[i + 1u]);
    if (index + r * WORKGROUP < K / 8u) { sum += dot(v[r][0], v[r][0]) + dot(v[r][1], v[r][1]); }
  }
  let scale = inverseSqrt(sum_workgroup(sum, index) / f32(K) + EPS);
  for (var r = 0u; r < ROUNDS_IN; r++) {
    let i = index + r * WORKGROUP;
    let made = make_record(v[r][0] * scale * w[r][0], v[r][1] * scale * w[r][1], index);
    let at = 12u * (i / 4u) + index % 4u;
    if (i < K / 8u) { records[at] = made.even; records[at + 4u] = made.odd; records[at + 8u] = made.scale; }
  }
  workgroupBarrier();
}
