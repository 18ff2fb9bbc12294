// y[m, USED] = the experts with the largest logits x[m, EXPERTS] of each token, and their weights: their probabilities,
// with WHOLE divided by the sum of those USED.
// One workgroup per token. The rank of an expert is the number of larger logits: counting takes no barriers, and
// EXPERTS reads of workgroup memory.
// Needs EXPERTS <= 1024. Parts: none.
const EXPERTS: u32 = 8u;
const USED: u32 = 2u;
const WHOLE: bool = true;
const WORKGROUP: u32 = 128u;
@group(0) @binding(0) var<storage, read_write> y: array<u32>;  // [m, USED] (expert, f32 weight)
@group(0) @binding(5) var<storage, read> x: array<f32>;
var<workgroup> logits: array<f32, EXPERTS>;
var<workgroup> best: array<f32, USED>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let token = workgroup.x;
  for (var i = index; i < EXPERTS; i += WORKGROUP) { logits[i] = x[token * EXPERTS + i]; }
  workgroupBarrier();
  for (var i = index; i < EXPERTS; i += WORKGROUP) {
    let own = logits[i];
    var rank = 0u;
    for (var j = 0u; j < EXPERTS; j++) { rank += u32(logits[j] > own || (logits[j] == own && j < i)); }
    if (rank < USED) {
      best[rank] = own;
      y[2u * (token * USED + rank)] = i;
    }
  }
  workgroupBarrier();
  if (index >= USED) { return; }
  var total = 0.0;
  if (WHOLE) {
    for (var i = 0u; i < USED; i++) { total += exp(best[i] - best[0]); }
  } else {
    for (var i = 0u; i < EXPERTS; i++) { total += exp(logits[i] - best[0]); }
  }
  y[2u * (token * USED + index) + 1u] = bitcast<u32>(exp(best[index] - best[0]) / total);
}
