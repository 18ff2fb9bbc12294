// y[m, HEADS, HEAD_DIM] = the merged splits of attend_split: sum of partial sums / sum of totals, each rescaled to the
// common top. Writes f32, or blocks with TO_BLOCKS.
// One workgroup per 32 dimensions; an invocation takes 4 dimensions of several splits.
// Needs HEAD_DIM % 32 == 0. Parts: blocks_*, sinks*.
const HEADS: u32 = 1u;
const HEAD_DIM: u32 = 64u;
const SPLITS: u32 = 2u;
const TO_BLOCKS: bool = false;
const BLOCKS: u32 = HEADS * HEAD_DIM / 32u;  // blocks of a token
const WORKGROUP: u32 = 64u;
@group(0) @binding(0) var<storage, read_write> y: array<u32>;
@group(0) @binding(3) var<storage, read> stats: array<vec2<f32>>;  // [m * HEADS, SPLITS] (top, total), see attend_split
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;      // partial sums [m * HEADS, SPLITS, HEAD_DIM]
var<workgroup> sums: array<vec4<f32>, WORKGROUP>;
var<workgroup> totals: array<f32, WORKGROUP>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let head = workgroup.x * 32u / HEAD_DIM;
  let dim4 = workgroup.x * 8u % (HEAD_DIM / 4u) + index % 8u;
  var top = sink(head % HEADS);
  for (var s = 0u; s < SPLITS; s++) { top = max(top, stats[head * SPLITS + s].x); }
  var sum = vec4<f32>();
  var total = 0.0;
  for (var s = index / 8u; s < SPLITS; s += WORKGROUP / 8u) {
    let stat = stats[head * SPLITS + s];
    let f = exp(stat.x - top);
    sum += x[(head * SPLITS + s) * (HEAD_DIM / 4u) + dim4] * f;
    total += stat.y * f;
  }
  sums[index] = sum;
  totals[index] = total;
  workgroupBarrier();
  if (index < 8u) {
    total += SINK_TOTAL * exp(sink(head % HEADS) - top);
    for (var i = 8u; i < WORKGROUP; i += 8u) { sum += sums[index + i]; total += totals[index + i]; }
    sums[index] = sum / total;
  }
  workgroupBarrier();
  if (!TO_BLOCKS) {
    if (index < 8u) {
      let u = bitcast<vec4<u32>>(sums[index]);
      let i = 4u * (workgroup.x * 8u + index);
      y[i] = u.x; y[i + 1u] = u.y; y[i + 2u] = u.z; y[i + 3u] = u.w;
    }
    return;
  }
  let i = min(index, 3u);
  store_block(block_word(workgroup.x / BLOCKS, workgroup.x % BLOCKS, BLOCKS), BLOCKS, sums[2u * i], sums[2u * i + 1u], index, index < 4u);
}
