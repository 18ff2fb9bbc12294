// y[m, HEADS, HEAD_DIM] = softmax(q K^T) V over a cache texture, causal, many tokens, texture backend (CPU adapters).
// An invocation computes one token and head with its own online softmax. Neighbours share the KV head and the texels
// that they read (broadcast_subgroup), so all of them loop over the same positions.
// Needs HEAD_DIM % 4 == 0, HEAD_DIM <= 128, TEXTURE_ROWS % PAGE == 0 and few enough positions: llvmpipe
// ends all loops of an invocation after 65535 iterations in total, without an error. Loops over HEAD_DIM are unrolled and
// do not count. If a loop ends early, y is NaN.
// Parts: pages, broadcast_*.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const HEADS: u32 = 1u;
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 4u;
const WINDOW: u32 = 0u;           // a token sees the last WINDOW positions, its own included; 0: all
const SCALE: f32 = 1.0;
const WORKGROUP: u32 = 8u;
const TEXTURE_ROWS: u32 = 8192u;  // cells below each other in the cache texture; the next block of them is to the right
const HEAD_VEC4: u32 = HEAD_DIM / 4u;
const TEXELS: u32 = min(HEAD_VEC4, 16u);
const HEADS_PER_KV: u32 = HEADS / KV_HEADS;
@group(0) @binding(0) var y: texture_storage_2d<rgba32float, write>;     // [m, HEADS, HEAD_VEC4]
@group(0) @binding(1) var cache: texture_storage_2d<rgba32float, read>;  // row = cell, [keys | values, KV_HEADS, HEAD_VEC4]
@group(0) @binding(5) var x: texture_storage_2d<rgba32float, read>;      // q [m, HEADS, HEAD_VEC4]
@group(0) @binding(8) var<uniform> step: Step;
fn texel(i: u32, column: u32, row: u32) -> vec4<f32> { return textureLoad(cache, vec2<u32>(column + i, row)); }
fn broadcast_rest(lane: u32, column: u32, row: u32) -> array<vec4<f32>, 16> {  // the texels after the first 16
  if (HEAD_VEC4 <= 16u) { return array<vec4<f32>, 16>(); }
  return broadcast_texels(lane, column + 16u, row);
}
fn first_seen(position: u32) -> u32 {
  let end = position + 1u;
  return select(0u, end - min(WINDOW, end), WINDOW > 0u);
}
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let segment = step.segment[workgroup.z];  // first row, rows
  let first_index = workgroup.x * WORKGROUP;  // of the workgroup's tokens and heads
  let index = first_index + lane;
  let position = segment.w;
  if (first_index / HEADS_PER_KV >= segment.y) { return; }  // each segment's grid has room for all rows of the step
  let last = segment.y - 1u;
  let token = min(index / HEADS_PER_KV, last);  // counted from the segment's first row
  let begin = first_seen(position + token);
  let out = (workgroup.y * HEADS_PER_KV + index % HEADS_PER_KV) * HEAD_VEC4;
  var q = array<vec4<f32>, HEAD_VEC4>();
  var acc = array<vec4<f32>, HEAD_VEC4>();
  for (var i = 0u; i < HEAD_VEC4; i++) { q[i] = textureLoad(x, vec2<u32>(out + i, segment.x + token)) * SCALE; }
  var top = -1e30;
  var total = 0.0;
  let first_token = first_index / HEADS_PER_KV;
  let end = position + min((first_index + WORKGROUP - 1u) / HEADS_PER_KV, last) + 1u;
  var p = first_seen(position + first_token);
  while (p < end) {
    let cell = cell_of(segment.z, p);
    let keys = (cell / TEXTURE_ROWS * 2u * KV_HEADS + workgroup.y) * HEAD_VEC4;
    let first_row = cell % TEXTURE_ROWS - p;  // of position 0, if all were in this page
    let page_end = min((p / PAGE + 1u) * PAGE, end);
    for (; p < page_end; p++) {
      let row = first_row + p;
      let k = broadcast_texels(lane, keys, row);
      let l = broadcast_rest(lane, keys, row);
      var products = vec4<f32>();
      for (var i = 0u; i < HEAD_VEC4; i++) { products += q[i] * select(k[i % 16u], l[i % 16u], i >= 16u); }
      let seen = p >= begin && p <= position + token;
      let s = select(-1e30, dot(products, vec4<f32>(1.0)), seen);
      let new_top = max(top, s);
      let rescale = exp(top - new_top);
      let e = select(0.0, exp(s - new_top), seen);
      top = new_top;
      total = total * rescale + e;
      let v = broadcast_texels(lane, keys + KV_HEADS * HEAD_VEC4, row);
      let w = broadcast_rest(lane, keys + KV_HEADS * HEAD_VEC4, row);
      for (var i = 0u; i < HEAD_VEC4; i++) { acc[i] = acc[i] * rescale + e * select(v[i % 16u], w[i % 16u], i >= 16u); }
    }
  }
  if (index / HEADS_PER_KV > last) { return; }
  if (p < end) { textureStore(y, vec2<u32>(out, segment.x + token), vec4<f32>(bitcast<f32>(0x7FC00000u | p))); return; }
  for (var i = 0u; i < HEAD_VEC4; i++) { textureStore(y, vec2<u32>(out + i, segment.x + token), acc[i] / total); }
}
