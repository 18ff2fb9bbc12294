// Samples the next token of each sequence from logits[segments, VOCAB]: repetition penalty, top-k, top-p, min-p,
// temperature, in llama.cpp's order. Like greedy, it then writes the ring of results, the embedding and the next row.
// The largest logit of every CANDIDATE_ROWS logits (a run) is a candidate. The k best tokens lie in the runs of the k
// best candidates, so that two binary searches for a threshold find them without sorting the vocabulary.
// One workgroup per segment. Needs 1 <= top_k <= MAX_TOP_K.
// Parts: pages; f16, (scales,) weight_* and embed_next, or embed_next_none.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
struct Sampling { temperature: f32, top_p: f32, min_p: f32, penalty: f32, top_k: u32, seed: u32, last_n: u32, oldest: u32 }  // oldest + position: index of the oldest of the last_n tokens, modulo last_n
const VOCAB: u32 = 1u;
const CANDIDATE_ROWS: u32 = 64u;  // logits of a run
const CANDIDATES: u32 = 1u;       // runs of a segment
const RING: u32 = 1u;             // tokens that a ring holds
const RING_WORDS: u32 = 1u;       // from one sequence's ring to the next
const MAX_TOP_K: u32 = 64u;
const MAX_KEPT: u32 = 128u;       // the k best tokens, and others with the same logit as the last of them
const WORKGROUP: u32 = 256u;
@group(0) @binding(1) var<storage, read_write> ring: array<u32>;              // [slots, RING_WORDS]: RING sampled tokens, by the position before theirs; then last_n recent tokens
@group(0) @binding(2) var<storage, read_write> step: Step;
@group(0) @binding(4) var<storage, read_write> logits: array<f32>;            // [segments, VOCAB]
@group(0) @binding(5) var<storage, read_write> candidates: array<vec2<u32>>;  // [segments, CANDIDATES] (bits of the f32 logit, index)
@group(0) @binding(8) var<uniform> sampling: array<Sampling, 64>;             // by sequence slot
var<workgroup> count: atomic<u32>;
var<workgroup> runs: array<u32, MAX_TOP_K>;
var<workgroup> found: array<vec2<u32>, MAX_KEPT>;  // (key, token), unordered
var<workgroup> sorted: array<vec2<u32>, MAX_KEPT>;
var<workgroup> sampled: u32;
var<workgroup> last_row: Row;  // of the segment. The workgroup loads it and `sum` together: barriers depend on them
var<workgroup> sum: u32;
var<private> row: Row;         // the segment's last row
var<private> logit0: u32;      // its first logit
var<private> candidate0: u32;  // its first candidate
var<private> recent0: u32;     // its first recent token
fn key(v: f32) -> u32 {  // unsigned order = float order; NaN counts as the smallest
  let u = bitcast<u32>(v);
  if (v != v) { return 0u; }
  return select(u | 0x80000000u, ~u, (u >> 31u) == 1u);
}
fn value(k: u32) -> f32 { return bitcast<f32>(select(~k, k & 0x7FFFFFFFu, (k >> 31u) == 1u)); }
fn logit_key(token: u32) -> u32 { return key(logits[logit0 + token]); }
fn candidate_key(i: u32) -> u32 { return key(bitcast<f32>(candidates[candidate0 + i].x)); }
fn total(own: u32, index: u32) -> u32 {  // sum over the workgroup, for all invocations; count is 0 before and after it
  if (own > 0u) { atomicAdd(&count, own); }
  workgroupBarrier();
  if (index == 0u) { sum = atomicExchange(&count, 0u); }
  return workgroupUniformLoad(&sum);
}
fn total_so_far() -> u32 {  // of what the workgroup has counted, for all invocations
  workgroupBarrier();
  let so_far = atomicLoad(&count);
  workgroupBarrier();
  return so_far;
}
fn best_of_run(run: u32) -> vec2<u32> {
  var top = vec2<u32>(0u, run * CANDIDATE_ROWS);
  for (var i = run * CANDIDATE_ROWS; i < min((run + 1u) * CANDIDATE_ROWS, VOCAB); i++) { let k = logit_key(i); if (k > top.x) { top = vec2<u32>(k, i); } }
  return vec2<u32>(bitcast<u32>(value(top.x)), top.y);
}
fn penalise(index: u32) {
  let s = sampling[row.slot];
  for (var i = index; i < s.last_n; i += WORKGROUP) {
    let t = ring[recent0 + i];
    var first = t < VOCAB;  // a token is penalised once, however often it occurred
    for (var j = 0u; j < i; j++) { first = first && ring[recent0 + j] != t; }
    if (first) { let v = logits[logit0 + t]; logits[logit0 + t] = select(v * s.penalty, v / s.penalty, v > 0.0); }
  }
  storageBarrier();
  workgroupBarrier();
  for (var i = index; i < s.last_n; i += WORKGROUP) {
    let t = ring[recent0 + i];
    if (t < VOCAB) { candidates[candidate0 + t / CANDIDATE_ROWS] = best_of_run(t / CANDIDATE_ROWS); }
  }
  storageBarrier();
  workgroupBarrier();
}
fn random() -> f32 {  // of (seed, position): the same seed gives the same text, however steps are submitted
  var h = sampling[row.slot].seed ^ ((row.position + 1u) * 2654435761u);
  h = h * 747796405u + 2891336453u;
  h = ((h >> ((h >> 28u) + 4u)) ^ h) * 277803737u;
  h = (h >> 22u) ^ h;
  h = h * 747796405u + 2891336453u;
  h = ((h >> ((h >> 28u) + 4u)) ^ h) * 277803737u;
  return f32(((h >> 22u) ^ h) >> 8u) / 16777216.0;
}
fn sample_sorted(n: u32) -> u32 {  // from sorted[0..n), likeliest first
  let s = sampling[row.slot];
  let top = value(sorted[0].x);
  var weight_sum = 0.0;
  for (var i = 0u; i < n; i++) { weight_sum += exp(value(sorted[i].x) - top); }
  var n_kept = 0u;
  var cumulative = 0.0;  // probability of the tokens kept so far
  while (n_kept < n) {
    let probability = exp(value(sorted[n_kept].x) - top) / weight_sum;
    if (n_kept > 0u && (cumulative >= s.top_p || probability < s.min_p / weight_sum)) { break; }
    cumulative += probability;
    n_kept += 1u;
  }
  weight_sum = 0.0;
  for (var i = 0u; i < n_kept; i++) { weight_sum += exp((value(sorted[i].x) - top) / s.temperature); }
  var remaining = random() * weight_sum;
  for (var i = 0u; i < n_kept; i++) {
    remaining -= exp((value(sorted[i].x) - top) / s.temperature);
    if (remaining < 0.0) { return sorted[i].y; }
  }
  return sorted[n_kept - 1u].y;
}
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let segment = workgroup.x;
  let first_row = step.segment[segment].x;
  if (index == 0u) {
    last_row = step.row[first_row + step.segment[segment].y - 1u];
    atomicStore(&count, 0u);
  }
  let own_row = workgroupUniformLoad(&last_row);
  row = own_row;
  logit0 = segment * VOCAB;
  candidate0 = segment * CANDIDATES;
  recent0 = row.slot * RING_WORDS + RING;
  let s = sampling[own_row.slot];
  if (s.penalty != 1.0) { penalise(index); }
  let k = min(s.top_k, VOCAB);
  // the key of the k-th best run, bit by bit; then the runs that are not below it
  var run_threshold = 0u;
  for (var bit = 0x80000000u; bit > 0u && k < CANDIDATES; bit >>= 1u) {
    var own = 0u;
    for (var i = index; i < CANDIDATES; i += WORKGROUP) { if (candidate_key(i) >= (run_threshold | bit)) { own += 1u; } }
    if (total(own, index) >= k) { run_threshold |= bit; }
  }
  for (var i = index; i < CANDIDATES; i += WORKGROUP) {
    if (candidate_key(i) > run_threshold) { runs[min(atomicAdd(&count, 1u), MAX_TOP_K - 1u)] = i; }
  }
  let better_runs = total_so_far();  // fewer than k, unless all are taken; equal ones fill the rest
  for (var i = index; i < CANDIDATES; i += WORKGROUP) {
    if (candidate_key(i) == run_threshold) { let entry = atomicAdd(&count, 1u); if (entry < MAX_TOP_K) { runs[entry] = i; } }
  }
  if (total_so_far() > MAX_TOP_K && index == 0u) {  // the first of them, so that a seed always gives the same text
    var entry = better_runs;
    for (var i = 0u; entry < MAX_TOP_K; i++) { if (candidate_key(i) == run_threshold) { runs[entry] = i; entry += 1u; } }
  }
  let in_runs = min(total(0u, index), MAX_TOP_K) * CANDIDATE_ROWS;
  // the key of the k-th best token of these runs; then the tokens that are not below it
  var token_threshold = 0u;
  for (var bit = 0x80000000u; bit > 0u; bit >>= 1u) {
    var own = 0u;
    for (var i = index; i < in_runs; i += WORKGROUP) {
      let t = runs[i / CANDIDATE_ROWS] * CANDIDATE_ROWS + i % CANDIDATE_ROWS;
      if (t < VOCAB && logit_key(min(t, VOCAB - 1u)) >= (token_threshold | bit)) { own += 1u; }
    }
    if (total(own, index) >= k) { token_threshold |= bit; }
  }
  for (var i = index; i < in_runs; i += WORKGROUP) {
    let t = runs[i / CANDIDATE_ROWS] * CANDIDATE_ROWS + i % CANDIDATE_ROWS;
    let key_t = logit_key(min(t, VOCAB - 1u));
    if (t < VOCAB && key_t > token_threshold) { found[min(atomicAdd(&count, 1u), MAX_KEPT - 1u)] = vec2<u32>(key_t, t); }
  }
  let better = total_so_far();  // fewer than k; equal ones fill the rest
  for (var i = index; i < in_runs; i += WORKGROUP) {
    let t = runs[i / CANDIDATE_ROWS] * CANDIDATE_ROWS + i % CANDIDATE_ROWS;
    if (t < VOCAB && logit_key(min(t, VOCAB - 1u)) == token_threshold) {
      let entry = atomicAdd(&count, 1u);
      if (entry < MAX_KEPT) { found[entry] = vec2<u32>(token_threshold, t); }
    }
  }
  if (total_so_far() > MAX_KEPT && index == 0u) {
    var entry = better;
    for (var t = 0u; entry < MAX_KEPT && t < VOCAB; t++) {
      if (logit_key(t) == token_threshold) { found[entry] = vec2<u32>(token_threshold, t); entry += 1u; }
    }
  }
  workgroupBarrier();
  let n = min(atomicLoad(&count), MAX_KEPT);
  for (var i = index; i < n; i += WORKGROUP) {  // sort by rank
    var rank = 0u;
    for (var j = 0u; j < n; j++) {
      let precedes = found[j].x > found[i].x || (found[j].x == found[i].x && found[j].y < found[i].y);
      rank += select(0u, 1u, precedes);
    }
    sorted[rank] = found[i];
  }
  workgroupBarrier();
  if (index == 0u) { sampled = sample_sorted(min(n, k)); }
  workgroupBarrier();
  let token = sampled;
  embed_next(token, segment, index);
  if (index > 0u) { return; }
  ring[row.slot * RING_WORDS + row.position % RING] = token;
  if (s.last_n > 0u) { ring[recent0 + (s.oldest + row.position) % s.last_n] = token; }
  step.row[first_row] = Row(row.slot, row.position + 1u, token, cell_of(row.slot, row.position + 1u));
  step.segment[segment] = vec4<u32>(first_row, 1u, row.slot, row.position + 1u);
  if (segment == 0u) { step.rows = step.segments; }
}
