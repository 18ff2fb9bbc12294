// y[m, USED] = the experts with the largest logits x[m, EXPERTS] of each token, and their weights.
// One workgroup per token. Needs EXPERTS <= 1024. Parts: choose_experts.
const EXPERTS: u32 = 8u;
const USED: u32 = 2u;
const WORKGROUP: u32 = 128u;
@group(0) @binding(0) var<storage, read_write> y: array<vec2<u32>>;  // [m, USED] (expert, f32 weight)
@group(0) @binding(5) var<storage, read> x: array<f32>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let token = workgroup.x;
  for (var i = index; i < EXPERTS; i += WORKGROUP) { expert_logits[i] = x[token * EXPERTS + i]; }
  rank_experts(index);
  weigh_experts(index);
  if (index < USED) { y[token * USED + index] = vec2<u32>(chosen[index], bitcast<u32>(expert_weights[index])); }
}
