// y[m, HEADS, HEAD_DIM] = softmax(q K^T) V of one token, of a few, or of many that are of different sequences, over a long context
// that is cut into splits (flash decoding).
// A workgroup takes one KV head, one split of the context and one token. Its subgroups are (query head of the KV head)
// x SUBGROUPS_PER_HEAD, so that K and V come from memory once for all heads that share them. Where that leaves a head few
// subgroups, or cores idle, HEAD_SHARES workgroups share the query heads, and each reads K and V.
// Within a subgroup, LANES_PER_POSITION lanes share a position and read its key and value along head_dim, 16 bytes each (runs).
// They have their own online softmax, so that the loop has no barrier. The end merges all of them through little workgroup
// memory: more makes the GPU reconfigure its caches between kernels, which takes 1 to 3 us on an H200.
// One split: writes the heads as f32, or as blocks with TO_BLOCKS. Several splits, or PARTIAL: writes partial sums and
// (top, total) for attend_merge or prologue_merge: largest score, sum of exp(score - top).
// late_x, repair_x: see parts/late_stores.wgsl.
// Needs HEAD_DIM % (RUN * LANES_PER_POSITION) == 0, SUBGROUP % LANES_PER_POSITION == 0, HEADS / KV_HEADS % HEAD_SHARES == 0.
// Parts: f16, kv_run_*, own_*, heads_*, pages, blocks_*; in a fused kernel also split_count_dynamic.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const HEADS: u32 = 1u;
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 64u;
const WINDOW: u32 = 0u;  // a token sees the last WINDOW positions, its own included; 0: all
const BY_LAYER: bool = false;  // layers of a fused kernel have different windows: see layer_kind
const SCALE: f32 = 1.0;
const SOFT_CAP: f32 = 0.0;  // scores s become SOFT_CAP tanh(s / SOFT_CAP); 0: they do not
const SUBGROUP: u32 = 32u;
const LANES_PER_POSITION: u32 = 8u;  // lanes that share a position
const POSITIONS_IN_FLIGHT: u32 = 4u;  // positions of a lane whose keys and values are loaded together
const SUBGROUPS_PER_HEAD: u32 = 2u;  // subgroups per query head, a power of two
const HEAD_SHARES: u32 = 1u;  // workgroups that share the query heads of a KV head
const TO_BLOCKS: bool = false;
const TOKENS: u32 = 1u;  // rows of a layer in a fused kernel
const RAW: bool = false;  // keys and values follow the queries of a row
const ROW_HEADS: u32 = HEADS + select(0u, 2u * KV_HEADS, RAW);
const PARTIAL: bool = false;  // write partial sums for a single split, too
const MAX_SPLITS: u32 = 16u;  // BY_LAYER: of any layer; from one to the next, for their splits must not overlap
const BLOCKS: u32 = HEADS * HEAD_DIM / 32u;  // blocks of a token
const OWN_HEADS: u32 = HEADS / KV_HEADS / HEAD_SHARES;  // query heads of a workgroup
const WORKGROUP: u32 = OWN_HEADS * SUBGROUPS_PER_HEAD * SUBGROUP;  // or more: the other invocations idle
const LANE_VEC4: u32 = HEAD_DIM / 4u / LANES_PER_POSITION;  // vec4s of a lane
const STRIDE: u32 = SUBGROUPS_PER_HEAD * SUBGROUP / LANES_PER_POSITION;  // from a position of a lane to its next
@group(0) @binding(0) var<storage, read_write> y: array<u32>;            // [m, HEADS, HEAD_DIM] f32; blocks or partial sums, padded after each layer
@group(0) @binding(3) var<storage, read_write> stats: array<vec2<f32>>;  // [layers or m, HEADS, splits] (top, total), padded
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;            // q [layers or m, ROW_HEADS, HEAD_DIM], padded
@group(0) @binding(8) var<uniform> step: Step;
const MERGE_PARTIALS: u32 = max(SUBGROUPS_PER_HEAD / 2u, 1u);
var<workgroup> merge_top: array<f32, OWN_HEADS * MERGE_PARTIALS>;
var<workgroup> merge_total: array<f32, OWN_HEADS * MERGE_PARTIALS>;
var<workgroup> merge_sum: array<vec4<f32>, OWN_HEADS * MERGE_PARTIALS * HEAD_DIM / 4u>;
fn late_x(v: vec4<f32>) -> bool { return false; }
fn repair_x(i: u32) {}
fn store4(i: u32, v: vec4<f32>) {
  let u = bitcast<vec4<u32>>(v);
  y[4u * i] = u.x; y[4u * i + 1u] = u.y; y[4u * i + 2u] = u.z; y[4u * i + 3u] = u.w;
}
fn vec4_of(i: u32, lane: u32) -> u32 { return RUN / 4u * (LANES_PER_POSITION * (i / (RUN / 4u)) + lane) + i % (RUN / 4u); }  // which vec4 of the head acc[i] is
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) index: u32) {
  let subgroup = index / SUBGROUP;
  let local_head = min(subgroup / SUBGROUPS_PER_HEAD, OWN_HEADS - 1u);
  let idle = subgroup >= OWN_HEADS * SUBGROUPS_PER_HEAD;
  let head = (layer() * TOKENS + workgroup.z) * HEADS + workgroup.x * OWN_HEADS + local_head;  // among the heads of all layers or tokens
  let kv_head = workgroup.x / HEAD_SHARES;
  let lane = index % LANES_PER_POSITION;
  let row_slot = step.row[row_index(workgroup.z)].slot;
  let end = step.row[row_index(workgroup.z)].position + 1u;
  let window = select(WINDOW, layer_kind().x, BY_LAYER);
  let begin = select(0u, end - min(window, end), window > 0u);
  let split_length = (end - begin + workgroups.y - 1u) / workgroups.y;
  let split_end = min(begin + (workgroup.y + 1u) * split_length, end);
  let base = opaque_zero() + (layer() * KV_HEADS + kv_head) * step.capacity;
  let own_cell = base + step.row[row_index(workgroup.z)].cell;
  let row_head = head + (layer() * TOKENS + workgroup.z) * (ROW_HEADS - HEADS);
  let q4 = opaque_zero() + layer() * (LINE_PADDING / 4u) + row_head * (HEAD_DIM / 4u);
  var q: LaneDims;
  var acc: LaneDims;
  for (var i = 0u; i < LANE_VEC4; i++) {
    q[i] = x[q4 + vec4_of(i, lane)];
    acc[i] = vec4<f32>();
  }
  var top = -1e30;
  var total = 0.0;
  let first = begin + workgroup.y * split_length + subgroup % SUBGROUPS_PER_HEAD * (SUBGROUP / LANES_PER_POSITION) + index % SUBGROUP / LANES_PER_POSITION;
  let iterations = (split_length + POSITIONS_IN_FLIGHT * STRIDE - 1u) / (POSITIONS_IN_FLIGHT * STRIDE);  // the same for all lanes, which shuffle together
  let own = own_position(first, STRIDE, end, workgroup.z, row_slot);
  let own_row = workgroup.z + min(own, end - 1u) + 1u - end;
  var cells: array<u32, POSITIONS_IN_FLIGHT>;  // looked up an iteration ahead: keys and values do not wait for the table
  for (var t = 0u; t < POSITIONS_IN_FLIGHT; t++) { cells[t] = cell_of(row_slot, min(first + t * STRIDE, end - 1u)); }
  for (var r = 0u; r < iterations; r++) {
    let p = first + r * POSITIONS_IN_FLIGHT * STRIDE;
    var keys: array<RawRun, POSITIONS_IN_FLIGHT * RUNS>;
    var values: array<RawRun, POSITIONS_IN_FLIGHT * RUNS>;  // loaded with the keys: one wait for memory instead of two
    for (var t = 0u; t < POSITIONS_IN_FLIGHT; t++) {
      for (var i = 0u; i < RUNS; i++) {
        keys[t * RUNS + i] = key_run(base + cells[t], LANES_PER_POSITION * i + lane);
        values[t * RUNS + i] = value_run(base + cells[t], LANES_PER_POSITION * i + lane);
      }
    }
    if (r == 0u) {  // what the stage before has stored may be late: keys and values do not wait for it
      store_own(own_cell, kv_head, own_row, lane, workgroup.x % HEAD_SHARES == 0u && workgroup.y == 0u && stores_own(index, own, STRIDE, end));
      var late = false;
      for (var i = 0u; i < LANE_VEC4; i++) { late = late || late_x(q[i]); }
      if (late) {
        for (var i = 0u; i < LANE_VEC4 + uniform_zero(); i++) { repair_x(q4 + vec4_of(i, lane)); }
        for (var i = 0u; i < LANE_VEC4; i++) { q[i] = x[q4 + vec4_of(i, lane)]; }
      }
      turn_query(&q);
      for (var i = 0u; i < LANE_VEC4; i++) { q[i] *= SCALE; }
    }
    for (var t = 0u; t < POSITIONS_IN_FLIGHT; t++) {
      let newest = p + t * STRIDE >= own;  // what store_own has loaded, or past it
      for (var i = 0u; i < RUNS; i++) {
        keys[t * RUNS + i] = newest_key(keys[t * RUNS + i], i, newest);
        values[t * RUNS + i] = newest_value(values[t * RUNS + i], i, newest);
      }
    }
    for (var t = 0u; t < POSITIONS_IN_FLIGHT; t++) { cells[t] = cell_of(row_slot, min(p + (POSITIONS_IN_FLIGHT + t) * STRIDE, end - 1u)); }
    var s = array<f32, POSITIONS_IN_FLIGHT>();
    for (var t = 0u; t < POSITIONS_IN_FLIGHT; t++) {
      for (var i = 0u; i < RUNS; i++) { s[t] += dot_run(&q, i, keys[t * RUNS + i], lane); }
    }
    for (var d = 1u; d < LANES_PER_POSITION; d <<= 1u) {
      for (var t = 0u; t < POSITIONS_IN_FLIGHT; t++) { s[t] += subgroupShuffleXor(s[t], d); }
    }
    var new_top = top;
    for (var t = 0u; t < POSITIONS_IN_FLIGHT; t++) {
      if (SOFT_CAP > 0.0) { s[t] = SOFT_CAP - 2.0 * SOFT_CAP / (1.0 + exp(2.0 * s[t] / SOFT_CAP)); }
      s[t] = select(-1e30, s[t], p + t * STRIDE < split_end);
      new_top = max(new_top, s[t]);
    }
    let rescale = exp(top - new_top);
    top = new_top;
    total *= rescale;
    for (var i = 0u; i < LANE_VEC4; i++) { acc[i] *= rescale; }
    for (var t = 0u; t < POSITIONS_IN_FLIGHT; t++) {
      let e = select(0.0, exp(s[t] - new_top), p + t * STRIDE < split_end);
      total += e;
      for (var i = 0u; i < RUNS; i++) { add_run(&acc, i, e, values[t * RUNS + i], lane); }
    }
  }
  // merge the positions of the subgroup, then the subgroups of the head
  var new_top = top;
  for (var d = LANES_PER_POSITION; d < SUBGROUP; d <<= 1u) { new_top = max(new_top, subgroupShuffleXor(new_top, d)); }
  let scale = exp(top - new_top);
  total *= scale;
  for (var d = LANES_PER_POSITION; d < SUBGROUP; d <<= 1u) { total += subgroupShuffleXor(total, d); }
  top = new_top;
  for (var i = 0u; i < LANE_VEC4; i++) {
    acc[i] *= scale;
    for (var d = LANES_PER_POSITION; d < SUBGROUP; d <<= 1u) { acc[i] += subgroupShuffleXor(acc[i], d); }
  }
  let subgroup_of_head = subgroup % SUBGROUPS_PER_HEAD;
  for (var half = SUBGROUPS_PER_HEAD / 2u; half > 0u; half >>= 1u) {  // the lower half of the subgroups merges the sums of the upper half
    let partial = local_head * MERGE_PARTIALS + subgroup_of_head % half;
    if (!idle && subgroup_of_head >= half && subgroup_of_head < 2u * half && index % SUBGROUP < LANES_PER_POSITION) {
      merge_top[partial] = top;
      merge_total[partial] = total;
      for (var i = 0u; i < LANE_VEC4; i++) { merge_sum[partial * (HEAD_DIM / 4u) + vec4_of(i, lane)] = acc[i]; }
    }
    workgroupBarrier();
    if (subgroup_of_head < half) {
      let merged_top = max(top, merge_top[partial]);
      let own_factor = exp(top - merged_top);
      let other_factor = exp(merge_top[partial] - merged_top);
      top = merged_top;
      total = total * own_factor + merge_total[partial] * other_factor;
      for (var i = 0u; i < LANE_VEC4; i++) { acc[i] = acc[i] * own_factor + merge_sum[partial * (HEAD_DIM / 4u) + vec4_of(i, lane)] * other_factor; }
    }
    workgroupBarrier();
  }
  let merged = subgroup_of_head == 0u && !idle;  // the others go on: all lanes of a subgroup quantise together
  let stores = merged && index % SUBGROUP < LANES_PER_POSITION;
  if (PARTIAL || workgroups.y > 1u) {
    let first = layer() * TOKENS * HEADS;
    let at = select(head * workgroups.y, first * MAX_SPLITS + (head - first) * workgroups.y, BY_LAYER) + workgroup.y;
    let out4 = layer() * (LINE_PADDING / 4u) + at * (HEAD_DIM / 4u);
    for (var i = 0u; i < LANE_VEC4; i++) { if (stores) { store4(out4 + vec4_of(i, lane), acc[i]); } }
    if (merged && index % SUBGROUP == 0u) { stats[layer() * (LINE_PADDING / 2u) + at] = vec2<f32>(top, total); }
    return;
  }
  let first_block = layer() * (block_word(TOKENS, 0u, BLOCKS) + LINE_PADDING);
  for (var i = 0u; i < LANE_VEC4 / 2u; i++) {
    let out4 = head * (HEAD_DIM / 4u) + 2u * (LANES_PER_POSITION * i + lane);
    let result = eight(&acc, i, lane, index);
    if (TO_BLOCKS) {  // 4 lanes hold 32 dimensions
      store_block(first_block + block_word(workgroup.z, out4 / 8u % BLOCKS, BLOCKS), BLOCKS, result[0] / total, result[1] / total, index, stores);
    } else if (stores) {
      store4(out4, result[0] / total);
      store4(out4 + 1u, result[1] / total);
    }
  }
}
