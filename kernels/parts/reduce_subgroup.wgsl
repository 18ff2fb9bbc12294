// Role reduce: subgroup operations, then one pass through workgroup memory. Every invocation must call these functions.
// sum_lanes(v, index): the sum of v over the LANES neighbouring invocations that share a result, for all of them.
// sum_workgroup(v, index): the same over the whole workgroup; the caller has a barrier between two calls. sum_begin and sum_end
// are such a sum in two halves; the caller puts a barrier between them.
// sum_part(v, i, count): parts of sums by token, in place of sum_begin: i numbers the values of all tokens, and a subgroup
// has values of one token. sum_parts(token, values) is the sum of the token's `values` values, after a barrier.
// sum_each(v, index): every lane has SUMS values; lane i gets the sums of all lanes' values HELD * i and so on,
// in the first HELD places of v.
const LANES: u32 = 64u;     // a multiple or a part of SUBGROUP, divides WORKGROUP
const WORKGROUP: u32 = 64u;
const SUBGROUP: u32 = 32u;  // lanes of a subgroup, as probed
const TOKENS: u32 = 1u;     // SUMS: a power of two, 32 at most, divides SUBGROUP where LANES is not less
const ROW_PAIRS: u32 = 1u;
const TOKEN_TEAMS: u32 = 1u;
const SUMS: u32 = TOKENS / TOKEN_TEAMS * ROW_PAIRS;
const HELD: u32 = max(1u, SUMS / LANES);  // sums that a lane gets
const K: u32 = 32u;
const TOKEN_PARTS: u32 = select(0u, TOKENS * K / 8u / SUBGROUP, TOKENS > 1u);
const PENDING: u32 = max(WORKGROUP / SUBGROUP, TOKEN_PARTS);
var<workgroup> subgroup_sums: array<vec2<f32>, WORKGROUP / SUBGROUP * SUMS>;
var<workgroup> pending_sums: array<f32, PENDING>;
var<workgroup> workgroup_sums: array<f32, (WORKGROUP + SUBGROUP - 1u) / SUBGROUP>;
fn sum_subgroups(v: vec2<f32>, index: u32, lanes: u32) -> vec2<f32> {
  if (lanes < SUBGROUP) {
    var part = v;
    for (var d = 1u; d < lanes; d <<= 1u) { part += subgroupShuffleXor(part, d); }
    return part;
  }
  var sum = subgroupAdd(v);
  if (lanes == SUBGROUP) { return sum; }
  workgroupBarrier();  // the sums of the last call have been read
  if (index % SUBGROUP == 0u) { subgroup_sums[index / SUBGROUP] = sum; }
  workgroupBarrier();
  let first = index / lanes * (lanes / SUBGROUP);
  sum = vec2<f32>();
  for (var i = 0u; i < lanes / SUBGROUP; i++) { sum += subgroup_sums[first + i]; }
  return sum;
}
fn sum_lanes(v: vec2<f32>, index: u32) -> vec2<f32> { return sum_subgroups(v, index, LANES); }
fn sum_workgroup(v: f32, index: u32) -> f32 {
  if (WORKGROUP <= SUBGROUP) { return sum_subgroups(vec2<f32>(v, 0.0), index, WORKGROUP).x; }
  let part = subgroupAdd(v);
  if (index % SUBGROUP == 0u) { workgroup_sums[index / SUBGROUP] = part; }
  workgroupBarrier();
  var sum = 0.0;
  for (var i = 0u; i < WORKGROUP / SUBGROUP; i++) { sum += workgroup_sums[i]; }
  return sum;
}
fn sum_begin(v: f32, index: u32) {
  let sum = subgroupAdd(v);
  if (index % SUBGROUP == 0u) { pending_sums[index / SUBGROUP] = sum; }
}
fn sum_end() -> f32 {
  var sum = 0.0;
  for (var i = 0u; i < WORKGROUP / SUBGROUP; i++) { sum += pending_sums[i]; }
  return sum;
}
fn sum_part(v: f32, i: u32, count: u32) {
  let sum = subgroupAdd(v);
  if (i % SUBGROUP == 0u && i < count) { pending_sums[i / SUBGROUP] = sum; }
}
fn sum_parts(token: u32, values: u32) -> f32 {
  var sum = 0.0;
  for (var i = 0u; i < values / SUBGROUP; i++) { sum += pending_sums[token * (values / SUBGROUP) + i]; }
  return sum;
}
fn halve(v: ptr<function, array<vec2<f32>, SUMS>>, count: u32, index: u32) {  // from 2 * count sums in each lane to count
  let distance = count / HELD;
  let upper = (index & distance) != 0u;
  for (var i = 0u; i < count; i++) {
    let a = (*v)[i];
    let b = (*v)[i + count];
    (*v)[i] = select(a, b, upper) + subgroupShuffleXor(select(b, a, upper), distance);
  }
}
fn sum_each(v: ptr<function, array<vec2<f32>, SUMS>>, index: u32) {
  if (SUMS > 16u && HELD <= 16u) { halve(v, 16u, index); }
  if (SUMS > 8u && HELD <= 8u) { halve(v, 8u, index); }
  if (SUMS > 4u && HELD <= 4u) { halve(v, 4u, index); }
  if (SUMS > 2u && HELD <= 2u) { halve(v, 2u, index); }
  if (SUMS > 1u && HELD <= 1u) { halve(v, 1u, index); }
  for (var d = SUMS / HELD; d < min(LANES, SUBGROUP); d <<= 1u) { (*v)[0] += subgroupShuffleXor((*v)[0], d); }
  if (LANES <= SUBGROUP) { return; }
  workgroupBarrier();  // the sums of the last call have been read
  if (index % SUBGROUP < SUMS) { subgroup_sums[index / SUBGROUP * SUMS + index % SUBGROUP] = (*v)[0]; }
  workgroupBarrier();
  let first = index / LANES * (LANES / SUBGROUP);
  var sum = vec2<f32>();
  for (var i = 0u; i < LANES / SUBGROUP; i++) { sum += subgroup_sums[(first + i) * SUMS + index % SUMS]; }
  (*v)[0] = sum;
}
