// The chosen token's row of the embedding table into x[0]. Parts before it: half, (scales,) weight.
// Needs a table in one part, K % 8 == 0 and GROUP % 8 == 0.
const K: u32 = 8u;
const WORKGROUP: u32 = 256u;
@group(0) @binding(3) var<storage, read_write> x: array<vec4<f32>>;
fn embed_next(token: u32, index: u32) {
  for (var i = index; i < K / 8u; i += WORKGROUP) {
    let v = weight8(token, i);
    x[2u * i] = v[0];
    x[2u * i + 1u] = v[1];
  }
}
