// The inputs of a linear of one token in workgroup memory, for parts that make them there: as int8 records (see inputs_i8).
// Parts: record. Every invocation must call keep, with eight values from 8 * eighth on.
const K: u32 = 32u;
struct Inputs { even: vec4<u32>, odd: vec4<u32>, scale: vec4<f32> }
var<workgroup> records: array<vec4<u32>, 3u * K / 32u>;
fn inputs(token: u32, b: u32) -> Inputs {
  return Inputs(records[3u * b], records[3u * b + 1u], bitcast<vec4<f32>>(records[3u * b + 2u]));
}
fn keep(a: vec4<f32>, b: vec4<f32>, eighth: u32, index: u32, inside: bool) {
  let r = make_record(a, b, index);
  let i = 3u * (eighth / 4u);
  let j = eighth % 4u;
  if (inside) { records[i][j] = r.even; records[i + 1u][j] = r.odd; records[i + 2u][j] = r.scale; }
}
