// y[m, HEADS, HEAD_DIM] = softmax(q K^T) V over the KV cache, causal; online softmax in f32, no score matrix.
// One workgroup per (token, head), 64 positions at a time. An invocation computes the score of one position, then sums
// four head dimensions of the values, so that neighbours read V along head_dim, 16 bytes (f32) or 8 bytes (f16) each.
// Needs HEAD_DIM % 4 == 0, HEAD_DIM <= 256 and WORKGROUP = PAGE: 64 positions are one page. Parts: f16, kv4_*, pages, sinks*.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const HEADS: u32 = 1u;
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 4u;
const WINDOW: u32 = 0u;                   // a token sees the last WINDOW positions, its own included; 0: all
const SCALE: f32 = 1.0;
const SOFT_CAP: f32 = 0.0;                // scores s become SOFT_CAP tanh(s / SOFT_CAP); 0: they do not
const WORKGROUP: u32 = 64u;
const HEAD_VEC4: u32 = HEAD_DIM / 4u;
const ROWS: u32 = WORKGROUP / HEAD_VEC4;  // positions whose values are read at the same time
@group(0) @binding(0) var<storage, read_write> y: array<vec4<f32>>;  // [m, HEADS, HEAD_DIM]
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;        // q [m, HEADS, HEAD_DIM]
@group(0) @binding(8) var<uniform> step: Step;
var<workgroup> q: array<vec4<f32>, HEAD_VEC4>;
var<workgroup> scores: array<f32, WORKGROUP>;
var<workgroup> weights: array<f32, WORKGROUP>;  // exp(score - top)
var<workgroup> sums: array<vec4<f32>, WORKGROUP>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let head = workgroup.x;
  let token = workgroup.y;
  let row = step.row[token];
  let end = row.position + 1u;
  let begin = select(0u, end - min(WINDOW, end), WINDOW > 0u);
  let base = head / (HEADS / KV_HEADS) * step.capacity;
  let dim4 = index % HEAD_VEC4;
  let out = (token * HEADS + head) * HEAD_VEC4;
  for (var i = index; i < HEAD_VEC4; i += WORKGROUP) { q[i] = x[out + i] * SCALE; }
  workgroupBarrier();
  var top = sink(head);
  var sum = SINK_TOTAL;
  var acc = vec4<f32>();
  for (var p0 = begin / PAGE * PAGE; p0 < end; p0 += PAGE) {
    let page = base + cell_of(row.slot, p0);
    let p = p0 + index;
    var s = -1e30;
    if (p >= begin && p < end) {
      s = 0.0;
      for (var i = 0u; i < HEAD_VEC4; i++) { s += dot(q[i], key4((page + index) * HEAD_VEC4 + i)); }
      if (SOFT_CAP > 0.0) { s = SOFT_CAP - 2.0 * SOFT_CAP / (1.0 + exp(2.0 * s / SOFT_CAP)); }
    }
    scores[index] = s;
    workgroupBarrier();
    var new_top = top;
    for (var i = 0u; i < WORKGROUP; i++) { new_top = max(new_top, scores[i]); }
    let rescale = exp(top - new_top);
    top = new_top;
    sum *= rescale;
    acc *= rescale;
    weights[index] = exp(s - new_top);
    workgroupBarrier();
    for (var i = 0u; i < WORKGROUP; i++) { sum += weights[i]; }
    if (index < ROWS * HEAD_VEC4) {
      for (var i = index / HEAD_VEC4; i < min(WORKGROUP, end - p0); i += ROWS) {
        acc += weights[i] * value4((page + i) * HEAD_VEC4 + dim4);
      }
    }
  }
  sums[index] = acc;
  workgroupBarrier();
  if (index < HEAD_VEC4) {
    for (var i = 1u; i < ROWS; i++) { acc += sums[i * HEAD_VEC4 + index]; }
    y[out + index] = acc / sum;
  }
}
