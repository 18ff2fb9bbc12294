// The inputs of a linear as int8 records [m, K/32], made by their producer (see make_record): per 32 values the 16 even
// ones, the 16 odd ones, then (d, d * sum of the first 16, d * sum of the last 16, d * sum). Needs K % 32 == 0.
const K: u32 = 32u;
struct Inputs { even: vec4<u32>, odd: vec4<u32>, scale: vec4<f32> }
@group(0) @binding(5) var<storage, read> x: array<vec4<u32>>;
fn inputs(token: u32, b: u32) -> Inputs {
  let i = 3u * (token * (K / 32u) + b);
  return Inputs(x[i], x[i + 1u], bitcast<vec4<f32>>(x[i + 2u]));
}
fn prepare(index: u32) {}
fn factor() -> f32 { return 1.0; }  // what the results are still to be multiplied with
