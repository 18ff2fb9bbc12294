// y[token, row ..] = base[token, row ..] + rows (+ bias), 8 at a time, image to image: the residual stream. Needs N % 8 == 0.
const N: u32 = 8u;       // rows of this part of the matrix
const ROW0: u32 = 0u;    // its first row in the whole matrix
const BIAS: bool = false;
@group(0) @binding(0) var y: texture_storage_2d<rgba32float, write>;
@group(0) @binding(1) var base: texture_storage_2d<rgba32float, read>;
@group(0) @binding(4) var<storage, read> bias: array<vec4<f32>>;
fn emit8(token: u32, row: u32, a: vec4<f32>, b: vec4<f32>) {
  if (row >= N) { return; }
  let at = vec2<u32>((ROW0 + row) / 4u, token);
  let next = at + vec2<u32>(1u, 0u);
  var v = a + textureLoad(base, at);
  var u = b + textureLoad(base, next);
  if (BIAS) { v += bias[at.x]; u += bias[next.x]; }
  textureStore(y, at, v);
  textureStore(y, next, u);
}
