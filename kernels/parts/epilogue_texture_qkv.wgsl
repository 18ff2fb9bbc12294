// Role epilogue: rows q | k | v of a token, 8 at a time. Adds the bias, rotates q and k (a RoPE pair is two adjacent
// rows), stores q in a texture and k and v in the token's cell of the cache texture.
// Needs HEAD_DIM % 8 == 0 and ROPE_DIMS % 8 == 0.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const N: u32 = 8u;                // rows of this shard
const ROW0: u32 = 0u;             // the shard's first row in the matrix
const HEADS: u32 = 1u;
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 8u;
const ROPE_DIMS: u32 = 8u;        // leading dimensions of a head that are rotated
const BIAS: bool = false;
const TEXTURE_ROWS: u32 = 8192u;  // cells below each other in the cache texture; the next block of them is to the right
@group(0) @binding(0) var y: texture_storage_2d<rgba32float, write>;      // q [m, HEADS, HEAD_DIM / 4]
@group(0) @binding(1) var cache: texture_storage_2d<rgba32float, write>;  // row = cell, [keys | values, KV_HEADS, HEAD_DIM / 4]
@group(0) @binding(3) var<storage, read> rope: array<vec4<f32>>;          // [positions, ROPE_DIMS / 4] (cos, sin, cos, sin)
@group(0) @binding(4) var<storage, read> bias: array<vec4<f32>>;
@group(0) @binding(8) var<uniform> step: Step;
fn rotate(v: vec4<f32>, r: vec4<f32>) -> vec4<f32> {
  return vec4<f32>(v.x * r.x - v.y * r.y, v.x * r.y + v.y * r.x, v.z * r.z - v.w * r.w, v.z * r.w + v.w * r.z);
}
fn epilogue8(token: u32, shard_row: u32, a: vec4<f32>, b: vec4<f32>) {
  if (shard_row >= N) { return; }
  let row = ROW0 + shard_row;
  let pos = step.row[token].position;
  let cell = step.row[token].cell;
  var v = a;
  var u = b;
  if (BIAS) { v += bias[row / 4u]; u += bias[row / 4u + 1u]; }
  if (row < (HEADS + KV_HEADS) * HEAD_DIM && row % HEAD_DIM < ROPE_DIMS) {
    let r = (pos * ROPE_DIMS + row % HEAD_DIM) / 4u;
    v = rotate(v, rope[r]);
    u = rotate(u, rope[r + 1u]);
  }
  if (row < HEADS * HEAD_DIM) {
    textureStore(y, vec2<u32>(row / 4u, token), v);
    textureStore(y, vec2<u32>(row / 4u + 1u, token), u);
  } else {
    let at = vec2<u32>((cell / TEXTURE_ROWS * 2u * KV_HEADS * HEAD_DIM + row - HEADS * HEAD_DIM) / 4u, cell % TEXTURE_ROWS);
    textureStore(cache, at, v);
    textureStore(cache, at + vec2<u32>(1u, 0u), u);
  }
}
