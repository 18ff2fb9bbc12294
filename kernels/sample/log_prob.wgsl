// out[t] = log softmax(logits[t])[targets[t]], for perplexity.
// One workgroup per token. Needs nothing. Parts: none.
const VOCAB: u32 = 1u;
const WORKGROUP: u32 = 64u;
@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@group(0) @binding(5) var<storage, read> logits: array<f32>;   // [rows, VOCAB]
@group(0) @binding(6) var<storage, read> targets: array<u32>;  // [rows]
var<workgroup> tops: array<f32, WORKGROUP>;
var<workgroup> sums: array<f32, WORKGROUP>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let base = workgroup.x * VOCAB;
  var top = -3.4e38;
  for (var i = index; i < VOCAB; i += WORKGROUP) { top = max(top, logits[base + i]); }
  tops[index] = top;
  workgroupBarrier();
  for (var i = 0u; i < WORKGROUP; i++) { top = max(top, tops[i]); }
  var sum = 0.0;
  for (var i = index; i < VOCAB; i += WORKGROUP) { sum += exp(logits[base + i] - top); }
  sums[index] = sum;
  workgroupBarrier();
  if (index > 0u) { return; }
  for (var i = 1u; i < WORKGROUP; i++) { sum += sums[i]; }
  out[workgroup.x] = logits[base + targets[workgroup.x]] - top - log(sum);
}
