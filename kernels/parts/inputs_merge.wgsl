// The inputs of a linear of one token, made in the kernel itself: the partial results of attend_split joined (see
// attend_merge) and quantised to int8 records in workgroup memory by every workgroup for itself (see make_record). Saves
// the merge's own dispatch. prepare must be called by every invocation. Parts: inputs_made, record.
// Needs K % 32 == 0, HEAD_DIM % 8 == 0, WORKGROUP % 4 == 0.
const K: u32 = 32u;
const HEAD_DIM: u32 = 32u;
const SPLITS: u32 = 2u;
const WORKGROUP: u32 = 64u;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;      // [HEADS, SPLITS, HEAD_DIM]
@group(0) @binding(9) var<storage, read> stats: array<vec2<f32>>;  // [HEADS, SPLITS] (top, total)
fn prepare(index: u32) {
  for (var u = 0u; u < K / 8u; u += WORKGROUP) {  // eight values each; the same rounds for all
    let i = min(u + index, K / 8u - 1u);
    let first = 8u * i / HEAD_DIM * SPLITS;
    var at: array<vec2<f32>, SPLITS>;
    var top = -1e30;
    for (var s = 0u; s < SPLITS; s++) { at[s] = stats[first + s]; top = max(top, at[s].x); }
    var a = vec4<f32>();
    var b = vec4<f32>();
    var total = 0.0;
    for (var s = 0u; s < SPLITS; s++) {
      let f = exp(at[s].x - top);
      let j = ((first + s) * HEAD_DIM + 8u * i % HEAD_DIM) / 4u;
      a += x[j] * f;
      b += x[j + 1u] * f;
      total += at[s].y * f;
    }
    let r = make_record(a / total, b / total, index);
    let into = 12u * (i / 4u) + index % 4u;
    if (u + index < K / 8u) { records[into] = r.even; records[into + 4u] = r.odd; records[into + 8u] = r.scale; }
  }
  workgroupBarrier();
}
