// rotate for the texture backend (CPU adapters): from the rows q | k | v of a token in a texture to its queries in another and
// its keys and values in its cell of the cache texture. QK norm, RoPE (a pair is two adjacent rows), attention temperature.
// One workgroup per head and token; with ROW_NORM one for all query heads of a token, one for its keys, one for its values.
// Needs HEAD_DIM % 4 == 0 and ROPE_DIMS % 4 == 0. Parts: reduce_*.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const HEADS: u32 = 1u;
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 4u;
const ROPE_DIMS: u32 = 4u;          // leading dimensions of a head that are rotated
const QK_NORM: bool = false;
const ROW_NORM: bool = false;       // the norm is over all heads of a token, with a weight for each row; else over a head
const EPS: f32 = 1e-5;
const TEMPERATURE: f32 = 0.0;       // queries grow by its product with ln(1 + position / TEMPERATURE_RUN)
const TEMPERATURE_RUN: u32 = 1u;    // positions with the same temperature
const TEXTURE_ROWS: u32 = 8192u;    // cells below each other in the cache texture; the next block of them is to the right
const WORKGROUP: u32 = 8u;
const HEAD_VEC4: u32 = HEAD_DIM / 4u;
const Q_VEC4: u32 = HEADS * HEAD_VEC4;
const KV_VEC4: u32 = KV_HEADS * HEAD_VEC4;
@group(0) @binding(0) var y: texture_storage_2d<rgba32float, write>;      // q [m, HEADS, HEAD_VEC4]
@group(0) @binding(1) var cache: texture_storage_2d<rgba32float, write>;  // row = cell, [keys | values, KV_HEADS, HEAD_VEC4]
@group(0) @binding(3) var<storage, read> rope: array<vec4<f32>>;          // [positions, ROPE_DIMS / 4] (cos, sin, cos, sin)
@group(0) @binding(5) var x: texture_storage_2d<rgba32float, read>;       // [m, q | k | v]
@group(0) @binding(6) var w: texture_storage_2d<rgba32float, read>;       // [1, weights of q | of k]
@group(0) @binding(8) var<uniform> step: Step;
fn first_texel_of(unit: u32) -> u32 {
  if (ROW_NORM) { return select(0u, Q_VEC4, unit > 0u) + select(0u, KV_VEC4, unit > 1u) + select(0u, KV_VEC4, unit > 2u); }
  return unit * HEAD_VEC4;
}
fn turned(v: vec4<f32>, r: vec4<f32>) -> vec4<f32> {
  return vec4<f32>(v.x * r.x - v.y * r.y, v.x * r.y + v.y * r.x, v.z * r.z - v.w * r.w, v.z * r.w + v.w * r.z);
}
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let first = first_texel_of(workgroup.x);
  let end = first_texel_of(workgroup.x + 1u);
  let token = workgroup.y;
  let row = step.row[token];
  var scale = 1.0;
  if (QK_NORM && first < Q_VEC4 + KV_VEC4) {
    var squares = 0.0;
    for (var i = first + index; i < end; i += WORKGROUP) { let v = textureLoad(x, vec2<u32>(i, token)); squares += dot(v, v); }
    scale = inverseSqrt(sum_workgroup(squares, index) / f32(4u * (end - first)) + EPS);
  }
  if (TEMPERATURE > 0.0 && first < Q_VEC4) { scale *= 1.0 + TEMPERATURE * log(1.0 + f32(row.position / TEMPERATURE_RUN)); }
  for (var i = first + index; i < end; i += WORKGROUP) {
    var v = textureLoad(x, vec2<u32>(i, token));
    let dim4 = i % HEAD_VEC4;
    if (i < Q_VEC4 + KV_VEC4) {
      v *= scale;
      if (QK_NORM) { v *= textureLoad(w, vec2<u32>(select(dim4 + select(0u, HEAD_VEC4, i >= Q_VEC4), i, ROW_NORM), 0u)); }
      if (dim4 < ROPE_DIMS / 4u) { v = turned(v, rope[row.position * (ROPE_DIMS / 4u) + dim4]); }
    }
    if (i < Q_VEC4) { textureStore(y, vec2<u32>(i, token), v); }
    else { textureStore(cache, vec2<u32>(row.cell / TEXTURE_ROWS * 2u * KV_VEC4 + i - Q_VEC4, row.cell % TEXTURE_ROWS), v); }
  }
}
