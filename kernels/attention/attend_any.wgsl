// y[m, HEADS, HEAD_DIM] = softmax(q K^T) V over the KV cache, causal, for every head_dim: the slow, simple fallback.
// One invocation per (token, head), grid folded over x and y. Online softmax; y is accumulated in memory.
// Needs HEAD_DIM even and capacity * HEAD_DIM % 4 == 0. llvmpipe ends the loops of an invocation after 65,535
// iterations: there positions * HEAD_DIM must stay below that.
// Parts: f16, kv4_*, pages, sinks*.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const HEADS: u32 = 1u;
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 2u;
const WINDOW: u32 = 0u;  // a token sees the last WINDOW positions, its own included; 0: all
const SCALE: f32 = 1.0;
const SOFT_CAP: f32 = 0.0;  // scores s become SOFT_CAP tanh(s / SOFT_CAP); 0: they do not
const WORKGROUP: u32 = 64u;
const HEAD_VEC2: u32 = HEAD_DIM / 2u;
@group(0) @binding(0) var<storage, read_write> y: array<vec2<f32>>;  // [m, HEADS, HEAD_DIM]
@group(0) @binding(5) var<storage, read> x: array<vec2<f32>>;        // q [m, HEADS, HEAD_DIM]
@group(0) @binding(8) var<uniform> step: Step;
fn vec2_of(v: vec4<f32>, i: u32) -> vec2<f32> { return select(v.xy, v.zw, (i & 1u) == 1u); }
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>) {
  let query = id.x + id.y * workgroups.x * WORKGROUP;
  if (query >= step.rows * HEADS) { return; }
  let head = query % HEADS;
  let row = step.row[query / HEADS];
  let end = row.position + 1u;
  let begin = select(0u, end - min(WINDOW, end), WINDOW > 0u);
  let base = head / (HEADS / KV_HEADS) * step.capacity;
  let q0 = query * HEAD_VEC2;
  var top = sink(head);
  var sum = SINK_TOTAL;
  for (var d = 0u; d < HEAD_VEC2; d++) { y[q0 + d] = vec2<f32>(); }
  for (var p = begin; p < end; p++) {
    let k0 = (base + cell_of(row.slot, p)) * HEAD_VEC2;
    var s = 0.0;
    for (var d = 0u; d < HEAD_VEC2; d++) { s += dot(x[q0 + d], vec2_of(key4((k0 + d) / 2u), k0 + d)); }
    s *= SCALE;
    if (SOFT_CAP > 0.0) { s = SOFT_CAP - 2.0 * SOFT_CAP / (1.0 + exp(2.0 * s / SOFT_CAP)); }
    let new_top = max(top, s);
    let rescale = exp(top - new_top);
    let e = exp(s - new_top);
    for (var d = 0u; d < HEAD_VEC2; d++) { y[q0 + d] = y[q0 + d] * rescale + e * vec2_of(value4((k0 + d) / 2u), k0 + d); }
    sum = sum * rescale + e;
    top = new_top;
  }
  for (var d = 0u; d < HEAD_VEC2; d++) { y[q0 + d] /= sum; }
}
