// Role prologue: the inputs of a linear of one token = x * weight, or x without NORM. Every workgroup computes them for
// itself, which saves a dispatch. output_scale() is the factor 1 / rms(x), applied to the results, so that no
// invocation waits for the sum.
// Every invocation must call run_prologue.
// Needs K % 32 == 0 and WORKGROUP % 4 == 0.
// Parts: prologue_f32 or prologue_int8, reduce_*; grid_barrier (or unfused).
const K: u32 = 32u;
const NORM: bool = true;
const INPUTS_READY: bool = false;  // the inputs are still in workgroup memory from an earlier stage
const EPS: f32 = 1e-5;
const WORKGROUP: u32 = 64u;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;     // [layers, K], padded after each layer
@group(0) @binding(9) var<storage, read> norm: array<vec4<f32>>;  // [layers, K]
const INPUT_ITERATIONS: u32 = (K / 8u + WORKGROUP - 1u) / WORKGROUP;  // an invocation takes eight values in each
fn input_index(index: u32, iteration: u32) -> u32 { return layer() * (K / 4u) + 2u * min(index + iteration * WORKGROUP, K / 8u - 1u); }
fn run_prologue(index: u32) {
  if (INPUTS_READY) { return; }
  var w: array<mat2x4<f32>, INPUT_ITERATIONS>;
  if (NORM) {
    for (var r = 0u; r < INPUT_ITERATIONS; r++) { let i = input_index(index, r); w[r] = mat2x4<f32>(norm[i], norm[i + 1u]); }
  }
  wait(index);
  var v: array<mat2x4<f32>, INPUT_ITERATIONS>;
  let padding = opaque_zero() + layer() * (LINE_PADDING / 4u);
  for (var r = 0u; r < INPUT_ITERATIONS; r++) { let i = padding + input_index(index, r); v[r] = mat2x4<f32>(x[i], x[i + 1u]); }
  var sum = 0.0;
  for (var r = 0u; r < INPUT_ITERATIONS; r++) {
    let i = index + r * WORKGROUP;
    if (NORM) {
      if (i < K / 8u) { sum += dot(v[r][0], v[r][0]) + dot(v[r][1], v[r][1]); }
      v[r] = mat2x4<f32>(v[r][0] * w[r][0], v[r][1] * w[r][1]);
    }
    store_inputs(v[r][0], v[r][1], i, index, i < K / 8u);
  }
  if (NORM) { sum_begin(sum, index); }
  workgroupBarrier();
}
fn output_scale() -> f32 { return select(1.0, inverseSqrt(sum_end() / f32(K) + EPS), NORM); }
