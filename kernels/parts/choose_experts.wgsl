// Role choice: rank_experts(index) makes chosen[rank] the experts with the largest of expert_logits, of equal ones the
// first; weigh_experts(index) their weights: their probabilities, with WHOLE divided by the sum of those USED. Every
// invocation must call both, and may store logits just before.
// The rank of an expert is the number of larger logits: counting takes no barriers, and EXPERTS reads of workgroup
// memory.
// Needs USED <= WORKGROUP.
const EXPERTS: u32 = 8u;
const USED: u32 = 2u;
const WHOLE: bool = true;
const WORKGROUP: u32 = 128u;
var<workgroup> expert_logits: array<f32, EXPERTS>;
var<workgroup> chosen: array<u32, USED>;
var<workgroup> expert_weights: array<f32, USED>;
fn rank_experts(index: u32) {
  if (index < USED) { chosen[index] = 0u; }  // where logits are no numbers, not every rank is given
  workgroupBarrier();
  for (var i = index; i < EXPERTS; i += WORKGROUP) {
    let own = expert_logits[i];
    var rank = 0u;
    for (var j = 0u; j < EXPERTS; j++) { rank += u32(expert_logits[j] > own || (expert_logits[j] == own && j < i)); }
    if (rank < USED) { chosen[rank] = i; }
  }
  workgroupBarrier();
}
fn weigh_experts(index: u32) {
  if (index < USED) {
    let top = expert_logits[chosen[0]];
    var total = 0.0;
    if (WHOLE) {
      for (var i = 0u; i < USED; i++) { total += exp(expert_logits[chosen[i]] - top); }
    } else {
      for (var i = 0u; i < EXPERTS; i++) { total += exp(expert_logits[i] - top); }
    }
    expert_weights[index] = exp(expert_logits[chosen[index]] - top) / total;
  }
  workgroupBarrier();
}
