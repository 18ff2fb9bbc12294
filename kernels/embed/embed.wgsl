// y[t, K] = row tokens[t] of the embedding table, dequantised. One invocation = 8 values of one token.
// A table split by rows is looked up part by part: each writes the tokens it holds. Parts: half, (scales,) weight.
// Needs K % 8 == 0 and GROUP % 8 == 0.
const K: u32 = 8u;
const N: u32 = 1u;     // rows of this part
const ROW0: u32 = 0u;  // its first row
const WORKGROUP: u32 = 64u;
@group(0) @binding(0) var<storage, read_write> y: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> tokens: array<u32>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let row = tokens[id.y] - ROW0;  // below ROW0 it wraps round and is not < N
  if (id.x >= K / 8u || row >= N) { return; }
  let v = weight8(row, id.x);
  y[(id.y * (K / 8u) + id.x) * 2u] = v[0];
  y[(id.y * (K / 8u) + id.x) * 2u + 1u] = v[1];
}
