// Rows q | k | v of one token: adds the bias, rotates q and k (a RoPE pair is two adjacent rows), stores q as f32
// and writes k and v into the cache at the token's position. v = (row, row + 1), row even.
// begin may be called before emit, to have rotation and bias there in time.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
const N: u32 = 2u;         // rows of this part of the matrix
const ROW0: u32 = 0u;      // its first row in the whole matrix
const HEADS: u32 = 1u;
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 2u;  // even
const ROPE_DIMS: u32 = 2u; // the first dimensions of a head that are rotated
const WIDTH: u32 = (HEADS + 2u * KV_HEADS) * HEAD_DIM;
const BIAS: bool = false;
const KV_F32: bool = false;
@group(0) @binding(0) var<storage, read_write> y: array<vec2<f32>>;       // q [layers or m, HEADS, HEAD_DIM], a gap after each layer's
@group(0) @binding(1) var<storage, read_write> k_cache: array<u32>;       // [layers, KV_HEADS, capacity, HEAD_DIM] f16 or f32
@group(0) @binding(2) var<storage, read_write> v_cache: array<u32>;
@group(0) @binding(3) var<storage, read> rope: array<vec2<f32>>;          // [capacity, ROPE_DIMS / 2] (cos, sin)
@group(0) @binding(4) var<storage, read> bias: array<f32>;
@group(0) @binding(8) var<uniform> step: Step;
var<private> begun: bool = false;
var<private> turn: vec2<f32>;    // (cos, sin) for this pair
var<private> shift: vec2<f32>;   // its bias
fn begin(token: u32, part_row: u32) {
  let row = ROW0 + min(part_row, N - 2u);
  let dim = row % HEAD_DIM;
  turn = vec2<f32>(1.0, 0.0);
  if (row / HEAD_DIM < HEADS + KV_HEADS && dim < ROPE_DIMS) { turn = rope[(step.pos + token) * (ROPE_DIMS / 2u) + dim / 2u]; }
  if (BIAS) { let i = slot() * WIDTH + row; shift = vec2<f32>(bias[i], bias[i + 1u]); }
  begun = true;
}
fn emit(token: u32, part_row: u32, v: vec2<f32>) {
  if (part_row >= N) { return; }
  if (!begun) { begin(token, part_row); }
  begun = false;
  let row = ROW0 + part_row;
  let pos = step.pos + token;
  let head = row / HEAD_DIM;
  let dim = row % HEAD_DIM;
  let u = select(v, v + shift, BIAS);
  let o = vec2<f32>(u.x * turn.x - u.y * turn.y, u.x * turn.y + u.y * turn.x);
  if (head < HEADS) {
    y[(layer() * GAP + (layer() + token) * HEADS * HEAD_DIM + row) / 2u] = o;
  } else if (head < HEADS + KV_HEADS) {
    let i = (((layer() * KV_HEADS + head - HEADS) * step.capacity + pos) * HEAD_DIM + dim) / 2u;
    if (KV_F32) { k_cache[2u * i] = bitcast<u32>(o.x); k_cache[2u * i + 1u] = bitcast<u32>(o.y); }
    else { k_cache[i] = pack_halves(o); }
  } else {
    let i = (((layer() * KV_HEADS + head - HEADS - KV_HEADS) * step.capacity + pos) * HEAD_DIM + dim) / 2u;
    if (KV_F32) { v_cache[2u * i] = bitcast<u32>(o.x); v_cache[2u * i + 1u] = bitcast<u32>(o.y); }
    else { v_cache[i] = pack_halves(o); }
  }
}
fn finish(group: u32, token0: u32, index: u32) {}
