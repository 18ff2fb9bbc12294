// y[token, head] = softmax(q . K) V over the cache, causal, no score matrix. One workgroup = one (token, head), 64
// positions at a time: an invocation is one position for the scores, then four head dimensions for the values, so
// that neighbours read V along head_dim, 16 bytes (f32) or 8 bytes (f16) each. Online softmax in f32.
// Parts: half, kv. Needs HEAD_DIM % 4 == 0 and HEAD_DIM <= 256.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
const HEADS: u32 = 1u;
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 4u;
const WINDOW: u32 = 0u;  // a token sees the last WINDOW positions, its own included; 0: all
const SCALE: f32 = 1.0;
const WORKGROUP: u32 = 64u;
const QUADS: u32 = HEAD_DIM / 4u;
const ROWS: u32 = WORKGROUP / QUADS;  // positions whose values are read at the same time
@group(0) @binding(0) var<storage, read_write> y: array<vec4<f32>>;  // [m, HEADS, HEAD_DIM]
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;        // q, likewise
@group(0) @binding(8) var<uniform> step: Step;
var<workgroup> q: array<vec4<f32>, QUADS>;
var<workgroup> scores: array<f32, WORKGROUP>;
var<workgroup> weights: array<f32, WORKGROUP>;  // exp(score - top)
var<workgroup> sums: array<vec4<f32>, WORKGROUP>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let head = group.x;
  let token = group.y;
  let end = step.pos + token + 1u;
  let begin = select(0u, end - min(WINDOW, end), WINDOW > 0u);
  let base = head / (HEADS / KV_HEADS) * step.capacity;
  let quad = index % QUADS;
  let out = (token * HEADS + head) * QUADS;
  for (var i = index; i < QUADS; i += WORKGROUP) { q[i] = x[out + i] * SCALE; }
  workgroupBarrier();
  var top = -1e30;
  var sum = 0.0;
  var acc = vec4<f32>();
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
    acc *= keep;
    weights[index] = exp(s - peak);
    workgroupBarrier();
    for (var i = 0u; i < WORKGROUP; i++) { sum += weights[i]; }
    if (index < ROWS * QUADS) {
      for (var i = index / QUADS; i < min(WORKGROUP, end - p0); i += ROWS) {
        acc += weights[i] * value4((base + p0 + i) * QUADS + quad);
      }
    }
  }
  sums[index] = acc;
  workgroupBarrier();
  if (index < QUADS) {
    for (var i = 1u; i < ROWS; i++) { acc += sums[i * QUADS + index]; }
    y[out + index] = acc / sum;
  }
}
