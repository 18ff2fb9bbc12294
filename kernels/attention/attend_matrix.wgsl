// y[m, HEADS, HEAD_DIM] = softmax(q K^T) V of many tokens over an f16 KV cache, causal; tiled, no score matrix. Both products run
// on subgroup matrices, f16 with f32 sums.
// A workgroup takes one KV head, TOKENS tokens of a segment and one split of the context. Its ROWS rows are these tokens in every
// query head that shares the KV head, 32 for two subgroups: of a kv tile each computes half of the scores, then half of the outputs'
// dimensions, so that a matrix of keys or values is loaded for two strips of 16 rows. Keys and values pass through workgroup memory
// in kv tiles of 32 positions; the next loads are in flight meanwhile. An iteration adds the values of the tile before to the outputs and computes
// the scores of its own. These leave the matrices through workgroup memory: two lanes have a row and make its weights, f16
// relative to the row's top, a score near the largest so far. Where a lane's weights exceed MOST in all, its top is too low: then
// the loop is left, and all rows get new tops and weights, and outputs that were rescaled in workgroup memory. That happens in the first tile
// and, with trained models, once more where a workgroup comes to the first positions, which have the largest scores.
// One split: writes f32, or blocks with TO_BLOCKS. Several: partial sums and (top, total) for attend_merge.
// Needs HEAD_DIM 64 or 128, subgroups of 32, f16 matrices of 16 x 16 x 16 (matrix_* makes them of smaller ones),
// HEADS_PER_KV <= ROWS, WORKGROUP 128, 192 or 256. Parts: f16, matrix_*, pages, blocks_*.
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
const KV_TILE: u32 = 32u;  // divides PAGE
const ROWS: u32 = WORKGROUP / 2u;
const TOKENS: u32 = ROWS / HEADS_PER_KV;
const HEAD_VEC8: u32 = HEAD_DIM / 8u;   // vec4s of f16
const PITCH: u32 = HEAD_VEC8 + 1u;      // of a position in workgroup memory, with padding
const SCORE_PITCH: u32 = 10u;           // vec4s of a row: 32 scores, or 32 dimensions of its output, and its factor; or 64 of its query
const WEIGHT_PITCH: u32 = 10u;          // vec2s of a row: 32 weights
const LOADS: u32 = (KV_TILE * HEAD_VEC8 + WORKGROUP - 1u) / WORKGROUP;  // vec4s of keys, or values, that an invocation stages
const EVEN: bool = KV_TILE * HEAD_VEC8 % WORKGROUP == 0u;  // every invocation stages as many
const LOWEST: f32 = -1e29;
const MOST: f32 = 32768.0;  // an f16 holds up to 65504
alias Left = subgroup_matrix_left<f16, 16, 16>;
alias Right = subgroup_matrix_right<f16, 16, 16>;
alias Result = subgroup_matrix_result<f32, 16, 16>;
@group(0) @binding(0) var<storage, read_write> y: array<u32>;            // [m, HEADS, HEAD_DIM] f32 or blocks; or partial sums
@group(0) @binding(1) var<storage, read> k_cache: array<vec4<u32>>;      // [KV_HEADS, capacity, HEAD_DIM] f16
@group(0) @binding(2) var<storage, read> v_cache: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> stats: array<vec2<f32>>;  // [m, HEADS, SPLITS] (top, total)
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;            // q [m, HEADS, HEAD_DIM]
@group(0) @binding(8) var<uniform> step: Step;
// No padding after the last row: two workgroups must fit in 48 KiB
var<workgroup> kv: array<vec4<u32>, 2u * KV_TILE * PITCH - 1u>;      // f16 [position][dimension]: keys, then values from VALUES on
var<workgroup> scores: array<vec4<u32>, ROWS * SCORE_PITCH - 1u>;    // f32 [row][position], or outputs [row][32 dimensions]; f16 queries at first
var<workgroup> weights: array<vec2<u32>, ROWS * WEIGHT_PITCH>;       // f16 [row][position]
const GREW: u32 = 8u;  // where weights tells, in padding, whether a row needs a new top
const VALUES: u32 = KV_TILE * PITCH;
fn after(tile: u32, begin: u32, end: u32) -> u32 {  // begin after the last
  return select(tile + 1u, min(begin, end - 1u), tile + 1u >= end);
}
struct Loads { v: array<vec4<u32>, LOADS> }
fn load_number(index: u32, i: u32) -> u32 { return select(min(index + i * WORKGROUP, KV_TILE * HEAD_VEC8 - 1u), index + i * WORKGROUP, EVEN); }
fn load_keys(cell0: u32, index: u32) -> Loads {
  var loads: Loads;
  for (var i = 0u; i < LOADS; i++) { loads.v[i] = k_cache[cell0 * HEAD_VEC8 + load_number(index, i)]; }
  return loads;
}
fn load_values(cell0: u32, index: u32) -> Loads {
  var loads: Loads;
  for (var i = 0u; i < LOADS; i++) { loads.v[i] = v_cache[cell0 * HEAD_VEC8 + load_number(index, i)]; }
  return loads;
}
fn stage(loads: ptr<function, Loads>, to: u32, count: u32, index: u32) {  // positions from count on become 0: cells may hold NaN
  for (var i = 0u; i < LOADS; i++) {
    let n = index + i * WORKGROUP;
    if (EVEN || n < KV_TILE * HEAD_VEC8) { kv[to + n / HEAD_VEC8 * PITCH + n % HEAD_VEC8] = select(vec4<u32>(), (*loads).v[i], n / HEAD_VEC8 < count); }
  }
}
fn half4(v: vec4<f32>) -> vec2<u32> { return vec2<u32>(pack_f16(v.xy), pack_f16(v.zw)); }
fn weight4(v: vec4<f32>) -> vec2<u32> { return vec2<u32>(pack2x16float(v.xy), pack2x16float(v.zw)); }  // one beyond f16 exceeds MOST: it is not used
fn score4(at: u32) -> vec4<f32> { return bitcast<vec4<f32>>(scores[at]); }
fn stage_queries(dim0: u32, kv_head: u32, token0: u32, segment: vec4<u32>, index: u32) {  // 64 dimensions of all rows, in place of scores
  for (var n = index; n < ROWS * 8u; n += WORKGROUP) {
    let at = place(n / 8u, kv_head, token0, segment).first4 + dim0 / 4u + n % 8u * 2u;
    const LOG2 = SCALE * 1.4426950408889634;  // exponentials are taken with exp2
    scores[n / 8u * SCORE_PITCH + n % 8u] = vec4<u32>(half4(x[at] * LOG2), half4(x[at + 1u] * LOG2));
  }
}
fn rescale_strip(at: u32, row0: u32, lane: u32) {  // 32 dimensions of the 16 rows from row0 on, times their factors
  for (var n = lane; n < 128u; n += 32u) {
    let i = at + n / 8u * SCORE_PITCH + n % 8u;
    scores[i] = bitcast<vec4<u32>>(score4(i) * score4((row0 + n / 8u) * SCORE_PITCH + 8u).x);
  }
}
fn max4(v: vec4<f32>) -> f32 { return max(max(v.x, v.y), max(v.z, v.w)); }
fn sum4(v: vec4<f32>) -> f32 { return (v.x + v.y) + (v.z + v.w); }
fn masked(v: vec4<f32>, since: u32, seen: u32) -> vec4<f32> {  // since: positions from the first that the row sees; it wraps around before it
  return select(vec4<f32>(-1e30), v, vec4<u32>(since) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(seen));
}
// 16 positions of a row: of the 8 vec4s of its scores one lane takes the even ones, its neighbour the odd ones. With SCORE_PITCH neither
// these loads nor the stores of matrices have bank conflicts.
struct Sixteen { a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32> }
fn load_scores(at: u32, top: f32, whole: bool, since: u32, seen: u32) -> Sixteen {  // relative to top
  let v = Sixteen(score4(at) - top, score4(at + 2u) - top, score4(at + 4u) - top, score4(at + 6u) - top);
  if (whole) { return v; }
  return Sixteen(masked(v.a, since, seen), masked(v.b, since + 8u, seen), masked(v.c, since + 16u, seen), masked(v.d, since + 24u, seen));
}
fn store_weights(at: u32, v: Sixteen) -> f32 {  // returns their sum
  let a = exp2(v.a);
  let b = exp2(v.b);
  let c = exp2(v.c);
  let d = exp2(v.d);
  weights[at] = weight4(a);
  weights[at + 2u] = weight4(b);
  weights[at + 4u] = weight4(c);
  weights[at + 6u] = weight4(d);
  return sum4((a + b) + (c + d));
}
fn store4(at: u32, v: vec4<f32>) {
  let u = bitcast<vec4<u32>>(v);
  y[4u * at] = u.x; y[4u * at + 1u] = u.y; y[4u * at + 2u] = u.z; y[4u * at + 3u] = u.w;
}
struct Place { first4: u32, begin: u32, seen: u32, live: bool }  // of a row: its head in x and y, the positions that it sees
fn place(row: u32, kv_head: u32, token0: u32, segment: vec4<u32>) -> Place {
  let token = token0 + row % TOKENS;
  let head = kv_head * HEADS_PER_KV + min(row / TOKENS, HEADS_PER_KV - 1u);
  let end = segment.w + token + 1u;
  let begin = select(0u, end - min(WINDOW, end), WINDOW > 0u);
  let first4 = ((segment.x + min(token, segment.y - 1u)) * HEADS + head) * (HEAD_DIM / 4u);
  return Place(first4, begin, end - begin, row < TOKENS * HEADS_PER_KV && token < segment.y);
}
fn store_strip(dim0: u32, kv_head: u32, token0: u32, segment: vec4<u32>, split: u32, at: u32, row0: u32, lane: u32) {  // 32 dimensions of the 16 rows from row0 on
  for (var i = 0u; i < 2u; i++) {
    let n = lane + 32u * i;
    let row = row0 + n / 4u;
    let p = place(row, kv_head, token0, segment);
    let own4 = at + n / 4u * SCORE_PITCH + n % 4u * 2u;
    let factor = score4(row * SCORE_PITCH + 8u).x;
    let a = score4(own4) * factor;
    let b = score4(own4 + 1u) * factor;
    let to = p.first4 + dim0 / 4u;
    if (SPLITS == 1u && TO_BLOCKS) {  // 4 neighbouring invocations hold 32 dimensions
      store_block(block_word(to / 8u / BLOCKS, to / 8u % BLOCKS, BLOCKS), BLOCKS, a, b, lane, p.live);
    } else if (p.live) {
      let out = p.first4 * SPLITS + split * (HEAD_DIM / 4u) + dim0 / 4u + n % 4u * 2u;
      store4(out, a);
      store4(out + 1u, b);
    }
  }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32, @builtin(subgroup_id) subgroup: u32) {
  let lane = index % 32u;
  let half = subgroup % 2u;          // of a kv tile's positions, and of the dimensions
  let row_a = subgroup / 2u * 32u;  // of the first strip
  let row_b = row_a + 16u;
  let segment = step.segment[select(workgroup.z, 0u, ONE_SEGMENT)];  // first row, rows, slot, first position
  let token0 = workgroup.y / SPLITS * TOKENS;  // counted from the segment's first row
  let split = workgroup.y % SPLITS;
  if (token0 >= segment.y) { return; }
  let tile_end = segment.w + min(token0 + TOKENS, segment.y);  // one past the last position that the tile's last token sees
  let first_token_end = segment.w + token0 + 1u;  // one past the last position that the tile's first token sees
  let first = select(0u, (first_token_end - min(WINDOW, first_token_end)) / KV_TILE, WINDOW > 0u);  // kv tile
  let tiles = (tile_end + KV_TILE - 1u) / KV_TILE;
  let split_tiles = (tiles - first + SPLITS - 1u) / SPLITS;
  let begin = min(first + split * split_tiles, tiles);
  let end = min(begin + split_tiles, tiles);
  let head_cell = workgroup.x * step.capacity;  // of the KV head
  // Each workgroup begins at a kv tile of its own, of those that all rows see whole: so together they soon have the cache in
  // L2, where one after the other all would wait for memory at every tile
  let seen_whole = select(0u, clamp(first_token_end / KV_TILE, begin, end) - begin, WINDOW == 0u);
  var tile = min(begin + token0 / TOKENS * seen_whole / ((segment.y + TOKENS - 1u) / TOKENS), end - 1u);
  var cell = head_cell + cell_of(segment.z, tile * KV_TILE);
  var keys = load_keys(cell, index);
  var values = load_values(cell, index);
  const HIGH = HEAD_DIM - 64u;  // 0, or where the second 64 dimensions begin
  let at_a = row_a * SCORE_PITCH;
  let at_b = row_b * SCORE_PITCH;
  stage_queries(0u, workgroup.x, token0, segment, index);
  workgroupBarrier();
  let qa0 = subgroupMatrixLoad<Left, row_major>(&scores, at_a, SCORE_PITCH);
  let qa1 = subgroupMatrixLoad<Left, row_major>(&scores, at_a + 2u, SCORE_PITCH);
  let qa2 = subgroupMatrixLoad<Left, row_major>(&scores, at_a + 4u, SCORE_PITCH);
  let qa3 = subgroupMatrixLoad<Left, row_major>(&scores, at_a + 6u, SCORE_PITCH);
  let qb0 = subgroupMatrixLoad<Left, row_major>(&scores, at_b, SCORE_PITCH);
  let qb1 = subgroupMatrixLoad<Left, row_major>(&scores, at_b + 2u, SCORE_PITCH);
  let qb2 = subgroupMatrixLoad<Left, row_major>(&scores, at_b + 4u, SCORE_PITCH);
  let qb3 = subgroupMatrixLoad<Left, row_major>(&scores, at_b + 6u, SCORE_PITCH);
  workgroupBarrier();
  if (HIGH > 0u) {
    stage_queries(HIGH, workgroup.x, token0, segment, index);
    workgroupBarrier();
  }
  let qa4 = subgroupMatrixLoad<Left, row_major>(&scores, at_a, SCORE_PITCH);
  let qa5 = subgroupMatrixLoad<Left, row_major>(&scores, at_a + 2u, SCORE_PITCH);
  let qa6 = subgroupMatrixLoad<Left, row_major>(&scores, at_a + 4u, SCORE_PITCH);
  let qa7 = subgroupMatrixLoad<Left, row_major>(&scores, at_a + 6u, SCORE_PITCH);
  let qb4 = subgroupMatrixLoad<Left, row_major>(&scores, at_b, SCORE_PITCH);
  let qb5 = subgroupMatrixLoad<Left, row_major>(&scores, at_b + 2u, SCORE_PITCH);
  let qb6 = subgroupMatrixLoad<Left, row_major>(&scores, at_b + 4u, SCORE_PITCH);
  let qb7 = subgroupMatrixLoad<Left, row_major>(&scores, at_b + 6u, SCORE_PITCH);
  let row = index / 2u;    // of the softmax
  let parity = index % 2u;  // of the vec4s that it takes
  let own = place(row, workgroup.x, token0, segment);
  let own_keys = half * 16u * PITCH;  // of the subgroup
  let own_values = VALUES + half * (HEAD_VEC8 / 2u);
  let own_scores = row * SCORE_PITCH + parity;
  let own_weights = row * WEIGHT_PITCH + parity;
  let strip = subgroup * 16u * SCORE_PITCH;  // where outputs leave the subgroup's matrices
  let dim0 = half * (HEAD_DIM / 2u);
  var top = LOWEST;
  var total = 0.0;
  var a0: Result; var a1: Result; var a2: Result; var a3: Result;  // outputs of the first strip
  var b0: Result; var b1: Result; var b2: Result; var b3: Result;
  // nothing is before the first kv tile: no weights, no values
  for (var n = index; n < KV_TILE * PITCH - 1u; n += WORKGROUP) { kv[VALUES + n] = vec4<u32>(); }
  for (var n = index; n < ROWS * WEIGHT_PITCH; n += WORKGROUP) { weights[n] = vec2<u32>(); }
  stage(&keys, 0u, KV_TILE, index);
  var next = after(tile, begin, end);
  cell = head_cell + cell_of(segment.z, next * KV_TILE);
  keys = load_keys(cell, index);
  var third = after(next, begin, end);
  var next_cell = head_cell + cell_of(segment.z, third * KV_TILE);  // read early: the loads wait for it
  workgroupBarrier();
  var left = end - begin;  // tiles
  loop {
    loop {
      var s_a: Result; var s_b: Result;
      if (HIGH == 0u) {  // before the products with values: faster with heads of 64, slower with 128 (kernels/README.md)
        let k0 = subgroupMatrixLoad<Right, col_major>(&kv, own_keys, PITCH);
        s_a = subgroupMatrixMultiplyAccumulate(qa0, k0, Result());
        s_b = subgroupMatrixMultiplyAccumulate(qb0, k0, Result());
        let k1 = subgroupMatrixLoad<Right, col_major>(&kv, own_keys + 2u, PITCH);
        s_a = subgroupMatrixMultiplyAccumulate(qa1, k1, s_a);
        s_b = subgroupMatrixMultiplyAccumulate(qb1, k1, s_b);
        let k2 = subgroupMatrixLoad<Right, col_major>(&kv, own_keys + 4u, PITCH);
        s_a = subgroupMatrixMultiplyAccumulate(qa2, k2, s_a);
        s_b = subgroupMatrixMultiplyAccumulate(qb2, k2, s_b);
        let k3 = subgroupMatrixLoad<Right, col_major>(&kv, own_keys + 6u, PITCH);
        s_a = subgroupMatrixMultiplyAccumulate(qa3, k3, s_a);
        s_b = subgroupMatrixMultiplyAccumulate(qb3, k3, s_b);
      }
      let wa0 = subgroupMatrixLoad<Left, row_major>(&weights, row_a * WEIGHT_PITCH, WEIGHT_PITCH);
      let wb0 = subgroupMatrixLoad<Left, row_major>(&weights, row_b * WEIGHT_PITCH, WEIGHT_PITCH);
      let v00 = subgroupMatrixLoad<Right, row_major>(&kv, own_values, PITCH);
      a0 = subgroupMatrixMultiplyAccumulate(wa0, v00, a0);
      b0 = subgroupMatrixMultiplyAccumulate(wb0, v00, b0);
      let v01 = subgroupMatrixLoad<Right, row_major>(&kv, own_values + 2u, PITCH);
      a1 = subgroupMatrixMultiplyAccumulate(wa0, v01, a1);
      b1 = subgroupMatrixMultiplyAccumulate(wb0, v01, b1);
      if (HIGH > 0u) {
        let v02 = subgroupMatrixLoad<Right, row_major>(&kv, own_values + 4u, PITCH);
        a2 = subgroupMatrixMultiplyAccumulate(wa0, v02, a2);
        b2 = subgroupMatrixMultiplyAccumulate(wb0, v02, b2);
        let v03 = subgroupMatrixLoad<Right, row_major>(&kv, own_values + 6u, PITCH);
        a3 = subgroupMatrixMultiplyAccumulate(wa0, v03, a3);
        b3 = subgroupMatrixMultiplyAccumulate(wb0, v03, b3);
      }
      let wa1 = subgroupMatrixLoad<Left, row_major>(&weights, row_a * WEIGHT_PITCH + 4u, WEIGHT_PITCH);
      let wb1 = subgroupMatrixLoad<Left, row_major>(&weights, row_b * WEIGHT_PITCH + 4u, WEIGHT_PITCH);
      let v10 = subgroupMatrixLoad<Right, row_major>(&kv, own_values + 16u * PITCH, PITCH);
      a0 = subgroupMatrixMultiplyAccumulate(wa1, v10, a0);
      b0 = subgroupMatrixMultiplyAccumulate(wb1, v10, b0);
      let v11 = subgroupMatrixLoad<Right, row_major>(&kv, own_values + 16u * PITCH + 2u, PITCH);
      a1 = subgroupMatrixMultiplyAccumulate(wa1, v11, a1);
      b1 = subgroupMatrixMultiplyAccumulate(wb1, v11, b1);
      if (HIGH > 0u) {
        let v12 = subgroupMatrixLoad<Right, row_major>(&kv, own_values + 16u * PITCH + 4u, PITCH);
        a2 = subgroupMatrixMultiplyAccumulate(wa1, v12, a2);
        b2 = subgroupMatrixMultiplyAccumulate(wb1, v12, b2);
        let v13 = subgroupMatrixLoad<Right, row_major>(&kv, own_values + 16u * PITCH + 6u, PITCH);
        a3 = subgroupMatrixMultiplyAccumulate(wa1, v13, a3);
        b3 = subgroupMatrixMultiplyAccumulate(wb1, v13, b3);
      }
      if (left == 0u) { break; }
      if (HIGH > 0u) {
        let k0 = subgroupMatrixLoad<Right, col_major>(&kv, own_keys, PITCH);
        s_a = subgroupMatrixMultiplyAccumulate(qa0, k0, Result());
        s_b = subgroupMatrixMultiplyAccumulate(qb0, k0, Result());
        let k1 = subgroupMatrixLoad<Right, col_major>(&kv, own_keys + 2u, PITCH);
        s_a = subgroupMatrixMultiplyAccumulate(qa1, k1, s_a);
        s_b = subgroupMatrixMultiplyAccumulate(qb1, k1, s_b);
        let k2 = subgroupMatrixLoad<Right, col_major>(&kv, own_keys + 4u, PITCH);
        s_a = subgroupMatrixMultiplyAccumulate(qa2, k2, s_a);
        s_b = subgroupMatrixMultiplyAccumulate(qb2, k2, s_b);
        let k3 = subgroupMatrixLoad<Right, col_major>(&kv, own_keys + 6u, PITCH);
        s_a = subgroupMatrixMultiplyAccumulate(qa3, k3, s_a);
        s_b = subgroupMatrixMultiplyAccumulate(qb3, k3, s_b);
        let k4 = subgroupMatrixLoad<Right, col_major>(&kv, own_keys + HIGH / 8u, PITCH);
        s_a = subgroupMatrixMultiplyAccumulate(qa4, k4, s_a);
        s_b = subgroupMatrixMultiplyAccumulate(qb4, k4, s_b);
        let k5 = subgroupMatrixLoad<Right, col_major>(&kv, own_keys + HIGH / 8u + 2u, PITCH);
        s_a = subgroupMatrixMultiplyAccumulate(qa5, k5, s_a);
        s_b = subgroupMatrixMultiplyAccumulate(qb5, k5, s_b);
        let k6 = subgroupMatrixLoad<Right, col_major>(&kv, own_keys + HIGH / 8u + 4u, PITCH);
        s_a = subgroupMatrixMultiplyAccumulate(qa6, k6, s_a);
        s_b = subgroupMatrixMultiplyAccumulate(qb6, k6, s_b);
        let k7 = subgroupMatrixLoad<Right, col_major>(&kv, own_keys + HIGH / 8u + 6u, PITCH);
        s_a = subgroupMatrixMultiplyAccumulate(qa7, k7, s_a);
        s_b = subgroupMatrixMultiplyAccumulate(qb7, k7, s_b);
      }
      subgroupMatrixStore<row_major>(&scores, at_a + 4u * half, s_a, SCORE_PITCH); subgroupMatrixStore<row_major>(&scores, at_b + 4u * half, s_b, SCORE_PITCH);
      workgroupBarrier();  // all are done with keys and values
      let p0 = tile * KV_TILE;
      stage(&values, VALUES, tile_end - min(tile_end, p0), index);
      stage(&keys, 0u, KV_TILE, index);
      values = load_values(cell, index);
      keys = load_keys(next_cell, index);
      cell = next_cell;
      let fourth = after(third, begin, end);
      next_cell = head_cell + cell_of(segment.z, fourth * KV_TILE);
      let whole = p0 + KV_TILE <= first_token_end && WINDOW == 0u;  // every row sees all positions of the kv tile
      let sum = store_weights(own_weights, load_scores(own_scores, top, whole, p0 + parity * 4u - own.begin, own.seen));
      if (sum > MOST) { weights[GREW].x = 1u; }
      if (workgroupUniformLoad(&weights[GREW]).x != 0u) { break; }  // with its barriers: weights, keys and values are there
      total += sum;
      left--;
      tile = next;
      next = third;
      third = fourth;
    }
    if (left == 0u) { break; }
    let since = tile * KV_TILE - own.begin;
    let a = load_scores(row * SCORE_PITCH, 0.0, false, since, own.seen);
    let b = load_scores(row * SCORE_PITCH + 1u, 0.0, false, since + 4u, own.seen);
    let most = max4(max(max(max(a.a, a.b), max(a.c, a.d)), max(max(b.a, b.b), max(b.c, b.d))));
    let rescale = exp2(min(top - most, 0.0));
    top = max(top, most);
    total = total * rescale + store_weights(own_weights, load_scores(own_scores, top, false, since + parity * 4u, own.seen));
    workgroupBarrier();  // all have read their scores
    if (index == 0u) { weights[GREW].x = 0u; }
    if (left < end - begin) {
      if (parity == 0u) { scores[row * SCORE_PITCH + 8u] = vec4<u32>(bitcast<u32>(rescale)); }
      subgroupMatrixStore<row_major>(&scores, strip, a0, SCORE_PITCH); subgroupMatrixStore<row_major>(&scores, strip + 4u, a1, SCORE_PITCH);
      workgroupBarrier();
      rescale_strip(strip, row_a, lane);
      workgroupBarrier();
      a0 = subgroupMatrixLoad<Result, row_major>(&scores, strip, SCORE_PITCH); a1 = subgroupMatrixLoad<Result, row_major>(&scores, strip + 4u, SCORE_PITCH);
      workgroupBarrier();
      subgroupMatrixStore<row_major>(&scores, strip, b0, SCORE_PITCH); subgroupMatrixStore<row_major>(&scores, strip + 4u, b1, SCORE_PITCH);
      workgroupBarrier();
      rescale_strip(strip, row_b, lane);
      workgroupBarrier();
      b0 = subgroupMatrixLoad<Result, row_major>(&scores, strip, SCORE_PITCH); b1 = subgroupMatrixLoad<Result, row_major>(&scores, strip + 4u, SCORE_PITCH);
      workgroupBarrier();
      if (HIGH > 0u) {
        subgroupMatrixStore<row_major>(&scores, strip, a2, SCORE_PITCH); subgroupMatrixStore<row_major>(&scores, strip + 4u, a3, SCORE_PITCH);
        workgroupBarrier();
        rescale_strip(strip, row_a, lane);
        workgroupBarrier();
        a2 = subgroupMatrixLoad<Result, row_major>(&scores, strip, SCORE_PITCH); a3 = subgroupMatrixLoad<Result, row_major>(&scores, strip + 4u, SCORE_PITCH);
        workgroupBarrier();
        subgroupMatrixStore<row_major>(&scores, strip, b2, SCORE_PITCH); subgroupMatrixStore<row_major>(&scores, strip + 4u, b3, SCORE_PITCH);
        workgroupBarrier();
        rescale_strip(strip, row_b, lane);
        workgroupBarrier();
        b2 = subgroupMatrixLoad<Result, row_major>(&scores, strip, SCORE_PITCH); b3 = subgroupMatrixLoad<Result, row_major>(&scores, strip + 4u, SCORE_PITCH);
        workgroupBarrier();
      }
    }
    left--;
    tile = next;
    next = third;
    third = after(third, begin, end);
  }
  workgroupBarrier();  // all are done with weights, which two lanes of a row now use to add up their totals
  weights[own_weights] = vec2<u32>(bitcast<u32>(total));
  workgroupBarrier();
  let all = bitcast<f32>(weights[row * WEIGHT_PITCH].x) + bitcast<f32>(weights[row * WEIGHT_PITCH + 1u].x);
  if (parity == 0u) {
    scores[row * SCORE_PITCH + 8u] = vec4<u32>(bitcast<u32>(select(1.0, 1.0 / all, SPLITS == 1u)));
    if (SPLITS > 1u && own.live) { stats[own.first4 / (HEAD_DIM / 4u) * SPLITS + split] = vec2<f32>(top * 0.6931471805599453, all); }
  }
  subgroupMatrixStore<row_major>(&scores, strip, a0, SCORE_PITCH); subgroupMatrixStore<row_major>(&scores, strip + 4u, a1, SCORE_PITCH);
  workgroupBarrier();
  store_strip(dim0, workgroup.x, token0, segment, split, strip, row_a, lane);
  workgroupBarrier();
  subgroupMatrixStore<row_major>(&scores, strip, b0, SCORE_PITCH); subgroupMatrixStore<row_major>(&scores, strip + 4u, b1, SCORE_PITCH);
  workgroupBarrier();
  store_strip(dim0, workgroup.x, token0, segment, split, strip, row_b, lane);
  if (HIGH > 0u) {
    workgroupBarrier();
    subgroupMatrixStore<row_major>(&scores, strip, a2, SCORE_PITCH); subgroupMatrixStore<row_major>(&scores, strip + 4u, a3, SCORE_PITCH);
    workgroupBarrier();
    store_strip(dim0 + 32u, workgroup.x, token0, segment, split, strip, row_a, lane);
    workgroupBarrier();
    subgroupMatrixStore<row_major>(&scores, strip, b2, SCORE_PITCH); subgroupMatrixStore<row_major>(&scores, strip + 4u, b3, SCORE_PITCH);
    workgroupBarrier();
    store_strip(dim0 + 32u, workgroup.x, token0, segment, split, strip, row_b, lane);
  }
}
