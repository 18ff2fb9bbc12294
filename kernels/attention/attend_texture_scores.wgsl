// scores[HEADS, positions] = q K^T of one token over a cache texture, texture backend (CPU adapters): the first half of
// attention in decode, see attend_texture_values.
// An invocation computes 4 positions for the heads that share a KV head. Positions that the token cannot see get -1e30.
// Needs m == 1 and HEAD_DIM % 4 == 0. Parts: pages.
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
const HEADS_PER_KV: u32 = HEADS / KV_HEADS;
@group(0) @binding(0) var y: texture_storage_2d<rgba32float, write>;     // scores [HEADS, positions / 4]
@group(0) @binding(1) var cache: texture_storage_2d<rgba32float, read>;  // row = cell, [keys | values, KV_HEADS, HEAD_VEC4]
@group(0) @binding(5) var x: texture_storage_2d<rgba32float, read>;      // q [1, HEADS, HEAD_VEC4]
@group(0) @binding(8) var<uniform> step: Step;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let p = vec4<u32>(4u * id.x) + vec4<u32>(0u, 1u, 2u, 3u);
  let end = step.row[0].position + 1u;
  let begin = select(0u, end - min(WINDOW, end), WINDOW > 0u);
  if (p.x >= end) { return; }
  let cell = cell_of(step.row[0].slot, p.x);  // and the next three
  let keys = (cell / TEXTURE_ROWS * 2u * KV_HEADS + id.y) * HEAD_VEC4;
  let row = vec4<u32>(cell % TEXTURE_ROWS) + vec4<u32>(0u, 1u, 2u, 3u);
  var s = array<vec4<f32>, HEADS_PER_KV>();
  for (var i = keys; i < keys + HEAD_VEC4; i++) {
    let k = mat4x4<f32>(textureLoad(cache, vec2<u32>(i, row.x)), textureLoad(cache, vec2<u32>(i, row.y)),
                        textureLoad(cache, vec2<u32>(i, row.z)), textureLoad(cache, vec2<u32>(i, row.w)));
    for (var h = 0u; h < HEADS_PER_KV; h++) {
      s[h] += textureLoad(x, vec2<u32>((id.y * HEADS_PER_KV + h) * HEAD_VEC4 + i - keys, 0u)) * k;
    }
  }
  let seen = (p >= vec4<u32>(begin)) & (p < vec4<u32>(end));
  for (var h = 0u; h < HEADS_PER_KV; h++) {
    textureStore(y, vec2<u32>(id.x % TEXTURE_ROWS, id.y * HEADS_PER_KV + h + id.x / TEXTURE_ROWS * HEADS), select(vec4<f32>(-1e30), s[h] * SCALE, seen));
  }
}
