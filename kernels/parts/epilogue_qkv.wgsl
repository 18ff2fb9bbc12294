// Role epilogue: rows q | k | v of a token. Adds the bias, rotates q and k (a RoPE pair is two adjacent rows), stores q
// as f32 and writes k and v into the token's cell of the KV cache. Rows come in pairs: row is even,
// v = (row, row + 1).
// epilogue_prefetch may be called before epilogue, to load rotation and bias early. Parts: f16, kv_store_*.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const N: u32 = 2u;          // rows of this shard
const ROW0: u32 = 0u;       // the shard's first row in the matrix
const HEADS: u32 = 1u;
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 2u;   // even
const ROPE_DIMS: u32 = 2u;  // leading dimensions of a head that are rotated
const BY_LAYER: bool = false;  // layers of a fused kernel have different rotations: see layer_kind
const WIDTH: u32 = (HEADS + 2u * KV_HEADS) * HEAD_DIM;
const BIAS: bool = false;
const TOKENS: u32 = 1u;
const ONE_SEGMENT: bool = false;  // all rows belong to one segment: then the rotation does not wait for the row (6 % on an H200 with SmolLM2)
@group(0) @binding(0) var<storage, read_write> y: array<vec2<f32>>;  // q [layers or m, HEADS, HEAD_DIM], padded after each layer
@group(0) @binding(3) var<storage, read> rope: array<vec2<f32>>;     // [positions, ROPE_DIMS / 2] (cos, sin); BY_LAYER: several
@group(0) @binding(4) var<storage, read> bias: array<f32>;
@group(0) @binding(8) var<uniform> step: Step;
var<private> prefetched: bool = false;
var<private> token_row: Row;      // the token's position and cell
var<private> rotation: vec2<f32>;  // (cos, sin) of the row pair
var<private> row_bias: vec2<f32>;  // bias of the row pair
fn epilogue_prefetch(token: u32, shard_row: u32) {
  let row = ROW0 + min(shard_row, N - 2u);
  let dim = row % HEAD_DIM;
  token_row = step.row[token];
  if (ONE_SEGMENT) { token_row.position = step.segment[0].w + token; }
  rotation = vec2<f32>(1.0, 0.0);
  let rope_dims = select(ROPE_DIMS, layer_kind().y, BY_LAYER);
  let rope_first = select(0u, layer_kind().z, BY_LAYER) + token_row.position * (ROPE_DIMS / 2u);
  if (row / HEAD_DIM < HEADS + KV_HEADS && dim < rope_dims) { rotation = rope[rope_first + dim / 2u]; }
  if (BIAS) { let i = slab_index() * WIDTH + row; row_bias = vec2<f32>(bias[i], bias[i + 1u]); }
  prefetched = true;
}
fn epilogue(token: u32, shard_row: u32, v: vec2<f32>) {
  if (shard_row >= N) { return; }
  if (!prefetched) { epilogue_prefetch(token, shard_row); }
  prefetched = false;
  let row = ROW0 + shard_row;
  let head = row / HEAD_DIM;
  let u = select(v, v + row_bias, BIAS);
  let o = vec2<f32>(u.x * rotation.x - u.y * rotation.y, u.x * rotation.y + u.y * rotation.x);
  if (head < HEADS) {
    y[(layer() * LINE_PADDING + (layer() * TOKENS + token) * HEADS * HEAD_DIM + row) / 2u] = o;
  } else {
    store_pair(token, token_row.cell, row - HEADS * HEAD_DIM, o);
  }
}
fn workgroup_epilogue(workgroup: u32, token0: u32, end: u32, index: u32) {}

fn residual_at(token: u32, row: u32) -> vec2<f32> { return vec2<f32>(); }
fn store_result(token: u32, row: u32, v: vec2<f32>) { epilogue(token, row, v); }
