// Role dot, float weights, int8 blocks: fetch(row, b) loads 32 weights of a row (four 16-byte loads), dot32 multiplies.
// Needs K % 32 == 0. Parts: pair_*, inputs_int8 or prologue_int8.
const K: u32 = 32u;
struct Weights { a: vec4<u32>, b: vec4<u32>, c: vec4<u32>, d: vec4<u32> }
@group(0) @binding(6) var<storage, read> w: array<vec4<u32>>;
fn fetch(row: u32, b: u32) -> Weights {
  let i = 4u * (row * (K / 32u) + b);
  return Weights(w[i], w[i + 1u], w[i + 2u], w[i + 3u]);
}
fn dot8(q: vec4<u32>, even: u32, odd: u32) -> f32 {
  let a = weight_pair(q.x); let b = weight_pair(q.y); let c = weight_pair(q.z); let d = weight_pair(q.w);
  return dot(vec4<f32>(a.x, b.x, c.x, d.x), vec4<f32>(unpack4xI8(even)))
       + dot(vec4<f32>(a.y, b.y, c.y, d.y), vec4<f32>(unpack4xI8(odd)));
}
fn dot32(v: Inputs, w: Weights) -> f32 {
  return v.scale.x * (dot8(w.a, v.even.x, v.odd.x) + dot8(w.b, v.even.y, v.odd.y)
                    + dot8(w.c, v.even.z, v.odd.z) + dot8(w.d, v.even.w, v.odd.w));
}
alias Unpacked = Weights;
fn unpack(w: Weights) -> Unpacked { return w; }
fn add_dot(sum: f32, v: Inputs, u: Unpacked) -> f32 { return sum + dot32(v, u); }
