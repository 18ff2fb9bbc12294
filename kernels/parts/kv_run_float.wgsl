// Role kv_run: the KV cache of a layer as f16 or f32, by runs of 8 dimensions that a lane of attend_split holds: run
// LANES_PER_POSITION * i + lane of a position is the lane's run i. key_run and value_run load one, dot_run multiplies it
// with queries, add_run adds it to the lane's sums. Parts: kv8_f16 or kv8_f32 and kv_own_none, or kv_own_f16.
const HEAD_DIM: u32 = 64u;
const LANES_PER_POSITION: u32 = 8u;  // lanes that share a position
const RUN: u32 = 8u;  // dimensions
const RUNS: u32 = HEAD_DIM / RUN / LANES_PER_POSITION;  // of a lane
alias LaneDims = array<vec4<f32>, RUNS * RUN / 4u>;
alias RawRun = Raw8;
fn dot_run(q: ptr<function, LaneDims>, i: u32, w: RawRun, lane: u32) -> f32 {
  let k = widen(w);
  return dot((*q)[2u * i], k[0]) + dot((*q)[2u * i + 1u], k[1]);
}
fn add_run(sums: ptr<function, LaneDims>, i: u32, e: f32, w: RawRun, lane: u32) {
  let v = widen(w);
  (*sums)[2u * i] += e * v[0];
  (*sums)[2u * i + 1u] += e * v[1];
}
// Dimensions 8 * (LANES_PER_POSITION * i + lane) .. + 7 of the sums.
fn eight(sums: ptr<function, LaneDims>, i: u32, lane: u32, index: u32) -> mat2x4<f32> { return mat2x4<f32>((*sums)[2u * i], (*sums)[2u * i + 1u]); }
