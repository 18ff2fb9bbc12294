// y[m, HEADS, HEAD_DIM] = the merged splits of attention: sum of partial sums / sum of totals, each rescaled to the
// common top.
// An invocation takes 8 dimensions of a token: of all splits, or, with TEAMS, of every TEAMS-th one. A team has LANES neighbours.
// Needs HEAD_DIM % 32 == 0. Parts: blocks_*, sinks*.
const HEADS: u32 = 1u;
const HEAD_DIM: u32 = 64u;
const SPLITS: u32 = 2u;
const BLOCKS: u32 = HEADS * HEAD_DIM / 32u;  // blocks of a token
const WORKGROUP: u32 = 64u;
const TEAMS: u32 = 1u;
const LANES: u32 = WORKGROUP / TEAMS;
@group(0) @binding(3) var<storage, read> stats: array<vec2<f32>>;  // [m * HEADS, SPLITS] (top, total), see attend_split, attend_int8, attend_matrix
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;      // partial sums [m * HEADS, SPLITS, HEAD_DIM]
struct Sum { lo: vec4<f32>, hi: vec4<f32>, total: f32 }
var<workgroup> sums: array<Sum, WORKGROUP>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let eight = workgroup.x * LANES + index % LANES;  // of the token's numbers
  let own = min(eight, HEADS * HEAD_DIM / 8u - 1u);
  let head = own * 8u / HEAD_DIM;
  let row = workgroup.y * HEADS + head;
  let first = sink(head);
  var top = first;
  for (var s = 0u; s < SPLITS; s++) { top = max(top, stats[row * SPLITS + s].x); }
  var sum = Sum(vec4<f32>(), vec4<f32>(), SINK_TOTAL * exp(first - top) * f32(index < LANES));
  for (var s = index / LANES; s < SPLITS; s += TEAMS) {
    let stat = stats[row * SPLITS + s];
    let f = exp(stat.x - top);
    let at = (row * SPLITS + s) * (HEAD_DIM / 4u) + own * 2u % (HEAD_DIM / 4u);
    sum = Sum(sum.lo + x[at] * f, sum.hi + x[at + 1u] * f, sum.total + stat.y * f);
  }
  if (TEAMS > 1u) {
    sums[index] = sum;
    workgroupBarrier();
    for (var i = index + LANES; i < WORKGROUP; i += LANES) {
      sum = Sum(sum.lo + sums[i].lo, sum.hi + sums[i].hi, sum.total + sums[i].total);
    }
  }
  let live = eight == own && index < LANES;  // the first team's sums are whole
  let lo = sum.lo / sum.total;
  let hi = sum.hi / sum.total;
  store_block(block_word(workgroup.y, own / 4u, BLOCKS), BLOCKS, lo, hi, index, live);
}
