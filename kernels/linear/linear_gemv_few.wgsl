// y[m, N] = x[m, K] @ W[N, K]^T for a few tokens (m <= TOKENS): LANES invocations share two rows and split K by blocks
// of 32; each 16-byte load of weights serves all tokens, so that two tokens cost little more than one.
// Parts: half, (scales, planes,) inputs, dot, out, reduce. Needs K % 32 == 0 (q6: 64), GROUP % 32 == 0 or GROUP == 16.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
const K: u32 = 32u;
const N: u32 = 2u;
const TOKENS: u32 = 4u;
const LANES: u32 = 64u;
const WORKGROUP: u32 = 128u;
@group(0) @binding(8) var<uniform> step: Step;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) index: u32) {
  let lane = index % LANES;
  let row = 2u * ((group.x + group.y * groups.x) * (WORKGROUP / LANES) + index / LANES);
  var sums: array<vec2<f32>, TOKENS>;
  for (var t = 0u; t < TOKENS; t++) { sums[t] = vec2<f32>(); }
  for (var b = lane; b < K / 32u; b += LANES) {
    let w0 = fetch(min(row, N - 1u), b);  // past the end: clamp the loads, emit guards the store
    let w1 = fetch(min(row + 1u, N - 1u), b);
    for (var t = 0u; t < TOKENS; t++) {
      let v = inputs(min(t, step.m - 1u), b);
      sums[t] += vec2<f32>(dot32(v, w0), dot32(v, w1));
    }
  }
  for (var t = 0u; t < TOKENS; t++) {
    let sum = sum_lanes(sums[t], index);
    if (lane == t && t < step.m) { emit(t, row, sum); }
  }
}
