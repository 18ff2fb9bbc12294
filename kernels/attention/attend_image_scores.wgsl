// scores[head, position] = q . k of one token over a cache image, for adapters that are a CPU: the first half of decode's
// attention. An invocation makes 4 positions for the heads that share a kv head. Positions that the token does not see get
// -1e30. Needs m == 1, HEAD_DIM % 4 == 0.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
const HEADS: u32 = 1u;
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 4u;
const WINDOW: u32 = 0u;  // a token sees the last WINDOW positions, its own included; 0: all
const SCALE: f32 = 1.0;
const WORKGROUP: u32 = 8u;
const FOLD: u32 = 8192u;  // rows of the cache image; later positions stand to the right
const QUADS: u32 = HEAD_DIM / 4u;
const SHARE: u32 = HEADS / KV_HEADS;
@group(0) @binding(0) var y: texture_storage_2d<rgba32float, write>;    // scores [HEADS, positions / 4]
@group(0) @binding(1) var cache: texture_storage_2d<rgba32float, read>; // row = position, [keys | values, KV_HEADS, QUADS]
@group(0) @binding(5) var x: texture_storage_2d<rgba32float, read>;     // q [1, HEADS, QUADS]
@group(0) @binding(8) var<uniform> step: Step;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let p = vec4<u32>(4u * id.x) + vec4<u32>(0u, 1u, 2u, 3u);
  let end = step.pos + 1u;
  let begin = select(0u, end - min(WINDOW, end), WINDOW > 0u);
  if (p.x >= end) { return; }
  let keys = (p.x / FOLD * 2u * KV_HEADS + id.y) * QUADS;
  let row = p % FOLD;
  var s = array<vec4<f32>, SHARE>();
  for (var i = keys; i < keys + QUADS; i++) {
    let k = mat4x4<f32>(textureLoad(cache, vec2<u32>(i, row.x)), textureLoad(cache, vec2<u32>(i, row.y)),
                        textureLoad(cache, vec2<u32>(i, row.z)), textureLoad(cache, vec2<u32>(i, row.w)));
    for (var h = 0u; h < SHARE; h++) {
      s[h] += textureLoad(x, vec2<u32>((id.y * SHARE + h) * QUADS + i - keys, 0u)) * k;
    }
  }
  let seen = (p >= vec4<u32>(begin)) & (p < vec4<u32>(end));
  for (var h = 0u; h < SHARE; h++) {
    textureStore(y, vec2<u32>(id.x % FOLD, id.y * SHARE + h + id.x / FOLD * HEADS), select(vec4<f32>(-1e30), s[h] * SCALE, seen));
  }
}
