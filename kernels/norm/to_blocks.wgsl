// y[m, ROWS, WIDTH / 32] = x as blocks (see blocks_*), for producers that cannot write blocks themselves.
// Eight values per invocation, grid folded over x and y. Needs WIDTH % 32 == 0. Parts: blocks_*.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const WIDTH: u32 = 32u;  // values per row
const ROWS: u32 = 1u;    // rows per token
const BLOCKS: u32 = WIDTH / 32u;
const WORKGROUP: u32 = 64u;
@group(0) @binding(0) var<storage, read_write> y: array<u32>;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(8) var<uniform> step: Step;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) index: u32) {
  let run = (workgroup.x + workgroup.y * workgroups.x) * WORKGROUP + index;
  let i = min(run, step.rows * ROWS * (WIDTH / 8u) - 1u);
  store_block(block_word(i / (WIDTH / 8u), i % (WIDTH / 8u) / 4u, BLOCKS), BLOCKS, x[2u * i], x[2u * i + 1u], index, run == i);
}
