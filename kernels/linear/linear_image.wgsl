// y[m, N] = x[m, K] @ W[N, K]^T, several tokens, for adapters that are a CPU: an invocation makes 8 rows x 4 tokens in
// registers, so that a weight is unpacked once for 4 tokens; neighbours take the next rows. Image loads only, as in
// linear_image_gemv. Parts: tile, out. Needs K and GROUP % STRIDE == 0.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
const GROUP: u32 = 32u;   // k under one scale
const STRIDE: u32 = 16u;  // k of one turn of the loop, 16 or 32
const WORKGROUP: u32 = 8u;
@group(0) @binding(5) var x: texture_storage_2d<rgba32float, read>;  // [m, K/4]
@group(0) @binding(8) var<uniform> step: Step;
struct Sums { r: array<vec4<f32>, 8>, inputs: vec4<f32> }  // [row][token], of the inputs themselves
fn inputs(k: u32, token: u32) -> mat4x4<f32> {  // [k][token]
  let i = k / 4u;
  return transpose(mat4x4<f32>(textureLoad(x, vec2<u32>(i, token)), textureLoad(x, vec2<u32>(i, token + 1u)),
                               textureLoad(x, vec2<u32>(i, token + 2u)), textureLoad(x, vec2<u32>(i, token + 3u))));
}
fn add_four(s: Sums, e: Eight, half: u32, k: u32, token: u32) -> Sums {
  let v = inputs(k + 4u * half, token);
  let by = weigh(vec4<f32>(1.0));
  let p = mat4x4<f32>(v[0] * by.x, v[1] * by.y, v[2] * by.z, v[3] * by.w);
  var r = s.r;
  for (var i = 0u; i < 8u; i++) { r[i] += p * four(e, i, half); }
  return Sums(r, s.inputs + ((v[0] + v[1]) + (v[2] + v[3])));
}
fn add_eight(s: Sums, t: u32, g: u32, k: u32, token: u32) -> Sums {
  let e = eight(t, g);
  return add_four(add_four(s, e, 0u, k, token), e, 1u, k, token);
}
fn scales(t: u32, g: u32) -> vec4<f32> { return bitcast<vec4<f32>>(textureLoad(w, vec2<u32>(t, g))); }
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let g = id.x;
  let token = 4u * id.y;
  var r = array<vec4<f32>, 8>();
  let end = textureDimensions(w).x;
  for (var k = 0u; first_texel(k) < end; k += STRIDE) {
    let t = first_texel(k);
    var s = add_eight(Sums(), t, g, k, token);
    s = add_eight(s, t + STEP, g, k + 8u, token);
    if (STRIDE > 16u) {
      s = add_eight(s, t + 2u * STEP, g, k + 16u, token);
      s = add_eight(s, t + 3u * STEP, g, k + 24u, token);
    }
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
