// The inputs of a linear of one token, made in the kernel itself: the partial results of attend_split joined (see
// attend_merge), by every workgroup for itself. Saves the merge's own dispatch. prepare must be called by every invocation.
// Parts: inputs_made, (record,) splits. Needs K % 32 == 0, HEAD_DIM % 8 == 0, WORKGROUP % 4 == 0.
const K: u32 = 32u;
const HEAD_DIM: u32 = 32u;
const READY: bool = false;  // an earlier stage has made them, and they are still there
const WORKGROUP: u32 = 64u;
const HEADS: u32 = K / HEAD_DIM;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;      // [layers, HEADS, splits, HEAD_DIM], gaps between layers
@group(0) @binding(9) var<storage, read> stats: array<vec2<f32>>;  // [layers, HEADS, splits] (top, total), likewise
fn prepare(index: u32) {
  if (READY) { return; }
  wait(index);
  let splits = split_count();
  for (var u = 0u; u < K / 8u; u += WORKGROUP) {  // eight values each; the same rounds for all
    let i = min(u + index, K / 8u - 1u);
    let first = later() + (layer() * HEADS + 8u * i / HEAD_DIM) * splits;
    var a = vec4<f32>();
    var b = vec4<f32>();
    var top = -1e30;
    var total = 0.0;
    for (var s0 = 0u; s0 < splits; s0 += 4u) {  // four at a time: they wait for memory together
      var at: array<vec2<f32>, 4>;
      var va: array<vec4<f32>, 4>;
      var vb: array<vec4<f32>, 4>;
      for (var s = 0u; s < 4u; s++) {
        let split = min(s0 + s, splits - 1u);
        let j = (layer() * GAP + (first + split) * HEAD_DIM + 8u * i % HEAD_DIM) / 4u;
        at[s] = stats[layer() * (GAP / 2u) + first + split];
        va[s] = x[j];
        vb[s] = x[j + 1u];
      }
      var peak = top;
      for (var s = 0u; s < 4u; s++) { peak = max(peak, at[s].x); }
      let shrink = exp(top - peak);
      a *= shrink;
      b *= shrink;
      total *= shrink;
      top = peak;
      for (var s = 0u; s < 4u; s++) {
        let f = select(0.0, exp(at[s].x - top), s0 + s < splits);
        a += va[s] * f;
        b += vb[s] * f;
        total += at[s].y * f;
      }
    }
    keep(a / total, b / total, i, index, u + index < K / 8u);
  }
  workgroupBarrier();
}
fn factor() -> f32 { return 1.0; }
