// Role epilogue: y[token, row ..] = base[token, row ..] + v (+ bias), 8 rows at a time, texture to texture: the
// residual stream. Needs N % 8 == 0.
const N: u32 = 8u;     // rows of this shard
const ROW0: u32 = 0u;  // the shard's first row in the matrix
const BIAS: bool = false;
@group(0) @binding(0) var y: texture_storage_2d<rgba32float, write>;
@group(0) @binding(1) var base: texture_storage_2d<rgba32float, read>;
@group(0) @binding(4) var<storage, read> bias: array<vec4<f32>>;
fn epilogue8(token: u32, row: u32, a: vec4<f32>, b: vec4<f32>) {
  if (row >= N) { return; }
  let at = vec2<u32>((ROW0 + row) / 4u, token);
  let next = at + vec2<u32>(1u, 0u);
  var v = a + textureLoad(base, at);
  var u = b + textureLoad(base, next);
  if (BIAS) { v += bias[at.x]; u += bias[next.x]; }
  textureStore(y, at, v);
  textureStore(y, next, u);
}
