// y[token, row ..] = rows (+ bias), 8 at a time, into an image. Needs N % 8 == 0.
const N: u32 = 8u;       // rows of this part of the matrix
const ROW0: u32 = 0u;    // its first row in the whole matrix
const BIAS: bool = false;
@group(0) @binding(0) var y: texture_storage_2d<rgba32float, write>;
@group(0) @binding(4) var<storage, read> bias: array<vec4<f32>>;
fn emit8(token: u32, row: u32, a: vec4<f32>, b: vec4<f32>) {
  if (row >= N) { return; }
  let i = (ROW0 + row) / 4u;
  var v = a;
  var u = b;
  if (BIAS) { v += bias[i]; u += bias[i + 1u]; }
  textureStore(y, vec2<u32>(i, token), v);
  textureStore(y, vec2<u32>(i + 1u, token), u);
}
