// y[head] = softmax(scores[head]) V of one token over a cache image, for adapters that are a CPU: the second half of
// decode's attention. An invocation makes 8 dimensions for the heads that share a kv head, 4 positions at a time.
// Needs m == 1, HEAD_DIM % 8 == 0. Where llvmpipe stops the loop early (see attend_image), the result is NaN.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
const HEADS: u32 = 1u;
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 4u;
const WINDOW: u32 = 0u;  // a token sees the last WINDOW positions, its own included; 0: all
const WORKGROUP: u32 = 8u;
const FOLD: u32 = 8192u;  // rows of the cache image; later positions stand to the right
const QUADS: u32 = HEAD_DIM / 4u;
const SHARE: u32 = HEADS / KV_HEADS;
@group(0) @binding(0) var y: texture_storage_2d<rgba32float, write>;    // [1, HEADS, QUADS]
@group(0) @binding(1) var cache: texture_storage_2d<rgba32float, read>; // row = position, [keys | values, KV_HEADS, QUADS]
@group(0) @binding(5) var x: texture_storage_2d<rgba32float, read>;     // scores [HEADS, positions / 4]
@group(0) @binding(8) var<uniform> step: Step;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let quad = 2u * id.x;  // and the next
  if (quad >= KV_HEADS * QUADS) { return; }
  let kv_head = quad / QUADS;
  let end = step.pos + 1u;
  let begin = select(0u, end - min(WINDOW, end), WINDOW > 0u);
  var acc = array<vec4<f32>, SHARE>();
  var next = array<vec4<f32>, SHARE>();
  var top = array<f32, SHARE>();
  var total = array<f32, SHARE>();
  for (var h = 0u; h < SHARE; h++) { top[h] = -1e30; }
  var p = begin / 4u;
  for (; 4u * p < end; p++) {
    let at = 4u * p / FOLD * 2u * KV_HEADS * QUADS + KV_HEADS * QUADS + quad;
    let row = 4u * p % FOLD;
    let v = mat4x4<f32>(textureLoad(cache, vec2<u32>(at, row)), textureLoad(cache, vec2<u32>(at, row + 1u)),
                        textureLoad(cache, vec2<u32>(at, row + 2u)), textureLoad(cache, vec2<u32>(at, row + 3u)));
    let u = mat4x4<f32>(textureLoad(cache, vec2<u32>(at + 1u, row)), textureLoad(cache, vec2<u32>(at + 1u, row + 1u)),
                        textureLoad(cache, vec2<u32>(at + 1u, row + 2u)), textureLoad(cache, vec2<u32>(at + 1u, row + 3u)));
    for (var h = 0u; h < SHARE; h++) {
      let s = textureLoad(x, vec2<u32>(p % FOLD, kv_head * SHARE + h + p / FOLD * HEADS));
      let peak = max(top[h], max(max(s.x, s.y), max(s.z, s.w)));
      let keep = exp(top[h] - peak);
      let e = exp(s - vec4<f32>(peak));
      top[h] = peak;
      total[h] = total[h] * keep + dot(e, vec4<f32>(1.0));
      acc[h] = acc[h] * keep + v * e;
      next[h] = next[h] * keep + u * e;
    }
  }
  if (4u * p < end) {
    textureStore(y, vec2<u32>(kv_head * SHARE * QUADS + quad % QUADS, 0u), vec4<f32>(bitcast<f32>(0x7FC00000u | p)));
    return;
  }
  for (var h = 0u; h < SHARE; h++) {
    let out = (kv_head * SHARE + h) * QUADS + quad % QUADS;
    textureStore(y, vec2<u32>(out, 0u), acc[h] / total[h]);
    textureStore(y, vec2<u32>(out + 1u, 0u), next[h] / total[h]);
  }
}
