// y[HEADS, HEAD_DIM] = softmax(scores) V of one token over a cache texture, texture backend (CPU adapters): the second
// half of attention in decode, after attend_texture_scores.
// An invocation computes 8 dimensions for the heads that share a KV head, 4 positions at a time.
// Needs m == 1, HEAD_DIM % 8 == 0 and TEXTURE_ROWS % PAGE == 0. If llvmpipe ends a loop early (see attend_texture), y is NaN.
// Parts: pages.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const HEADS: u32 = 1u;
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 4u;
const WINDOW: u32 = 0u;           // a token sees the last WINDOW positions, its own included; 0: all
const WORKGROUP: u32 = 8u;
const TEXTURE_ROWS: u32 = 8192u;  // cells below each other in the cache texture; the next block of them is to the right
const HEAD_VEC4: u32 = HEAD_DIM / 4u;
const HEADS_PER_KV: u32 = HEADS / KV_HEADS;
@group(0) @binding(0) var y: texture_storage_2d<rgba32float, write>;     // [1, HEADS, HEAD_VEC4]
@group(0) @binding(1) var cache: texture_storage_2d<rgba32float, read>;  // row = cell, [keys | values, KV_HEADS, HEAD_VEC4]
@group(0) @binding(5) var x: texture_storage_2d<rgba32float, read>;      // scores [HEADS, positions / 4]
@group(0) @binding(8) var<uniform> step: Step;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let dim4 = 2u * id.x;  // and the next one
  if (dim4 >= KV_HEADS * HEAD_VEC4) { return; }
  let kv_head = dim4 / HEAD_VEC4;
  let end = step.row[0].position + 1u;
  let slot = step.row[0].slot;
  let begin = select(0u, end - min(WINDOW, end), WINDOW > 0u);
  var acc = array<vec4<f32>, HEADS_PER_KV>();
  var next = array<vec4<f32>, HEADS_PER_KV>();
  var top = array<f32, HEADS_PER_KV>();
  var total = array<f32, HEADS_PER_KV>();
  for (var h = 0u; h < HEADS_PER_KV; h++) { top[h] = -1e30; }
  var p = begin / 4u;
  while (4u * p < end) {
    let cell = cell_of(slot, 4u * p);
    let at = (cell / TEXTURE_ROWS * 2u + 1u) * KV_HEADS * HEAD_VEC4 + dim4;
    let page_end = min((4u * p / PAGE + 1u) * PAGE, end);
    let first_row = cell % TEXTURE_ROWS - 4u * p;  // of position 0, if all were in this page
    for (; 4u * p < page_end; p++) {
      let row = first_row + min(vec4<u32>(4u * p, 4u * p + 1u, 4u * p + 2u, 4u * p + 3u), vec4<u32>(end - 1u));  // the cells after the last are not the sequence's
      let v = mat4x4<f32>(textureLoad(cache, vec2<u32>(at, row.x)), textureLoad(cache, vec2<u32>(at, row.y)),
                          textureLoad(cache, vec2<u32>(at, row.z)), textureLoad(cache, vec2<u32>(at, row.w)));
      let u = mat4x4<f32>(textureLoad(cache, vec2<u32>(at + 1u, row.x)), textureLoad(cache, vec2<u32>(at + 1u, row.y)),
                          textureLoad(cache, vec2<u32>(at + 1u, row.z)), textureLoad(cache, vec2<u32>(at + 1u, row.w)));
      for (var h = 0u; h < HEADS_PER_KV; h++) {
        let s = textureLoad(x, vec2<u32>(p % TEXTURE_ROWS, kv_head * HEADS_PER_KV + h + p / TEXTURE_ROWS * HEADS));
        let new_top = max(top[h], max(max(s.x, s.y), max(s.z, s.w)));
        let rescale = exp(top[h] - new_top);
        let e = exp(s - vec4<f32>(new_top));
        top[h] = new_top;
        total[h] = total[h] * rescale + dot(e, vec4<f32>(1.0));
        acc[h] = acc[h] * rescale + v * e;
        next[h] = next[h] * rescale + u * e;
      }
    }
  }
  if (4u * p < end) {
    textureStore(y, vec2<u32>(kv_head * HEADS_PER_KV * HEAD_VEC4 + dim4 % HEAD_VEC4, 0u), vec4<f32>(bitcast<f32>(0x7FC00000u | p)));
    return;
  }
  for (var h = 0u; h < HEADS_PER_KV; h++) {
    let out = (kv_head * HEADS_PER_KV + h) * HEAD_VEC4 + dim4 % HEAD_VEC4;
    textureStore(y, vec2<u32>(out, 0u), acc[h] / total[h]);
    textureStore(y, vec2<u32>(out + 1u, 0u), next[h] / total[h]);
  }
}
