// y[m, N] = x[m, K] @ W[N, K]^T for a few tokens (m <= TOKENS): LANES invocations share PAIRS pairs of rows and split K
// by blocks of 32; each 16-byte load of weights serves all tokens, so that two tokens cost little more than one.
// Parts: half, (scales, planes,) inputs, dot, out, reduce. Needs TOKENS * PAIRS <= LANES, K % 32 == 0 (q6: 64),
// GROUP % 32 == 0 or GROUP == 16.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
const K: u32 = 32u;
const N: u32 = 2u;
const TOKENS: u32 = 4u;
const LANES: u32 = 32u;
const PAIRS: u32 = 1u;
const WORKGROUP: u32 = 128u;
const BLOCKS: u32 = K / 32u;
const ROUNDS: u32 = (BLOCKS + LANES - 1u) / LANES;
struct WeightPair { a: Weights, b: Weights }
@group(0) @binding(8) var<uniform> step: Step;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) index: u32) {
  let lane = index % LANES;
  let group0 = group.x + group.y * groups.x;
  let row = 2u * PAIRS * (group0 * (WORKGROUP / LANES) + index / LANES);
  var sums: array<vec2<f32>, TOKENS * PAIRS>;
  for (var i = 0u; i < TOKENS * PAIRS; i++) { sums[i] = vec2<f32>(); }
  for (var r = 0u; r < ROUNDS; r++) {
    let b = lane + r * LANES;
    if (BLOCKS % LANES == 0u || b < BLOCKS) {
      var w: array<WeightPair, PAIRS>;  // past the end: clamp the loads, emit guards the store
      for (var p = 0u; p < PAIRS; p++) {
        w[p] = WeightPair(fetch(min(row + 2u * p, N - 1u), b), fetch(min(row + 2u * p + 1u, N - 1u), b));
      }
      for (var t = 0u; t < TOKENS; t++) {
        let v = inputs(min(t, step.m - 1u), b);
        for (var p = 0u; p < PAIRS; p++) { sums[t * PAIRS + p] += vec2<f32>(dot32(v, w[p].a), dot32(v, w[p].b)); }
      }
    }
  }
  let sum = sum_each(&sums, index);
  if (lane < TOKENS * PAIRS && lane / PAIRS < step.m) { emit(lane / PAIRS, row + 2u * (lane % PAIRS), sum); }
  finish(group0, 0u, index);
}
