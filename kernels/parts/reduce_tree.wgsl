// sum_lanes: the sum of v over the LANES neighbouring invocations that share a result, given to all of them.
// sum_workgroup: the same over the whole workgroup; sum_begin and sum_end are its two halves, with a barrier of the caller's
// between them. sum_each: of TOKENS * PAIRS values, the sum of the one whose number is the invocation's.
// Trees in workgroup memory; every invocation must call them.
const LANES: u32 = 64u;      // a power of two, divides WORKGROUP
const WORKGROUP: u32 = 64u;  // a power of two where sum_workgroup is used
const TOKENS: u32 = 1u;
const PAIRS: u32 = 1u;
const EACH: u32 = TOKENS * PAIRS;
var<workgroup> lane_sums: array<vec2<f32>, WORKGROUP>;
fn tree_sum(v: vec2<f32>, index: u32, lanes: u32) -> vec2<f32> {
  workgroupBarrier();  // the last result has been read by all
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
var<private> kept: f32;
fn sum_begin(v: f32, index: u32) { kept = sum_workgroup(v, index); }
fn sum_end() -> f32 { return kept; }
fn sum_each(v: ptr<function, array<vec2<f32>, EACH>>, index: u32) -> vec2<f32> {
  var own = vec2<f32>();
  for (var i = 0u; i < EACH; i++) {
    let sum = sum_lanes((*v)[i], index);
    own = select(own, sum, index % LANES == i);
  }
  return own;
}
