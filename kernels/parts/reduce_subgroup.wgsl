// sum_lanes: the sum of v over the LANES neighbouring invocations that share a result, given to all of them.
// sum_workgroup: the same over the whole workgroup; sum_begin and sum_end are its two halves, with a barrier of the caller's
// between them. sum_each: of TOKENS * PAIRS values, the sum of the one whose number is the invocation's.
// Subgroup operations, then one step through workgroup memory; every invocation must call them.
const LANES: u32 = 64u;      // a multiple of SUBGROUP, divides WORKGROUP
const WORKGROUP: u32 = 64u;
const SUBGROUP: u32 = 32u;   // lanes of a subgroup, as probed
const TOKENS: u32 = 1u;      // TOKENS * PAIRS: a power of two, 16 at most, divides SUBGROUP
const PAIRS: u32 = 1u;
const EACH: u32 = TOKENS * PAIRS;
var<workgroup> subgroup_sums: array<vec2<f32>, WORKGROUP / SUBGROUP * EACH>;
var<workgroup> kept_sums: array<f32, WORKGROUP / SUBGROUP>;
fn joined_sum(v: vec2<f32>, index: u32, lanes: u32) -> vec2<f32> {
  var sum = subgroupAdd(v);
  if (lanes == SUBGROUP) { return sum; }
  workgroupBarrier();  // the last result has been read by all
  if (index % SUBGROUP == 0u) { subgroup_sums[index / SUBGROUP] = sum; }
  workgroupBarrier();
  let first = index / lanes * (lanes / SUBGROUP);
  sum = vec2<f32>();
  for (var i = 0u; i < lanes / SUBGROUP; i++) { sum += subgroup_sums[first + i]; }
  return sum;
}
fn sum_lanes(v: vec2<f32>, index: u32) -> vec2<f32> { return joined_sum(v, index, LANES); }
fn sum_workgroup(v: f32, index: u32) -> f32 { return joined_sum(vec2<f32>(v, 0.0), index, WORKGROUP).x; }
fn sum_begin(v: f32, index: u32) {
  let sum = subgroupAdd(v);
  if (index % SUBGROUP == 0u) { kept_sums[index / SUBGROUP] = sum; }
}
fn sum_end() -> f32 {
  var sum = 0.0;
  for (var i = 0u; i < WORKGROUP / SUBGROUP; i++) { sum += kept_sums[i]; }
  return sum;
}
fn halve(v: ptr<function, array<vec2<f32>, EACH>>, count: u32, index: u32) {  // 2 * count sums to count in each lane
  let upper = (index & count) != 0u;
  for (var i = 0u; i < count; i++) {
    let a = (*v)[i];
    let b = (*v)[i + count];
    (*v)[i] = select(a, b, upper) + subgroupShuffleXor(select(b, a, upper), count);
  }
}
fn sum_each(v: ptr<function, array<vec2<f32>, EACH>>, index: u32) -> vec2<f32> {
  if (EACH > 8u) { halve(v, 8u, index); }
  if (EACH > 4u) { halve(v, 4u, index); }
  if (EACH > 2u) { halve(v, 2u, index); }
  if (EACH > 1u) { halve(v, 1u, index); }
  var sum = (*v)[0];
  for (var d = EACH; d < SUBGROUP; d <<= 1u) { sum += subgroupShuffleXor(sum, d); }
  if (LANES == SUBGROUP) { return sum; }
  if (index % SUBGROUP < EACH) { subgroup_sums[index / SUBGROUP * EACH + index % SUBGROUP] = sum; }
  workgroupBarrier();
  let first = index / LANES * (LANES / SUBGROUP);
  sum = vec2<f32>();
  for (var i = 0u; i < LANES / SUBGROUP; i++) { sum += subgroup_sums[(first + i) * EACH + index % EACH]; }
  return sum;
}
