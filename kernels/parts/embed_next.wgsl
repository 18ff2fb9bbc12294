// Role embed_next: embed_next(token, row, index) writes the embedding of the sampled token to x[row, K].
// Needs an embedding table of one shard, K % 8 == 0 and GROUP % 8 == 0. Parts: f16, (scales,) weight_*.
const K: u32 = 8u;
const WORKGROUP: u32 = 256u;
@group(0) @binding(3) var<storage, read_write> x: array<vec4<f32>>;
fn embed_next(token: u32, row: u32, index: u32) {
  for (var i = index; i < K / 8u; i += WORKGROUP) {
    let v = weight8(token, i);
    x[row * (K / 4u) + 2u * i] = v[0];
    x[row * (K / 4u) + 2u * i + 1u] = v[1];
  }
}
