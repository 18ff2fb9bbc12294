// y[m, HEADS, HEAD_DIM] = softmax(q K^T) V over a cache texture, a token of each of m sequences, texture backend (CPU adapters).
// A workgroup computes the heads of a token that share a KV head, WORKGROUP positions at a time: a lane takes one of them
// for the scores, then some of the dimensions for the values of all. Scores and weights pass between lanes by broadcasts.
// attend_texture, where a lane computes a head, would have idle lanes if fewer than WORKGROUP heads share a KV head.
// Needs WORKGROUP lanes in a subgroup, HEAD_DIM % 4 == 0, PAGE % WORKGROUP == 0 and TEXTURE_ROWS % PAGE == 0. Parts: pages.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const HEADS: u32 = 1u;
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 4u;
const WINDOW: u32 = 0u;           // a token sees the last WINDOW positions, its own included; 0: all
const SCALE: f32 = 1.0;
const WORKGROUP: u32 = 8u;        // one subgroup: 4, 8 or 16 lanes
const TEXTURE_ROWS: u32 = 8192u;  // cells below each other in the cache texture; the next block of them is to the right
const HEAD_VEC4: u32 = HEAD_DIM / 4u;
const HEADS_PER_KV: u32 = HEADS / KV_HEADS;
const OWN: u32 = (HEAD_VEC4 + WORKGROUP - 1u) / WORKGROUP;  // texels of a head that a lane has
@group(0) @binding(0) var y: texture_storage_2d<rgba32float, write>;     // [m, HEADS, HEAD_VEC4]
@group(0) @binding(1) var cache: texture_storage_2d<rgba32float, read>;  // row = cell, [keys | values, KV_HEADS, HEAD_VEC4]
@group(0) @binding(5) var x: texture_storage_2d<rgba32float, read>;      // q [m, HEADS, HEAD_VEC4]
@group(0) @binding(8) var<uniform> step: Step;
fn every_lane(v: f32) -> array<f32, 16> {  // the v of each lane
  return array<f32, 16>(
    subgroupBroadcast(v, 0u % WORKGROUP), subgroupBroadcast(v, 1u % WORKGROUP), subgroupBroadcast(v, 2u % WORKGROUP), subgroupBroadcast(v, 3u % WORKGROUP),
    subgroupBroadcast(v, 4u % WORKGROUP), subgroupBroadcast(v, 5u % WORKGROUP), subgroupBroadcast(v, 6u % WORKGROUP), subgroupBroadcast(v, 7u % WORKGROUP),
    subgroupBroadcast(v, 8u % WORKGROUP), subgroupBroadcast(v, 9u % WORKGROUP), subgroupBroadcast(v, 10u % WORKGROUP), subgroupBroadcast(v, 11u % WORKGROUP),
    subgroupBroadcast(v, 12u % WORKGROUP), subgroupBroadcast(v, 13u % WORKGROUP), subgroupBroadcast(v, 14u % WORKGROUP), subgroupBroadcast(v, 15u % WORKGROUP));
}
fn max_lanes(v: f32) -> f32 {
  let all = every_lane(v);
  var top = v;
  for (var i = 0u; i < WORKGROUP; i++) { top = max(top, all[i]); }
  return top;
}
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let row = step.row[workgroup.y];
  let end = row.position + 1u;
  let begin = select(0u, end - min(WINDOW, end), WINDOW > 0u);
  let out = workgroup.x * HEADS_PER_KV * HEAD_VEC4;
  var q = array<array<vec4<f32>, HEAD_VEC4>, HEADS_PER_KV>();
  var acc = array<array<vec4<f32>, OWN>, HEADS_PER_KV>();
  var top = array<f32, HEADS_PER_KV>();
  var total = array<f32, HEADS_PER_KV>();
  for (var h = 0u; h < HEADS_PER_KV; h++) {
    top[h] = -1e30;
    for (var i = 0u; i < HEAD_VEC4; i++) { q[h][i] = textureLoad(x, vec2<u32>(out + h * HEAD_VEC4 + i, workgroup.y)) * SCALE; }
  }
  var p = begin / WORKGROUP * WORKGROUP;  // of lane 0
  while (p < end) {
    let cell = cell_of(row.slot, p);
    let keys = (cell / TEXTURE_ROWS * 2u * KV_HEADS + workgroup.x) * HEAD_VEC4;
    let values = keys + KV_HEADS * HEAD_VEC4;
    let first_row = cell % TEXTURE_ROWS - p;  // of position 0, if all were in this page
    let page_end = min((p / PAGE + 1u) * PAGE, end);
    for (; p < page_end; p += WORKGROUP) {
      let seen = p + lane >= begin && p + lane < end;
      var s = array<vec4<f32>, HEADS_PER_KV>();
      for (var i = 0u; i < HEAD_VEC4; i++) {
        let k = textureLoad(cache, vec2<u32>(keys + i, first_row + p + lane));
        for (var h = 0u; h < HEADS_PER_KV; h++) { s[h] += q[h][i] * k; }
      }
      var weight = array<array<f32, WORKGROUP>, HEADS_PER_KV>();
      for (var h = 0u; h < HEADS_PER_KV; h++) {
        let score = select(-1e30, dot(s[h], vec4<f32>(1.0)), seen);
        let new_top = max(top[h], max_lanes(score));
        let rescale = exp(top[h] - new_top);
        let e = select(0.0, exp(score - new_top), seen);
        top[h] = new_top;
        total[h] = total[h] * rescale + e;
        for (var i = 0u; i < OWN; i++) { acc[h][i] *= rescale; }
        let all = every_lane(e);
        for (var j = 0u; j < WORKGROUP; j++) { weight[h][j] = all[j]; }
      }
      for (var j = 0u; j < WORKGROUP; j++) {
        let value_row = first_row + min(p + j, end - 1u);
        for (var i = 0u; i < OWN; i++) {
          let v = textureLoad(cache, vec2<u32>(values + min(lane + i * WORKGROUP, HEAD_VEC4 - 1u), value_row));
          for (var h = 0u; h < HEADS_PER_KV; h++) { acc[h][i] += weight[h][j] * v; }
        }
      }
    }
  }
  for (var h = 0u; h < HEADS_PER_KV; h++) {
    let sum = subgroupAdd(total[h]);
    for (var i = 0u; i < OWN; i++) {
      let texel = lane + i * WORKGROUP;
      if (texel < HEAD_VEC4) { textureStore(y, vec2<u32>(out + h * HEAD_VEC4 + texel, workgroup.y), acc[h][i] / sum); }
    }
  }
}
