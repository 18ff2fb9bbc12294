// y[m, HEADS, HEAD_DIM] = softmax(q K^T) V as in attend, but V is read across positions: the baseline of attend.
// An invocation takes one head dimension at a time and reads it for four positions per iteration, HEAD_DIM apart.
// attend reads four adjacent dimensions instead. All else is the same. No route takes this kernel.
// Needs HEAD_DIM % 4 == 0, HEAD_DIM <= 256 and WORKGROUP = PAGE. Parts: f16, kv4_*, pages.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const HEADS: u32 = 1u;
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 4u;
const WINDOW: u32 = 0u;                                         // a token sees the last WINDOW positions, its own included; 0: all
const SCALE: f32 = 1.0;
const WORKGROUP: u32 = 64u;
const HEAD_VEC4: u32 = HEAD_DIM / 4u;
const OWN_DIMS: u32 = (HEAD_DIM + WORKGROUP - 1u) / WORKGROUP;  // dimensions of an invocation, WORKGROUP apart
@group(0) @binding(0) var<storage, read_write> y: array<f32>;  // [m, HEADS, HEAD_DIM]
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;  // q [m, HEADS, HEAD_DIM]
@group(0) @binding(8) var<uniform> step: Step;
var<workgroup> q: array<vec4<f32>, HEAD_VEC4>;
var<workgroup> scores: array<f32, WORKGROUP>;
var<workgroup> weights: array<f32, WORKGROUP>;  // exp(score - top), 0 past the end
fn value(p: u32, d: u32) -> f32 { return value4(p * HEAD_VEC4 + d / 4u)[d % 4u]; }
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let head = workgroup.x;
  let token = workgroup.y;
  let row = step.row[token];
  let end = row.position + 1u;
  let begin = select(0u, end - min(WINDOW, end), WINDOW > 0u);
  let base = head / (HEADS / KV_HEADS) * step.capacity;
  let out = (token * HEADS + head) * HEAD_VEC4;
  for (var i = index; i < HEAD_VEC4; i += WORKGROUP) { q[i] = x[out + i] * SCALE; }
  workgroupBarrier();
  var top = -1e30;
  var sum = 0.0;
  var acc = array<f32, OWN_DIMS>();
  for (var p0 = begin / PAGE * PAGE; p0 < end; p0 += PAGE) {
    let page = base + cell_of(row.slot, p0);
    let p = p0 + index;
    var s = -1e30;
    if (p >= begin && p < end) {
      s = 0.0;
      for (var i = 0u; i < HEAD_VEC4; i++) { s += dot(q[i], key4((page + index) * HEAD_VEC4 + i)); }
    }
    scores[index] = s;
    workgroupBarrier();
    var new_top = top;
    for (var i = 0u; i < WORKGROUP; i++) { new_top = max(new_top, scores[i]); }
    let rescale = exp(top - new_top);
    top = new_top;
    sum *= rescale;
    weights[index] = select(0.0, exp(s - new_top), p >= begin && p < end);
    workgroupBarrier();
    for (var i = 0u; i < WORKGROUP; i++) { sum += weights[i]; }
    for (var j = 0u; j < OWN_DIMS; j++) {
      let d = min(index + j * WORKGROUP, HEAD_DIM - 1u);
      var a = acc[j] * rescale;
      for (var i = 0u; i < min(WORKGROUP, end - p0); i += 4u) {
        let at = page + i;
        let last = page + min(PAGE, end - p0) - 1u;  // past the end the weight is 0
        a += dot(vec4<f32>(weights[i], weights[i + 1u], weights[i + 2u], weights[i + 3u]),
                 vec4<f32>(value(at, d), value(min(at + 1u, last), d), value(min(at + 2u, last), d), value(min(at + 3u, last), d)));
      }
      acc[j] = a;
    }
  }
  for (var j = 0u; j < OWN_DIMS; j++) {
    let d = index + j * WORKGROUP;
    if (d < HEAD_DIM) { y[4u * out + d] = acc[j] / sum; }
  }
}
