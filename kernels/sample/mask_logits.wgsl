// Logits that a grammar's mask does not allow become LOWEST, and candidates[segment, i] = (largest logit, its index) of the
// i-th run again. Rows without a mask stay as they are.
// One invocation per run, segments in y. Needs nothing. Parts: none.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
struct Sampling { temperature: f32, top_p: f32, min_p: f32, penalty: f32, presence: f32, frequency: f32, top_k: u32, seed: u32, last_n: u32, biases: u32, masked: u32, logprobs: u32 }  // see engine/device_sampler.py
const VOCAB: u32 = 1u;
const CANDIDATE_ROWS: u32 = 64u;  // logits of a run
const CANDIDATES: u32 = 1u;       // runs of a segment
const WORKGROUP: u32 = 16u;
const LOWEST: f32 = -3.4e38;
@group(0) @binding(4) var<storage, read_write> logits: array<f32>;            // [segments, VOCAB]
@group(0) @binding(5) var<storage, read_write> candidates: array<vec2<u32>>;  // [segments, CANDIDATES] (bits of the f32 logit, index)
@group(0) @binding(6) var<storage, read> mask: array<u32>;                    // [slots, VOCAB / 32 rounded up]: bit set = allowed
@group(0) @binding(8) var<uniform> step: Step;
@group(0) @binding(9) var<uniform> sampling: array<Sampling, 64>;             // by sequence slot
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let slot = step.segment[id.y].z;
  if (id.x >= CANDIDATES || sampling[slot].masked == 0u) { return; }
  var top = LOWEST;
  var top_index = 0xFFFFFFFFu;
  for (var i = id.x * CANDIDATE_ROWS; i < min((id.x + 1u) * CANDIDATE_ROWS, VOCAB); i++) {
    let allowed = (mask[slot * ((VOCAB + 31u) / 32u) + i / 32u] >> (i % 32u)) & 1u;
    let v = logits[id.y * VOCAB + i];
    if (allowed == 0u) { logits[id.y * VOCAB + i] = LOWEST; } else if (v > top) { top = v; top_index = i; }
  }
  candidates[id.y * CANDIDATES + id.x] = vec2<u32>(bitcast<u32>(top), top_index);
}
