// y[m, K] = the dequantised rows of the embedding table for the tokens of the step.
// One invocation per 8 values of one token. A table of several shards takes one dispatch each, which writes the tokens
// whose rows are in the shard.
// Needs K % 8 == 0 and GROUP % 8 == 0. Parts: f16, (scales,) weight_*.
const K: u32 = 8u;
const N: u32 = 1u;     // rows of this shard
const ROW0: u32 = 0u;  // the shard's first row in the table
const WORKGROUP: u32 = 64u;
@group(0) @binding(0) var<storage, read_write> y: array<vec4<f32>>;
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
@group(0) @binding(8) var<uniform> step: Step;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let row = step.row[id.y].token - ROW0;  // wraps around below ROW0, and then is not < N
  if (id.x >= K / 8u || row >= N) { return; }
  let v = weight8(row, id.x);
  y[(id.y * (K / 8u) + id.x) * 2u] = v[0];
  y[(id.y * (K / 8u) + id.x) * 2u + 1u] = v[1];
}
