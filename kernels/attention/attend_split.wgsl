// Attention of one token, or a few, over a long cache. A workgroup takes one kv head and one of the splits of a token's
// context; its subgroups are (query head of the group) x STRANDS, so K and V come from memory once for all heads that
// share them. Within a subgroup TEAM lanes own a position and read its key and value along head_dim, 16 bytes each; every
// team keeps its own online softmax, so the loop has no barrier; they are joined at the end, through little workgroup
// memory (more makes the GPU rearrange its caches between kernels, 1 to 3 us a time on an H200).
// One split: writes the heads (as int8 records with I8). Several: writes (sum, top, total) for attend_merge.
// Parts: half, kv8, record. Needs HEAD_DIM % (8 * TEAM) == 0, SUBGROUP % TEAM == 0.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
const HEADS: u32 = 1u;
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 64u;
const WINDOW: u32 = 0u;  // a token sees the last WINDOW positions, its own included; 0: all
const SCALE: f32 = 1.0;
const SUBGROUP: u32 = 32u;
const TEAM: u32 = 8u;     // lanes that share a position
const TAKES: u32 = 4u;    // positions of a team that are on their way together
const STRANDS: u32 = 2u;  // subgroups per query head, a power of two
const I8: bool = false;
const PARTIAL: bool = false;  // leaves partial sums of one split, too
const GROUP_HEADS: u32 = HEADS / KV_HEADS;
const WORKGROUP: u32 = GROUP_HEADS * STRANDS * SUBGROUP;  // or more: the rest is idle
const OCTS: u32 = HEAD_DIM / 8u / TEAM;          // runs of 8 dimensions that a lane owns: run lane + TEAM * i
const STRIDE: u32 = STRANDS * SUBGROUP / TEAM;  // from a position of a team to its next
@group(0) @binding(0) var<storage, read_write> y: array<u32>;              // [m, HEADS, HEAD_DIM] f32 or records; or partial sums, a gap after each layer's
@group(0) @binding(3) var<storage, read_write> stats: array<vec2<f32>>;    // [layers or m, HEADS, splits] (top, total), likewise
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;              // q [layers or m, HEADS, HEAD_DIM], likewise
@group(0) @binding(8) var<uniform> step: Step;
const HALF: u32 = max(STRANDS / 2u, 1u);
var<workgroup> half_top: array<f32, GROUP_HEADS * HALF>;
var<workgroup> half_total: array<f32, GROUP_HEADS * HALF>;
var<workgroup> half_sum: array<vec4<f32>, GROUP_HEADS * HALF * HEAD_DIM / 4u>;
fn put4(i: u32, v: vec4<f32>) {
  let u = bitcast<vec4<u32>>(v);
  y[4u * i] = u.x; y[4u * i + 1u] = u.y; y[4u * i + 2u] = u.z; y[4u * i + 3u] = u.w;
}
fn quad_of(i: u32, lane: u32) -> u32 { return 2u * (TEAM * (i / 2u) + lane) + i % 2u; }  // of acc[i], in the head
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) index: u32) {
  let subgroup = index / SUBGROUP;
  let local_head = min(subgroup / STRANDS, GROUP_HEADS - 1u);
  let idle = subgroup >= GROUP_HEADS * STRANDS;
  let head = (layer() + group.z) * HEADS + group.x * GROUP_HEADS + local_head;  // of all layers' or tokens' heads
  let lane = index % TEAM;
  let end = step.pos + group.z + 1u;
  let begin = select(0u, end - min(WINDOW, end), WINDOW > 0u);
  let share = (end - begin + groups.y - 1u) / groups.y;
  let last = min(begin + (group.y + 1u) * share, end);
  let base = later() + (layer() * KV_HEADS + group.x) * step.capacity;
  var q: array<vec4<f32>, 2u * OCTS>;
  var acc: array<vec4<f32>, 2u * OCTS>;
  for (var i = 0u; i < OCTS; i++) {
    let j = later() + layer() * (GAP / 4u) + head * (HEAD_DIM / 4u) + 2u * (TEAM * i + lane);
    q[2u * i] = x[j] * SCALE;
    q[2u * i + 1u] = x[j + 1u] * SCALE;
    acc[2u * i] = vec4<f32>();
    acc[2u * i + 1u] = vec4<f32>();
  }
  var top = -1e30;
  var total = 0.0;
  let first = begin + group.y * share + subgroup % STRANDS * (SUBGROUP / TEAM) + index % SUBGROUP / TEAM;
  let rounds = (share + TAKES * STRIDE - 1u) / (TAKES * STRIDE);  // the same for all lanes: they shuffle together
  for (var r = 0u; r < rounds; r++) {
    let p = first + r * TAKES * STRIDE;
    var keys: array<Oct, TAKES * OCTS>;
    var values: array<Oct, TAKES * OCTS>;  // loaded before the scores are known: both wait for memory once
    for (var t = 0u; t < TAKES; t++) {
      let row = (base + min(p + t * STRIDE, end - 1u)) * (HEAD_DIM / 8u) + lane;
      for (var i = 0u; i < OCTS; i++) {
        keys[t * OCTS + i] = key_oct(row + TEAM * i);
        values[t * OCTS + i] = value_oct(row + TEAM * i);
      }
    }
    var s = array<f32, TAKES>();
    for (var t = 0u; t < TAKES; t++) {
      for (var i = 0u; i < OCTS; i++) {
        let k = widen(keys[t * OCTS + i]);
        s[t] += dot(q[2u * i], k[0]) + dot(q[2u * i + 1u], k[1]);
      }
    }
    for (var d = 1u; d < TEAM; d <<= 1u) {
      for (var t = 0u; t < TAKES; t++) { s[t] += subgroupShuffleXor(s[t], d); }
    }
    var peak = top;
    for (var t = 0u; t < TAKES; t++) {
      s[t] = select(-1e30, s[t], p + t * STRIDE < last);
      peak = max(peak, s[t]);
    }
    let keep = exp(top - peak);
    top = peak;
    total *= keep;
    for (var i = 0u; i < 2u * OCTS; i++) { acc[i] *= keep; }
    for (var t = 0u; t < TAKES; t++) {
      let e = select(0.0, exp(s[t] - peak), p + t * STRIDE < last);
      total += e;
      for (var i = 0u; i < OCTS; i++) {
        let v = widen(values[t * OCTS + i]);
        acc[2u * i] += e * v[0];
        acc[2u * i + 1u] += e * v[1];
      }
    }
  }
  // join the positions of the subgroup, then the strands of the head
  var peak = top;
  for (var d = TEAM; d < SUBGROUP; d <<= 1u) { peak = max(peak, subgroupShuffleXor(peak, d)); }
  let scale = exp(top - peak);
  total *= scale;
  for (var d = TEAM; d < SUBGROUP; d <<= 1u) { total += subgroupShuffleXor(total, d); }
  top = peak;
  for (var i = 0u; i < 2u * OCTS; i++) {
    acc[i] *= scale;
    for (var d = TEAM; d < SUBGROUP; d <<= 1u) { acc[i] += subgroupShuffleXor(acc[i], d); }
  }
  let strand = subgroup % STRANDS;
  for (var half = STRANDS / 2u; half > 0u; half >>= 1u) {  // the upper half of the strands hands over to the lower
    let slot = local_head * HALF + strand % half;
    if (!idle && strand >= half && strand < 2u * half && index % SUBGROUP < TEAM) {
      half_top[slot] = top;
      half_total[slot] = total;
      for (var i = 0u; i < 2u * OCTS; i++) { half_sum[slot * (HEAD_DIM / 4u) + quad_of(i, lane)] = acc[i]; }
    }
    workgroupBarrier();
    if (strand < half) {
      let both = max(top, half_top[slot]);
      let own = exp(top - both);
      let other = exp(half_top[slot] - both);
      top = both;
      total = total * own + half_total[slot] * other;
      for (var i = 0u; i < 2u * OCTS; i++) { acc[i] = acc[i] * own + half_sum[slot * (HEAD_DIM / 4u) + quad_of(i, lane)] * other; }
    }
    workgroupBarrier();
  }
  if (strand > 0u || idle) { return; }
  let first_team = index % SUBGROUP < TEAM;
  if (PARTIAL || groups.y > 1u) {
    let at = head * groups.y + group.y;
    let quad = layer() * (GAP / 4u) + at * (HEAD_DIM / 4u);
    for (var i = 0u; i < 2u * OCTS; i++) { if (first_team) { put4(quad + quad_of(i, lane), acc[i]); } }
    if (index % SUBGROUP == 0u) { stats[layer() * (GAP / 2u) + at] = vec2<f32>(top, total); }
    return;
  }
  for (var i = 0u; i < OCTS; i++) {
    let quad = head * (HEAD_DIM / 4u) + quad_of(2u * i, lane);
    if (I8) {  // 4 lanes hold 32 dimensions
      let r = make_record(acc[2u * i] / total, acc[2u * i + 1u] / total, index);
      let at = 12u * (quad / 8u) + index % 4u;
      if (first_team) { y[at] = r.even; y[at + 4u] = r.odd; y[at + 8u] = r.scale; }
    } else if (first_team) {
      put4(quad, acc[2u * i] / total);
      put4(quad + 1u, acc[2u * i + 1u] / total);
    }
  }
}
