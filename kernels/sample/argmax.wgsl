// best[i] = (largest logit, its index) of the i-th CHUNK of logits: the first half of a greedy choice.
// One workgroup per chunk; of equal logits the lowest index wins. Needs nothing.
const VOCAB: u32 = 1u;
const CHUNK: u32 = 1024u;
const WORKGROUP: u32 = 64u;
@group(0) @binding(0) var<storage, read_write> best: array<vec2<u32>>;  // (bits of the f32 logit, index)
@group(0) @binding(5) var<storage, read> logits: array<f32>;
var<workgroup> values: array<f32, WORKGROUP>;
var<workgroup> places: array<u32, WORKGROUP>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  var value = -3.4e38;
  var place = 0xFFFFFFFFu;
  let end = min((group.x + 1u) * CHUNK, VOCAB);
  for (var i = group.x * CHUNK + index; i < end; i += WORKGROUP) {
    let v = logits[i];
    if (v > value) { value = v; place = i; }
  }
  values[index] = value;
  places[index] = place;
  workgroupBarrier();
  for (var half = WORKGROUP / 2u; half > 0u; half >>= 1u) {
    if (index < half) {
      let v = values[index + half];
      let p = places[index + half];
      if (v > values[index] || (v == values[index] && p < places[index])) { values[index] = v; places[index] = p; }
    }
    workgroupBarrier();
  }
  if (index == 0u) { best[group.x] = vec2<u32>(bitcast<u32>(values[0]), places[0]); }
}
