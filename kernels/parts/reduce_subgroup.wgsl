// sum_lanes: the sum of v over the LANES neighbouring invocations that share a result, given to all of them.
// sum_workgroup: the same over the whole workgroup. Subgroup additions, then one step through workgroup memory;
// every invocation must call them.
const LANES: u32 = 64u;      // a multiple of SUBGROUP, divides WORKGROUP
const WORKGROUP: u32 = 64u;
const SUBGROUP: u32 = 32u;   // lanes of a subgroup, as probed
var<workgroup> subgroup_sums: array<vec2<f32>, WORKGROUP / SUBGROUP>;
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
