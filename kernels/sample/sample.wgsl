// Draws the next token: repetition penalty, top-k, top-p, min-p, temperature, in llama.cpp's order, then does what pick
// does (next input, ring of results, embedding, position). The logits came with the largest of every RUN rows in `best`:
// the k best tokens lie in the k best runs, so two searches for a threshold find them without sorting the vocabulary.
// One workgroup. Parts: half, (scales,) weight, next_embed or next_none. Needs 1 <= top_k <= MOST.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
struct Sampling { temperature: f32, top_p: f32, min_p: f32, penalty: f32, top_k: u32, seed: u32, last_n: u32, recent: u32 }  // recent: the oldest of last_n
const VOCAB: u32 = 1u;
const RUN: u32 = 64u;
const CANDIDATES: u32 = 1u;  // runs
const RING: u32 = 1u;
const MOST: u32 = 64u;
const KEPT: u32 = 128u;      // the k best and as many more as are equal to the last of them
const WORKGROUP: u32 = 256u;
@group(0) @binding(0) var<storage, read_write> tokens: array<u32>;       // [0] = the next input
@group(0) @binding(1) var<storage, read_write> ring: array<u32>;         // [RING] the picked tokens, oldest overwritten;
                                                                         // then [last_n] tokens the penalty looks at
@group(0) @binding(2) var<storage, read_write> step: Step;
@group(0) @binding(4) var<storage, read_write> logits: array<f32>;
@group(0) @binding(5) var<storage, read_write> best: array<vec2<u32>>;   // [CANDIDATES] (bits of the f32 logit, index)
@group(0) @binding(8) var<uniform> sampling: Sampling;
var<workgroup> count: atomic<u32>;
var<workgroup> runs: array<u32, MOST>;
var<workgroup> found: array<vec2<u32>, KEPT>;   // (key, token), unordered
var<workgroup> sorted: array<vec2<u32>, KEPT>;
var<workgroup> chosen: u32;
fn key(v: f32) -> u32 {  // unsigned order = float order; NaN counts as the smallest
  let u = bitcast<u32>(v);
  if (v != v) { return 0u; }
  return select(u | 0x80000000u, ~u, (u >> 31u) == 1u);
}
fn value(k: u32) -> f32 { return bitcast<f32>(select(~k, k & 0x7FFFFFFFu, (k >> 31u) == 1u)); }
fn total(own: u32, index: u32) -> u32 {  // of the whole workgroup, the same for all
  workgroupBarrier();
  if (index == 0u) { atomicStore(&count, 0u); }
  workgroupBarrier();
  if (own > 0u) { atomicAdd(&count, own); }
  workgroupBarrier();
  let sum = atomicLoad(&count);
  workgroupBarrier();
  return sum;
}
fn run_top(run: u32) -> vec2<u32> {
  var top = vec2<u32>(0u, run * RUN);
  for (var i = run * RUN; i < min((run + 1u) * RUN, VOCAB); i++) { let k = key(logits[i]); if (k > top.x) { top = vec2<u32>(k, i); } }
  return vec2<u32>(bitcast<u32>(value(top.x)), top.y);
}
fn penalise(index: u32) {
  for (var i = index; i < sampling.last_n; i += WORKGROUP) {
    let t = ring[RING + i];
    var first = t < VOCAB;  // a token is penalised once, however often it came
    for (var j = 0u; j < i; j++) { first = first && ring[RING + j] != t; }
    if (first) { let v = logits[t]; logits[t] = select(v * sampling.penalty, v / sampling.penalty, v > 0.0); }
  }
  storageBarrier();
  workgroupBarrier();
  for (var i = index; i < sampling.last_n; i += WORKGROUP) { if (ring[RING + i] < VOCAB) { best[ring[RING + i] / RUN] = run_top(ring[RING + i] / RUN); } }
  storageBarrier();
  workgroupBarrier();
}
fn random() -> f32 {  // of (seed, position): the same text for the same seed, whatever the batches
  var h = sampling.seed ^ ((step.pos + step.m) * 2654435761u);
  h = h * 747796405u + 2891336453u;
  h = ((h >> ((h >> 28u) + 4u)) ^ h) * 277803737u;
  h = (h >> 22u) ^ h;
  h = h * 747796405u + 2891336453u;
  h = ((h >> ((h >> 28u) + 4u)) ^ h) * 277803737u;
  return f32(((h >> 22u) ^ h) >> 8u) / 16777216.0;
}
fn draw(n: u32) -> u32 {  // from sorted[0..n), likeliest first
  let top = value(sorted[0].x);
  var all = 0.0;
  for (var i = 0u; i < n; i++) { all += exp(value(sorted[i].x) - top); }
  var kept = 0u;
  var before = 0.0;  // the share of those already in
  while (kept < n) {
    let share = exp(value(sorted[kept].x) - top) / all;
    if (kept > 0u && (before >= sampling.top_p || share < sampling.min_p / all)) { break; }
    before += share;
    kept += 1u;
  }
  all = 0.0;
  for (var i = 0u; i < kept; i++) { all += exp((value(sorted[i].x) - top) / sampling.temperature); }
  var left = random() * all;
  for (var i = 0u; i < kept; i++) {
    left -= exp((value(sorted[i].x) - top) / sampling.temperature);
    if (left < 0.0) { return sorted[i].y; }
  }
  return sorted[kept - 1u].y;
}
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(local_invocation_index) index: u32) {
  if (sampling.penalty != 1.0) { penalise(index); }
  let k = min(sampling.top_k, VOCAB);
  // the k-th best run, and the runs from there on
  var least = 0u;
  for (var bit = 0x80000000u; bit > 0u && k < CANDIDATES; bit >>= 1u) {
    var own = 0u;
    for (var i = index; i < CANDIDATES; i += WORKGROUP) { if (key(bitcast<f32>(best[i].x)) >= (least | bit)) { own += 1u; } }
    if (total(own, index) >= k) { least |= bit; }
  }
  let zeroed = total(0u, index);  // the counter counts from 0 again
  for (var i = index; i < CANDIDATES; i += WORKGROUP) {
    if (key(bitcast<f32>(best[i].x)) >= least) { let slot = atomicAdd(&count, 1u); if (slot < MOST) { runs[slot] = i; } }
  }
  workgroupBarrier();
  let held = min(atomicLoad(&count), MOST) * RUN;
  // the k-th best token of those runs, and the tokens from there on
  var floor_key = 0u;
  for (var bit = 0x80000000u; bit > 0u; bit >>= 1u) {
    var own = 0u;
    for (var i = index; i < held; i += WORKGROUP) {
      let t = runs[i / RUN] * RUN + i % RUN;
      if (t < VOCAB && key(logits[min(t, VOCAB - 1u)]) >= (floor_key | bit)) { own += 1u; }
    }
    if (total(own, index) >= k) { floor_key |= bit; }
  }
  let again = total(0u, index);
  for (var i = index; i < held; i += WORKGROUP) {
    let t = runs[i / RUN] * RUN + i % RUN;
    let key_t = key(logits[min(t, VOCAB - 1u)]);
    if (t < VOCAB && key_t >= floor_key) { let slot = atomicAdd(&count, 1u); if (slot < KEPT) { found[slot] = vec2<u32>(key_t, t); } }
  }
  workgroupBarrier();
  let n = min(atomicLoad(&count), KEPT);
  for (var i = index; i < n; i += WORKGROUP) {  // its rank is its place
    var rank = 0u;
    for (var j = 0u; j < n; j++) {
      let ahead = found[j].x > found[i].x || (found[j].x == found[i].x && found[j].y < found[i].y);
      rank += select(0u, 1u, ahead);
    }
    sorted[rank] = found[i];
  }
  workgroupBarrier();
  if (index == 0u) { chosen = draw(min(n, k)); }
  workgroupBarrier();
  let token = chosen;
  embed_next(token, index);
  if (index > 0u) { return; }
  tokens[0] = token;
  ring[step.count % RING] = token;
  if (sampling.last_n > 0u) { ring[RING + (sampling.recent + step.count) % sampling.last_n] = token; }
  step.count += 1u;
  step.pos += step.m;
  step.m = 1u;
}
