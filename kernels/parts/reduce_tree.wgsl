// Role reduce: trees in workgroup memory. Every invocation must call these functions.
// sum_lanes(v, index): the sum of v over the LANES neighbouring invocations that share a result, for all of them.
// sum_workgroup(v, index): the same over the whole workgroup; the caller has a barrier between two calls. sum_begin and sum_end
// are such a sum in two halves; the caller puts a barrier between them.
// sum_each(v, index): every lane has SUMS values; lane i gets the sums of all lanes' values HELD * i and so on,
// in the first HELD places of v.
const LANES: u32 = 64u;      // a power of two, divides WORKGROUP
const WORKGROUP: u32 = 64u;  // a power of two where sum_workgroup is used
const TOKENS: u32 = 1u;
const ROW_PAIRS: u32 = 1u;
const TOKEN_TEAMS: u32 = 1u;
const SUMS: u32 = TOKENS / TOKEN_TEAMS * ROW_PAIRS;
const HELD: u32 = max(1u, SUMS / LANES);  // sums that a lane gets
var<workgroup> lane_sums: array<vec2<f32>, WORKGROUP>;
fn tree_sum(v: vec2<f32>, index: u32, lanes: u32) -> vec2<f32> {
  workgroupBarrier();  // the sums of the last call have been read
  lane_sums[index] = v;
  workgroupBarrier();
  for (var half = lanes / 2u; half > 0u; half >>= 1u) {
    if (index % lanes < half) { lane_sums[index] += lane_sums[index + half]; }
    workgroupBarrier();
  }
  return lane_sums[index - index % lanes];
}
fn sum_lanes(v: vec2<f32>, index: u32) -> vec2<f32> { return tree_sum(v, index, LANES); }
fn sum_workgroup(v: f32, index: u32) -> f32 { return tree_sum(vec2<f32>(v, 0.0), index, WORKGROUP).x; }
var<private> pending_sum: f32;
fn sum_begin(v: f32, index: u32) { pending_sum = sum_workgroup(v, index); }
fn sum_end() -> f32 { return pending_sum; }
fn sum_part(v: f32, i: u32, count: u32) {}  // for several tokens: only by subgroups
fn sum_parts(token: u32, values: u32) -> f32 { return 0.0; }
fn sum_each(v: ptr<function, array<vec2<f32>, SUMS>>, index: u32) {
  for (var i = 0u; i < SUMS; i++) {
    let sum = sum_lanes((*v)[i], index);
    if (index % LANES == i / HELD) { (*v)[i % HELD] = sum; }
  }
}
