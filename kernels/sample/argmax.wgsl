// candidates[segment, i] = (largest logit, its index) of the i-th run of CANDIDATE_ROWS logits: the first half of sampling.
// One invocation per run, segments in y. Among equal logits the lowest index wins. Needs nothing. Parts: none.
const VOCAB: u32 = 1u;
const CANDIDATE_ROWS: u32 = 64u;
const WORKGROUP: u32 = 16u;
const CANDIDATES: u32 = (VOCAB + CANDIDATE_ROWS - 1u) / CANDIDATE_ROWS;
@group(0) @binding(0) var<storage, read_write> candidates: array<vec2<u32>>;  // [segments, CANDIDATES] (bits of the f32 logit, index)
@group(0) @binding(5) var<storage, read> logits: array<f32>;                  // [segments, VOCAB]
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x >= CANDIDATES) { return; }
  var top = -3.4e38;
  var top_index = 0xFFFFFFFFu;
  for (var i = id.x * CANDIDATE_ROWS; i < min((id.x + 1u) * CANDIDATE_ROWS, VOCAB); i++) {
    let v = logits[id.y * VOCAB + i];
    if (v > top) { top = v; top_index = i; }
  }
  candidates[id.y * CANDIDATES + id.x] = vec2<u32>(bitcast<u32>(top), top_index);
}
