// y[i] = silu(y[i]) * up[i], y holding the gate: for files whose gate and up are of different types and cannot be interleaved.
// One invocation per value, grid folded over x and y. Needs nothing.
const WIDTH: u32 = 1u;  // values per token
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
const WORKGROUP: u32 = 64u;
@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(6) var<storage, read> up: array<f32>;
@group(0) @binding(8) var<uniform> step: Step;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
  let i = id.x + id.y * groups.x * WORKGROUP;
  if (i >= step.m * WIDTH) { return; }
  let g = y[i];
  y[i] = g / (1.0 + exp(-g)) * up[i];
}
