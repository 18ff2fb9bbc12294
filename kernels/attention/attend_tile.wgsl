// y[m, HEADS, HEAD_DIM] = softmax(q K^T) V of many tokens over the KV cache, causal; tiled, no score matrix.
// A workgroup takes one KV head and TOKENS tokens of a segment. Its rows are these tokens in every query head that
// shares the KV head, so that K and V come from memory once for all of them. OWNERS neighbouring invocations own two
// rows, HEAD_DIM / OWNERS dimensions each, in registers. Keys and values pass through workgroup memory in kv tiles of
// KV_TILE positions. Scores are summed over the owners so that each owner ends up with some scores of one row; it takes
// their exponentials and broadcasts them to the other owners.
// All arithmetic is f32; attend_int8 is faster where int8 will do. The causal bound is per tile. Writes f32, or blocks
// with TO_BLOCKS.
// Needs OWNERS 4 or 8, HEAD_DIM % (8 * OWNERS) == 0, KV_TILE % 8 == 0, PAGE % KV_TILE == 0,
// HEADS_PER_KV <= 2 * WORKGROUP / OWNERS. Parts: f16, kv8_*, pages, blocks_*, sinks*.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const HEADS: u32 = 1u;
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 64u;
const WINDOW: u32 = 0u;  // a token sees the last WINDOW positions, its own included; 0: all
const SCALE: f32 = 1.0;
const SOFT_CAP: f32 = 0.0;  // scores s become SOFT_CAP tanh(s / SOFT_CAP); 0: they do not
const TO_BLOCKS: bool = false;
const ONE_SEGMENT: bool = false;  // all rows belong to one segment: then nothing is looked up by row (4 % on an H200 with SmolLM2)
const BLOCKS: u32 = HEADS * HEAD_DIM / 32u;  // blocks of a token
const WORKGROUP: u32 = 128u;
const OWNERS: u32 = 4u;
const KV_TILE: u32 = 16u;
const HEADS_PER_KV: u32 = HEADS / KV_HEADS;
const LOG2_E: f32 = 1.4426950408889634;  // exponentials are taken with exp2, and scores are in its units
const TOKENS: u32 = 2u * WORKGROUP / OWNERS / HEADS_PER_KV;
const HEAD_VEC4: u32 = HEAD_DIM / 4u;
const HEAD_VEC8: u32 = HEAD_DIM / 8u;
const OWN_VEC4: u32 = 2u * HEAD_VEC8 / OWNERS;  // vec4s of dimensions that an invocation owns, in runs of 8: run own + OWNERS * j
const LOADS: u32 = (KV_TILE * HEAD_VEC8 + WORKGROUP - 1u) / WORKGROUP;  // runs of 8 dimensions that an invocation stages
alias Part = array<vec4<f32>, OWN_VEC4>;  // an owner's part of a row
struct QueryRow { head: u32, first4: u32, begin: u32, end: u32, live: bool }  // first vec4 in x and y; the positions that it sees; whether it exists
@group(0) @binding(0) var<storage, read_write> y: array<u32>;  // [m, HEADS, HEAD_DIM] f32 or blocks
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;  // q [m, HEADS, HEAD_DIM]
@group(0) @binding(8) var<uniform> step: Step;
var<workgroup> keys: array<vec4<f32>, KV_TILE * HEAD_VEC4>;
var<workgroup> values: array<vec4<f32>, KV_TILE * HEAD_VEC4>;
// The vec4 of the head that is the owner's vec4 i. Four of eight owners begin with the second vec4 of a run, so that all eight
// read different banks.
fn vec4_of(i: u32, own: u32) -> u32 { return 2u * (own + OWNERS * (i / 2u)) + (i + own / 4u) % 2u; }
fn row_of(row: u32, kv_head: u32, token0: u32, segment: vec4<u32>, position: u32) -> QueryRow {
  let token = token0 + row % TOKENS;
  let head = kv_head * HEADS_PER_KV + min(row / TOKENS, HEADS_PER_KV - 1u);
  let end = position + token + 1u;
  let begin = select(0u, end - min(WINDOW, end), WINDOW > 0u);
  return QueryRow(head, ((segment.x + min(token, segment.y - 1u)) * HEADS + head) * HEAD_VEC4, begin, end, row < TOKENS * HEADS_PER_KV && token < segment.y);
}
fn cache_index(first_cell: u32, last: u32, i: u32) -> u32 { return (first_cell + min(i / HEAD_VEC8, last)) * HEAD_VEC8 + i % HEAD_VEC8; }  // last: of the kv tile's positions
fn score(q: ptr<function, Part>, r: ptr<function, Part>, tile_position: u32, own: u32) -> f32 {
  var sums = vec2<f32>();  // the owner's share of both rows' scores
  for (var i = 0u; i < OWN_VEC4; i++) {
    let k = keys[tile_position * HEAD_VEC4 + vec4_of(i, own)];
    sums += vec2<f32>(dot((*q)[i], k), dot((*r)[i], k));
  }
  let second = own % 2u == 1u;
  return select(sums.x, sums.y, second) + subgroupShuffleXor(select(sums.y, sums.x, second), 1u);
}
fn scores(q: ptr<function, Part>, r: ptr<function, Part>, tile_position: u32, own: u32) -> vec4<f32> {
  return vec4<f32>(score(q, r, tile_position, own), score(q, r, tile_position + 1u, own),
                   score(q, r, tile_position + 2u, own), score(q, r, tile_position + 3u, own));
}
fn max4(v: vec4<f32>) -> f32 { return max(max(v.x, v.y), max(v.z, v.w)); }
fn store_row(row: QueryRow, out: ptr<function, Part>, total: f32, own: u32, index: u32) {
  for (var i = 0u; i < OWN_VEC4; i += 2u) {
    let other = vec4_of(i, own) % 2u == 1u;  // the vec4s of the run are in reverse order
    let a = select((*out)[i], (*out)[i + 1u], other) / total;
    let b = select((*out)[i + 1u], (*out)[i], other) / total;
    let out4 = row.first4 + vec4_of(i, own) / 2u * 2u;
    if (TO_BLOCKS) {  // 4 neighbouring invocations hold 32 dimensions
      store_block(block_word(out4 / 8u / BLOCKS, out4 / 8u % BLOCKS, BLOCKS), BLOCKS, a, b, index, row.live);
    } else if (row.live) {
      let u = bitcast<vec4<u32>>(a);
      let v = bitcast<vec4<u32>>(b);
      y[4u * out4] = u.x; y[4u * out4 + 1u] = u.y; y[4u * out4 + 2u] = u.z; y[4u * out4 + 3u] = u.w;
      y[4u * out4 + 4u] = v.x; y[4u * out4 + 5u] = v.y; y[4u * out4 + 6u] = v.z; y[4u * out4 + 7u] = v.w;
    }
  }
}
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32,
        @builtin(subgroup_invocation_id) lane: u32) {
  let own = index % OWNERS;
  let first_lane = lane - own;
  let second = own % 2u == 1u;  // this invocation ends up with scores of the second row
  let upper = own % 4u > 1u;  // and of the upper half of eight positions
  let segment = step.segment[select(workgroup.z, 0u, ONE_SEGMENT)];  // first row, rows, slot, first position
  let position = segment.w;
  let token0 = workgroup.y * TOKENS;  // counted from the segment's first row
  if (token0 >= segment.y) { return; }
  let row0 = row_of(index / OWNERS * 2u, workgroup.x, token0, segment, position);
  let row1 = row_of(index / OWNERS * 2u + 1u, workgroup.x, token0, segment, position);
  let begin = select(row0.begin, row1.begin, second);
  let seen = select(row0.end, row1.end, second) - begin;
  var q0: Part;
  var q1: Part;
  var y0 = Part();
  var y1 = Part();
  let base = workgroup.x * step.capacity;
  let tile_end = position + min(token0 + TOKENS, segment.y);  // one past the last position that the tile's last token sees
  let first_token_end = position + token0 + 1u;  // one past the last position that the tile's first token sees
  let first = select(0u, (first_token_end - min(WINDOW, first_token_end)) / KV_TILE * KV_TILE, WINDOW > 0u);  // a kv tile lies in one page
  let last_tile = (tile_end - 1u) / KV_TILE * KV_TILE;
  var top = LOG2_E * sink(select(row0.head, row1.head, second));
  var total = select(SINK_TOTAL, 0.0, upper);  // sum of the exponentials that this invocation takes
  var next_k: array<Raw8, LOADS>;  // prefetch: the kv tile after the one in workgroup memory
  var next_v: array<Raw8, LOADS>;
  for (var i = 0u; i < LOADS; i++) {
    let cached = cache_index(base + cell_of(segment.z, first), tile_end - 1u - first, index + i * WORKGROUP);
    next_k[i] = key8(cached);
    next_v[i] = value8(cached);
  }
  var next_cell = base + cell_of(segment.z, min(first + KV_TILE, last_tile));  // looked up a kv tile ahead
  for (var i = 0u; i < OWN_VEC4; i++) {
    q0[i] = x[row0.first4 + vec4_of(i, own)] * (SCALE * LOG2_E);
    q1[i] = x[row1.first4 + vec4_of(i, own)] * (SCALE * LOG2_E);
  }
  for (var p0 = first; p0 < tile_end; p0 += KV_TILE) {
    for (var i = 0u; i < LOADS; i++) {
      let n = index + i * WORKGROUP;
      let k = widen(next_k[i]);
      let v = widen(next_v[i]);
      if (KV_TILE * HEAD_VEC8 % WORKGROUP == 0u || n < KV_TILE * HEAD_VEC8) {
        keys[2u * n] = k[0]; keys[2u * n + 1u] = k[1];
        values[2u * n] = v[0]; values[2u * n + 1u] = v[1];
      }
    }
    workgroupBarrier();
    let next_last = tile_end - 1u - min(p0 + KV_TILE, last_tile);
    for (var i = 0u; i < LOADS; i++) {
      let cached = cache_index(next_cell, next_last, index + i * WORKGROUP);
      next_k[i] = key8(cached);
      next_v[i] = value8(cached);
    }
    next_cell = base + cell_of(segment.z, min(p0 + 2u * KV_TILE, last_tile));
    let edge = p0 + KV_TILE > first_token_end || WINDOW > 0u;  // some row does not see all positions of the kv tile
    var e: array<vec4<f32>, KV_TILE / 8u>;  // scores, then their exponentials: 4 of every 8 positions, for one row
    var new_top = top;
    for (var j = 0u; j < KV_TILE / 8u; j++) {
      let low = scores(&q0, &q1, 8u * j, own);
      let high = scores(&q0, &q1, 8u * j + 4u, own);
      var sum = select(low, high, upper) + subgroupShuffleXor(select(high, low, upper), 2u);
      if (OWNERS == 8u) { sum += subgroupShuffleXor(sum, 4u); }
      if (SOFT_CAP > 0.0) { sum = LOG2_E * (SOFT_CAP - 2.0 * SOFT_CAP / (1.0 + exp2(2.0 * sum / SOFT_CAP))); }
      if (edge) {
        let since_begin = vec4<u32>(p0 + 8u * j + 2u * (own & 2u) - begin) + vec4<u32>(0u, 1u, 2u, 3u);  // wraps around before begin
        sum = select(vec4<f32>(-1e30), sum, since_begin < vec4<u32>(seen));
      }
      e[j] = sum;
      new_top = max(new_top, max4(sum));
    }
    new_top = max(new_top, subgroupShuffleXor(new_top, 2u));
    let rescale = exp2(top - new_top);
    top = new_top;
    total *= rescale;
    for (var j = 0u; j < KV_TILE / 8u; j++) {
      e[j] = exp2(e[j] - new_top);
      if (edge) { e[j] = select(e[j], vec4<f32>(), vec4<bool>(new_top < -1e29)); }  // the row has seen no position yet
      total += dot(e[j], vec4<f32>(1.0));
    }
    let rescale0 = subgroupShuffle(rescale, first_lane);
    let rescale1 = subgroupShuffle(rescale, first_lane + 1u);
    for (var i = 0u; i < OWN_VEC4; i++) {
      y0[i] *= rescale0;
      y1[i] *= rescale1;
    }
    for (var j = 0u; j < KV_TILE / 8u; j++) {
      let a = subgroupShuffle(e[j], first_lane);      let b = subgroupShuffle(e[j], first_lane + 1u);
      let c = subgroupShuffle(e[j], first_lane + 2u); let d = subgroupShuffle(e[j], first_lane + 3u);
      for (var i = 0u; i < OWN_VEC4; i++) {
        let n = 8u * j * HEAD_VEC4 + vec4_of(i, own);
        let v0 = values[n];                  let v1 = values[n + HEAD_VEC4];
        let v2 = values[n + 2u * HEAD_VEC4]; let v3 = values[n + 3u * HEAD_VEC4];
        let v4 = values[n + 4u * HEAD_VEC4]; let v5 = values[n + 5u * HEAD_VEC4];
        let v6 = values[n + 6u * HEAD_VEC4]; let v7 = values[n + 7u * HEAD_VEC4];
        y0[i] += a.x * v0; y0[i] += a.y * v1; y0[i] += a.z * v2; y0[i] += a.w * v3;
        y0[i] += c.x * v4; y0[i] += c.y * v5; y0[i] += c.z * v6; y0[i] += c.w * v7;
        y1[i] += b.x * v0; y1[i] += b.y * v1; y1[i] += b.z * v2; y1[i] += b.w * v3;
        y1[i] += d.x * v4; y1[i] += d.y * v5; y1[i] += d.z * v6; y1[i] += d.w * v7;
      }
    }
    workgroupBarrier();
  }
  total += subgroupShuffleXor(total, 2u);
  store_row(row0, &y0, subgroupShuffle(total, first_lane), own, index);
  store_row(row1, &y1, subgroupShuffle(total, first_lane + 1u), own, index);
}
