// Samples the next token of each of the first segments from logits[segments, VOCAB]: logit bias, penalties, top-k, top-p,
// min-p, temperature, in llama.cpp's order. Like greedy, it then writes the ring of results, the embedding and the next row.
// A random number selects among the tokens that are left, the likeliest first. Where top-k lets more pass than MAX_TOP_K, and
// top-p and min-p leave as many, it selects in the order of ids, which needs no sorting.
// One workgroup per segment. Needs nothing.
// Parts: pages; best_tokens; f16, (scales,) weight_* and embed_next, or embed_next_none.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
struct Sampling { temperature: f32, top_p: f32, min_p: f32, penalty: f32, presence: f32, frequency: f32, top_k: u32, seed: u32, last_n: u32, biases: u32, masked: u32, logprobs: u32 }  // see engine/device_sampler.py
const VOCAB: u32 = 1u;
const CANDIDATE_ROWS: u32 = 64u;  // logits of a run
const CANDIDATES: u32 = 1u;       // runs of a segment
const RING: u32 = 1u;             // tokens that a ring holds
const RING_WORDS: u32 = 1u;       // from one sequence's ring to the next
const CHANGES: u32 = 1u;          // first word of the changes in the ring's buffer: one binding more would be too many
const MAX_TOP_K: u32 = 256u;
const MAX_RECENT: u32 = 1024u;    // longest window of the penalties
const MAX_BIASES: u32 = 300u;     // as many as OpenAI's API takes
const MAX_CHANGED: u32 = MAX_BIASES + MAX_RECENT;
const CHANGE_WORDS: u32 = MAX_RECENT + 2u * MAX_BIASES + MAX_CHANGED;
const WORKGROUP: u32 = 256u;       // at most MAX_TOP_K
const CHUNK: u32 = (VOCAB + WORKGROUP - 1u) / WORKGROUP;  // tokens of an invocation, in the order of ids
const LOWEST: f32 = -3.4e38;      // of a token that must not come
@group(0) @binding(1) var<storage, read_write> ring: array<u32>;   // [slots, RING_WORDS]: RING sampled tokens by position, then the bits of their logits; from CHANGES on [slots, CHANGE_WORDS]: recent tokens by position % last_n, (token, bias), logits before the changes
@group(0) @binding(2) var<storage, read_write> step: Step;
@group(0) @binding(8) var<uniform> sampling: array<Sampling, 64>;  // by sequence slot
var<workgroup> weights: array<vec2<f32>, MAX_TOP_K>;  // of sorted tokens: at temperature 1, at the row's
var<workgroup> own_segment: vec4<u32>;  // first row, rows, slot, first position. Barriers depend on it
var<workgroup> n_kept: u32;
var<workgroup> sampled: u32;
var<workgroup> sampled_logit: u32;      // its bits, before the changes
fn best_of_run(run: u32) -> vec2<u32> {
  var top = vec2<u32>(0u, run * CANDIDATE_ROWS);
  for (var i = run * CANDIDATE_ROWS; i < min((run + 1u) * CANDIDATE_ROWS, VOCAB); i++) { let k = logit_key(i); if (k > top.x) { top = vec2<u32>(k, i); } }
  return vec2<u32>(bitcast<u32>(value(top.x)), top.y);
}
fn changed(s: Sampling, first: u32, i: u32) -> u32 {  // the i-th token: of the biases, then recent ones
  return ring[first + select(i - s.biases, MAX_RECENT + 2u * i, i < s.biases)];
}
fn change(s: Sampling, first: u32, index: u32) {  // bias and penalties
  let n = s.biases + s.last_n;
  for (var i = index; i < n; i += WORKGROUP) {
    let t = changed(s, first, i);
    if (t < VOCAB) { ring[first + MAX_RECENT + 2u * MAX_BIASES + i] = bitcast<u32>(logits[logit0 + t]); }
  }
  storageBarrier();
  workgroupBarrier();
  for (var i = index; i < n; i += WORKGROUP) {
    let t = changed(s, first, i);
    var is_first = t < VOCAB;  // a token is changed once, however often it is here
    for (var j = 0u; j < i && is_first; j++) { is_first = changed(s, first, j) != t; }
    if (is_first) {
      var v = logits[logit0 + t];
      if (i < s.biases) { v = max(v + bitcast<f32>(ring[first + MAX_RECENT + 2u * i + 1u]), LOWEST); }
      var times = 0u;
      for (var j = s.biases; j < n; j++) { times += select(0u, 1u, changed(s, first, j) == t); }
      if (times > 0u && v > LOWEST) { v = select(v * s.penalty, v / s.penalty, v > 0.0) - f32(times) * s.frequency - s.presence; }
      logits[logit0 + t] = v;
    }
  }
  storageBarrier();
  workgroupBarrier();
  for (var i = index; i < n; i += WORKGROUP) {
    let t = changed(s, first, i);
    if (t < VOCAB) { candidates[candidate0 + t / CANDIDATE_ROWS] = best_of_run(t / CANDIDATE_ROWS); }
  }
  storageBarrier();
  workgroupBarrier();
}
fn random(seed: u32, position: u32) -> f32 {  // the same seed gives the same text, however steps are submitted
  var h = seed ^ (position * 2654435761u);
  h = h * 747796405u + 2891336453u;
  h = ((h >> ((h >> 28u) + 4u)) ^ h) * 277803737u;
  h = (h >> 22u) ^ h;
  h = h * 747796405u + 2891336453u;
  h = ((h >> ((h >> 28u) + 4u)) ^ h) * 277803737u;
  return f32(((h >> 22u) ^ h) >> 8u) / 16777216.0;
}
fn likely(s: Sampling, n: u32, weight_sum: f32) -> u32 {  // how many of sorted[0..n) top-p and min-p keep
  var kept = 0u;
  var cumulative = 0.0;  // probability of the tokens kept so far
  while (kept < n) {
    let w = weights[kept].x;
    if (kept > 0u && ((s.top_p < 1.0 && cumulative >= s.top_p) || w < s.min_p)) { break; }
    cumulative += w / weight_sum;
    kept += 1u;
  }
  return kept;
}
fn sample_sorted(n: u32, number: f32) -> u32 {  // from sorted[0..n)
  var weight_sum = 0.0;
  for (var i = 0u; i < n; i++) { weight_sum += weights[i].y; }
  var remaining = number * weight_sum;
  var last = 0u;
  for (var i = 0u; i < n; i++) {
    let w = weights[i].y;
    remaining -= w;
    if (remaining < 0.0) { return sorted[i].y; }
    if (w > 0.0) { last = i; }
  }
  return sorted[last].y;
}
fn kept_weight(s: Sampling, k: u32, top: f32, threshold: u32, is_kept_equal: bool) -> f32 {
  let kept = (k > threshold || (k == threshold && is_kept_equal)) && exp_weight(k, top, 1.0) >= s.min_p;
  return select(0.0, exp_weight(k, top, s.temperature), kept);
}
fn least_of_best(k: u32, index: u32) -> vec2<u32> {  // the smallest key of the k best tokens, and how many of them have it
  if (k == VOCAB) { return vec2<u32>(0u, VOCAB); }
  var threshold = 0u;
  for (var bit = 0x80000000u; bit > 0u; bit >>= 1u) {
    var own = 0u;
    for (var t = index; t < VOCAB; t += WORKGROUP) { own += select(0u, 1u, logit_key(t) >= (threshold | bit)); }
    if (total(own, index) >= k) { threshold |= bit; }
  }
  var better = 0u;
  for (var t = index; t < VOCAB; t += WORKGROUP) { better += select(0u, 1u, logit_key(t) > threshold); }
  return vec2<u32>(threshold, k - total(better, index));
}
fn sample_by_id(s: Sampling, top: f32, least: vec2<u32>, weight_sum: f32, number: f32, index: u32) {  // from all tokens that the filters keep
  var threshold = least.x;  // the smallest key that is kept, and how many equal ones of the lowest ids
  var equals_kept = least.y;
  if (s.top_p < 1.0) {
    threshold = 0u;
    if (index == 0u) { sum = sorted[MAX_TOP_K - 1u].x; }
    let highest = workgroupUniformLoad(&sum);  // the sorted tokens do not reach top-p
    var above = 0.0;
    for (var i = 0u; i <= 32u; i++) {
      let bit = select(0u, 0x80000000u >> (i & 31u), i < 32u);  // last, the weight above the threshold
      if (i < 32u && (threshold | bit) > highest) { continue; }
      if (i < 32u && (threshold | bit) <= least.x) { threshold |= bit; continue; }
      above = total_weight(top, select(threshold + 1u, threshold | bit, i < 32u), index);
      if (above >= s.top_p * weight_sum) { threshold |= bit; }
    }
    let wanted = ceil((s.top_p * weight_sum - above) / exp_weight(threshold, top, 1.0));
    equals_kept = u32(clamp(wanted, 1.0, f32(select(VOCAB, least.y, threshold == least.x))));
  }
  let first = index * CHUNK;
  let end = min(first + CHUNK, VOCAB);
  var equals_before = 0u;
  if (threshold > 0u) {
    var own_equals = 0u;
    for (var t = first; t < end; t++) { own_equals += select(0u, 1u, logit_key(t) == threshold); }
    runs[index] = own_equals;
    workgroupBarrier();
    for (var i = 0u; i < index; i++) { equals_before += runs[i]; }
  }
  var equals = equals_before;
  var own = 0.0;
  for (var t = first; t < end; t++) {
    let k = logit_key(t);
    own += kept_weight(s, k, top, threshold, equals < equals_kept);
    equals += select(0u, 1u, k == threshold);
  }
  var remaining = number * total_f32(own, index);
  var chosen = 0u;
  for (var i = 0u; i < WORKGROUP; i++) {  // the invocation in whose tokens the number lies; every one finds the same
    if (partials[i] > 0.0) { chosen = i; if (remaining < partials[i]) { break; } remaining -= partials[i]; }
  }
  equals = equals_before;
  for (var t = first; index == chosen && t < end; t++) {
    let k = logit_key(t);
    let w = kept_weight(s, k, top, threshold, equals < equals_kept);
    equals += select(0u, 1u, k == threshold);
    if (w > 0.0) { sampled = t; remaining -= w; }
    if (remaining < 0.0) { break; }
  }
}
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let segment = workgroup.x;
  if (index == 0u) { own_segment = step.segment[segment]; sampled = 0u; }
  let own = workgroupUniformLoad(&own_segment);
  let slot = own.z;
  let position = own.w + own.y;  // of the new token
  let s = sampling[slot];
  let changes = CHANGES + slot * CHANGE_WORDS;
  let n_changed = s.biases + s.last_n;
  let number = random(s.seed, position);
  begin_segment(segment, index);
  if (n_changed > 0u) { change(s, changes, index); }
  let passed = min(select(s.top_k, VOCAB, s.top_k == 0u), VOCAB);  // by top-k
  let k = min(passed, MAX_TOP_K);
  let by_id = passed > MAX_TOP_K && s.top_p >= 1.0 && s.min_p == 0.0;
  if (by_id) {
    var own_top = 0u;
    for (var i = index; i < CANDIDATES; i += WORKGROUP) { own_top = max(own_top, candidate_key(i)); }
    let top_key = largest(own_top, index);
    if (index == 0u) { sorted[0] = vec2<u32>(top_key, 0u); }
  } else {
    best_tokens(k, index);
  }
  let top = value(workgroupUniformLoad(&sorted[0]).x);
  for (var i = index; i < k && !by_id; i += WORKGROUP) {
    weights[i] = vec2<f32>(exp_weight(sorted[i].x, top, 1.0), exp_weight(sorted[i].x, top, s.temperature));
  }
  workgroupBarrier();
  var least = vec2<u32>(0u);
  var all_weights = 0.0;  // of the tokens that top-k lets pass
  if (passed > MAX_TOP_K) { least = least_of_best(passed, index); }
  if (passed > MAX_TOP_K && s.top_p < 1.0) {
    all_weights = total_weight(top, least.x + 1u, index) + f32(least.y) * exp_weight(least.x, top, 1.0);
  }
  if (index == 0u) {
    var weight_sum = all_weights;
    for (var i = 0u; i < k && passed <= MAX_TOP_K; i++) { weight_sum += weights[i].x; }
    n_kept = MAX_TOP_K;
    if (!by_id) { n_kept = likely(s, k, weight_sum); }
  }
  let kept = workgroupUniformLoad(&n_kept);
  if (passed > MAX_TOP_K && kept == MAX_TOP_K) {
    sample_by_id(s, top, least, all_weights, number, index);
  } else if (index == 0u) {
    sampled = sample_sorted(kept, number);
  }
  workgroupBarrier();
  let token = min(sampled, VOCAB - 1u);
  let valid = sorted[0].x > key(LOWEST) && sorted[0].x < 0xFF800000u;  // else every logit is NaN or not allowed, or one is infinite
  if (index == 0u) { sampled_logit = select(0x7FC00000u, bitcast<u32>(logits[logit0 + token]), valid); }
  workgroupBarrier();
  for (var i = index; i < n_changed; i += WORKGROUP) {  // equal tokens had the same logit
    if (changed(s, changes, i) == token && valid) { sampled_logit = ring[changes + MAX_RECENT + 2u * MAX_BIASES + i]; }
  }
  embed_next(token, segment, index);
  workgroupBarrier();
  if (index > 0u) { return; }
  ring[slot * RING_WORDS + position % RING] = token;
  ring[slot * RING_WORDS + RING + position % RING] = sampled_logit;
  if (s.last_n > 0u) { ring[changes + position % s.last_n] = token; }
  step.row[segment] = Row(slot, position, token, cell_of(slot, position));
  step.segment[segment] = vec4<u32>(segment, 1u, slot, position);
  if (segment == 0u) { step.rows = workgroups.x; step.segments = workgroups.x; }
}
