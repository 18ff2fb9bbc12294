// Greedy sampling, second half: the best of candidates[segments, CANDIDATES] is the next token of each of the first segments.
// The token goes into its sequence's ring of results, its embedding is looked up, and the next step is written, so that
// decode continues without the host: segment i of this step is row i and segment i of the next. Prompts that are not
// finished come last in a step, without a workgroup here.
// One workgroup per segment. Among equal logits the lowest index wins. Needs WORKGROUP a power of two.
// Parts: pages; f16, (scales,) weight_* and embed_next, or embed_next_none.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const CANDIDATES: u32 = 1u;  // of each segment
const RING: u32 = 1u;        // tokens that a ring holds
const RING_WORDS: u32 = 1u;  // from one sequence's ring to the next
const WORKGROUP: u32 = 256u;
@group(0) @binding(1) var<storage, read_write> ring: array<u32>;        // [slots, RING_WORDS]: RING sampled tokens by position, then the bits of their logits
@group(0) @binding(2) var<storage, read_write> step: Step;
@group(0) @binding(5) var<storage, read> candidates: array<vec2<u32>>;  // [segments, CANDIDATES] (bits of the f32 logit, index)
var<workgroup> tops: array<f32, WORKGROUP>;
var<workgroup> top_indices: array<u32, WORKGROUP>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let segment = workgroup.x;
  let own = step.segment[segment];  // not its rows: other workgroups write theirs
  let position = own.w + own.y;     // of the new token
  var top = -3.4e38;
  var top_index = 0xFFFFFFFFu;
  for (var i = index; i < CANDIDATES; i += WORKGROUP) {
    let candidate = candidates[segment * CANDIDATES + i];
    let v = bitcast<f32>(candidate.x);
    if (v > top || (v == top && candidate.y < top_index)) { top = v; top_index = candidate.y; }
  }
  tops[index] = top;
  top_indices[index] = top_index;
  workgroupBarrier();
  for (var half = WORKGROUP / 2u; half > 0u; half >>= 1u) {
    if (index < half) {
      let v = tops[index + half];
      let p = top_indices[index + half];
      if (v > tops[index] || (v == tops[index] && p < top_indices[index])) { tops[index] = v; top_indices[index] = p; }
    }
    workgroupBarrier();
  }
  let found = top_indices[0] != 0xFFFFFFFFu;  // else every logit is NaN or not allowed
  let token = select(0u, top_indices[0], found);
  embed_next(token, segment, index);
  if (index > 0u) { return; }
  ring[own.z * RING_WORDS + position % RING] = token;
  ring[own.z * RING_WORDS + RING + position % RING] = select(0x7FC00000u, bitcast<u32>(tops[0]), found);
  step.row[segment] = Row(own.z, position, token, cell_of(own.z, position));
  step.segment[segment] = vec4<u32>(segment, 1u, own.z, position);
  if (segment == 0u) { step.rows = workgroups.x; step.segments = workgroups.x; }
}
