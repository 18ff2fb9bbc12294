// Role best_tokens: best_tokens(k, index) leaves the k best tokens of a segment's logits in sorted[0..k), the likeliest
// first, among equal logits the lowest id.
// The largest logit of every CANDIDATE_ROWS logits (a run) is a candidate. The k best tokens lie in the runs of the k best
// candidates, and none is below the last of these: a binary search for its key finds them without sorting the vocabulary.
// Where more than MAX_FOUND tokens are left (many equal ones, few good runs), a second search finds the k-th best token.
// Every invocation of the workgroup calls it, after begin_segment. Needs 1 <= k <= min(MAX_TOP_K, VOCAB).
const VOCAB: u32 = 1u;
const CANDIDATE_ROWS: u32 = 64u;  // logits of a run
const CANDIDATES: u32 = 1u;       // runs of a segment
const MAX_TOP_K: u32 = 256u;
const MAX_FOUND: u32 = 512u;
const WORKGROUP: u32 = 256u;
@group(0) @binding(4) var<storage, read_write> logits: array<f32>;            // [segments, VOCAB]
@group(0) @binding(5) var<storage, read_write> candidates: array<vec2<u32>>;  // [segments, CANDIDATES] (bits of the f32 logit, index)
var<workgroup> count: atomic<u32>;                  // 0 between calls of total
var<workgroup> filled: atomic<u32>;                 // entries of found
var<workgroup> sum: u32;
var<workgroup> partials: array<f32, WORKGROUP>;
var<workgroup> partial_sum: f32;
var<workgroup> runs: array<u32, MAX_TOP_K>;
var<workgroup> found: array<vec2<u32>, MAX_FOUND>;  // (key, id), unordered
var<workgroup> sorted: array<vec2<u32>, MAX_TOP_K>;
var<private> logit0: u32;      // the segment's first logit
var<private> candidate0: u32;  // its first candidate
fn begin_segment(segment: u32, index: u32) {
  logit0 = segment * VOCAB;
  candidate0 = segment * CANDIDATES;
  if (index == 0u) { atomicStore(&count, 0u); }
  workgroupBarrier();
}
fn key(v: f32) -> u32 {  // unsigned order = float order; -0 equals 0; 0 for NaN and -inf
  let u = select(bitcast<u32>(v), 0u, bitcast<u32>(v) == 0x80000000u);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u || u == 0xFF800000u) { return 0u; }
  return select(u | 0x80000000u, ~u, (u >> 31u) == 1u);
}
fn value(k: u32) -> f32 { return bitcast<f32>(select(~k, k & 0x7FFFFFFFu, (k >> 31u) == 1u)); }
fn logit_key(token: u32) -> u32 { return key(logits[logit0 + token]); }
fn candidate_key(i: u32) -> u32 {  // 0 for a run without a number
  let candidate = candidates[candidate0 + i];
  return select(key(bitcast<f32>(candidate.x)), 0u, candidate.y == 0xFFFFFFFFu);
}
fn exp_weight(k: u32, top: f32, temperature: f32) -> f32 { return select(exp((value(k) - top) / temperature), 0.0, k == 0u); }
fn total(own: u32, index: u32) -> u32 {  // sum over the workgroup, for all invocations
  if (own > 0u) { atomicAdd(&count, own); }
  workgroupBarrier();
  if (index == 0u) { sum = atomicExchange(&count, 0u); }
  return workgroupUniformLoad(&sum);
}
fn largest(own: u32, index: u32) -> u32 {  // over the workgroup, for all invocations
  atomicMax(&count, own);
  workgroupBarrier();
  if (index == 0u) { sum = atomicExchange(&count, 0u); }
  return workgroupUniformLoad(&sum);
}
fn total_f32(own: f32, index: u32) -> f32 {  // always in the same order; leaves partials as they are
  partials[index] = own;
  workgroupBarrier();
  if (index == 0u) {
    var all = 0.0;
    for (var i = 0u; i < WORKGROUP; i++) { all += partials[i]; }
    partial_sum = all;
  }
  return workgroupUniformLoad(&partial_sum);
}
fn total_weight(top: f32, least_key: u32, index: u32) -> f32 {  // of all tokens of the segment whose key is not below
  var own = 0.0;
  for (var t = index; t < VOCAB; t += WORKGROUP) { let k = logit_key(t); if (k >= least_key) { own += exp_weight(k, top, 1.0); } }
  return total_f32(own, index);
}
fn entry(i: u32, of_runs: bool) -> vec2<u32> {  // (key, id) of a run, or of a token of the runs found; padding has key 0
  if (of_runs) { return vec2<u32>(candidate_key(i), i); }
  let t = runs[i / CANDIDATE_ROWS] * CANDIDATE_ROWS + i % CANDIDATE_ROWS;
  return vec2<u32>(select(0u, logit_key(min(t, VOCAB - 1u)), t < VOCAB), t);
}
fn find(e: vec2<u32>) {
  let i = atomicAdd(&filled, 1u);
  if (i < MAX_FOUND) { found[i] = e; }
}
fn select_best(k: u32, entries: u32, of_runs: bool, index: u32) -> u32 {  // the k best entries, or all, into found; the least key
  if (index == 0u) { atomicStore(&filled, 0u); }
  var threshold = 0u;  // the key of the k-th best, bit by bit
  for (var bit = 0x80000000u; bit > 0u && k < entries; bit >>= 1u) {
    var own = 0u;
    for (var i = index; i < entries; i += WORKGROUP) { if (entry(i, of_runs).x >= (threshold | bit)) { own += 1u; } }
    if (total(own, index) >= k) { threshold |= bit; }
  }
  workgroupBarrier();
  var better = 0u;
  var equal = 0u;
  for (var i = index; i < entries; i += WORKGROUP) {
    let e = entry(i, of_runs);
    if (e.x > threshold) { find(e); better += 1u; }
    if (e.x == threshold) { equal += 1u; }
  }
  let needed = min(k, entries) - total(better, index);
  var last = 0xFFFFFFFFu;  // of equals the lowest ids are taken, up to this one
  if (total(equal, index) > needed) {
    last = 0u;
    for (var bit = 0x80000000u >> countLeadingZeros(VOCAB); bit > 0u; bit >>= 1u) {
      var own = 0u;
      for (var i = index; i < entries; i += WORKGROUP) {
        let e = entry(i, of_runs);
        if (e.x == threshold && e.y < (last | bit)) { own += 1u; }
      }
      if (total(own, index) < needed) { last |= bit; }
    }
  }
  for (var i = index; i < entries; i += WORKGROUP) {
    let e = entry(i, of_runs);
    if (e.x == threshold && e.y <= last) { find(e); }
  }
  workgroupBarrier();
  return threshold;
}
fn best_tokens(k: u32, index: u32) {
  let n_runs = min(k, CANDIDATES);
  let least = select_best(k, CANDIDATES, true, index);
  for (var i = index; i < n_runs; i += WORKGROUP) { runs[i] = found[i].y; }
  if (index == 0u) { atomicStore(&filled, 0u); }
  workgroupBarrier();
  var own = 0u;
  for (var i = index; i < n_runs * CANDIDATE_ROWS; i += WORKGROUP) {
    let e = entry(i, false);
    if (e.x >= least && e.y < VOCAB) { find(e); own += 1u; }
  }
  var n = total(own, index);
  if (n > MAX_FOUND) {
    select_best(k, n_runs * CANDIDATE_ROWS, false, index);
    n = k;
  }
  for (var i = index; i < n; i += WORKGROUP) {  // sort by rank
    let e = found[i];
    var rank = 0u;
    for (var j = 0u; j < n; j++) { rank += select(0u, 1u, found[j].x > e.x || (found[j].x == e.x && found[j].y < e.y)); }
    if (rank < k) { sorted[rank] = e; }
  }
  workgroupBarrier();
}
