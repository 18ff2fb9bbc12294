// Attention of many tokens, no score matrix. A workgroup takes one kv head and TOKENS tokens; its rows are the tokens of
// every query head that shares the kv head, so K and V come from memory once for all of them. SHARE neighbouring
// invocations own two rows, HEAD_DIM / SHARE dimensions each, in registers; keys and values pass through workgroup
// memory, PLACES positions at a time, each read once for two rows; online softmax in f32, eight positions per update;
// causal bound per tile. Parts: half, kv, team_subgroup. Needs HEAD_DIM % (4 * SHARE) == 0, PLACES % 8 == 0.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
const HEADS: u32 = 1u;
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 64u;
const WINDOW: u32 = 0u;  // a token sees the last WINDOW positions, its own included; 0: all
const SCALE: f32 = 1.0;
const WORKGROUP: u32 = 128u;
const SHARE: u32 = 4u;
const PLACES: u32 = 32u;  // 2 * PLACES * HEAD_DIM * 4 bytes of workgroup memory
const GROUP_HEADS: u32 = HEADS / KV_HEADS;
const TOKENS: u32 = 2u * WORKGROUP / SHARE / GROUP_HEADS;
const QUADS: u32 = HEAD_DIM / 4u;
const OWN: u32 = QUADS / SHARE;  // quads of dimensions that an invocation owns: its number + SHARE * i
const LOADS: u32 = (PLACES * QUADS + WORKGROUP - 1u) / WORKGROUP;  // quads of K that an invocation stages
struct Row { at: u32, begin: u32, end: u32, live: bool }  // place in x and y, positions it sees
@group(0) @binding(0) var<storage, read_write> y: array<vec4<f32>>;  // [m, HEADS, HEAD_DIM]
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;        // q, likewise
@group(0) @binding(8) var<uniform> step: Step;
var<workgroup> keys: array<vec4<f32>, PLACES * QUADS>;
var<workgroup> values: array<vec4<f32>, PLACES * QUADS>;
fn row_of(row: u32, kv_head: u32, token0: u32) -> Row {
  let token = token0 + row % TOKENS;
  let head = kv_head * GROUP_HEADS + min(row / TOKENS, GROUP_HEADS - 1u);
  let end = step.pos + token + 1u;
  let begin = select(0u, end - min(WINDOW, end), WINDOW > 0u);
  return Row((min(token, step.m - 1u) * HEADS + head) * QUADS, begin, end, row < TOKENS * GROUP_HEADS && token < step.m);
}
fn masked(s: vec4<f32>, p: u32, row: Row) -> vec4<f32> {
  let past = vec4<u32>(p - row.begin) + vec4<u32>(0u, 1u, 2u, 3u);  // before begin it wraps round
  return select(vec4<f32>(-1e30), s, past < vec4<u32>(row.end - row.begin));
}
fn cache_place(base: u32, p0: u32, last: u32, i: u32) -> u32 { return (base + min(p0 + i / QUADS, last - 1u)) * QUADS + i % QUADS; }
fn largest(v: vec4<f32>) -> f32 { return max(max(v.x, v.y), max(v.z, v.w)); }
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let own = index % SHARE;
  let token0 = group.y * TOKENS;
  let a = row_of(index / SHARE * 2u, group.x, token0);
  let b = row_of(index / SHARE * 2u + 1u, group.x, token0);
  var q: array<vec4<f32>, OWN>;
  var r: array<vec4<f32>, OWN>;
  var y0: array<vec4<f32>, OWN>;
  var y1: array<vec4<f32>, OWN>;
  for (var i = 0u; i < OWN; i++) {
    q[i] = x[a.at + own + SHARE * i] * SCALE;
    r[i] = x[b.at + own + SHARE * i] * SCALE;
    y0[i] = vec4<f32>();
    y1[i] = vec4<f32>();
  }
  let base = group.x * step.capacity;
  let last = step.pos + min(token0 + TOKENS, step.m);  // one past what the tile's last token sees
  let early = step.pos + token0 + 1u;
  let first = select(0u, early - min(WINDOW, early), WINDOW > 0u);
  var top = vec2<f32>(-1e30);
  var total = vec2<f32>();
  var next_k: array<Quad, LOADS>;  // the tile after the one in workgroup memory, on its way
  var next_v: array<Quad, LOADS>;
  for (var i = 0u; i < LOADS; i++) {
    let cached = cache_place(base, first, last, index + i * WORKGROUP);
    next_k[i] = k_cache[cached];
    next_v[i] = v_cache[cached];
  }
  for (var p0 = first; p0 < last; p0 += PLACES) {
    for (var i = 0u; i < LOADS; i++) {
      let n = index + i * WORKGROUP;
      if (PLACES * QUADS % WORKGROUP == 0u || n < PLACES * QUADS) { keys[n] = widen(next_k[i]); values[n] = widen(next_v[i]); }
    }
    workgroupBarrier();
    for (var i = 0u; i < LOADS; i++) {
      let cached = cache_place(base, p0 + PLACES, last, index + i * WORKGROUP);
      next_k[i] = k_cache[cached];
      next_v[i] = v_cache[cached];
    }
    let edge = p0 + PLACES > early || WINDOW > 0u;  // some row does not see all of these positions
    for (var j = 0u; j < PLACES; j += 8u) {
      let k = j * QUADS + own;
      var s0 = vec4<f32>(); var s1 = vec4<f32>();  // scores of the first row with eight positions
      var t0 = vec4<f32>(); var t1 = vec4<f32>();  // and of the second
      for (var i = 0u; i < OWN; i++) {
        let n = k + SHARE * i;
        let k0 = keys[n];              let k1 = keys[n + QUADS];
        let k2 = keys[n + 2u * QUADS]; let k3 = keys[n + 3u * QUADS];
        let k4 = keys[n + 4u * QUADS]; let k5 = keys[n + 5u * QUADS];
        let k6 = keys[n + 6u * QUADS]; let k7 = keys[n + 7u * QUADS];
        s0 += vec4<f32>(dot(q[i], k0), dot(q[i], k1), dot(q[i], k2), dot(q[i], k3));
        s1 += vec4<f32>(dot(q[i], k4), dot(q[i], k5), dot(q[i], k6), dot(q[i], k7));
        t0 += vec4<f32>(dot(r[i], k0), dot(r[i], k1), dot(r[i], k2), dot(r[i], k3));
        t1 += vec4<f32>(dot(r[i], k4), dot(r[i], k5), dot(r[i], k6), dot(r[i], k7));
      }
      s0 = team_sum(s0); s1 = team_sum(s1); t0 = team_sum(t0); t1 = team_sum(t1);
      if (edge) {
        s0 = masked(s0, p0 + j, a); s1 = masked(s1, p0 + j + 4u, a);
        t0 = masked(t0, p0 + j, b); t1 = masked(t1, p0 + j + 4u, b);
      }
      let peak = max(top, vec2<f32>(largest(max(s0, s1)), largest(max(t0, t1))));
      let keep = exp(top - peak);
      top = peak;
      s0 = exp(s0 - peak.x); s1 = exp(s1 - peak.x);
      t0 = exp(t0 - peak.y); t1 = exp(t1 - peak.y);
      if (edge) {  // a row that has seen nothing yet has its peak at the mask's value
        s0 = select(s0, vec4<f32>(), vec4<bool>(peak.x < -1e29)); s1 = select(s1, vec4<f32>(), vec4<bool>(peak.x < -1e29));
        t0 = select(t0, vec4<f32>(), vec4<bool>(peak.y < -1e29)); t1 = select(t1, vec4<f32>(), vec4<bool>(peak.y < -1e29));
      }
      total = total * keep + vec2<f32>(dot(s0 + s1, vec4<f32>(1.0)), dot(t0 + t1, vec4<f32>(1.0)));
      for (var i = 0u; i < OWN; i++) {
        let n = k + SHARE * i;
        let v0 = values[n];              let v1 = values[n + QUADS];
        let v2 = values[n + 2u * QUADS]; let v3 = values[n + 3u * QUADS];
        let v4 = values[n + 4u * QUADS]; let v5 = values[n + 5u * QUADS];
        let v6 = values[n + 6u * QUADS]; let v7 = values[n + 7u * QUADS];
        y0[i] = y0[i] * keep.x + s0.x * v0 + s0.y * v1 + s0.z * v2 + s0.w * v3
              + s1.x * v4 + s1.y * v5 + s1.z * v6 + s1.w * v7;
        y1[i] = y1[i] * keep.y + t0.x * v0 + t0.y * v1 + t0.z * v2 + t0.w * v3
              + t1.x * v4 + t1.y * v5 + t1.z * v6 + t1.w * v7;
      }
    }
    workgroupBarrier();
  }
  for (var i = 0u; i < OWN; i++) {
    if (a.live) { y[a.at + own + SHARE * i] = y0[i] / total.x; }
    if (b.live) { y[b.at + own + SHARE * i] = y1[i] / total.y; }
  }
}
