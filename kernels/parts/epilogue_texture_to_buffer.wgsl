// Role epilogue: y[token, row ..] = v (+ bias), 8 rows at a time, into a buffer, for every N.
const N: u32 = 8u;      // rows of this shard
const ROW0: u32 = 0u;   // the shard's first row in the matrix
const WIDTH: u32 = 8u;  // rows of the matrix
const BIAS: bool = false;
@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(4) var<storage, read> bias: array<f32>;
fn epilogue8(token: u32, row: u32, a: vec4<f32>, b: vec4<f32>) {
  let v = array<f32, 8>(a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w);
  for (var i = 0u; i < 8u; i++) {
    if (row + i < N) { y[token * WIDTH + ROW0 + row + i] = v[i] + select(0.0, bias[ROW0 + row + i], BIAS); }
  }
}
