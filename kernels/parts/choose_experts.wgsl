// Role choice: rank_experts(index) makes chosen[rank] the experts with the largest of expert_logits, of equal ones the
// first; weigh_experts(index) their weights: their probabilities, with WHOLE divided by the sum of those USED. Every
// invocation must call both, and may store logits just before.
// The rank of an expert is the number of larger logits. SHARES invocations count them, each among a part of the experts. & and |
// do not branch as && and || do: with these, and one invocation per expert, Qwen 3 30B-A3B decoded 604 tokens a second on an H200,
// now 680 (2026-11-17).
// Needs USED <= WORKGROUP.
const EXPERTS: u32 = 8u;
const USED: u32 = 2u;
const WHOLE: bool = true;
const WORKGROUP: u32 = 128u;
const SHARES: u32 = max(WORKGROUP / EXPERTS, 1u);     // invocations that count for an expert
const SHARE: u32 = (EXPERTS + SHARES - 1u) / SHARES;  // experts that each of them looks at
var<workgroup> expert_logits: array<f32, EXPERTS>;
var<workgroup> expert_ranks: array<atomic<u32>, EXPERTS>;
var<workgroup> chosen: array<u32, USED>;
var<workgroup> expert_weights: array<f32, USED>;
fn rank_experts(index: u32) {
  if (index < USED) { chosen[index] = 0u; }  // where logits are no numbers, not every rank is given
  for (var i = index; i < EXPERTS; i += WORKGROUP) { atomicStore(&expert_ranks[i], 0u); }
  workgroupBarrier();
  for (var t = index; t < EXPERTS * SHARES; t += WORKGROUP) {
    let i = t % EXPERTS;
    let own = expert_logits[i];
    let first = t / EXPERTS * SHARE;
    var larger = 0u;
    for (var j = first; j < min(first + SHARE, EXPERTS); j++) {
      let other = expert_logits[j];
      larger += u32((other > own) | ((other == own) & (j < i)));
    }
    atomicAdd(&expert_ranks[i], larger);
  }
  workgroupBarrier();
  for (var i = index; i < EXPERTS; i += WORKGROUP) {
    let rank = atomicLoad(&expert_ranks[i]);
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
