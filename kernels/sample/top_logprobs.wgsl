// For rows that ask for log probabilities: scores[slot, position % RING] = (largest logit, log of the sum of exp(logit - largest),
// then (id, logit) of the best tokens), as the logits are before mask, bias and penalties.
// One workgroup per segment. Needs logprobs <= MAX_LOGPROBS + 1. Parts: best_tokens.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
struct Sampling { temperature: f32, top_p: f32, min_p: f32, penalty: f32, presence: f32, frequency: f32, top_k: u32, seed: u32, last_n: u32, biases: u32, masked: u32, logprobs: u32 }  // see engine/device_sampler.py
const VOCAB: u32 = 1u;
const RING: u32 = 1u;          // tokens that a ring holds
const MAX_LOGPROBS: u32 = 20u;
const SCORE_WORDS: u32 = 2u + 2u * MAX_LOGPROBS;
const WORKGROUP: u32 = 256u;
@group(0) @binding(0) var<storage, read_write> scores: array<u32>;  // [slots, RING, SCORE_WORDS]
@group(0) @binding(8) var<uniform> step: Step;
@group(0) @binding(9) var<uniform> sampling: array<Sampling, 64>;   // by sequence slot
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let own = step.segment[workgroup.x];
  let wanted = sampling[own.z].logprobs;  // 1 more than tokens; 0: none
  if (wanted == 0u) { return; }
  begin_segment(workgroup.x, index);
  let k = min(max(wanted - 1u, 1u), min(MAX_LOGPROBS, VOCAB));
  best_tokens(k, index);
  let top = value(sorted[0].x);
  let log_sum = log(total_weight(top, 0u, index));
  let first = (own.z * RING + (own.w + own.y) % RING) * SCORE_WORDS;
  if (index == 0u) {
    scores[first] = bitcast<u32>(top);
    scores[first + 1u] = bitcast<u32>(log_sum);
  }
  for (var i = index; i < k; i += WORKGROUP) {
    scores[first + 2u + 2u * i] = sorted[i].y;
    scores[first + 3u + 2u * i] = bitcast<u32>(value(sorted[i].x));
  }
}
