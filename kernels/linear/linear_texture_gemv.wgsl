// y[N] = x[K] @ W[N, K]^T, one token, texture backend (CPU adapters).
// One invocation computes 8 whole rows; a workgroup is one vector of the CPU. The loop has no barrier, and all loads
// are texture loads: llvmpipe fetches 16 bytes for each of 8 lanes in 45 instructions, but reads a storage buffer in a
// loop over the lanes with a branch in it. x, which all lanes need, is loaded once for them (broadcast_subgroup).
// With NORM the kernel normalises x first, which costs less than a separate dispatch (28 us of 80).
// Needs m == 1, K % STRIDE == 0 and GROUP % STRIDE == 0. A longer STRIDE runs faster and takes longer to compile.
// Parts: texture_*, broadcast_*, reduce_*, epilogue_texture_*.
const GROUP: u32 = 32u;    // k that share one scale
const STRIDE: u32 = 32u;   // k of one iteration, 16 or 32
const TEXELS: u32 = STRIDE / 4u;
const WORKGROUP: u32 = 8u;
const NORM: bool = false;  // the input is x / rms(x) * norm
const EPS: f32 = 1e-5;
@group(0) @binding(5) var x: texture_storage_2d<rgba32float, read>;     // [1, K/4]
@group(0) @binding(9) var norm: texture_storage_2d<rgba32float, read>;  // [1, K/4]
var<private> inverse_rms: f32;  // 1 / rms(x), with NORM
struct Sums { a: vec4<f32>, b: vec4<f32> }  // rows 0-3, rows 4-7
fn texel(i: u32, k: u32, token: u32) -> vec4<f32> {
  let at = vec2<u32>(k / 4u + i, token);
  let v = prescale(textureLoad(x, at));
  if (NORM) { return v * inverse_rms * textureLoad(norm, at); }
  return v;
}
fn dot_row(e: Weights8, r: u32, v: vec4<f32>, u: vec4<f32>) -> f32 { return dot(weights4(e, r, 0u), v) + dot(weights4(e, r, 1u), u); }
fn add8(s: Sums, t: u32, g: u32, p: vec4<f32>, q: vec4<f32>) -> Sums {
  let e = load8(t, g);
  return Sums(
    s.a + vec4<f32>(dot_row(e, 0u, p, q), dot_row(e, 1u, p, q), dot_row(e, 2u, p, q), dot_row(e, 3u, p, q)),
    s.b + vec4<f32>(dot_row(e, 4u, p, q), dot_row(e, 5u, p, q), dot_row(e, 6u, p, q), dot_row(e, 7u, p, q)));
}
fn scales(t: u32, g: u32) -> vec4<f32> { return bitcast<vec4<f32>>(textureLoad(w, vec2<u32>(t, g))); }
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let g = id.x;
  if (NORM) {
    let width = textureDimensions(norm).x;
    var squares = 0.0;
    for (var i = lane; i < width; i += WORKGROUP) { let v = textureLoad(x, vec2<u32>(i, 0u)); squares += dot(v, v); }
    inverse_rms = inverseSqrt(sum_workgroup(squares, lane) / f32(4u * width) + EPS);
  }
  var a = vec4<f32>();
  var b = vec4<f32>();
  let end = textureDimensions(w).x;  // K is not a constant, so that one pipeline serves attn_output and ffn_down
  for (var k = 0u; first_texel(k) < end; k += STRIDE) {
    let t = first_texel(k);
    let v = broadcast_texels(lane, k, 0u);
    var s = add8(Sums(), t, g, v[0], v[1]);
    s = add8(s, t + TEXELS_PER_8, g, v[2], v[3]);
    if (STRIDE > 16u) {
      s = add8(s, t + 2u * TEXELS_PER_8, g, v[4], v[5]);
      s = add8(s, t + 3u * TEXELS_PER_8, g, v[6], v[7]);
    }
    if (HAS_SCALES) {
      let f = scale_texel(k);
      var inputs = (v[0] + v[1]) + (v[2] + v[3]);
      if (STRIDE > 16u) { inputs += (v[4] + v[5]) + (v[6] + v[7]); }
      let sum = dot(inputs, 1.0 / prescale(vec4<f32>(1.0)));
      a += s.a * scales(f, g) + sum * scales(f + 2u, g);
      b += s.b * scales(f + 1u, g) + sum * scales(f + 3u, g);
    } else {
      a += s.a;
      b += s.b;
    }
  }
  epilogue8(0u, 8u * g, a, b);
}
