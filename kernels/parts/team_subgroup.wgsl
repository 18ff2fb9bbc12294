// team_sum: the sum over the SHARE neighbouring invocations of a row, by subgroup shuffles. SHARE: a power of two.
const SHARE: u32 = 1u;
fn team_sum(v: vec4<f32>) -> vec4<f32> {
  var sum = v;
  for (var d = 1u; d < SHARE; d <<= 1u) { sum += subgroupShuffleXor(sum, d); }
  return sum;
}
