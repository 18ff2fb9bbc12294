// Role epilogue: y[token, row / 2 ..] = silu(gate) * up, into a texture. The rows of gate and up are interleaved: 8
// rows make one texel. Needs N % 8 == 0.
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
  let gate = vec4<f32>(v.xz, u.xz);
  textureStore(y, vec2<u32>(i / 2u, token), gate / (1.0 + exp(-gate)) * vec4<f32>(v.yw, u.yw));
}
