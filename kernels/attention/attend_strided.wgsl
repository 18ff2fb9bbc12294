// attend with its values read the other way: an invocation takes one head dimension at a time and walks V across
// positions, four of them per step and HEAD_DIM apart, instead of four dimensions that lie side by side. All else is the
// same. The baseline that attend is measured against; in no route. Parts: half, kv. Needs HEAD_DIM % 4 == 0, <= 256.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
const HEADS: u32 = 1u;
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 4u;
const WINDOW: u32 = 0u;  // a token sees the last WINDOW positions, its own included; 0: all
const SCALE: f32 = 1.0;
const WORKGROUP: u32 = 64u;
const QUADS: u32 = HEAD_DIM / 4u;
const OWN: u32 = (HEAD_DIM + WORKGROUP - 1u) / WORKGROUP;  // dimensions of an invocation: WORKGROUP apart
@group(0) @binding(0) var<storage, read_write> y: array<f32>;  // [m, HEADS, HEAD_DIM]
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;  // q, likewise
@group(0) @binding(8) var<uniform> step: Step;
var<workgroup> q: array<vec4<f32>, QUADS>;
var<workgroup> scores: array<f32, WORKGROUP>;
var<workgroup> weights: array<f32, WORKGROUP>;  // exp(score - top), 0 past the end
fn value(p: u32, d: u32) -> f32 { return value4(p * QUADS + d / 4u)[d % 4u]; }
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let head = group.x;
  let token = group.y;
  let end = step.pos + token + 1u;
  let begin = select(0u, end - min(WINDOW, end), WINDOW > 0u);
  let base = head / (HEADS / KV_HEADS) * step.capacity;
  let out = (token * HEADS + head) * QUADS;
  for (var i = index; i < QUADS; i += WORKGROUP) { q[i] = x[out + i] * SCALE; }
  workgroupBarrier();
  var top = -1e30;
  var sum = 0.0;
  var acc = array<f32, OWN>();
  for (var p0 = begin; p0 < end; p0 += WORKGROUP) {
    let p = p0 + index;
    var s = -1e30;
    if (p < end) {
      s = 0.0;
      for (var i = 0u; i < QUADS; i++) { s += dot(q[i], key4((base + p) * QUADS + i)); }
    }
    scores[index] = s;
    workgroupBarrier();
    var peak = top;
    for (var i = 0u; i < WORKGROUP; i++) { peak = max(peak, scores[i]); }
    let keep = exp(top - peak);
    top = peak;
    sum *= keep;
    weights[index] = select(0.0, exp(s - peak), p < end);
    workgroupBarrier();
    for (var i = 0u; i < WORKGROUP; i++) { sum += weights[i]; }
    for (var j = 0u; j < OWN; j++) {
      let d = min(index + j * WORKGROUP, HEAD_DIM - 1u);
      var a = acc[j] * keep;
      for (var i = 0u; i < min(WORKGROUP, end - p0); i += 4u) {
        let at = base + p0 + i;
        let last = base + end - 1u;  // past the end the weight is 0
        a += dot(vec4<f32>(weights[i], weights[i + 1u], weights[i + 2u], weights[i + 3u]),
                 vec4<f32>(value(at, d), value(min(at + 1u, last), d), value(min(at + 2u, last), d), value(min(at + 3u, last), d)));
      }
      acc[j] = a;
    }
  }
  for (var j = 0u; j < OWN; j++) {
    let d = index + j * WORKGROUP;
    if (d < HEAD_DIM) { y[4u * out + d] = acc[j] / sum; }
  }
}
