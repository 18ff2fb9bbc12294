// Greedy sampling, second half: the best of candidates[segments, CANDIDATES] is the next token of each sequence.
// The token is appended to the sequence's ring of results, its embedding is looked up, and the row of the next step is
// written, so that decode continues without the host.
// One workgroup per segment. Among equal logits the lowest index wins. Needs WORKGROUP a power of two.
// Parts: pages; f16, (scales,) weight_* and embed_next, or embed_next_none.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const CANDIDATES: u32 = 1u;  // of each segment
const RING: u32 = 1u;        // tokens that a ring holds
const RING_WORDS: u32 = 1u;  // from one sequence's ring to the next
const WORKGROUP: u32 = 256u;
@group(0) @binding(1) var<storage, read_write> ring: array<u32>;        // [slots, RING_WORDS]: RING sampled tokens, by the position before theirs
@group(0) @binding(2) var<storage, read_write> step: Step;
@group(0) @binding(5) var<storage, read> candidates: array<vec2<u32>>;  // [segments, CANDIDATES] (bits of the f32 logit, index)
var<workgroup> tops: array<f32, WORKGROUP>;
var<workgroup> top_indices: array<u32, WORKGROUP>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let segment = workgroup.x;
  let first_row = step.segment[segment].x;
  var row = step.row[first_row + step.segment[segment].y - 1u];
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
  let token = select(top_indices[0], 0u, top_indices[0] == 0xFFFFFFFFu);  // every logit was NaN
  embed_next(token, segment, index);
  if (index > 0u) { return; }
  ring[row.slot * RING_WORDS + row.position % RING] = token;
  step.row[first_row] = Row(row.slot, row.position + 1u, token, cell_of(row.slot, row.position + 1u));
  step.segment[segment] = vec4<u32>(first_row, 1u, row.slot, row.position + 1u);
  if (segment == 0u) { step.rows = step.segments; }
}
