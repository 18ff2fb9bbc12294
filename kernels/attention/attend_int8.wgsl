// y[m, HEADS, HEAD_DIM] = softmax(q K^T) V of many tokens over keys and values in int8, causal; tiled, no score matrix. All
// products are packed int8 dot products.
// A workgroup takes one KV head, TOKENS tokens of a segment and one split of the context. Its rows are these tokens in
// every query head that shares the KV head. Keys and values pass through workgroup memory in kv tiles of 64 positions, as
// quantise_kv has left them.
// Invocation (tx, ty) computes rows ty + TEAM * i (i < 4) of both products: scores of positions 4tx .. 4tx + 3 and of those
// 32 further on, then outputs of dimensions 8tx .. 8tx + 7 and of those 64 further on.
// The weights of every 16 positions are 8 bits of their largest. They contain the values' scales: the first token of a text
// often has the largest weight and a value of almost 0, whose rounding would cost more than the other tokens are worth.
// Sums of products begin at the bits of 2^23 or 1.5 * 2^23 and are floats without a conversion. All registers have names or
// are in structs: the driver does not unroll loops of this size. One operand of a dot product has its words in the order
// yxwz: with both operands in the same register bank of an H200 it waits.
// One split: writes f32, or blocks with TO_BLOCKS. Several: partial sums and (top, total) for attend_merge.
// Needs HEAD_DIM 64 or 128, subgroups of 8 lanes, HEADS_PER_KV <= ROWS. Parts: pages, int8_block_*, blocks_*.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const HEADS: u32 = 1u;
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 64u;
const WINDOW: u32 = 0u;  // a token sees the last WINDOW positions, its own included; 0: all
const SCALE: f32 = 1.0;
const TO_BLOCKS: bool = false;
const BLOCKS: u32 = HEADS * HEAD_DIM / 32u;  // blocks of a token
const ONE_SEGMENT: bool = false;  // all rows belong to one segment: then nothing is looked up by row
const SPLITS: u32 = 1u;
const WORKGROUP: u32 = 128u;
const HEADS_PER_KV: u32 = HEADS / KV_HEADS;
const KV_TILE: u32 = 64u;  // = PAGE
const TEAM: u32 = WORKGROUP / 8u;
const ROWS: u32 = 4u * TEAM;
const TOKENS: u32 = ROWS / HEADS_PER_KV;
const RUNS: u32 = HEAD_DIM / 64u;  // runs of 8 dimensions of an invocation
const HEAD_VEC4: u32 = HEAD_DIM / 4u;
const RECORD: u32 = 8u * HEAD_DIM + 32u + 2u * HEAD_VEC4;  // vec4s of a kv tile: keys, values, scales, square roots
const CHUNKS: u32 = HEAD_DIM / 16u;
const QUERY_PLANE: u32 = ROWS + 2u;  // planes begin at different banks
const WEIGHT_PLANE: u32 = ROWS + 4u;
const LOADS: u32 = 4u * HEAD_DIM / WORKGROUP;  // vec4s of keys, or values, that an invocation stages
const SIGNED_BASE: i32 = 0x4B400000i;  // bits of 1.5 * 2^23
const BASE: u32 = 0x4B000000u;         // bits of 2^23
@group(0) @binding(0) var<storage, read_write> y: array<u32>;            // [m, HEADS, HEAD_DIM] f32 or blocks; or partial sums
@group(0) @binding(1) var<storage, read> kv: array<vec4<u32>>;           // [KV_HEADS, pages] records of quantise_kv
@group(0) @binding(3) var<storage, read_write> stats: array<vec2<f32>>;  // [m, HEADS, SPLITS] (top, total)
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;            // q [m, HEADS, HEAD_DIM]
@group(0) @binding(8) var<uniform> step: Step;
var<workgroup> keys: array<vec4<u32>, 4u * HEAD_DIM>;             // [16 dimensions][position]
var<workgroup> values: array<vec4<u32>, 4u * HEAD_DIM>;           // [16 positions][dimension], + 128
var<workgroup> scales: array<vec4<f32>, 32>;                      // of keys; reciprocals of those of values
var<workgroup> queries: array<vec4<u32>, CHUNKS * QUERY_PLANE>;   // [16 dimensions][row]
var<workgroup> weights: array<vec4<u32>, 4u * WEIGHT_PLANE>;      // [16 positions][row]
var<workgroup> factors: array<vec2<f32>, 4u * ROWS>;              // [16 positions][row]: the sum s counts s * x + y
fn page_of(slot: u32, tile: u32) -> u32 { return table[slot * step.pages + tile]; }
struct Loads { v: array<vec4<u32>, LOADS> }
struct Eight { a: vec4<f32>, b: vec4<f32> }  // of 4 positions and 4 others, or of 8 dimensions
struct FourRows { r0: Eight, r1: Eight, r2: Eight, r3: Eight }
struct Scales { key: Eight, zero: Eight, value: Eight, log: Eight }
struct Softmax { top: f32, total: f32, rescale: f32, factor: vec2<f32>, words: vec2<u32> }
fn load(first: u32, index: u32) -> Loads {
  var loads: Loads;
  for (var i = 0u; i < LOADS; i++) { loads.v[i] = kv[first + index + i * WORKGROUP]; }
  return loads;
}
fn stage_query(first4: u32, row: u32, roots: u32, tx: u32) -> f32 {  // returns the scale
  var q: array<vec4<f32>, 2u * RUNS>;
  var top = 0.0;
  for (var i = 0u; i < 2u * RUNS; i++) {
    let at = 2u * (tx + 8u * (i / 2u)) + i % 2u;
    q[i] = x[first4 + at] * bitcast<vec4<f32>>(kv[roots + at]);
    top = max(top, max_abs(q[i]));
  }
  for (var d = 1u; d < 8u; d <<= 1u) { top = max(top, subgroupShuffleXor(top, d)); }
  let inverse_scale = select(0.0, 127.0 / top, top > 0.0);
  for (var i = 0u; i < 2u * RUNS; i++) { queries[(tx / 2u + 4u * (i / 2u)) * QUERY_PLANE + row][2u * (tx % 2u) + i % 2u] = to_int8(q[i], inverse_scale); }
  return top * (SCALE * 1.4426950408889634 / 127.0);  // log2(e): exponentials are taken with exp2
}
fn dots(s: vec4<i32>, q: vec4<u32>, a: vec4<u32>, b: vec4<u32>, c: vec4<u32>, d: vec4<u32>) -> vec4<i32> {
  var t = s;
  t += vec4<i32>(dot4I8Packed(q.x, a.y), dot4I8Packed(q.x, b.y), dot4I8Packed(q.x, c.y), dot4I8Packed(q.x, d.y));
  t += vec4<i32>(dot4I8Packed(q.y, a.x), dot4I8Packed(q.y, b.x), dot4I8Packed(q.y, c.x), dot4I8Packed(q.y, d.x));
  t += vec4<i32>(dot4I8Packed(q.z, a.w), dot4I8Packed(q.z, b.w), dot4I8Packed(q.z, c.w), dot4I8Packed(q.z, d.w));
  t += vec4<i32>(dot4I8Packed(q.w, a.z), dot4I8Packed(q.w, b.z), dot4I8Packed(q.w, c.z), dot4I8Packed(q.w, d.z));
  return t;
}
fn sum4(p: vec4<u32>, a: vec4<u32>, b: vec4<u32>, c: vec4<u32>, d: vec4<u32>) -> vec4<f32> {
  var t = vec4<u32>(BASE);
  t += vec4<u32>(dot4U8Packed(p.x, a.y), dot4U8Packed(p.x, b.y), dot4U8Packed(p.x, c.y), dot4U8Packed(p.x, d.y));
  t += vec4<u32>(dot4U8Packed(p.y, a.x), dot4U8Packed(p.y, b.x), dot4U8Packed(p.y, c.x), dot4U8Packed(p.y, d.x));
  t += vec4<u32>(dot4U8Packed(p.z, a.w), dot4U8Packed(p.z, b.w), dot4U8Packed(p.z, c.w), dot4U8Packed(p.z, d.w));
  t += vec4<u32>(dot4U8Packed(p.w, a.z), dot4U8Packed(p.w, b.z), dot4U8Packed(p.w, c.z), dot4U8Packed(p.w, d.z));
  return bitcast<vec4<f32>>(t);
}
fn scaled(s: vec4<i32>, key: vec4<f32>, zero: vec4<f32>, query_scale: f32, log: vec4<f32>) -> vec4<f32> {
  return fma(fma(bitcast<vec4<f32>>(s), key, zero), vec4<f32>(query_scale), log);
}
fn max4(v: vec4<f32>) -> f32 { return max(max(v.x, v.y), max(v.z, v.w)); }
fn word(e: vec4<f32>) -> u32 {  // the nearest integers as bytes
  let r = bitcast<vec4<u32>>(e + 8388608.0);
  return r.x + (r.y << 8u) + (r.z << 16u) + (r.w << 24u) - BASE;
}
fn softmax(a_sum: vec4<i32>, b_sum: vec4<i32>, scale: Scales, query_scale: f32, top: f32, total: f32, edge: bool, since: u32, seen: u32) -> Softmax {
  var a = scaled(a_sum, scale.key.a, scale.zero.a, query_scale, scale.log.a);
  var b = scaled(b_sum, scale.key.b, scale.zero.b, query_scale, scale.log.b);
  if (edge) {  // since: positions from the first that the row sees; it wraps around before it
    let position = vec4<u32>(since) + vec4<u32>(0u, 1u, 2u, 3u);
    a = select(vec4<f32>(-1e30), a, position < vec4<u32>(seen));
    b = select(vec4<f32>(-1e30), b, position + vec4<u32>(32u) < vec4<u32>(seen));
  }
  var most = max(vec2<f32>(max4(a), max4(b)), vec2<f32>(-1e29));
  most = max(most, subgroupShuffleXor(most, 1u));
  most = max(most, subgroupShuffleXor(most, 2u));
  var new_top = max(most.x, most.y);
  new_top = max(top, max(new_top, subgroupShuffleXor(new_top, 4u)));
  let rescale = exp2(top - new_top);
  let factor = exp2(most - new_top);
  a = exp2(a - (most.x - 7.994353436858858));  // of the largest 255
  b = exp2(b - (most.y - 7.994353436858858));
  let sum = dot(a, scale.value.a) * factor.x + dot(b, scale.value.b) * factor.y;
  return Softmax(new_top, total * rescale + sum, rescale, factor, vec2<u32>(word(a), word(b)));
}
fn counts(words: vec2<u32>) -> vec2<u32> { return vec2<u32>(dot4U8Packed(words.x, 0x01010101u), dot4U8Packed(words.y, 0x01010101u)); }
fn stage_weights(s: Softmax, count: vec2<u32>, row: u32, tx: u32) {
  let at = tx / 4u * WEIGHT_PLANE + row;
  weights[at][tx % 4u] = s.words.x;
  weights[at + 2u * WEIGHT_PLANE][tx % 4u] = s.words.y;
  if (tx % 4u == 0u) {  // sums begin at 2^23, and values are 128 too large
    let zero = -(8388608.0 + 128.0 * vec2<f32>(count));
    factors[tx / 4u * ROWS + row] = vec2<f32>(s.factor.x, zero.x * s.factor.x);
    factors[(tx / 4u + 2u) * ROWS + row] = vec2<f32>(s.factor.y, zero.y * s.factor.y);
  }
}
fn add(sum: Eight, a: vec4<f32>, b: vec4<f32>, f: vec2<f32>) -> Eight {
  return Eight(sum.a + fma(a, vec4<f32>(f.x), vec4<f32>(f.y)), sum.b + fma(b, vec4<f32>(f.x), vec4<f32>(f.y)));
}
fn add_values(sums: FourRows, run: u32, rescale: vec4<f32>, tx: u32, ty: u32) -> FourRows {
  var s = sums;
  s.r0.a *= rescale.x; s.r0.b *= rescale.x; s.r1.a *= rescale.y; s.r1.b *= rescale.y;
  s.r2.a *= rescale.z; s.r2.b *= rescale.z; s.r3.a *= rescale.w; s.r3.b *= rescale.w;
  for (var c = 0u; c < 4u; c++) {
    let v = c * HEAD_DIM + 64u * run + tx;
    let v0 = values[v];       let v1 = values[v + 8u];  let v2 = values[v + 16u]; let v3 = values[v + 24u];
    let v4 = values[v + 32u]; let v5 = values[v + 40u]; let v6 = values[v + 48u]; let v7 = values[v + 56u];
    let p = c * WEIGHT_PLANE + ty;
    let f = c * ROWS + ty;
    let p0 = weights[p];             s.r0 = add(s.r0, sum4(p0, v0, v1, v2, v3), sum4(p0, v4, v5, v6, v7), factors[f]);
    let p1 = weights[p + TEAM];      s.r1 = add(s.r1, sum4(p1, v0, v1, v2, v3), sum4(p1, v4, v5, v6, v7), factors[f + TEAM]);
    let p2 = weights[p + 2u * TEAM]; s.r2 = add(s.r2, sum4(p2, v0, v1, v2, v3), sum4(p2, v4, v5, v6, v7), factors[f + 2u * TEAM]);
    let p3 = weights[p + 3u * TEAM]; s.r3 = add(s.r3, sum4(p3, v0, v1, v2, v3), sum4(p3, v4, v5, v6, v7), factors[f + 3u * TEAM]);
  }
  return s;
}
fn store4(at: u32, v: vec4<f32>) {
  let u = bitcast<vec4<u32>>(v);
  y[4u * at] = u.x; y[4u * at + 1u] = u.y; y[4u * at + 2u] = u.z; y[4u * at + 3u] = u.w;
}
fn store_run(sum: Eight, factor: f32, first4: u32, split: u32, live: bool, run: u32, roots: u32, index: u32) {
  let at = 2u * (index % 8u + 8u * run);
  let a = sum.a * bitcast<vec4<f32>>(kv[roots + HEAD_VEC4 + at]) * factor;
  let b = sum.b * bitcast<vec4<f32>>(kv[roots + HEAD_VEC4 + at + 1u]) * factor;
  if (SPLITS == 1u && TO_BLOCKS) {  // 4 neighbouring invocations hold 32 dimensions
    let number = (first4 + at) / 8u;
    store_block(block_word(number / BLOCKS, number % BLOCKS, BLOCKS), BLOCKS, a, b, index, live);
  } else if (live) {
    let out = first4 * SPLITS + split * HEAD_VEC4 + at;
    store4(out, a);
    store4(out + 1u, b);
  }
}
fn store_row(low: Eight, high: Eight, top: f32, total: f32, first4: u32, split: u32, live: bool, roots: u32, index: u32) {
  var all = total;
  for (var d = 1u; d < 8u; d <<= 1u) { all += subgroupShuffleXor(all, d); }
  let factor = select(1.0, 1.0 / all, SPLITS == 1u);
  store_run(low, factor, first4, split, live, 0u, roots, index);
  if (RUNS > 1u) { store_run(high, factor, first4, split, live, 1u, roots, index); }
  if (SPLITS > 1u && live && index % 8u == 0u) { stats[first4 / HEAD_VEC4 * SPLITS + split] = vec2<f32>(top * 0.6931471805599453, all); }
}
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let tx = index % 8u;
  let ty = index / 8u;
  let segment = step.segment[select(workgroup.z, 0u, ONE_SEGMENT)];  // first row, rows, slot, first position
  let token0 = workgroup.y / SPLITS * TOKENS;  // counted from the segment's first row
  let split = workgroup.y % SPLITS;
  if (token0 >= segment.y) { return; }
  let tile_end = segment.w + min(token0 + TOKENS, segment.y);  // one past the last position that the tile's last token sees
  let first_token_end = segment.w + token0 + 1u;  // one past the last position that the tile's first token sees
  let first = select(0u, (first_token_end - min(WINDOW, first_token_end)) / KV_TILE, WINDOW > 0u);  // kv tile
  let tiles = (tile_end + KV_TILE - 1u) / KV_TILE;
  let split_tiles = (tiles - first + SPLITS - 1u) / SPLITS;
  let end = min(first + (split + 1u) * split_tiles, tiles);
  var tile = min(first + split * split_tiles, tiles - 1u);  // an empty split loads the last
  let first_page = workgroup.x * ((step.capacity + PAGE - 1u) / PAGE);  // of the KV head
  let record = RECORD * (first_page + page_of(segment.z, tile));
  let roots = record + 8u * HEAD_DIM + 32u;
  let row = vec4<u32>(ty) + TEAM * vec4<u32>(0u, 1u, 2u, 3u);
  let token = vec4<u32>(token0) + row % vec4<u32>(TOKENS);
  let query_head = workgroup.x * HEADS_PER_KV + min(row / vec4<u32>(TOKENS), vec4<u32>(HEADS_PER_KV - 1u));
  let first4 = ((segment.x + min(token, vec4<u32>(segment.y - 1u))) * HEADS + query_head) * HEAD_VEC4;  // in x and y
  let seen_end = segment.w + token + 1u;
  let begin = select(vec4<u32>(), seen_end - min(vec4<u32>(WINDOW), seen_end), vec4<bool>(WINDOW > 0u));
  let seen = seen_end - begin;  // positions that the row sees, from begin on
  let live = (row < vec4<u32>(TOKENS * HEADS_PER_KV)) & (token < vec4<u32>(segment.y));
  let query_scale = vec4<f32>(stage_query(first4.x, row.x, roots, tx), stage_query(first4.y, row.y, roots, tx),
                              stage_query(first4.z, row.z, roots, tx), stage_query(first4.w, row.w, roots, tx));
  var top = vec4<f32>(-1e29);
  var total = vec4<f32>();
  var low: FourRows;
  var high: FourRows;
  var next_keys = load(record, index);
  var next_values = load(record + 4u * HEAD_DIM, index);
  var next_scales = kv[record + 8u * HEAD_DIM + index % 32u];
  var next_page = page_of(segment.z, min(tile + 1u, tiles - 1u));  // looked up a kv tile ahead
  if (first + split * split_tiles >= end) { tile = end; }
  for (; tile < end; tile++) {
    for (var i = 0u; i < LOADS; i++) { keys[index + i * WORKGROUP] = next_keys.v[i]; }
    if (index < 32u) { scales[index] = bitcast<vec4<f32>>(next_scales); }
    workgroupBarrier();  // and all are done with the values before
    let next = RECORD * (first_page + next_page);
    next_page = page_of(segment.z, min(tile + 2u, tiles - 1u));
    for (var i = 0u; i < LOADS; i++) { values[index + i * WORKGROUP] = next_values.v[i]; }
    next_keys = load(next, index);
    next_scales = kv[next + 8u * HEAD_DIM + index % 32u];
    var a0 = vec4<i32>(SIGNED_BASE); var a1 = a0; var a2 = a0; var a3 = a0;  // of 4 rows: scores of the first 4 positions
    var b0 = a0; var b1 = a0; var b2 = a0; var b3 = a0;                      // and of the others
    for (var c = 0u; c < CHUNKS; c++) {
      let k = c * KV_TILE + tx;
      let k0 = keys[k];       let k1 = keys[k + 8u];  let k2 = keys[k + 16u]; let k3 = keys[k + 24u];
      let k4 = keys[k + 32u]; let k5 = keys[k + 40u]; let k6 = keys[k + 48u]; let k7 = keys[k + 56u];
      let q = c * QUERY_PLANE + ty;
      let q0 = queries[q];             a0 = dots(a0, q0, k0, k1, k2, k3); b0 = dots(b0, q0, k4, k5, k6, k7);
      let q1 = queries[q + TEAM];      a1 = dots(a1, q1, k0, k1, k2, k3); b1 = dots(b1, q1, k4, k5, k6, k7);
      let q2 = queries[q + 2u * TEAM]; a2 = dots(a2, q2, k0, k1, k2, k3); b2 = dots(b2, q2, k4, k5, k6, k7);
      let q3 = queries[q + 3u * TEAM]; a3 = dots(a3, q3, k0, k1, k2, k3); b3 = dots(b3, q3, k4, k5, k6, k7);
    }
    let key = Eight(scales[tx], scales[tx + 8u]);
    let value = Eight(scales[tx + 16u], scales[tx + 24u]);
    let scale = Scales(key, Eight(key.a * -12582912.0, key.b * -12582912.0), value, Eight(-log2(value.a), -log2(value.b)));
    let p0 = tile * KV_TILE;
    let edge = p0 + KV_TILE > first_token_end || WINDOW > 0u;  // some row does not see all positions of the kv tile
    let since = vec4<u32>(p0 + 4u * tx) - begin;
    let s0 = softmax(a0, b0, scale, query_scale.x, top.x, total.x, edge, since.x, seen.x);
    let s1 = softmax(a1, b1, scale, query_scale.y, top.y, total.y, edge, since.y, seen.y);
    let s2 = softmax(a2, b2, scale, query_scale.z, top.z, total.z, edge, since.z, seen.z);
    let s3 = softmax(a3, b3, scale, query_scale.w, top.w, total.w, edge, since.w, seen.w);
    top = vec4<f32>(s0.top, s1.top, s2.top, s3.top);
    total = vec4<f32>(s0.total, s1.total, s2.total, s3.total);
    var count = vec4<u32>(counts(s0.words) | (counts(s1.words) << vec2<u32>(16u)), counts(s2.words) | (counts(s3.words) << vec2<u32>(16u)));
    count += subgroupShuffleXor(count, 1u);
    count += subgroupShuffleXor(count, 2u);
    stage_weights(s0, count.xy & vec2<u32>(0xFFFFu), row.x, tx);
    stage_weights(s1, count.xy >> vec2<u32>(16u), row.y, tx);
    stage_weights(s2, count.zw & vec2<u32>(0xFFFFu), row.z, tx);
    stage_weights(s3, count.zw >> vec2<u32>(16u), row.w, tx);
    workgroupBarrier();
    next_values = load(next + 4u * HEAD_DIM, index);
    let rescale = vec4<f32>(s0.rescale, s1.rescale, s2.rescale, s3.rescale);
    low = add_values(low, 0u, rescale, tx, ty);
    if (RUNS > 1u) { high = add_values(high, 1u, rescale, tx, ty); }
  }
  store_row(low.r0, high.r0, top.x, total.x, first4.x, split, live.x, roots, index);
  store_row(low.r1, high.r1, top.y, total.y, first4.y, split, live.y, roots, index);
  store_row(low.r2, high.r2, top.z, total.z, first4.z, split, live.z, roots, index);
  store_row(low.r3, high.r3, top.w, total.w, first4.w, split, live.w, roots, index);
}
