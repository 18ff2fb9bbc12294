// The second half of a greedy choice: the best of the candidates becomes the next input token, is appended to the ring
// of results, its embedding is looked up, and the position moves on: the next step needs nothing from the host.
// One workgroup. Of equal logits the lowest index wins. Parts: half, (scales,) weight, and next_embed or next_none.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
const CANDIDATES: u32 = 1u;
const RING: u32 = 1u;
const WORKGROUP: u32 = 256u;
@group(0) @binding(0) var<storage, read_write> tokens: array<u32>;      // [0] = the next input
@group(0) @binding(1) var<storage, read_write> ring: array<u32>;        // [RING] the picked tokens, oldest overwritten
@group(0) @binding(2) var<storage, read_write> step: Step;
@group(0) @binding(5) var<storage, read> best: array<vec2<u32>>;        // (bits of the f32 logit, index)
var<workgroup> values: array<f32, WORKGROUP>;
var<workgroup> places: array<u32, WORKGROUP>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(local_invocation_index) index: u32) {
  var value = -3.4e38;
  var place = 0xFFFFFFFFu;
  for (var i = index; i < CANDIDATES; i += WORKGROUP) {
    let v = bitcast<f32>(best[i].x);
    if (v > value || (v == value && best[i].y < place)) { value = v; place = best[i].y; }
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
  let token = select(places[0], 0u, places[0] == 0xFFFFFFFFu);  // every logit was NaN
  embed_next(token, index);
  if (index > 0u) { return; }
  tokens[0] = token;
  ring[step.count % RING] = token;
  step.count += 1u;
  step.pos += step.m;
  step.m = 1u;
}
