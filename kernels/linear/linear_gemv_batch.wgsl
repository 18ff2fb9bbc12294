// y[m, N] = x[m, K] @ W[N, K]^T, a few tokens (m <= TOKENS): GEMV of a small batch.
// LANES invocations share ROW_PAIRS row pairs and split K by blocks of 32. Each 16-byte load of weights serves all
// tokens, so that two tokens cost little more than one.
// Needs TOKENS * ROW_PAIRS <= LANES, K % 32 == 0 (q6: 64), GROUP % 32 == 0 or GROUP == 16.
// Parts: f16, (scales, planes_*,) inputs_*, dot_*, epilogue_*, reduce_*.
struct Row { slot: u32, position: u32, token: u32, generated: u32 }  // a token row: sequence slot, position, token id, tokens generated so far
struct Step { rows: u32, segments: u32, capacity: u32, slots: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const K: u32 = 32u;
const N: u32 = 2u;
const TOKENS: u32 = 4u;
const LANES: u32 = 32u;
const ROW_PAIRS: u32 = 1u;
const WORKGROUP: u32 = 128u;
const BLOCKS: u32 = K / 32u;
const ITERATIONS: u32 = (BLOCKS + LANES - 1u) / LANES;
@group(0) @binding(8) var<uniform> step: Step;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) index: u32) {
  let lane = index % LANES;
  let workgroup_index = workgroup.x + workgroup.y * workgroups.x;
  let row = 2u * ROW_PAIRS * (workgroup_index * (WORKGROUP / LANES) + index / LANES);
  var sums: array<vec2<f32>, TOKENS * ROW_PAIRS>;
  for (var i = 0u; i < TOKENS * ROW_PAIRS; i++) { sums[i] = vec2<f32>(); }
  for (var r = 0u; r < ITERATIONS; r++) {
    let b = lane + r * LANES;
    if (BLOCKS % LANES == 0u || b < BLOCKS) {
      var w: array<Weights, 2u * ROW_PAIRS>;  // past the last row loads are clamped and the epilogue guards the store
      for (var i = 0u; i < 2u * ROW_PAIRS; i++) { w[i] = fetch(min(row + i, N - 1u), b); }
      var u: array<Unpacked, 2u * ROW_PAIRS>;
      for (var i = 0u; i < 2u * ROW_PAIRS; i++) { u[i] = unpack(w[i]); }
      for (var t = 0u; t < TOKENS; t++) {
        let v = inputs(min(t, step.rows - 1u), b);
        for (var p = 0u; p < ROW_PAIRS; p++) {
          let s = sums[t * ROW_PAIRS + p];
          sums[t * ROW_PAIRS + p] = vec2<f32>(add_dot(s.x, v, u[2u * p]), add_dot(s.y, v, u[2u * p + 1u]));
        }
      }
    }
  }
  let sum = sum_each(&sums, index);
  if (lane < TOKENS * ROW_PAIRS && lane / ROW_PAIRS < step.rows) { epilogue(lane / ROW_PAIRS, row + 2u * (lane % ROW_PAIRS), sum); }
  workgroup_epilogue(workgroup_index, 0u, index);
}
