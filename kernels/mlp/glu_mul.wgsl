// y[m, WIDTH] = glu(y, up), where y holds the gate: for models whose gate and up have different types and cannot be
// interleaved.
// One invocation per value, grid folded over x and y. Needs nothing. Parts: activation_*.
const WIDTH: u32 = 1u;  // values per token
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const WORKGROUP: u32 = 64u;
@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(6) var<storage, read> up: array<f32>;
@group(0) @binding(8) var<uniform> step: Step;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>) {
  let i = id.x + id.y * workgroups.x * WORKGROUP;
  if (i >= step.rows * WIDTH) { return; }
  y[i] = glu(y[i], up[i]);
}
