// Role epilogue: y[token, row ..] = v (+ bias), 8 rows at a time, into a texture. Needs N % 8 == 0.
const N: u32 = 8u;     // rows of this shard
const ROW0: u32 = 0u;  // the shard's first row in the matrix
const BIAS: bool = false;
@group(0) @binding(0) var y: texture_storage_2d<rgba32float, write>;
@group(0) @binding(4) var<storage, read> bias: array<vec4<f32>>;
fn epilogue8(token: u32, row: u32, a: vec4<f32>, b: vec4<f32>) {
  if (row >= N) { return; }
  let i = (ROW0 + row) / 4u;
  var v = a;
  var u = b;
  if (BIAS) { v += bias[i]; u += bias[i + 1u]; }
  textureStore(y, vec2<u32>(i, token), v);
  textureStore(y, vec2<u32>(i + 1u, token), u);
}
