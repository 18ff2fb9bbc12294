// Role prologue: the inputs of a linear of one token = s * weight, or s without NORM, where s = residual + x / rms(x) * after is
// the residual stream after attention or feed forward (x) with a norm of its own. Every workgroup computes s for itself, which
// saves a grid barrier, and the first one stores it in `stream`, for the next sum. output_scale(token) is the factor
// 1 / rms(s), applied to the results.
// With BEFORE all of them are of the layer before; the first layer finds its s in `stream`.
// Every invocation must call run_prologue. late_*, repair_*: see parts/late_stores.wgsl. Needs K % 32 == 0 and WORKGROUP % 4 == 0.
// Parts: prologue_f32 or prologue_int8, reduce_*; grid_barrier (or unfused).
const K: u32 = 32u;
const NORM: bool = true;
const BEFORE: bool = false;
const INPUTS_READY: bool = false;  // the inputs are still in workgroup memory from an earlier stage
const EPS: f32 = 1e-5;
const AFTER_EPS: f32 = 1e-5;
const WORKGROUP: u32 = 64u;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;              // [layers, K], padded after each layer
@group(0) @binding(9) var<storage, read> norm: array<vec4<f32>>;           // [layers, K]
@group(0) @binding(10) var<storage, read> residual: array<vec4<f32>>;      // [layers, K], padded after each layer
@group(0) @binding(11) var<storage, read> after: array<vec4<f32>>;         // [layers, K]
@group(0) @binding(12) var<storage, read_write> stream: array<vec4<f32>>;  // [layers, K], padded after each layer
const OCTETS: u32 = K / 8u;
const INPUT_ITERATIONS: u32 = (OCTETS + WORKGROUP - 1u) / WORKGROUP;  // an invocation takes eight values in each
const STREAM_STRIDE: u32 = (K + LINE_PADDING) / 4u;
fn late_x(v: vec4<f32>) -> bool { return false; }
fn repair_x(i: u32) {}
fn late_residual(v: vec4<f32>) -> bool { return false; }
fn repair_residual(i: u32) {}
fn octet_of(index: u32, iteration: u32) -> u32 { return min(index + iteration * WORKGROUP, OCTETS - 1u); }
fn run_prologue(index: u32) {
  if (INPUTS_READY) { return; }
  let begins = BEFORE && layer() == 0u;
  let from_layer = layer() - select(0u, 1u, BEFORE && !begins);
  var w: array<mat2x4<f32>, INPUT_ITERATIONS>;
  var a: array<mat2x4<f32>, INPUT_ITERATIONS>;
  for (var r = 0u; r < INPUT_ITERATIONS; r++) {
    let i = 2u * octet_of(index, r);
    if (NORM) { w[r] = mat2x4<f32>(norm[layer() * (K / 4u) + i], norm[layer() * (K / 4u) + i + 1u]); }
    a[r] = mat2x4<f32>(after[from_layer * (K / 4u) + i], after[from_layer * (K / 4u) + i + 1u]);
  }
  wait(index);
  let first = opaque_zero() + from_layer * STREAM_STRIDE;
  var v: array<mat2x4<f32>, INPUT_ITERATIONS>;
  var s: array<mat2x4<f32>, INPUT_ITERATIONS>;
  var squares = 0.0;
  var repaired = begins;
  loop {
    for (var r = 0u; r < INPUT_ITERATIONS; r++) {
      let i = first + 2u * octet_of(index, r);
      if (begins) {  // x and residual are not there yet: nobody may read them
        v[r] = mat2x4<f32>();
        s[r] = mat2x4<f32>(stream[i], stream[i + 1u]);
      } else {
        v[r] = mat2x4<f32>(x[i], x[i + 1u]);
        s[r] = mat2x4<f32>(residual[i], residual[i + 1u]);
      }
    }
    var late = vec2<bool>();
    for (var r = 0u; r < INPUT_ITERATIONS; r++) {
      late.x = late.x || late_x(v[r][0]) || late_x(v[r][1]);
      late.y = late.y || late_residual(s[r][0]) || late_residual(s[r][1]);
    }
    if (repaired || !any(late)) { break; }
    repaired = true;
    for (var r = 0u; r < 2u * INPUT_ITERATIONS + uniform_zero(); r++) {
      let i = first + 2u * octet_of(index, r / 2u) + r % 2u;
      if (late.x) { repair_x(i); }
      if (late.y) { repair_residual(i); }  // not the first layer's, which no stage stores
    }
  }
  for (var r = 0u; r < INPUT_ITERATIONS; r++) {
    if (index + r * WORKGROUP < OCTETS) { squares += dot(v[r][0], v[r][0]) + dot(v[r][1], v[r][1]); }
  }
  let scale = inverseSqrt(sum_workgroup(squares, index) / f32(K) + AFTER_EPS);
  let stores = first_workgroup() && !begins;
  var sum = 0.0;
  for (var r = 0u; r < INPUT_ITERATIONS; r++) {
    let octet = index + r * WORKGROUP;
    s[r] = mat2x4<f32>(s[r][0] + v[r][0] * scale * a[r][0], s[r][1] + v[r][1] * scale * a[r][1]);
    if (octet < OCTETS) { sum += dot(s[r][0], s[r][0]) + dot(s[r][1], s[r][1]); }
    if (stores && octet < OCTETS) {
      stream[layer() * STREAM_STRIDE + 2u * octet] = s[r][0];
      stream[layer() * STREAM_STRIDE + 2u * octet + 1u] = s[r][1];
    }
    if (NORM) { s[r] = mat2x4<f32>(s[r][0] * w[r][0], s[r][1] * w[r][1]); }
    store_inputs(s[r][0], s[r][1], octet, index, octet < OCTETS);
  }
  if (NORM) { sum_begin(sum, index); }
  workgroupBarrier();
}
fn output_scale(token: u32) -> f32 {
  if (!NORM) { return 1.0; }
  return inverseSqrt(sum_end() / f32(K) + EPS);
}
