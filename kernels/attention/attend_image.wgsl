// y[token, head] = softmax(q . K) V over a cache image, causal, many tokens, for adapters that are a CPU. An invocation is
// one token and head with its own online softmax; neighbours share the kv head, so that all lanes read the same texels,
// and nothing else. Needs HEAD_DIM % 4 == 0 and <= 128, and fewer than 65535 positions: llvmpipe ends all loops of an
// invocation after 65535 turns in sum, without a word; those over HEAD_DIM it unrolls, up to 32 turns.
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
@group(0) @binding(0) var y: texture_storage_2d<rgba32float, write>;   // [m, HEADS, QUADS]
@group(0) @binding(1) var cache: texture_storage_2d<rgba32float, read>; // row = position, [keys | values, KV_HEADS, QUADS]
@group(0) @binding(5) var x: texture_storage_2d<rgba32float, read>;    // q, as y
@group(0) @binding(8) var<uniform> step: Step;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let token = id.x / SHARE;
  if (token >= step.m) { return; }
  let out = (id.y * SHARE + id.x % SHARE) * QUADS;
  let end = step.pos + token + 1u;
  let begin = select(0u, end - min(WINDOW, end), WINDOW > 0u);
  var q = array<vec4<f32>, QUADS>();
  var acc = array<vec4<f32>, QUADS>();
  for (var i = 0u; i < QUADS; i++) { q[i] = textureLoad(x, vec2<u32>(out + i, token)) * SCALE; }
  var top = -1e30;
  var total = 0.0;
  for (var p = begin; p < end; p++) {
    let row = p % FOLD;
    let keys = (p / FOLD * 2u * KV_HEADS + id.y) * QUADS;
    let values = keys + KV_HEADS * QUADS;
    var products = vec4<f32>();
    for (var i = 0u; i < QUADS; i++) { products += q[i] * textureLoad(cache, vec2<u32>(keys + i, row)); }
    let s = dot(products, vec4<f32>(1.0));
    let peak = max(top, s);
    let keep = exp(top - peak);
    let e = exp(s - peak);
    top = peak;
    total = total * keep + e;
    for (var i = 0u; i < QUADS; i++) { acc[i] = acc[i] * keep + e * textureLoad(cache, vec2<u32>(values + i, row)); }
  }
  for (var i = 0u; i < QUADS; i++) { textureStore(y, vec2<u32>(out + i, token), acc[i] / total); }
}
