// y = the sum of what the GRID_SPLIT splits of a linear stored (epilogue_partial), with the linear's own epilogue.
// An invocation adds up a pair of rows of a token. Needs an even N. Parts: f16, epilogue_*.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const N: u32 = 2u;
const GRID_SPLIT: u32 = 1u;
const SPLIT_ROWS: u32 = 1u;  // token rows of a split's results
const WORKGROUP: u32 = 128u;
@group(0) @binding(5) var<storage, read> x: array<vec2<f32>>;  // [splits, SPLIT_ROWS, N]
@group(0) @binding(8) var<uniform> step: Step;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let row = 2u * (workgroup.x * WORKGROUP + index);
  let token = workgroup.y;
  if (row >= N || token >= step.rows) { return; }
  epilogue_prefetch(token, row);
  var v = vec2<f32>();
  for (var split = 0u; split < GRID_SPLIT; split++) { v += x[((split * SPLIT_ROWS + token) * N + row) / 2u]; }
  epilogue(token, row, v);
}
