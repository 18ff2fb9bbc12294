// fetch, dot32: 32 inputs as an int8 record times 32 f16 weights of one row, four 16-byte loads.
// Parts: half, inputs_i8 or inputs_norm.
const K: u32 = 32u;
struct Weights { a: vec4<u32>, b: vec4<u32>, c: vec4<u32>, d: vec4<u32> }
@group(0) @binding(6) var<storage, read> w: array<vec4<u32>>;
fn fetch(row: u32, b: u32) -> Weights {
  let i = 4u * (row * (K / 32u) + b);
  return Weights(w[i], w[i + 1u], w[i + 2u], w[i + 3u]);
}
fn dot8(q: vec4<u32>, even: u32, odd: u32) -> f32 {
  let a = halves(q.x); let b = halves(q.y); let c = halves(q.z); let d = halves(q.w);
  return dot(vec4<f32>(a.x, b.x, c.x, d.x), vec4<f32>(unpack4xI8(even)))
       + dot(vec4<f32>(a.y, b.y, c.y, d.y), vec4<f32>(unpack4xI8(odd)));
}
fn dot32(v: Inputs, w: Weights) -> f32 {
  return v.scale.x * (dot8(w.a, v.even.x, v.odd.x) + dot8(w.b, v.even.y, v.odd.y)
                    + dot8(w.c, v.even.z, v.odd.z) + dot8(w.d, v.even.w, v.odd.w));
}
