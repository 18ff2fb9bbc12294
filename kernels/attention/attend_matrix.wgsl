// y[m, HEADS, HEAD_DIM] = softmax(q K^T) V of many tokens over an f16 KV cache, causal; tiled, no score matrix. Both products run
// on subgroup matrices, f16 with f32 sums.
// A workgroup takes one KV head, TOKENS tokens of a segment and one split of the context. Its ROWS rows are these tokens in every
// query head that shares the KV head, 16 for each subgroup. Keys, then values pass through workgroup memory in kv tiles of 64
// positions; the next loads are in flight during the products. Scores leave the matrices through workgroup memory: two lanes
// have a row and make its weights, f16 relative to a score near the largest so far. Where weights would exceed 2^GROWTH, the
// outputs leave their matrices to be rescaled: a few times at the beginning of a context.
// One split: writes f32, or blocks with TO_BLOCKS. Several: partial sums and (top, total) for attend_merge.
// Needs HEAD_DIM 64 or 128, subgroups of 32, f16 matrices of 16 x 16 x 16 (matrix_* makes them of smaller ones),
// HEADS_PER_KV <= ROWS, WORKGROUP 32, 64 or 128. Parts: f16, matrix_*, pages, blocks_*.
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
const ROWS: u32 = WORKGROUP / 2u;
const TOKENS: u32 = ROWS / HEADS_PER_KV;
const HEAD_VEC8: u32 = HEAD_DIM / 8u;   // vec4s of f16
const PITCH: u32 = HEAD_VEC8 + 1u;      // of a position or query in workgroup memory, with padding
const SCORE_PITCH: u32 = 17u;           // vec4s of a row's 64 scores, or of 64 dimensions of its output, and its factor
const WEIGHT_PITCH: u32 = 9u;
const LOADS: u32 = KV_TILE * HEAD_VEC8 / WORKGROUP;  // vec4s of keys, or values, that an invocation stages
const LOWEST: f32 = -1e29;
const GROWTH: f32 = 8.0;
alias Left = subgroup_matrix_left<f16, 16, 16>;
alias Right = subgroup_matrix_right<f16, 16, 16>;
alias Result = subgroup_matrix_result<f32, 16, 16>;
@group(0) @binding(0) var<storage, read_write> y: array<u32>;            // [m, HEADS, HEAD_DIM] f32 or blocks; or partial sums
@group(0) @binding(1) var<storage, read> k_cache: array<vec4<u32>>;      // [KV_HEADS, capacity, HEAD_DIM] f16
@group(0) @binding(2) var<storage, read> v_cache: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> stats: array<vec2<f32>>;  // [m, HEADS, SPLITS] (top, total)
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;            // q [m, HEADS, HEAD_DIM]
@group(0) @binding(8) var<uniform> step: Step;
var<workgroup> kv: array<vec4<u32>, KV_TILE * PITCH>;           // f16 [position][dimension]: queries, then keys and values in turn
var<workgroup> scores: array<vec4<u32>, ROWS * SCORE_PITCH>;    // f32 [row][position], or outputs [row][64 dimensions]
var<workgroup> weights: array<vec4<u32>, ROWS * WEIGHT_PITCH>;  // f16 [row][position]
var<workgroup> grew: u32;                                       // whether outputs must be rescaled
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
fn stage(loads: ptr<function, Loads>, count: u32, index: u32) {  // positions from count on become 0: cells may hold NaN
  for (var i = 0u; i < LOADS; i++) {
    let n = index + i * WORKGROUP;
    kv[n / HEAD_VEC8 * PITCH + n % HEAD_VEC8] = select(vec4<u32>(), (*loads).v[i], n / HEAD_VEC8 < count);
  }
}
fn half8(a: vec4<f32>, b: vec4<f32>) -> vec4<u32> { return vec4<u32>(pack_f16(a.xy), pack_f16(a.zw), pack_f16(b.xy), pack_f16(b.zw)); }
fn score4(at: u32) -> vec4<f32> { return bitcast<vec4<f32>>(scores[at]); }
fn rescale_strip(row0: u32, lane: u32) {  // 64 dimensions of 16 rows, times their factors
  for (var n = lane; n < 256u; n += 32u) {
    let first = (row0 + n / 16u) * SCORE_PITCH;
    scores[first + n % 16u] = bitcast<vec4<u32>>(score4(first + n % 16u) * score4(first + 16u).x);
  }
}
fn max4(v: vec4<f32>) -> f32 { return max(max(v.x, v.y), max(v.z, v.w)); }
fn sum4(v: vec4<f32>) -> f32 { return (v.x + v.y) + (v.z + v.w); }
fn masked(v: vec4<f32>, since: u32, seen: u32) -> vec4<f32> {  // since: positions from the first that the row sees; it wraps around before it
  return select(vec4<f32>(-1e30), v, vec4<u32>(since) + vec4<u32>(0u, 1u, 2u, 3u) < vec4<u32>(seen));
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
fn store_half(half: u32, kv_head: u32, token0: u32, segment: vec4<u32>, split: u32, row0: u32, lane: u32) {  // 64 dimensions of 16 rows
  for (var i = 0u; i < 4u; i++) {
    let n = lane + 32u * i;
    let row = row0 + n / 8u;
    let p = place(row, kv_head, token0, segment);
    let at = row * SCORE_PITCH + n % 8u * 2u;
    let factor = score4(row * SCORE_PITCH + 16u).x;
    let a = score4(at) * factor;
    let b = score4(at + 1u) * factor;
    let to = p.first4 + 16u * half + n % 8u * 2u;
    if (SPLITS == 1u && TO_BLOCKS) {  // 4 neighbouring invocations hold 32 dimensions
      store_block(block_word(to / 8u / BLOCKS, to / 8u % BLOCKS, BLOCKS), BLOCKS, a, b, lane, p.live);
    } else if (p.live) {
      let out = p.first4 * SPLITS + split * (HEAD_DIM / 4u) + 16u * half + n % 8u * 2u;
      store4(out, a);
      store4(out + 1u, b);
    }
  }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32, @builtin(subgroup_id) subgroup: u32) {
  let lane = index % 32u;
  let row0 = subgroup * 16u;
  let segment = step.segment[select(workgroup.z, 0u, ONE_SEGMENT)];  // first row, rows, slot, first position
  let token0 = workgroup.y / SPLITS * TOKENS;  // counted from the segment's first row
  let split = workgroup.y % SPLITS;
  if (token0 >= segment.y) { return; }
  let tile_end = segment.w + min(token0 + TOKENS, segment.y);  // one past the last position that the tile's last token sees
  let first_token_end = segment.w + token0 + 1u;  // one past the last position that the tile's first token sees
  let first = select(0u, (first_token_end - min(WINDOW, first_token_end)) / KV_TILE, WINDOW > 0u);  // kv tile
  let tiles = (tile_end + KV_TILE - 1u) / KV_TILE;
  let split_tiles = (tiles - first + SPLITS - 1u) / SPLITS;
  let begin = first + split * split_tiles;
  let end = min(begin + split_tiles, tiles);
  let head_cell = workgroup.x * step.capacity;  // of the KV head
  for (var n = index; n < ROWS * HEAD_VEC8; n += WORKGROUP) {
    let at = place(n / HEAD_VEC8, workgroup.x, token0, segment).first4 + n % HEAD_VEC8 * 2u;
    const LOG2 = SCALE * 1.4426950408889634;  // exponentials are taken with exp2
    kv[n / HEAD_VEC8 * PITCH + n % HEAD_VEC8] = half8(x[at] * LOG2, x[at + 1u] * LOG2);
  }
  workgroupBarrier();
  let q_at = row0 * PITCH;
  let q0 = subgroupMatrixLoad<Left, row_major>(&kv, q_at, PITCH);
  let q1 = subgroupMatrixLoad<Left, row_major>(&kv, q_at + 2u, PITCH);
  let q2 = subgroupMatrixLoad<Left, row_major>(&kv, q_at + 4u, PITCH);
  let q3 = subgroupMatrixLoad<Left, row_major>(&kv, q_at + 6u, PITCH);
  const HIGH = HEAD_DIM - 64u;  // 0, or where the second 64 dimensions begin
  let q4 = subgroupMatrixLoad<Left, row_major>(&kv, q_at + HIGH / 8u, PITCH);
  let q5 = subgroupMatrixLoad<Left, row_major>(&kv, q_at + HIGH / 8u + 2u, PITCH);
  let q6 = subgroupMatrixLoad<Left, row_major>(&kv, q_at + HIGH / 8u + 4u, PITCH);
  let q7 = subgroupMatrixLoad<Left, row_major>(&kv, q_at + HIGH / 8u + 6u, PITCH);
  workgroupBarrier();
  let row = row0 + lane / 2u;  // of the softmax: the other lane has every second eight of its positions
  let own = place(row, workgroup.x, token0, segment);
  var top = LOWEST;
  var total = 0.0;
  var o0: Result; var o1: Result; var o2: Result; var o3: Result;
  var o4: Result; var o5: Result; var o6: Result; var o7: Result;
  var keys = load_keys(head_cell + cell_of(segment.z, min(begin, tiles - 1u) * KV_TILE), index);
  for (var tile = begin; tile < end; tile++) {
    let p0 = tile * KV_TILE;
    stage(&keys, KV_TILE, index);
    if (index == 0u) { grew = 0u; }
    workgroupBarrier();
    var values = load_values(head_cell + cell_of(segment.z, p0), index);
    var s0: Result; var s1: Result; var s2: Result; var s3: Result;
    s0 = subgroupMatrixMultiplyAccumulate(q0, subgroupMatrixLoad<Right, col_major>(&kv, 0u, PITCH), Result());
    s1 = subgroupMatrixMultiplyAccumulate(q0, subgroupMatrixLoad<Right, col_major>(&kv, 16u * PITCH, PITCH), Result());
    s2 = subgroupMatrixMultiplyAccumulate(q0, subgroupMatrixLoad<Right, col_major>(&kv, 32u * PITCH, PITCH), Result());
    s3 = subgroupMatrixMultiplyAccumulate(q0, subgroupMatrixLoad<Right, col_major>(&kv, 48u * PITCH, PITCH), Result());
    s0 = subgroupMatrixMultiplyAccumulate(q1, subgroupMatrixLoad<Right, col_major>(&kv, 2u, PITCH), s0);
    s1 = subgroupMatrixMultiplyAccumulate(q1, subgroupMatrixLoad<Right, col_major>(&kv, 16u * PITCH + 2u, PITCH), s1);
    s2 = subgroupMatrixMultiplyAccumulate(q1, subgroupMatrixLoad<Right, col_major>(&kv, 32u * PITCH + 2u, PITCH), s2);
    s3 = subgroupMatrixMultiplyAccumulate(q1, subgroupMatrixLoad<Right, col_major>(&kv, 48u * PITCH + 2u, PITCH), s3);
    s0 = subgroupMatrixMultiplyAccumulate(q2, subgroupMatrixLoad<Right, col_major>(&kv, 4u, PITCH), s0);
    s1 = subgroupMatrixMultiplyAccumulate(q2, subgroupMatrixLoad<Right, col_major>(&kv, 16u * PITCH + 4u, PITCH), s1);
    s2 = subgroupMatrixMultiplyAccumulate(q2, subgroupMatrixLoad<Right, col_major>(&kv, 32u * PITCH + 4u, PITCH), s2);
    s3 = subgroupMatrixMultiplyAccumulate(q2, subgroupMatrixLoad<Right, col_major>(&kv, 48u * PITCH + 4u, PITCH), s3);
    s0 = subgroupMatrixMultiplyAccumulate(q3, subgroupMatrixLoad<Right, col_major>(&kv, 6u, PITCH), s0);
    s1 = subgroupMatrixMultiplyAccumulate(q3, subgroupMatrixLoad<Right, col_major>(&kv, 16u * PITCH + 6u, PITCH), s1);
    s2 = subgroupMatrixMultiplyAccumulate(q3, subgroupMatrixLoad<Right, col_major>(&kv, 32u * PITCH + 6u, PITCH), s2);
    s3 = subgroupMatrixMultiplyAccumulate(q3, subgroupMatrixLoad<Right, col_major>(&kv, 48u * PITCH + 6u, PITCH), s3);
    if (HIGH > 0u) {
      s0 = subgroupMatrixMultiplyAccumulate(q4, subgroupMatrixLoad<Right, col_major>(&kv, HIGH / 8u, PITCH), s0);
      s1 = subgroupMatrixMultiplyAccumulate(q4, subgroupMatrixLoad<Right, col_major>(&kv, 16u * PITCH + HIGH / 8u, PITCH), s1);
      s2 = subgroupMatrixMultiplyAccumulate(q4, subgroupMatrixLoad<Right, col_major>(&kv, 32u * PITCH + HIGH / 8u, PITCH), s2);
      s3 = subgroupMatrixMultiplyAccumulate(q4, subgroupMatrixLoad<Right, col_major>(&kv, 48u * PITCH + HIGH / 8u, PITCH), s3);
      s0 = subgroupMatrixMultiplyAccumulate(q5, subgroupMatrixLoad<Right, col_major>(&kv, HIGH / 8u + 2u, PITCH), s0);
      s1 = subgroupMatrixMultiplyAccumulate(q5, subgroupMatrixLoad<Right, col_major>(&kv, 16u * PITCH + HIGH / 8u + 2u, PITCH), s1);
      s2 = subgroupMatrixMultiplyAccumulate(q5, subgroupMatrixLoad<Right, col_major>(&kv, 32u * PITCH + HIGH / 8u + 2u, PITCH), s2);
      s3 = subgroupMatrixMultiplyAccumulate(q5, subgroupMatrixLoad<Right, col_major>(&kv, 48u * PITCH + HIGH / 8u + 2u, PITCH), s3);
      s0 = subgroupMatrixMultiplyAccumulate(q6, subgroupMatrixLoad<Right, col_major>(&kv, HIGH / 8u + 4u, PITCH), s0);
      s1 = subgroupMatrixMultiplyAccumulate(q6, subgroupMatrixLoad<Right, col_major>(&kv, 16u * PITCH + HIGH / 8u + 4u, PITCH), s1);
      s2 = subgroupMatrixMultiplyAccumulate(q6, subgroupMatrixLoad<Right, col_major>(&kv, 32u * PITCH + HIGH / 8u + 4u, PITCH), s2);
      s3 = subgroupMatrixMultiplyAccumulate(q6, subgroupMatrixLoad<Right, col_major>(&kv, 48u * PITCH + HIGH / 8u + 4u, PITCH), s3);
      s0 = subgroupMatrixMultiplyAccumulate(q7, subgroupMatrixLoad<Right, col_major>(&kv, HIGH / 8u + 6u, PITCH), s0);
      s1 = subgroupMatrixMultiplyAccumulate(q7, subgroupMatrixLoad<Right, col_major>(&kv, 16u * PITCH + HIGH / 8u + 6u, PITCH), s1);
      s2 = subgroupMatrixMultiplyAccumulate(q7, subgroupMatrixLoad<Right, col_major>(&kv, 32u * PITCH + HIGH / 8u + 6u, PITCH), s2);
      s3 = subgroupMatrixMultiplyAccumulate(q7, subgroupMatrixLoad<Right, col_major>(&kv, 48u * PITCH + HIGH / 8u + 6u, PITCH), s3);
    }
    let s_at = row0 * SCORE_PITCH;
    subgroupMatrixStore<row_major>(&scores, s_at, s0, SCORE_PITCH); subgroupMatrixStore<row_major>(&scores, s_at + 4u, s1, SCORE_PITCH);
    subgroupMatrixStore<row_major>(&scores, s_at + 8u, s2, SCORE_PITCH); subgroupMatrixStore<row_major>(&scores, s_at + 12u, s3, SCORE_PITCH);
    workgroupBarrier();  // all are done with the keys
    stage(&values, tile_end - min(tile_end, p0), index);
    // the scores of 32 positions, in four eights
    let at = row * SCORE_PITCH + lane % 2u * 2u;
    var a0 = score4(at); var b0 = score4(at + 1u); var a1 = score4(at + 4u); var b1 = score4(at + 5u);
    var a2 = score4(at + 8u); var b2 = score4(at + 9u); var a3 = score4(at + 12u); var b3 = score4(at + 13u);
    if (p0 + KV_TILE > first_token_end || WINDOW > 0u) {  // some row does not see all positions of the kv tile
      let since = p0 + lane % 2u * 8u - own.begin;
      a0 = masked(a0, since, own.seen); b0 = masked(b0, since + 4u, own.seen);
      a1 = masked(a1, since + 16u, own.seen); b1 = masked(b1, since + 20u, own.seen);
      a2 = masked(a2, since + 32u, own.seen); b2 = masked(b2, since + 36u, own.seen);
      a3 = masked(a3, since + 48u, own.seen); b3 = masked(b3, since + 52u, own.seen);
    }
    var most = max4(max(max(max(a0, b0), max(a1, b1)), max(max(a2, b2), max(a3, b3))));
    most = max(most, subgroupShuffleXor(most, 1u));
    let old = top;
    if (most > top + GROWTH) { top = most; }
    if (top != old && tile > begin) { grew = 1u; }
    let rescale = exp2(old - top);
    a0 = exp2(a0 - top); b0 = exp2(b0 - top); a1 = exp2(a1 - top); b1 = exp2(b1 - top);
    a2 = exp2(a2 - top); b2 = exp2(b2 - top); a3 = exp2(a3 - top); b3 = exp2(b3 - top);
    total = total * rescale + sum4(((a0 + b0) + (a1 + b1)) + ((a2 + b2) + (a3 + b3)));
    let w_at = row * WEIGHT_PITCH + lane % 2u;
    weights[w_at] = half8(a0, b0); weights[w_at + 2u] = half8(a1, b1); weights[w_at + 4u] = half8(a2, b2); weights[w_at + 6u] = half8(a3, b3);
    if (workgroupUniformLoad(&grew) != 0u) {  // with its barriers: weights and values are there
      if (lane % 2u == 0u) { scores[row * SCORE_PITCH + 16u] = vec4<u32>(bitcast<u32>(rescale)); }
      subgroupMatrixStore<row_major>(&scores, s_at, o0, SCORE_PITCH); subgroupMatrixStore<row_major>(&scores, s_at + 4u, o1, SCORE_PITCH);
      subgroupMatrixStore<row_major>(&scores, s_at + 8u, o2, SCORE_PITCH); subgroupMatrixStore<row_major>(&scores, s_at + 12u, o3, SCORE_PITCH);
      workgroupBarrier();
      rescale_strip(row0, lane);
      workgroupBarrier();
      o0 = subgroupMatrixLoad<Result, row_major>(&scores, s_at, SCORE_PITCH); o1 = subgroupMatrixLoad<Result, row_major>(&scores, s_at + 4u, SCORE_PITCH);
      o2 = subgroupMatrixLoad<Result, row_major>(&scores, s_at + 8u, SCORE_PITCH); o3 = subgroupMatrixLoad<Result, row_major>(&scores, s_at + 12u, SCORE_PITCH);
      if (HIGH > 0u) {
        workgroupBarrier();
        subgroupMatrixStore<row_major>(&scores, s_at, o4, SCORE_PITCH); subgroupMatrixStore<row_major>(&scores, s_at + 4u, o5, SCORE_PITCH);
        subgroupMatrixStore<row_major>(&scores, s_at + 8u, o6, SCORE_PITCH); subgroupMatrixStore<row_major>(&scores, s_at + 12u, o7, SCORE_PITCH);
        workgroupBarrier();
        rescale_strip(row0, lane);
        workgroupBarrier();
        o4 = subgroupMatrixLoad<Result, row_major>(&scores, s_at, SCORE_PITCH); o5 = subgroupMatrixLoad<Result, row_major>(&scores, s_at + 4u, SCORE_PITCH);
        o6 = subgroupMatrixLoad<Result, row_major>(&scores, s_at + 8u, SCORE_PITCH); o7 = subgroupMatrixLoad<Result, row_major>(&scores, s_at + 12u, SCORE_PITCH);
      }
    }
    keys = load_keys(head_cell + cell_of(segment.z, min(tile + 1u, tiles - 1u) * KV_TILE), index);
    for (var t = 0u; t < 4u; t++) {  // 16 positions each
      let a = subgroupMatrixLoad<Left, row_major>(&weights, row0 * WEIGHT_PITCH + 2u * t, WEIGHT_PITCH);
      let v_at = 16u * t * PITCH;
      o0 = subgroupMatrixMultiplyAccumulate(a, subgroupMatrixLoad<Right, row_major>(&kv, v_at, PITCH), o0);
      o1 = subgroupMatrixMultiplyAccumulate(a, subgroupMatrixLoad<Right, row_major>(&kv, v_at + 2u, PITCH), o1);
      o2 = subgroupMatrixMultiplyAccumulate(a, subgroupMatrixLoad<Right, row_major>(&kv, v_at + 4u, PITCH), o2);
      o3 = subgroupMatrixMultiplyAccumulate(a, subgroupMatrixLoad<Right, row_major>(&kv, v_at + 6u, PITCH), o3);
      if (HIGH > 0u) {
        o4 = subgroupMatrixMultiplyAccumulate(a, subgroupMatrixLoad<Right, row_major>(&kv, v_at + HIGH / 8u, PITCH), o4);
        o5 = subgroupMatrixMultiplyAccumulate(a, subgroupMatrixLoad<Right, row_major>(&kv, v_at + HIGH / 8u + 2u, PITCH), o5);
        o6 = subgroupMatrixMultiplyAccumulate(a, subgroupMatrixLoad<Right, row_major>(&kv, v_at + HIGH / 8u + 4u, PITCH), o6);
        o7 = subgroupMatrixMultiplyAccumulate(a, subgroupMatrixLoad<Right, row_major>(&kv, v_at + HIGH / 8u + 6u, PITCH), o7);
      }
    }
    workgroupBarrier();
  }
  let all = total + subgroupShuffleXor(total, 1u);
  if (lane % 2u == 0u) {
    scores[row * SCORE_PITCH + 16u] = vec4<u32>(bitcast<u32>(select(1.0, 1.0 / all, SPLITS == 1u)));
    if (SPLITS > 1u && own.live) { stats[own.first4 / (HEAD_DIM / 4u) * SPLITS + split] = vec2<f32>(top * 0.6931471805599453, all); }
  }
  let s_at = row0 * SCORE_PITCH;
  subgroupMatrixStore<row_major>(&scores, s_at, o0, SCORE_PITCH); subgroupMatrixStore<row_major>(&scores, s_at + 4u, o1, SCORE_PITCH);
  subgroupMatrixStore<row_major>(&scores, s_at + 8u, o2, SCORE_PITCH); subgroupMatrixStore<row_major>(&scores, s_at + 12u, o3, SCORE_PITCH);
  workgroupBarrier();
  store_half(0u, workgroup.x, token0, segment, split, row0, lane);
  if (HIGH > 0u) {
    workgroupBarrier();
    subgroupMatrixStore<row_major>(&scores, s_at, o4, SCORE_PITCH); subgroupMatrixStore<row_major>(&scores, s_at + 4u, o5, SCORE_PITCH);
    subgroupMatrixStore<row_major>(&scores, s_at + 8u, o6, SCORE_PITCH); subgroupMatrixStore<row_major>(&scores, s_at + 12u, o7, SCORE_PITCH);
    workgroupBarrier();
    store_half(1u, workgroup.x, token0, segment, split, row0, lane);
  }
}
