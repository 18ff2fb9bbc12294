// y[token, head] = softmax(q . K) V over the cache, causal, for every head_dim: the slow, obvious kernel.
// One invocation = one (token, head), grid folded over x and y; online softmax, y is added up in memory.
// Parts: half, kv. Needs HEAD_DIM even and capacity * HEAD_DIM % 4 == 0. llvmpipe ends the loops of an invocation
// after 65,535 iterations, so there also positions * HEAD_DIM below that.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
const HEADS: u32 = 1u;
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 2u;
const WINDOW: u32 = 0u;  // a token sees the last WINDOW positions, its own included; 0: all
const SCALE: f32 = 1.0;
const WORKGROUP: u32 = 64u;
const PAIRS: u32 = HEAD_DIM / 2u;
@group(0) @binding(0) var<storage, read_write> y: array<vec2<f32>>;  // [m, HEADS, HEAD_DIM]
@group(0) @binding(5) var<storage, read> x: array<vec2<f32>>;        // q, likewise
@group(0) @binding(8) var<uniform> step: Step;
fn two(v: vec4<f32>, i: u32) -> vec2<f32> { return select(v.xy, v.zw, (i & 1u) == 1u); }
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
  let row = id.x + id.y * groups.x * WORKGROUP;
  if (row >= step.m * HEADS) { return; }
  let head = row % HEADS;
  let end = step.pos + row / HEADS + 1u;
  let begin = select(0u, end - min(WINDOW, end), WINDOW > 0u);
  let base = head / (HEADS / KV_HEADS) * step.capacity;
  let q0 = row * PAIRS;
  var top = -1e30;
  var sum = 0.0;
  for (var d = 0u; d < PAIRS; d++) { y[q0 + d] = vec2<f32>(); }
  for (var p = begin; p < end; p++) {
    let k0 = (base + p) * PAIRS;
    var s = 0.0;
    for (var d = 0u; d < PAIRS; d++) { s += dot(x[q0 + d], two(key4((k0 + d) / 2u), k0 + d)); }
    let peak = max(top, s * SCALE);
    let keep = exp(top - peak);
    let e = exp(s * SCALE - peak);
    for (var d = 0u; d < PAIRS; d++) { y[q0 + d] = y[q0 + d] * keep + e * two(value4((k0 + d) / 2u), k0 + d); }
    sum = sum * keep + e;
    top = peak;
  }
  for (var d = 0u; d < PAIRS; d++) { y[q0 + d] /= sum; }
}
