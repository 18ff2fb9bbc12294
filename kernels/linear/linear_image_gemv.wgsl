// y[N] = x[K] @ W[N, K]^T, one token, for adapters that are a CPU: an invocation makes 8 whole rows, a workgroup is one
// vector. There is no barrier, and all loads are image loads: llvmpipe fetches 16 bytes for each of 8 lanes in 45
// instructions, where a storage buffer takes it a loop over the lanes with a branch in it. x, which all lanes need, is loaded
// once for them (see spread_subgroup). With NORM x is normalised first: that costs less than a dispatch for it (28 us of 80).
// Parts: tile, spread, reduce, out. Needs m == 1, K and GROUP % STRIDE == 0. Longer strides run faster and take longer to
// compile.
const GROUP: u32 = 32u;   // k under one scale
const STRIDE: u32 = 32u;  // k of one turn of the loop, 16 or 32
const TEXELS: u32 = STRIDE / 4u;
const WORKGROUP: u32 = 8u;
const NORM: bool = false; // x / rms(x) * norm instead of x
const EPS: f32 = 1e-5;
@group(0) @binding(5) var x: texture_storage_2d<rgba32float, read>;     // [1, K/4]
@group(0) @binding(9) var norm: texture_storage_2d<rgba32float, read>;  // likewise
var<private> rms: f32;  // 1 / rms(x)
struct Sums { a: vec4<f32>, b: vec4<f32> }  // rows 0-3, rows 4-7
fn texel(i: u32, k: u32, token: u32) -> vec4<f32> {
  let at = vec2<u32>(k / 4u + i, token);
  let v = weigh(textureLoad(x, at));
  if (NORM) { return v * rms * textureLoad(norm, at); }
  return v;
}
fn row(e: Eight, r: u32, v: vec4<f32>, u: vec4<f32>) -> f32 { return dot(four(e, r, 0u), v) + dot(four(e, r, 1u), u); }
fn add_eight(s: Sums, t: u32, g: u32, p: vec4<f32>, q: vec4<f32>) -> Sums {
  let e = eight(t, g);
  return Sums(
    s.a + vec4<f32>(row(e, 0u, p, q), row(e, 1u, p, q), row(e, 2u, p, q), row(e, 3u, p, q)),
    s.b + vec4<f32>(row(e, 4u, p, q), row(e, 5u, p, q), row(e, 6u, p, q), row(e, 7u, p, q)));
}
fn scales(t: u32, g: u32) -> vec4<f32> { return bitcast<vec4<f32>>(textureLoad(w, vec2<u32>(t, g))); }
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let g = id.x;
  if (NORM) {
    let width = textureDimensions(norm).x;
    var squares = 0.0;
    for (var i = lane; i < width; i += WORKGROUP) { let v = textureLoad(x, vec2<u32>(i, 0u)); squares += dot(v, v); }
    rms = inverseSqrt(sum_workgroup(squares, lane) / f32(4u * width) + EPS);
  }
  var a = vec4<f32>();
  var b = vec4<f32>();
  let end = textureDimensions(w).x;  // not a constant K: one pipeline serves attn_output and ffn_down
  for (var k = 0u; first_texel(k) < end; k += STRIDE) {
    let t = first_texel(k);
    let v = spread(lane, k, 0u);
    var s = add_eight(Sums(), t, g, v[0], v[1]);
    s = add_eight(s, t + STEP, g, v[2], v[3]);
    if (STRIDE > 16u) {
      s = add_eight(s, t + 2u * STEP, g, v[4], v[5]);
      s = add_eight(s, t + 3u * STEP, g, v[6], v[7]);
    }
    if (SCALED) {
      let f = scale_texel(k);
      var inputs = (v[0] + v[1]) + (v[2] + v[3]);
      if (STRIDE > 16u) { inputs += (v[4] + v[5]) + (v[6] + v[7]); }
      let sum = dot(inputs, 1.0 / weigh(vec4<f32>(1.0)));
      a += s.a * scales(f, g) + sum * scales(f + 2u, g);
      b += s.b * scales(f + 1u, g) + sum * scales(f + 3u, g);
    } else {
      a += s.a;
      b += s.b;
    }
  }
  emit8(0u, 8u * g, a, b);
}
