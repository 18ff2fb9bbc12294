// Attention of many tokens, no score matrix. A workgroup takes one kv head and TOKENS tokens; its rows are the tokens of
// every query head that shares the kv head, so K and V come from memory once for all of them. SHARE neighbouring
// invocations own two rows, HEAD_DIM / SHARE dimensions each, in registers; keys and values pass through workgroup
// memory, PLACES positions at a time. Scores are summed over the owners so that each ends up with a part of one row's,
// takes their exponentials, and shows them to the others. What is multiplied with what is the score part's; sums of more
// than PLACES products and the online softmax are f32; causal bound per tile. Writes f32, or int8 records with I8.
// Parts: score, half, kv8, record. Needs SHARE 4 or 8, HEAD_DIM % (8 * SHARE) == 0, PLACES % 8 == 0,
// no more heads to a kv head than 2 * WORKGROUP / SHARE.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
const HEADS: u32 = 1u;
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 64u;
const WINDOW: u32 = 0u;  // a token sees the last WINDOW positions, its own included; 0: all
const SCALE: f32 = 1.0;
const I8: bool = false;
const WORKGROUP: u32 = 128u;
const SHARE: u32 = 4u;
const PLACES: u32 = 16u;
const GROUP_HEADS: u32 = HEADS / KV_HEADS;
const TOKENS: u32 = 2u * WORKGROUP / SHARE / GROUP_HEADS;
const QUADS: u32 = HEAD_DIM / 4u;
const OCTS: u32 = HEAD_DIM / 8u;
const OWN: u32 = 2u * OCTS / SHARE;  // quads of dimensions that an invocation owns, in runs of 8: its number + SHARE * j
const LOADS: u32 = (PLACES * OCTS + WORKGROUP - 1u) / WORKGROUP;  // runs of 8 that an invocation stages
struct Row { at: u32, begin: u32, end: u32, live: bool }  // first quad in x and y, positions it sees
@group(0) @binding(0) var<storage, read_write> y: array<u32>;    // [m, HEADS, HEAD_DIM] f32 or records
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;    // q [m, HEADS, HEAD_DIM]
@group(0) @binding(8) var<uniform> step: Step;
var<workgroup> values: array<Real4, PLACES * QUADS>;
fn row_of(row: u32, kv_head: u32, token0: u32) -> Row {
  let token = token0 + row % TOKENS;
  let head = kv_head * GROUP_HEADS + min(row / TOKENS, GROUP_HEADS - 1u);
  let end = step.pos + token + 1u;
  let begin = select(0u, end - min(WINDOW, end), WINDOW > 0u);
  return Row((min(token, step.m - 1u) * HEADS + head) * QUADS, begin, end, row < TOKENS * GROUP_HEADS && token < step.m);
}
fn cache_place(base: u32, p0: u32, last: u32, i: u32) -> u32 { return (base + min(p0 + i / OCTS, last - 1u)) * OCTS + i % OCTS; }
fn score(q: ptr<function, Query>, r: ptr<function, Query>, place: u32, own: u32) -> Sum {
  let sums = products(q, r, place, own);  // the owner's share of both rows' scores
  let second = own % 2u == 1u;
  return select(sums.x, sums.y, second) + subgroupShuffleXor(select(sums.y, sums.x, second), 1u);
}
fn scores(q: ptr<function, Query>, r: ptr<function, Query>, place: u32, own: u32) -> vec4<Sum> {
  return vec4<Sum>(score(q, r, place, own), score(q, r, place + 1u, own),
                   score(q, r, place + 2u, own), score(q, r, place + 3u, own));
}
fn largest4(v: vec4<f32>) -> f32 { return max(max(v.x, v.y), max(v.z, v.w)); }
fn bring_out(row: Row, out: ptr<function, array<vec4<f32>, OWN>>, total: f32, own: u32, index: u32) {
  for (var i = 0u; i < OWN; i += 2u) {
    let other = quad_of(i, own) % 2u == 1u;  // the second comes first
    let a = select((*out)[i], (*out)[i + 1u], other) / total;
    let b = select((*out)[i + 1u], (*out)[i], other) / total;
    let quad = row.at + quad_of(i, own) / 2u * 2u;
    if (I8) {  // 4 neighbours hold 32 dimensions
      let r = make_record(a, b, index);
      let at = 12u * (quad / 8u) + index % 4u;
      if (row.live) { y[at] = r.even; y[at + 4u] = r.odd; y[at + 8u] = r.scale; }
    } else if (row.live) {
      let u = bitcast<vec4<u32>>(a);
      let v = bitcast<vec4<u32>>(b);
      y[4u * quad] = u.x; y[4u * quad + 1u] = u.y; y[4u * quad + 2u] = u.z; y[4u * quad + 3u] = u.w;
      y[4u * quad + 4u] = v.x; y[4u * quad + 5u] = v.y; y[4u * quad + 6u] = v.z; y[4u * quad + 7u] = v.w;
    }
  }
}
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32,
        @builtin(subgroup_invocation_id) lane: u32) {
  let own = index % SHARE;
  let first_lane = lane - own;
  let second = own % 2u == 1u;  // of the two rows, the one whose scores this invocation ends up with
  let upper = own % 4u > 1u;    // and of eight positions, the half
  let token0 = group.y * TOKENS;
  let row0 = row_of(index / SHARE * 2u, group.x, token0);
  let row1 = row_of(index / SHARE * 2u + 1u, group.x, token0);
  let begin = select(row0.begin, row1.begin, second);
  let reach = select(row0.end, row1.end, second) - begin;
  var y0: array<vec4<f32>, OWN>;
  var y1: array<vec4<f32>, OWN>;
  let base = group.x * step.capacity;
  let last = step.pos + min(token0 + TOKENS, step.m);  // one past what the tile's last token sees
  let early = step.pos + token0 + 1u;
  let first = select(0u, early - min(WINDOW, early), WINDOW > 0u);
  var top = -1e30;
  var total = 0.0;  // of what this invocation took the exponentials of
  var next_k: array<Oct, LOADS>;  // the places after those in workgroup memory, on their way
  var next_v: array<Oct, LOADS>;
  for (var i = 0u; i < LOADS; i++) {
    let cached = cache_place(base, first, last, index + i * WORKGROUP);
    next_k[i] = key_oct(cached);
    next_v[i] = value_oct(cached);
  }
  even_out(&next_k, index);
  let scale = SCALE * 1.4426950408889634;  // scores are powers of two
  for (var i = 0u; i < OWN; i++) {
    y0[i] = x[row0.at + quad_of(i, own)] * scale;
    y1[i] = x[row1.at + quad_of(i, own)] * scale;
  }
  var q0 = query(&y0, own);
  var q1 = query(&y1, own);
  let unit = select(q0.unit, q1.unit, second);
  for (var i = 0u; i < OWN; i++) { y0[i] = vec4<f32>(); y1[i] = vec4<f32>(); }
  for (var p0 = first; p0 < last; p0 += PLACES) {
    for (var i = 0u; i < LOADS; i++) {
      let n = index + i * WORKGROUP;
      let v = widen(next_v[i]);
      put_key(n, widen(next_k[i]));
      if (PLACES * OCTS % WORKGROUP == 0u || n < PLACES * OCTS) { values[2u * n] = Real4(v[0]); values[2u * n + 1u] = Real4(v[1]); }
    }
    workgroupBarrier();
    for (var i = 0u; i < LOADS; i++) {
      let cached = cache_place(base, p0 + PLACES, last, index + i * WORKGROUP);
      next_k[i] = key_oct(cached);
      next_v[i] = value_oct(cached);
    }
    let edge = p0 + PLACES > early || WINDOW > 0u;  // some row does not see all of these positions
    var e: array<vec4<f32>, PLACES / 8u>;  // scores, then their exponentials: 4 of every 8 positions, for one row
    var peak = top;
    for (var j = 0u; j < PLACES / 8u; j++) {
      let low = scores(&q0, &q1, 8u * j, own);
      let high = scores(&q0, &q1, 8u * j + 4u, own);
      var sum = select(low, high, upper) + subgroupShuffleXor(select(high, low, upper), 2u);
      if (SHARE == 8u) { sum += subgroupShuffleXor(sum, 4u); }
      var s = scaled(sum, unit, 8u * j + 2u * (own & 2u));
      if (edge) {
        let past = vec4<u32>(p0 + 8u * j + 2u * (own & 2u) - begin) + vec4<u32>(0u, 1u, 2u, 3u);  // before begin it wraps round
        s = select(vec4<f32>(-1e30), s, past < vec4<u32>(reach));
      }
      e[j] = s;
      peak = max(peak, largest4(s));
    }
    peak = max(peak, subgroupShuffleXor(peak, 2u));
    let keep = exp2(top - peak);
    top = peak;
    total *= keep;
    for (var j = 0u; j < PLACES / 8u; j++) {
      e[j] = exp2(e[j] - peak);
      if (edge) { e[j] = select(e[j], vec4<f32>(), vec4<bool>(peak < -1e29)); }  // the row has seen nothing yet
      total += dot(e[j], vec4<f32>(1.0));
    }
    let keep0 = subgroupShuffle(keep, first_lane);
    let keep1 = subgroupShuffle(keep, first_lane + 1u);
    var sum: Rows;  // of this tile's values
    for (var i = 0u; i < OWN; i++) {
      y0[i] *= keep0;
      y1[i] *= keep1;
      sum.a[i] = start(y0[i]);
      sum.b[i] = start(y1[i]);
    }
    for (var j = 0u; j < PLACES / 8u; j++) {
      let a = spread(e[j], first_lane);      let b = spread(e[j], first_lane + 1u);
      let c = spread(e[j], first_lane + 2u); let d = spread(e[j], first_lane + 3u);
      for (var i = 0u; i < OWN; i++) {
        let n = 8u * j * QUADS + quad_of(i, own);
        let v0 = values[n];              let v1 = values[n + QUADS];
        let v2 = values[n + 2u * QUADS]; let v3 = values[n + 3u * QUADS];
        let v4 = values[n + 4u * QUADS]; let v5 = values[n + 5u * QUADS];
        let v6 = values[n + 6u * QUADS]; let v7 = values[n + 7u * QUADS];
        sum.a[i] += a.x * v0; sum.a[i] += a.y * v1; sum.a[i] += a.z * v2; sum.a[i] += a.w * v3;
        sum.a[i] += c.x * v4; sum.a[i] += c.y * v5; sum.a[i] += c.z * v6; sum.a[i] += c.w * v7;
        sum.b[i] += b.x * v0; sum.b[i] += b.y * v1; sum.b[i] += b.z * v2; sum.b[i] += b.w * v3;
        sum.b[i] += d.x * v4; sum.b[i] += d.y * v5; sum.b[i] += d.z * v6; sum.b[i] += d.w * v7;
      }
    }
    for (var i = 0u; i < OWN; i++) {
      y0[i] = joined(y0[i], sum.a[i]);
      y1[i] = joined(y1[i], sum.b[i]);
    }
    workgroupBarrier();
  }
  total += subgroupShuffleXor(total, 2u);
  bring_out(row0, &y0, subgroupShuffle(total, first_lane), own, index);
  bring_out(row1, &y1, subgroupShuffle(total, first_lane + 1u), own, index);
}
