// The inputs of a linear of one token, made in the kernel itself: x / rms(x) * weight, quantised to int8 records in
// workgroup memory by every workgroup for itself (see make_record). Saves the norm's own dispatch.
// prepare must be called by every invocation. Parts: record, reduce. Needs K % 32 == 0, WORKGROUP % 4 == 0.
const K: u32 = 32u;
const EPS: f32 = 1e-5;
const WORKGROUP: u32 = 64u;
struct Inputs { even: vec4<u32>, odd: vec4<u32>, scale: vec4<f32> }
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(9) var<storage, read> norm: array<vec4<f32>>;
var<workgroup> records: array<u32, 12u * K / 32u>;
fn prepare(index: u32) {
  var sum = 0.0;
  for (var i = index; i < K / 4u; i += WORKGROUP) { let v = x[i]; sum += dot(v, v); }
  let scale = inverseSqrt(sum_workgroup(sum, index) / f32(K) + EPS);
  for (var u = 0u; u < K / 8u; u += WORKGROUP) {  // eight values each; the same rounds for all
    let i = min(u + index, K / 8u - 1u);
    let r = make_record(x[2u * i] * scale * norm[2u * i], x[2u * i + 1u] * scale * norm[2u * i + 1u], index);
    let at = 12u * (i / 4u) + index % 4u;
    if (u + index < K / 8u) { records[at] = r.even; records[at + 4u] = r.odd; records[at + 8u] = r.scale; }
  }
  workgroupBarrier();
}
fn inputs(token: u32, b: u32) -> Inputs {
  let i = 12u * b;
  return Inputs(vec4<u32>(records[i], records[i + 1u], records[i + 2u], records[i + 3u]),
                vec4<u32>(records[i + 4u], records[i + 5u], records[i + 6u], records[i + 7u]),
                bitcast<vec4<f32>>(vec4<u32>(records[i + 8u], records[i + 9u], records[i + 10u], records[i + 11u])));
}
