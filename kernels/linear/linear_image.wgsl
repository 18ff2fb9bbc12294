// y[m, N] = x[m, K] @ W[N, K]^T, several tokens, for adapters that are a CPU: an invocation makes 8 rows x 4 tokens in
// registers, so that a weight is unpacked once for 4 tokens; neighbours take the next rows. Image loads only, as in
// linear_image_gemv. Parts: tile, spread, out. Needs K and GROUP % STRIDE == 0.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
const GROUP: u32 = 32u;   // k under one scale
const STRIDE: u32 = 16u;  // k of one turn of the loop
const TEXELS: u32 = STRIDE;
const WORKGROUP: u32 = 8u;
@group(0) @binding(5) var x: texture_storage_2d<rgba32float, read>;  // [m, K/4]
@group(0) @binding(8) var<uniform> step: Step;
struct Sums { r: array<vec4<f32>, 8>, inputs: vec4<f32> }  // [row][token], of the inputs themselves
fn texel(i: u32, k: u32, token: u32) -> vec4<f32> {  // 4 k of each of 4 tokens, then the next 4 k
  return weigh(textureLoad(x, vec2<u32>(k / 4u + i / 4u, token + i % 4u)));
}
fn add_four(s: Sums, e: Eight, half: u32, a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32>) -> Sums {
  let p = transpose(mat4x4<f32>(a, b, c, d));  // [k][token]
  var r = s.r;
  for (var i = 0u; i < 8u; i++) { r[i] += p * four(e, i, half); }
  return Sums(r, s.inputs + (1.0 / weigh(vec4<f32>(1.0))) * mat4x4<f32>(a, b, c, d));
}
fn scales(t: u32, g: u32) -> vec4<f32> { return bitcast<vec4<f32>>(textureLoad(w, vec2<u32>(t, g))); }
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let g = id.x;
  let token = 4u * id.y;
  var r = array<vec4<f32>, 8>();
  let end = textureDimensions(w).x;
  for (var k = 0u; first_texel(k) < end; k += STRIDE) {
    let t = first_texel(k);
    let v = spread(lane, k, token);
    let e = eight(t, g);
    var s = add_four(Sums(), e, 0u, v[0], v[1], v[2], v[3]);
    s = add_four(s, e, 1u, v[4], v[5], v[6], v[7]);
    let f = eight(t + STEP, g);
    s = add_four(s, f, 0u, v[8], v[9], v[10], v[11]);
    s = add_four(s, f, 1u, v[12], v[13], v[14], v[15]);
    if (SCALED) {
      let f = scale_texel(k);
      let by = array<vec4<f32>, 4>(scales(f, g), scales(f + 1u, g), scales(f + 2u, g), scales(f + 3u, g));
      for (var i = 0u; i < 8u; i++) { r[i] += s.r[i] * by[i / 4u][i % 4u] + s.inputs * by[2u + i / 4u][i % 4u]; }
    } else {
      for (var i = 0u; i < 8u; i++) { r[i] += s.r[i]; }
    }
  }
  let a = transpose(mat4x4<f32>(r[0], r[1], r[2], r[3]));
  let b = transpose(mat4x4<f32>(r[4], r[5], r[6], r[7]));
  for (var i = 0u; i < 4u; i++) {
    if (token + i < step.m) { emit8(token + i, 8u * g, a[i], b[i]); }
  }
}
