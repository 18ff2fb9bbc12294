// best[i] = (largest logit, its index) of the i-th CHUNK of logits: the first half of a choice.
// One invocation per chunk; of equal logits the lowest index wins. Needs nothing.
const VOCAB: u32 = 1u;
const CHUNK: u32 = 64u;
const WORKGROUP: u32 = 16u;
@group(0) @binding(0) var<storage, read_write> best: array<vec2<u32>>;  // (bits of the f32 logit, index)
@group(0) @binding(5) var<storage, read> logits: array<f32>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x * CHUNK >= VOCAB) { return; }
  var value = -3.4e38;
  var place = 0xFFFFFFFFu;
  for (var i = id.x * CHUNK; i < min((id.x + 1u) * CHUNK, VOCAB); i++) {
    let v = logits[i];
    if (v > value) { value = v; place = i; }
  }
  best[id.x] = vec2<u32>(bitcast<u32>(value), place);
}
