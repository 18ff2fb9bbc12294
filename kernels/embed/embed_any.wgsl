// y[t, K] = row tokens[t] of the embedding table, dequantised, for every K: one invocation per value.
// A table split by rows is looked up part by part: each writes the tokens it holds. Parts: half, (scales,) weight.
const K: u32 = 1u;
const N: u32 = 1u;     // rows of this part
const ROW0: u32 = 0u;  // its first row
const WORKGROUP: u32 = 64u;
@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(5) var<storage, read> tokens: array<u32>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let row = tokens[id.y] - ROW0;  // below ROW0 it wraps round and is not < N
  if (id.x >= K || row >= N) { return; }
  y[id.y * K + id.x] = weight(row, id.x);
}
