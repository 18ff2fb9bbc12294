// From the rows q | k | v of a token to its queries, keys and values, for architectures where epilogue_qkv does not
// suffice: QK norm needs a whole head, attention temperature the position. Normalises q and k, rotates them (a RoPE
// pair is two adjacent rows), stores q as f32 and k and v as kv_store does.
// One workgroup per head and token; with ROW_NORM one for all query heads of a token, one for its keys, one for its values.
// Needs HEAD_DIM even. Parts: f16, reduce_*, kv_store_*; grid_barrier (or unfused).
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const HEADS: u32 = 1u;
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 2u;
const ROPE_DIMS: u32 = 2u;          // leading dimensions of a head that are rotated
const BY_LAYER: bool = false;       // layers of a fused kernel have different rotations: see layer_kind
const QK_NORM: bool = false;
const ROW_NORM: bool = false;       // the norm is over all heads of a token, with a weight for each row; else over a head
const EPS: f32 = 1e-5;
const TEMPERATURE: f32 = 0.0;       // queries grow by its product with ln(1 + position / TEMPERATURE_RUN)
const TEMPERATURE_RUN: u32 = 1u;    // positions with the same temperature
const TOKENS: u32 = 1u;
const WORKGROUP: u32 = 64u;
const Q_WIDTH: u32 = HEADS * HEAD_DIM;
const KV_WIDTH: u32 = KV_HEADS * HEAD_DIM;
const ROWS: u32 = Q_WIDTH + 2u * KV_WIDTH;
const WEIGHTS: u32 = select(2u * HEAD_DIM, Q_WIDTH + KV_WIDTH, ROW_NORM);
@group(0) @binding(0) var<storage, read_write> y: array<vec2<f32>>;  // q [layers or m, HEADS, HEAD_DIM], padded after each layer
@group(0) @binding(3) var<storage, read> rope: array<vec2<f32>>;     // [positions, ROPE_DIMS / 2] (cos, sin); BY_LAYER: several
@group(0) @binding(5) var<storage, read> x: array<vec2<f32>>;        // [layers, TOKENS or m, ROWS], padded after each layer
@group(0) @binding(8) var<uniform> step: Step;
@group(0) @binding(9) var<storage, read> norm: array<vec2<f32>>;     // [layers, WEIGHTS]: of q, then of k
fn first_row(unit: u32) -> u32 {
  if (ROW_NORM) { return select(0u, Q_WIDTH, unit > 0u) + select(0u, KV_WIDTH, unit > 1u) + select(0u, KV_WIDTH, unit > 2u); }
  return unit * HEAD_DIM;
}
fn norm_weight(row: u32) -> vec2<f32> {
  let i = select(row % HEAD_DIM + select(0u, HEAD_DIM, row >= Q_WIDTH), row, ROW_NORM);
  return norm[(layer() * WEIGHTS + i) / 2u];
}
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let first = first_row(workgroup.x);
  let end = first_row(workgroup.x + 1u);
  let token = workgroup.y;
  let row_in = step.row[token];
  let base = opaque_zero() + (layer() * (TOKENS * ROWS + LINE_PADDING) + token * ROWS) / 2u;
  let rope_dims = select(ROPE_DIMS, layer_kind().y, BY_LAYER);
  let rope_first = select(0u, layer_kind().z, BY_LAYER) + row_in.position * (ROPE_DIMS / 2u);
  var scale = 1.0;
  if (QK_NORM && first < Q_WIDTH + KV_WIDTH) {
    var squares = 0.0;
    for (var r = first + 2u * index; r < end; r += 2u * WORKGROUP) { let v = x[base + r / 2u]; squares += dot(v, v); }
    scale = inverseSqrt(sum_workgroup(squares, index) / f32(end - first) + EPS);
    workgroupBarrier();  // a fused stage may take another unit: this one's sum has been read
  }
  if (TEMPERATURE > 0.0 && first < Q_WIDTH) { scale *= 1.0 + TEMPERATURE * log(1.0 + f32(row_in.position / TEMPERATURE_RUN)); }
  for (var r = first + 2u * index; r < end; r += 2u * WORKGROUP) {
    let dim = r % HEAD_DIM;
    var v = x[base + r / 2u];
    if (r >= Q_WIDTH + KV_WIDTH) { store_pair(token, row_in.cell, r - Q_WIDTH, v); continue; }
    v *= scale;
    if (QK_NORM) { v *= norm_weight(r); }
    if (dim < rope_dims) {
      let turn = rope[rope_first + dim / 2u];
      v = vec2<f32>(v.x * turn.x - v.y * turn.y, v.x * turn.y + v.y * turn.x);
    }
    if (r < Q_WIDTH) {
      y[(layer() * (TOKENS * Q_WIDTH + LINE_PADDING) + token * Q_WIDTH + r) / 2u] = v;
    } else {
      store_pair(token, row_in.cell, r - Q_WIDTH, v);
    }
  }
}
