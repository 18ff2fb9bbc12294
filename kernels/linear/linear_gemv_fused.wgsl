// y[N] = x[K] @ W[N, K]^T, one token, as a stage of a fused kernel (gpu/fuse.py): GEMV in a grid-stride loop over rows.
// Of experts, W is [expert, rows, K], and rows_experts says which of its rows these are.
// LANES invocations share a row pair and split K by blocks of 32, with 16-byte loads (32 weights of q4 each).
// Prefetch: loads of IN_FLIGHT iterations are always in flight, the first ones before the prologue waits for x. After a
// block is used, its registers load the block IN_FLIGHT iterations later, or at the end of a row pair one of the next.
// A stage that chooses its experts cannot load before that: its prologue does not wait, and runs first.
// Needs m == 1, K % 32 == 0 (q6: 64), GROUP % 32 == 0 or GROUP == 16.
// Parts: f16, (scales, planes_*,) inputs_interleaved or prologue_*, dot_*, epilogue_*, reduce_*, turn_*, rows_*.
const K: u32 = 32u;
const N: u32 = 2u;
const LANES: u32 = 64u;
const WORKGROUP: u32 = 64u;
const INPUT_WIDTH: u32 = K;                                // of all experts together
const BLOCKS: u32 = INPUT_WIDTH / 32u;
const ITERATIONS: u32 = (BLOCKS + LANES - 1u) / LANES;
const PREFETCH: u32 = 4u;                                  // prefetch depth: iterations in flight, as many as registers hold
const IN_FLIGHT: u32 = min(ITERATIONS, PREFETCH);
const NO_TAIL: bool = BLOCKS % (LANES * IN_FLIGHT) == 0u;  // every lane has a block in every iteration
struct WeightPair { a: Weights, b: Weights }
fn fetch_pair(row: u32, b: u32) -> WeightPair {  // past the last row loads are clamped and the epilogue guards the store
  let i = select(min(b, BLOCKS - 1u), b, NO_TAIL);
  let first = slab_row(row, i);
  return WeightPair(fetch(first + min(row, N - 1u), row_block(i)), fetch(first + min(row + 1u, N - 1u), row_block(i)));
}
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) index: u32) {
  let lane = index % LANES;
  let row_offset = 2u * (index / LANES);
  let stride = workgroups.x * workgroups.y * 2u * (WORKGROUP / LANES);
  var first_row = (workgroup.x + workgroup.y * workgroups.x) * 2u * (WORKGROUP / LANES);
  var row = first_row + row_offset;
  if (lane == 0u) { epilogue_prefetch(0u, row); }
  var w: array<WeightPair, IN_FLIGHT>;
  if (!CHOOSES) {
    for (var j = 0u; j < IN_FLIGHT; j++) { w[j] = fetch_pair(row, lane + j * LANES); }
  }
  run_prologue(index);
  if (CHOOSES) {
    choose_experts(index);
    for (var j = 0u; j < IN_FLIGHT; j++) { w[j] = fetch_pair(row, lane + j * LANES); }
    weigh_experts(index);  // while the loads are in flight
  }
  let iterations = ITERATIONS + opaque_zero();  // not a constant: a driver that unrolls the loop runs out of registers
  loop {
    var s = vec2<f32>();
    let has_next = workgroup_row(first_row, row, row_offset) + stride < N;
    var i = 0u;
    loop {
      let last = IN_FLIGHT == ITERATIONS || i + IN_FLIGHT >= iterations;
      let next_row = select(row, row + stride, last);
      let next_block = select(lane + (i + IN_FLIGHT) * LANES, lane, last);
      for (var j = 0u; j < IN_FLIGHT; j++) {
        let b = lane + (i + j) * LANES;
        if (NO_TAIL || b < BLOCKS) {
          let v = inputs(0u, b);
          s += vec2<f32>(dot32(v, w[j].a), dot32(v, w[j].b));
        }
        if (!last || has_next) { w[j] = fetch_pair(next_row, next_block + j * LANES); }
      }
      if (last) { break; }
      i += IN_FLIGHT;
    }
    s = sum_lanes(s, index);
    if (lane == 0u) { epilogue(0u, row, weigh_results(row, s * output_scale(0u))); }
    if (!has_next) { break; }
    first_row += stride;
    row += stride;
    if (lane == 0u) { epilogue_prefetch(0u, row); }
  }
}
