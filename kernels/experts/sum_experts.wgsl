// y[m, WIDTH] += the results x[m, USED, WIDTH] of the experts of each token, times their weights.
// One invocation per value, grid folded over x and y. Needs nothing. Parts: none.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const WIDTH: u32 = 1u;
const USED: u32 = 2u;
const WORKGROUP: u32 = 64u;
@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(5) var<storage, read> x: array<f32>;
@group(0) @binding(8) var<uniform> step: Step;
@group(0) @binding(9) var<storage, read> chosen: array<vec2<u32>>;  // [m, USED] (expert, f32 weight)
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>) {
  let i = id.x + id.y * workgroups.x * WORKGROUP;
  if (i >= step.rows * WIDTH) { return; }
  let first = i / WIDTH * USED;
  var sum = y[i];
  for (var rank = 0u; rank < USED; rank++) {
    sum += bitcast<f32>(chosen[first + rank].y) * x[(first + rank) * WIDTH + i % WIDTH];
  }
  y[i] = sum;
}
