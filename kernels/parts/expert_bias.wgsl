// Role expert_bias: expert_bias(expert, row) = the bias of rows row and row + 1 of an expert of this shard.
const N: u32 = 2u;             // rows of an expert
const FIRST_EXPERT: u32 = 0u;  // of this shard
const EXPERT_BIAS: bool = false;
@group(0) @binding(4) var<storage, read> bias: array<f32>;  // [experts, N]
fn expert_bias(expert: u32, row: u32) -> vec2<f32> {
  if (!EXPERT_BIAS) { return vec2<f32>(); }
  let first = (FIRST_EXPERT + expert) * N;
  return vec2<f32>(bias[first + min(row, N - 1u)], bias[first + min(row + 1u, N - 1u)]);
}
