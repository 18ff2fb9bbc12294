// y[m, N] = x[m, K] @ W[N, K]^T, several tokens, texture backend (CPU adapters).
// One invocation computes 8 rows x 4 tokens in registers, so that a weight is unpacked once for 4 tokens. Neighbouring
// invocations take the next rows. All loads are texture loads, as in linear_texture_gemv.
// Scales are loaded once for 32 k where they share them: 65 ms instead of 69 for four sequences of SmolLM2 (two Xeon cores).
// Needs K % GROUP == 0 or no scales, K % STRIDE == 0 and GROUP % STRIDE == 0. Parts: texture_*, broadcast_*, epilogue_texture_*.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const GROUP: u32 = 32u;   // k that share one scale
const STRIDE: u32 = 16u;  // k that are loaded together
const TEXELS: u32 = STRIDE;
const PARTS: u32 = select(1u, 2u, HAS_SCALES && GROUP % (2u * STRIDE) == 0u);  // of one iteration
const WORKGROUP: u32 = 8u;
@group(0) @binding(5) var x: texture_storage_2d<rgba32float, read>;  // [m, K/4]
@group(0) @binding(8) var<uniform> step: Step;
struct Sums { r: array<vec4<f32>, 8>, inputs: vec4<f32> }  // sums of products [row][token]; sums of the inputs [token], for offsets
fn texel(i: u32, k: u32, token: u32) -> vec4<f32> {  // 4 k of each of 4 tokens, then the next 4 k
  return prescale(textureLoad(x, vec2<u32>(k / 4u + i / 4u, token + i % 4u)));
}
fn add4(s: Sums, e: Weights8, half: u32, a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32>) -> Sums {
  let p = transpose(mat4x4<f32>(a, b, c, d));  // [k][token]
  var r = s.r;
  for (var i = 0u; i < 8u; i++) { r[i] += p * weights4(e, i, half); }
  return Sums(r, s.inputs + (1.0 / prescale(vec4<f32>(1.0))) * mat4x4<f32>(a, b, c, d));
}
fn scales(t: u32, g: u32) -> vec4<f32> { return bitcast<vec4<f32>>(textureLoad(w, vec2<u32>(t, g))); }
fn add16(s: Sums, k: u32, g: u32, lane: u32, token: u32) -> Sums {
  let t = first_texel(k);
  let v = broadcast_texels(lane, k, token);
  let e = load8(t, g);
  let f = load8(t + TEXELS_PER_8, g);
  let low = add4(add4(s, e, 0u, v[0], v[1], v[2], v[3]), e, 1u, v[4], v[5], v[6], v[7]);
  return add4(add4(low, f, 0u, v[8], v[9], v[10], v[11]), f, 1u, v[12], v[13], v[14], v[15]);
}
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let g = id.x;
  let token = 4u * id.y;
  var r = array<vec4<f32>, 8>();
  let end = textureDimensions(w).x;
  for (var k = 0u; first_texel(k) < end; k += PARTS * STRIDE) {
    var s = add16(Sums(), k, g, lane, token);
    if (PARTS > 1u) { s = add16(s, k + STRIDE, g, lane, token); }
    if (HAS_SCALES) {
      let f = scale_texel(k);
      let scale_offset = array<vec4<f32>, 4>(scales(f, g), scales(f + 1u, g), scales(f + 2u, g), scales(f + 3u, g));
      for (var i = 0u; i < 8u; i++) { r[i] += s.r[i] * scale_offset[i / 4u][i % 4u] + s.inputs * scale_offset[2u + i / 4u][i % 4u]; }
    } else {
      for (var i = 0u; i < 8u; i++) { r[i] += s.r[i]; }
    }
  }
  let a = transpose(mat4x4<f32>(r[0], r[1], r[2], r[3]));
  let b = transpose(mat4x4<f32>(r[4], r[5], r[6], r[7]));
  for (var i = 0u; i < 4u; i++) {
    if (token + i < step.rows) { epilogue8(token + i, 8u * g, a[i], b[i]); }
  }
}
