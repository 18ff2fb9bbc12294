// y[m, HEADS, HEAD_DIM] = softmax(q K^T) V of many tokens over an f16 KV cache, causal; tiled, no score matrix. Both products run
// on subgroup matrices, f16 with f32 sums; sums of scores are f16 with scores_f16.
// A workgroup takes one KV head, ROWS rows of a segment and one split of the context. The rows of a KV head are its query heads of the
// first token, then of the next. Two subgroups have 32 rows: of a kv tile each computes half of the scores, then half of the
// outputs' dimensions, so that a matrix of keys or values is loaded for two strips of 16 rows. Keys and values pass through
// workgroup memory in kv tiles of 32 positions; the next loads are in flight meanwhile. Scores leave the matrices through workgroup
// memory: two lanes have a row and make its weights, f16 relative to the row's top, a score near the largest so far, in their place.
// An iteration has three tiles in work, so that its parts do not wait for each other: scores of the next, weights of this and outputs
// of the one before. Where a lane's weights exceed MOST in all, its top is too low: then the loop is left, and all rows get new tops
// and weights, and outputs that were rescaled in workgroup memory. That happens in the first tile and, with trained models, hardly
// ever after it.
// Several splits write partial sums, f32, and (top, total) for attend_merge.
// Needs HEAD_DIM 64 or 128, WORKGROUP 128, or 256 with HEAD_DIM 128, subgroups of 32, f16 matrices of 16 x 16 x 16 (matrix_* makes
// them of smaller ones). Parts: f16, matrix_*, scores_*, pages, blocks_*.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const HEADS: u32 = 1u;
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 64u;
const WINDOW: u32 = 0u;  // a token sees the last WINDOW positions, its own included; 0: all
const SCALE: f32 = 1.0;
const ONE_SEGMENT: bool = false;  // all rows belong to one segment: then nothing is looked up by row
const SPLITS: u32 = 1u;
const BLOCKS: u32 = HEADS * HEAD_DIM / 32u * SPLITS;  // blocks of a token
const WORKGROUP: u32 = 128u;
const HEADS_PER_KV: u32 = HEADS / KV_HEADS;
const KV_TILE: u32 = 32u;  // divides PAGE
const ROWS: u32 = WORKGROUP / 2u;
const HEAD_VEC8: u32 = HEAD_DIM / 8u;  // vec4s of f16
const PITCH: u32 = HEAD_VEC8 + 1u;     // of a position in workgroup memory, with padding
const ROW_PITCH: u32 = 5u;             // vec4s of a row in a region: 64 bytes of scores or weights, and padding
const PADDING: u32 = 4u;               // where it is
const REGION: u32 = ROWS * ROW_PITCH;
const QUERY_PITCH: u32 = 10u;          // vec4s of a row: 64 dimensions of its query, and padding
const LOADS: u32 = KV_TILE * HEAD_VEC8 / WORKGROUP;  // vec4s of keys, or values, that an invocation stages
const LOWEST: f32 = -1e29;
const MOST: f32 = 32768.0;  // an f16 holds up to 65504
alias Left = subgroup_matrix_left<f16, 16, 16>;
alias Right = subgroup_matrix_right<f16, 16, 16>;
alias Result = subgroup_matrix_result<f32, 16, 16>;
// Nothing is written to the caches: the driver moves loads from what is only read to where they are waited for
@group(0) @binding(1) var<storage, read_write> k_cache: array<vec4<u32>>;  // [KV_HEADS, capacity, HEAD_DIM] f16
@group(0) @binding(2) var<storage, read_write> v_cache: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> stats: array<vec2<f32>>;  // [m, HEADS, SPLITS] (top, total)
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;              // q [m, HEADS, HEAD_DIM]
@group(0) @binding(8) var<uniform> step: Step;
var<workgroup> kv: array<vec4<u32>, 2u * KV_TILE * PITCH>;    // f16 [position][dimension]: keys, then values; or f32 [row][32 dimensions]: outputs
var<workgroup> row_data: array<vec4<u32>, REGIONS * REGION>;  // [region][row][16 scores f32, or 32 scores or weights f16]; queries at first
const VALUES: u32 = KV_TILE * PITCH;
const GREW: u32 = 2u * VALUES - 1u;  // where kv tells, in padding, whether a row needs a new top
fn after(tile: u32, begin: u32, end: u32) -> u32 {  // begin + 1 after the last
  return select(tile + 1u, min(begin + 1u, end - 1u), tile + 1u >= end);
}
struct Loads { v: array<vec4<u32>, LOADS> }
fn load_keys(cell0: u32, index: u32) -> Loads {
  var loads: Loads;
  for (var i = 0u; i < LOADS; i++) { loads.v[i] = k_cache[cell0 * HEAD_VEC8 + index + i * WORKGROUP]; }
  return loads;
}
fn load_values(cell0: u32, index: u32) -> Loads {
  var loads: Loads;
  for (var i = 0u; i < LOADS; i++) { loads.v[i] = v_cache[cell0 * HEAD_VEC8 + index + i * WORKGROUP]; }
  return loads;
}
fn stage_keys(loads: ptr<function, Loads>, index: u32) {
  for (var i = 0u; i < LOADS; i++) {
    let n = index + i * WORKGROUP;
    kv[n / HEAD_VEC8 * PITCH + n % HEAD_VEC8] = (*loads).v[i];
  }
}
fn stage_values(loads: ptr<function, Loads>, count: u32, index: u32) {  // positions from count on become 0: cells may hold NaN
  if (count < KV_TILE) {
    for (var i = 0u; i < LOADS; i++) { (*loads).v[i] = select(vec4<u32>(), (*loads).v[i], (index + i * WORKGROUP) / HEAD_VEC8 < count); }
  }
  for (var i = 0u; i < LOADS; i++) {
    let n = index + i * WORKGROUP;
    kv[VALUES + weight_column(n / HEAD_VEC8) * PITCH + n % HEAD_VEC8] = (*loads).v[i];
  }
}
fn half4(v: vec4<f32>) -> vec2<u32> { return vec2<u32>(pack_f16(v.xy), pack_f16(v.zw)); }
// One beyond f16 exceeds MOST: it is not used
fn weight4(v: vec4<f32>) -> vec2<u32> { return vec2<u32>(pack2x16float(v.xy), pack2x16float(v.zw)); }
fn score4(at: u32) -> vec4<f32> { return bitcast<vec4<f32>>(row_data[at]); }
fn output4(at: u32) -> vec4<f32> { return bitcast<vec4<f32>>(kv[at]); }
struct Queries { v: array<vec4<u32>, 4> }
fn load_queries(dim0: u32, kv_head: u32, row0: u32, segment: vec4<u32>, index: u32) -> Queries {  // 64 dimensions of all rows
  var queries: Queries;
  for (var i = 0u; i < 4u; i++) {
    let n = index + i * WORKGROUP;
    let at = place(n / 8u, kv_head, row0, segment).first4 + dim0 / 4u + n % 8u * 2u;
    const LOG2 = SCALE * 1.4426950408889634;  // exponentials are taken with exp2
    queries.v[i] = vec4<u32>(half4(x[at] * LOG2), half4(x[at + 1u] * LOG2));
  }
  return queries;
}
fn stage_queries(queries: ptr<function, Queries>, index: u32) {
  for (var i = 0u; i < 4u; i++) {
    let n = index + i * WORKGROUP;
    row_data[n / 8u * QUERY_PITCH + n % 8u] = (*queries).v[i];
  }
}
fn rescale_strip(at: u32, strip_row: u32, lane: u32) {  // 32 dimensions of the 16 rows from strip_row on, times their factors
  for (var i = 0u; i < 4u; i++) {
    let n = lane + 32u * i;
    kv[at + n] = bitcast<vec4<u32>>(output4(at + n) * score4((strip_row + n / 8u) * ROW_PITCH + PADDING).x);
  }
}
fn max4(v: vec4<f32>) -> f32 { return max(max(v.x, v.y), max(v.z, v.w)); }
fn sum4(v: vec4<f32>) -> f32 { return (v.x + v.y) + (v.z + v.w); }
struct Sixteen { a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32> }  // scores of a lane: half of a row's
// since: positions from the first that the row sees; it wraps around before it
fn masked4(v: vec4<f32>, since: u32, seen: u32) -> vec4<f32> {
  return select(vec4<f32>(-1e30), v, vec4<u32>(since) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(seen));
}
fn masked(s: Sixteen, since: u32, seen: u32) -> Sixteen {
  let a = masked4(s.a, since + FOURS.x, seen);
  let b = masked4(s.b, since + FOURS.y, seen);
  return Sixteen(a, b, masked4(s.c, since + FOURS.z, seen), masked4(s.d, since + FOURS.w, seen));
}
fn store_weights(at: u32, s: Sixteen, top: f32) -> f32 {  // returns their sum
  let a = exp2(s.a - top);
  let b = exp2(s.b - top);
  let c = exp2(s.c - top);
  let d = exp2(s.d - top);
  row_data[at] = vec4<u32>(weight4(a), weight4(b));
  row_data[at + 1u] = vec4<u32>(weight4(c), weight4(d));
  return sum4((a + b) + (c + d));
}
struct Place { first4: u32, begin: u32, seen: u32, live: bool }  // of a row: its head in x and y, the positions that it sees
fn place(row: u32, kv_head: u32, row0: u32, segment: vec4<u32>) -> Place {
  let token = (row0 + row) / HEADS_PER_KV;
  let head = kv_head * HEADS_PER_KV + (row0 + row) % HEADS_PER_KV;
  let own = min(token, segment.y - 1u);  // rows past the segment's end are like the last one, and not stored
  let end = segment.w + own + 1u;
  let begin = select(0u, end - min(WINDOW, end), WINDOW > 0u);
  let first4 = ((segment.x + own) * HEADS + head) * (HEAD_DIM / 4u);
  return Place(first4, begin, end - begin, token < segment.y);
}
struct Output { block: u32, factor: f32, live: bool }  // of a row: its first block in y, and what its sums are multiplied by
fn output(row: u32, kv_head: u32, row0: u32, segment: vec4<u32>, split: u32) -> Output {
  let p = place(row, kv_head, row0, segment);
  return Output(p.first4 / 8u * SPLITS + split * (HEAD_DIM / 32u), score4(row * ROW_PITCH + PADDING).x, p.live);
}
fn store_eight(own: Output, dim0: u32, at: u32, n: u32) {  // the n-th of 64 neighbours
  let block = own.block + dim0 / 32u;
  let word = block_word(block / BLOCKS, block % BLOCKS, BLOCKS);
  store_block(word, BLOCKS, output4(at + 2u * n) * own.factor, output4(at + 2u * n + 1u) * own.factor, n, own.live);
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32, @builtin(subgroup_id) subgroup: u32) {
  let lane = index % 32u;
  let half = subgroup % 2u;          // of a kv tile's positions, and of the dimensions
  let row_a = subgroup / 2u * 32u;  // of the first strip
  let row_b = row_a + 16u;
  let segment = step.segment[select(workgroup.z, 0u, ONE_SEGMENT)];  // first row, rows, slot, first position
  let row0 = workgroup.y / SPLITS * ROWS;  // of the KV head's rows in the segment
  let split = workgroup.y % SPLITS;
  if (row0 >= segment.y * HEADS_PER_KV) { return; }
  let tile_end = segment.w + min((row0 + ROWS - 1u) / HEADS_PER_KV + 1u, segment.y);  // one past the last position that the last token sees
  let first_token_end = segment.w + row0 / HEADS_PER_KV + 1u;  // one past the last position that the first token sees
  let first = select(0u, (first_token_end - min(WINDOW, first_token_end)) / KV_TILE, WINDOW > 0u);  // kv tile
  let unseen = select(0u, tile_end - min(WINDOW, tile_end), WINDOW > 0u);  // positions before it are not seen by the last token
  let tiles = (tile_end + KV_TILE - 1u) / KV_TILE;
  let split_tiles = (tiles - first + SPLITS - 1u) / SPLITS;
  let begin = min(first + split * split_tiles, tiles);
  let end = min(begin + split_tiles, tiles);
  let head_cell = workgroup.x * step.capacity;  // of the KV head
  // After the first kv tile, which has the largest scores of trained models, each workgroup goes on at one of its own, of those that
  // all rows see whole: so together they soon have the cache in L2, where one after the other all would wait for memory
  let seen_whole = select(0u, clamp(first_token_end / KV_TILE, begin, end) - begin, WINDOW == 0u);
  var tile = min(begin, end - 1u);
  var next = clamp(begin + row0 * seen_whole / (segment.y * HEADS_PER_KV), min(begin + 1u, end - 1u), end - 1u);
  var cell = head_cell + cell_of(segment.z, tile * KV_TILE);
  var next_cell = head_cell + cell_of(segment.z, next * KV_TILE);
  var keys = load_keys(cell, index);
  const HIGH = HEAD_DIM - 64u;  // 0, or where the second 64 dimensions begin
  var low_queries = load_queries(0u, workgroup.x, row0, segment, index);
  var high_queries = load_queries(HIGH, workgroup.x, row0, segment, index);
  stage_queries(&low_queries, index);
  workgroupBarrier();
  let qa0 = subgroupMatrixLoad<Left, row_major>(&row_data, row_a * QUERY_PITCH, QUERY_PITCH);
  let qa1 = subgroupMatrixLoad<Left, row_major>(&row_data, row_a * QUERY_PITCH + 2u, QUERY_PITCH);
  let qa2 = subgroupMatrixLoad<Left, row_major>(&row_data, row_a * QUERY_PITCH + 4u, QUERY_PITCH);
  let qa3 = subgroupMatrixLoad<Left, row_major>(&row_data, row_a * QUERY_PITCH + 6u, QUERY_PITCH);
  let qb0 = subgroupMatrixLoad<Left, row_major>(&row_data, row_b * QUERY_PITCH, QUERY_PITCH);
  let qb1 = subgroupMatrixLoad<Left, row_major>(&row_data, row_b * QUERY_PITCH + 2u, QUERY_PITCH);
  let qb2 = subgroupMatrixLoad<Left, row_major>(&row_data, row_b * QUERY_PITCH + 4u, QUERY_PITCH);
  let qb3 = subgroupMatrixLoad<Left, row_major>(&row_data, row_b * QUERY_PITCH + 6u, QUERY_PITCH);
  workgroupBarrier();
  if (HIGH > 0u) {
    stage_queries(&high_queries, index);
    workgroupBarrier();
  }
  let qa4 = subgroupMatrixLoad<Left, row_major>(&row_data, row_a * QUERY_PITCH, QUERY_PITCH);
  let qa5 = subgroupMatrixLoad<Left, row_major>(&row_data, row_a * QUERY_PITCH + 2u, QUERY_PITCH);
  let qa6 = subgroupMatrixLoad<Left, row_major>(&row_data, row_a * QUERY_PITCH + 4u, QUERY_PITCH);
  let qa7 = subgroupMatrixLoad<Left, row_major>(&row_data, row_a * QUERY_PITCH + 6u, QUERY_PITCH);
  let qb4 = subgroupMatrixLoad<Left, row_major>(&row_data, row_b * QUERY_PITCH, QUERY_PITCH);
  let qb5 = subgroupMatrixLoad<Left, row_major>(&row_data, row_b * QUERY_PITCH + 2u, QUERY_PITCH);
  let qb6 = subgroupMatrixLoad<Left, row_major>(&row_data, row_b * QUERY_PITCH + 4u, QUERY_PITCH);
  let qb7 = subgroupMatrixLoad<Left, row_major>(&row_data, row_b * QUERY_PITCH + 6u, QUERY_PITCH);
  let row = subgroup * 16u + lane / 16u * 8u + lane % 8u;  // of the softmax
  let part = lane / 8u % 2u;  // which of its two lanes
  let own = place(row, workgroup.x, row0, segment);
  let own_keys = half * 16u * PITCH;  // of the subgroup
  let own_values = VALUES + half * (HEAD_VEC8 / 2u);
  let own_row = row * ROW_PITCH + 2u * part;
  let strip = subgroup * 128u;  // where 32 dimensions of outputs leave the subgroup's matrices
  let dim0 = half * (HEAD_DIM / 2u);
  var top = LOWEST;
  var total = 0.0;
  var a0: Result; var a1: Result; var a2: Result; var a3: Result;  // outputs of the first strip
  var b0: Result; var b1: Result; var b2: Result; var b3: Result;
  stage_keys(&keys, index);
  workgroupBarrier();
  for (var n = index; n < REGION; n += WORKGROUP) { row_data[REGION * (REGIONS - 1u) + n] = vec4<u32>(); }  // no weights before the first tile
  if (index == 0u) { kv[GREW].x = 0u; }
  var s_a: Score; var s_b: Score;  // scores of the first tile and, in the loop, of the next one
  let k0 = subgroupMatrixLoad<Right, col_major>(&kv, own_keys, PITCH);
  s_a = subgroupMatrixMultiplyAccumulate(qa0, k0, Score());
  s_b = subgroupMatrixMultiplyAccumulate(qb0, k0, Score());
  let k1 = subgroupMatrixLoad<Right, col_major>(&kv, own_keys + 2u, PITCH);
  s_a = subgroupMatrixMultiplyAccumulate(qa1, k1, s_a);
  s_b = subgroupMatrixMultiplyAccumulate(qb1, k1, s_b);
  let k2 = subgroupMatrixLoad<Right, col_major>(&kv, own_keys + 4u, PITCH);
  s_a = subgroupMatrixMultiplyAccumulate(qa2, k2, s_a);
  s_b = subgroupMatrixMultiplyAccumulate(qb2, k2, s_b);
  let k3 = subgroupMatrixLoad<Right, col_major>(&kv, own_keys + 6u, PITCH);
  s_a = subgroupMatrixMultiplyAccumulate(qa3, k3, s_a);
  s_b = subgroupMatrixMultiplyAccumulate(qb3, k3, s_b);
  if (HIGH > 0u) {
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
  keys = load_keys(next_cell, index);
  var values: Loads;  // before the first tile there are none
  var filled = 0u;  // positions of values before tile_end
  var third = after(next, begin, end);
  var third_cell = head_cell + cell_of(segment.z, third * KV_TILE);
  var regions = vec3<u32>(0u, REGION, REGION * (REGIONS - 1u));  // of scores, scores of the second half, and weights
  var s: Sixteen;
  var left = end - begin;  // tiles
  var sum = 0.0;
  workgroupBarrier();
  loop {
    loop {
      // Scores of `tile`, keys of the next one and values of the one before come into workgroup memory
      let at = scores_at(regions, half);
      subgroupMatrixStore<row_major>(&row_data, at + row_a * ROW_PITCH, s_a, ROW_PITCH);
      subgroupMatrixStore<row_major>(&row_data, at + row_b * ROW_PITCH, s_b, ROW_PITCH);
      stage_values(&values, filled, index);
      stage_keys(&keys, index);
      let value_cell = cell;
      let key_cell = third_cell;
      let p0 = tile * KV_TILE;
      filled = tile_end - min(tile_end, p0);
      cell = next_cell;
      next_cell = third_cell;
      tile = next;
      next = third;
      third = after(third, begin, end);
      third_cell = head_cell + cell_of(segment.z, third * KV_TILE);
      workgroupBarrier();
      // Outputs of the tile before, scores of the next one, weights of this
      let wa0 = subgroupMatrixLoad<Left, row_major>(&row_data, regions.z + row_a * ROW_PITCH, ROW_PITCH);
      let wb0 = subgroupMatrixLoad<Left, row_major>(&row_data, regions.z + row_b * ROW_PITCH, ROW_PITCH);
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
      values = load_values(value_cell, index);
      keys = load_keys(key_cell, index);
      let wa1 = subgroupMatrixLoad<Left, row_major>(&row_data, regions.z + row_a * ROW_PITCH + 2u, ROW_PITCH);
      let wb1 = subgroupMatrixLoad<Left, row_major>(&row_data, regions.z + row_b * ROW_PITCH + 2u, ROW_PITCH);
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
      let k0 = subgroupMatrixLoad<Right, col_major>(&kv, own_keys, PITCH);
      s_a = subgroupMatrixMultiplyAccumulate(qa0, k0, Score());
      s_b = subgroupMatrixMultiplyAccumulate(qb0, k0, Score());
      let k1 = subgroupMatrixLoad<Right, col_major>(&kv, own_keys + 2u, PITCH);
      s_a = subgroupMatrixMultiplyAccumulate(qa1, k1, s_a);
      s_b = subgroupMatrixMultiplyAccumulate(qb1, k1, s_b);
      let k2 = subgroupMatrixLoad<Right, col_major>(&kv, own_keys + 4u, PITCH);
      s_a = subgroupMatrixMultiplyAccumulate(qa2, k2, s_a);
      s_b = subgroupMatrixMultiplyAccumulate(qb2, k2, s_b);
      let k3 = subgroupMatrixLoad<Right, col_major>(&kv, own_keys + 6u, PITCH);
      s_a = subgroupMatrixMultiplyAccumulate(qa3, k3, s_a);
      s_b = subgroupMatrixMultiplyAccumulate(qb3, k3, s_b);
      if (HIGH > 0u) {
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
      s = load_scores(regions, own_row);
      if (p0 + KV_TILE > first_token_end || p0 < unseen) { s = masked(s, p0 + part * PART - own.begin, own.seen); }
      sum = store_weights(regions.x + own_row, s, top);
      if (sum > MOST) { kv[GREW].x = 1u; }
      regions = next_regions(regions);
      if (left == 0u || workgroupUniformLoad(&kv[GREW]).x != 0u) { break; }
      total += sum;
      left--;
    }
    if (left == 0u) { break; }
    row_data[part * REGION + row * ROW_PITCH + PADDING].x = bitcast<u32>(max(max(max4(s.a), max4(s.b)), max(max4(s.c), max4(s.d))));
    workgroupBarrier();
    let most = max(score4(row * ROW_PITCH + PADDING).x, score4(REGION + row * ROW_PITCH + PADDING).x);
    workgroupBarrier();
    let rescale = exp2(min(top - most, 0.0));
    top = max(top, most);
    total = total * rescale + store_weights(regions.z + own_row, s, top);
    if (index == 0u) { kv[GREW].x = 0u; }
    if (part == 0u) { row_data[row * ROW_PITCH + PADDING].x = bitcast<u32>(rescale); }
    if (left < end - begin) {
      subgroupMatrixStore<row_major>(&kv, strip, a0, 8u); subgroupMatrixStore<row_major>(&kv, strip + 4u, a1, 8u);
      workgroupBarrier();
      rescale_strip(strip, row_a, lane);
      workgroupBarrier();
      a0 = subgroupMatrixLoad<Result, row_major>(&kv, strip, 8u); a1 = subgroupMatrixLoad<Result, row_major>(&kv, strip + 4u, 8u);
      workgroupBarrier();
      subgroupMatrixStore<row_major>(&kv, strip, b0, 8u); subgroupMatrixStore<row_major>(&kv, strip + 4u, b1, 8u);
      workgroupBarrier();
      rescale_strip(strip, row_b, lane);
      workgroupBarrier();
      b0 = subgroupMatrixLoad<Result, row_major>(&kv, strip, 8u); b1 = subgroupMatrixLoad<Result, row_major>(&kv, strip + 4u, 8u);
      workgroupBarrier();
      if (HIGH > 0u) {
        subgroupMatrixStore<row_major>(&kv, strip, a2, 8u); subgroupMatrixStore<row_major>(&kv, strip + 4u, a3, 8u);
        workgroupBarrier();
        rescale_strip(strip, row_a, lane);
        workgroupBarrier();
        a2 = subgroupMatrixLoad<Result, row_major>(&kv, strip, 8u); a3 = subgroupMatrixLoad<Result, row_major>(&kv, strip + 4u, 8u);
        workgroupBarrier();
        subgroupMatrixStore<row_major>(&kv, strip, b2, 8u); subgroupMatrixStore<row_major>(&kv, strip + 4u, b3, 8u);
        workgroupBarrier();
        rescale_strip(strip, row_b, lane);
        workgroupBarrier();
        b2 = subgroupMatrixLoad<Result, row_major>(&kv, strip, 8u); b3 = subgroupMatrixLoad<Result, row_major>(&kv, strip + 4u, 8u);
        workgroupBarrier();
      }
    }
    left--;
  }
  workgroupBarrier();
  row_data[part * REGION + row * ROW_PITCH + PADDING].x = bitcast<u32>(total);
  workgroupBarrier();
  let all = score4(row * ROW_PITCH + PADDING).x + score4(REGION + row * ROW_PITCH + PADDING).x;
  workgroupBarrier();
  if (part == 0u) {
    row_data[row * ROW_PITCH + PADDING].x = bitcast<u32>(select(1.0, 1.0 / all, SPLITS == 1u));
    if (SPLITS > 1u && own.live) { stats[own.first4 / (HEAD_DIM / 4u) * SPLITS + split] = vec2<f32>(top * 0.6931471805599453, all); }
  }
  workgroupBarrier();
  // of the outputs' rows, four lanes have the same
  let a_low = output(row_a + lane / 4u, workgroup.x, row0, segment, split);
  let a_high = output(row_a + lane / 4u + 8u, workgroup.x, row0, segment, split);
  let b_low = output(row_b + lane / 4u, workgroup.x, row0, segment, split);
  let b_high = output(row_b + lane / 4u + 8u, workgroup.x, row0, segment, split);
  subgroupMatrixStore<row_major>(&kv, strip, a0, 8u); subgroupMatrixStore<row_major>(&kv, strip + 4u, a1, 8u);
  workgroupBarrier();
  store_eight(a_low, dim0, strip, lane);
  store_eight(a_high, dim0, strip, lane + 32u);
  workgroupBarrier();
  subgroupMatrixStore<row_major>(&kv, strip, b0, 8u); subgroupMatrixStore<row_major>(&kv, strip + 4u, b1, 8u);
  workgroupBarrier();
  store_eight(b_low, dim0, strip, lane);
  store_eight(b_high, dim0, strip, lane + 32u);
  if (HIGH > 0u) {
    workgroupBarrier();
    subgroupMatrixStore<row_major>(&kv, strip, a2, 8u); subgroupMatrixStore<row_major>(&kv, strip + 4u, a3, 8u);
    workgroupBarrier();
    store_eight(a_low, dim0 + 32u, strip, lane);
    store_eight(a_high, dim0 + 32u, strip, lane + 32u);
    workgroupBarrier();
    subgroupMatrixStore<row_major>(&kv, strip, b2, 8u); subgroupMatrixStore<row_major>(&kv, strip + 4u, b3, 8u);
    workgroupBarrier();
    store_eight(b_low, dim0 + 32u, strip, lane);
    store_eight(b_high, dim0 + 32u, strip, lane + 32u);
  }
}
