// y[token, head] = softmax(q . K) V over a cache image, causal, many tokens, for adapters that are a CPU. An invocation is
// one token and head with its own online softmax; neighbours share the kv head, and the texels they read (see
// spread_subgroup), so that all go through the same positions. Parts: spread. Needs HEAD_DIM % 4 == 0 and <= 128, and fewer
// than 65535 positions: llvmpipe ends all loops of an invocation after 65535 turns in sum, without a word; those over HEAD_DIM
// it unrolls. Where it stops early all the same, the result is NaN.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
const HEADS: u32 = 1u;
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 4u;
const WINDOW: u32 = 0u;  // a token sees the last WINDOW positions, its own included; 0: all
const SCALE: f32 = 1.0;
const WORKGROUP: u32 = 8u;
const FOLD: u32 = 8192u;  // rows of the cache image; later positions stand to the right
const QUADS: u32 = HEAD_DIM / 4u;
const TEXELS: u32 = min(QUADS, 16u);
const SHARE: u32 = HEADS / KV_HEADS;
@group(0) @binding(0) var y: texture_storage_2d<rgba32float, write>;   // [m, HEADS, QUADS]
@group(0) @binding(1) var cache: texture_storage_2d<rgba32float, read>; // row = position, [keys | values, KV_HEADS, QUADS]
@group(0) @binding(5) var x: texture_storage_2d<rgba32float, read>;    // q, as y
@group(0) @binding(8) var<uniform> step: Step;
fn texel(i: u32, column: u32, row: u32) -> vec4<f32> { return textureLoad(cache, vec2<u32>(column + i, row)); }
fn more(lane: u32, column: u32, row: u32) -> array<vec4<f32>, 16> {  // the texels after those of spread
  if (QUADS <= 16u) { return array<vec4<f32>, 16>(); }
  return spread(lane, column + 16u, row);
}
fn first_seen(token: u32) -> u32 {
  let end = step.pos + token + 1u;
  return select(0u, end - min(WINDOW, end), WINDOW > 0u);
}
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
  let last = step.m - 1u;
  let token = min(id.x / SHARE, last);
  let begin = first_seen(token);
  let out = (id.y * SHARE + id.x % SHARE) * QUADS;
  var q = array<vec4<f32>, QUADS>();
  var acc = array<vec4<f32>, QUADS>();
  for (var i = 0u; i < QUADS; i++) { q[i] = textureLoad(x, vec2<u32>(out + i, token)) * SCALE; }
  var top = -1e30;
  var total = 0.0;
  let from_token = (id.x - lane) / SHARE;
  let end = step.pos + min((id.x - lane + WORKGROUP - 1u) / SHARE, last) + 1u;
  var p = first_seen(from_token);
  for (; p < end; p++) {
    let row = p % FOLD;
    let keys = (p / FOLD * 2u * KV_HEADS + id.y) * QUADS;
    let k = spread(lane, keys, row);
    let l = more(lane, keys, row);
    var products = vec4<f32>();
    for (var i = 0u; i < QUADS; i++) { products += q[i] * select(k[i % 16u], l[i % 16u], i >= 16u); }
    let seen = p >= begin && p <= step.pos + token;
    let s = select(-1e30, dot(products, vec4<f32>(1.0)), seen);
    let peak = max(top, s);
    let keep = exp(top - peak);
    let e = select(0.0, exp(s - peak), seen);
    top = peak;
    total = total * keep + e;
    let v = spread(lane, keys + KV_HEADS * QUADS, row);
    let w = more(lane, keys + KV_HEADS * QUADS, row);
    for (var i = 0u; i < QUADS; i++) { acc[i] = acc[i] * keep + e * select(v[i % 16u], w[i % 16u], i >= 16u); }
  }
  if (id.x / SHARE > last) { return; }
  if (p < end) { textureStore(y, vec2<u32>(out, token), vec4<f32>(bitcast<f32>(0x7FC00000u | p))); return; }
  for (var i = 0u; i < QUADS; i++) { textureStore(y, vec2<u32>(out + i, token), acc[i] / total); }
}
