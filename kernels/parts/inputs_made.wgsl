// The inputs of a linear of one token as int8 records in workgroup memory (see inputs_i8), for parts that make them there.
const K: u32 = 32u;
struct Inputs { even: vec4<u32>, odd: vec4<u32>, scale: vec4<f32> }
var<workgroup> records: array<u32, 12u * K / 32u>;
fn inputs(token: u32, b: u32) -> Inputs {
  let i = 12u * b;
  return Inputs(vec4<u32>(records[i], records[i + 1u], records[i + 2u], records[i + 3u]),
                vec4<u32>(records[i + 4u], records[i + 5u], records[i + 6u], records[i + 7u]),
                bitcast<vec4<f32>>(vec4<u32>(records[i + 8u], records[i + 9u], records[i + 10u], records[i + 11u])));
}
