// Role prologue: the inputs of a linear of TOKENS tokens = the merged splits of attend_split (see attend_merge). Every
// workgroup computes them for itself, which saves a dispatch. Every invocation must call run_prologue.
// late_*, repair_*: see parts/late_stores.wgsl. With Tint a step has TOKENS rows, no fewer.
// Needs K % 32 == 0, HEAD_DIM % 8 == 0, WORKGROUP % 4 == 0.
// Parts: prologue_f32 or prologue_int8, split_count_*; grid_barrier (or unfused).
const K: u32 = 32u;
const TOKENS: u32 = 1u;
const HEAD_DIM: u32 = 32u;
const BY_LAYER: bool = false;  // layers of a fused kernel have different windows, so other numbers of splits
const MAX_SPLITS: u32 = 16u;
const INPUTS_READY: bool = false;  // the inputs are still in workgroup memory from an earlier stage
const WORKGROUP: u32 = 64u;
const HEADS: u32 = TOKENS * K / HEAD_DIM;  // of all tokens
const OCTETS: u32 = TOKENS * K / 8u;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;      // [layers, TOKENS * HEADS, splits, HEAD_DIM], padded after each layer
@group(0) @binding(9) var<storage, read> stats: array<vec2<f32>>;  // [layers, TOKENS * HEADS, splits] (top, total), padded after each layer
fn late_x(v: vec4<f32>) -> bool { return false; }
fn repair_x(i: u32) {}
fn repair_stats(i: u32) {}
fn run_prologue(index: u32) {
  if (INPUTS_READY) { return; }
  wait(index);
  let splits = split_count();
  let octets = OCTETS + select(0u, uniform_zero(), TOKENS > 1u);  // not a constant: unrolled, the loop would be long
  for (var i0 = 0u; i0 < octets; i0 += WORKGROUP) {  // eight values each; the same iterations for all invocations
    let i = min(i0 + index, OCTETS - 1u);
    let head = 8u * i / HEAD_DIM;
    let first = opaque_zero() + select((layer() * HEADS + head) * splits, layer() * HEADS * MAX_SPLITS + head * splits, BY_LAYER);
    let first_stat = layer() * (LINE_PADDING / 2u) + first;
    let first_sum = (layer() * LINE_PADDING + first * HEAD_DIM + 8u * i % HEAD_DIM) / 4u;
    var merged: mat2x4<f32>;
    var repaired = false;
    loop {
      var a = vec4<f32>();
      var b = vec4<f32>();
      var top = -1e30;
      var total = 0.0;
      for (var s0 = 0u; s0 < splits; s0 += 4u) {  // four at a time: one wait for memory
        var stat: array<vec2<f32>, 4>;
        var va: array<vec4<f32>, 4>;
        var vb: array<vec4<f32>, 4>;
        for (var s = 0u; s < 4u; s++) {
          let split = min(s0 + s, splits - 1u);
          let j = first_sum + split * (HEAD_DIM / 4u);
          stat[s] = stats[first_stat + split];
          va[s] = x[j];
          vb[s] = x[j + 1u];
        }
        var new_top = top;
        for (var s = 0u; s < 4u; s++) { new_top = max(new_top, stat[s].x); }
        let rescale = exp(top - new_top);
        a *= rescale;
        b *= rescale;
        total *= rescale;
        top = new_top;
        for (var s = 0u; s < 4u; s++) {
          let f = select(0.0, exp(stat[s].x - top), s0 + s < splits);
          a += va[s] * f;
          b += vb[s] * f;
          total += stat[s].y * f;
        }
      }
      merged = mat2x4<f32>(a / total, b / total);
      if (repaired || !(late_x(merged[0]) || late_x(merged[1]))) { break; }
      repaired = true;
      for (var split = 0u; split < splits; split++) {
        repair_stats(first_stat + split);
        for (var half = 0u; half < 2u + uniform_zero(); half++) { repair_x(first_sum + split * (HEAD_DIM / 4u) + half); }
      }
    }
    store_inputs(merged[0], merged[1], i, index, i0 + index < OCTETS);
  }
  workgroupBarrier();
}
fn copy_piece(first: u32, index: u32) -> u32 { return 0u; }  // no pieces: see prologue_blocks
fn output_scale(token: u32) -> f32 { return 1.0; }
