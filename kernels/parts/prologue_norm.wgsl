// Role prologue: the inputs of a linear of TOKENS tokens = x * weight, or x without NORM. Every workgroup computes them
// for itself, which saves a dispatch. output_scale(token) is the factor 1 / rms(x), applied to the results, so that no
// invocation waits for the sum.
// Every invocation must call run_prologue. late_x, repair_x: see parts/late_stores.wgsl. With Tint a step has TOKENS rows, no fewer.
// Needs INPUT_WIDTH % 32 == 0 and WORKGROUP % 4 == 0; for several tokens reduce_subgroup and INPUT_WIDTH / 8 in whole
// subgroups.
// Parts: prologue_f32 or prologue_int8, reduce_*; grid_barrier (or unfused).
const K: u32 = 32u;
const INPUT_WIDTH: u32 = K;  // more than a row of the weights where several experts have inputs
const TOKENS: u32 = 1u;
const NORM: bool = true;
const INPUTS_READY: bool = false;  // the inputs are still in workgroup memory from an earlier stage
const CHOOSES: bool = false;       // the stage waits later, to choose its experts: x is older than the stage before
const EPS: f32 = 1e-5;
const WORKGROUP: u32 = 64u;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;     // [layers, TOKENS, INPUT_WIDTH], padded after each layer
@group(0) @binding(9) var<storage, read> norm: array<vec4<f32>>;  // [layers, INPUT_WIDTH]
const OCTETS: u32 = TOKENS * INPUT_WIDTH / 8u;
const INPUT_ITERATIONS: u32 = (OCTETS + WORKGROUP - 1u) / WORKGROUP;  // an invocation takes eight values in each
const INPUTS_IN_FLIGHT: u32 = select(min(INPUT_ITERATIONS, 4u), INPUT_ITERATIONS, TOKENS == 1u);
const ONE_WEIGHT: bool = WORKGROUP % (INPUT_WIDTH / 8u) == 0u;  // all octets of an invocation have the same weights
fn late_x(v: vec4<f32>) -> bool { return false; }
fn repair_x(i: u32) {}
fn octet_of(index: u32, iteration: u32) -> u32 { return min(index + iteration * WORKGROUP, OCTETS - 1u); }
fn norm_weight(octet: u32) -> mat2x4<f32> {
  let i = layer() * (INPUT_WIDTH / 4u) + 2u * (octet % (INPUT_WIDTH / 8u));
  return mat2x4<f32>(norm[i], norm[i + 1u]);
}
fn run_prologue(index: u32) {
  if (INPUTS_READY) { return; }
  var w: array<mat2x4<f32>, INPUTS_IN_FLIGHT>;
  if (NORM) {
    for (var r = 0u; r < INPUTS_IN_FLIGHT; r++) { w[r] = norm_weight(octet_of(index, r)); }
  }
  if (!CHOOSES) { wait(index); }
  let first = opaque_zero() + layer() * ((TOKENS * INPUT_WIDTH + LINE_PADDING) / 4u);
  var sum = 0.0;
  for (var r0 = 0u; r0 < INPUT_ITERATIONS; r0 += INPUTS_IN_FLIGHT) {
    var v: array<mat2x4<f32>, INPUTS_IN_FLIGHT>;
    var repaired = false;
    loop {
      var late = false;
      for (var r = 0u; r < INPUTS_IN_FLIGHT; r++) {
        let i = first + 2u * octet_of(index, r0 + r);
        v[r] = mat2x4<f32>(x[i], x[i + 1u]);
        if (NORM && !ONE_WEIGHT && r0 > 0u) { w[r] = norm_weight(octet_of(index, r0 + r)); }
      }
      for (var r = 0u; r < INPUTS_IN_FLIGHT; r++) { late = late || late_x(v[r][0]) || late_x(v[r][1]); }
      if (repaired || !late) { break; }
      repaired = true;
      for (var r = 0u; r < 2u * INPUTS_IN_FLIGHT + uniform_zero(); r++) { repair_x(first + 2u * octet_of(index, r0 + r / 2u) + r % 2u); }
    }
    for (var r = 0u; r < INPUTS_IN_FLIGHT; r++) {
      let i = index + (r0 + r) * WORKGROUP;
      if (NORM) {
        let squares = dot(v[r][0], v[r][0]) + dot(v[r][1], v[r][1]);
        if (TOKENS > 1u) { sum_part(squares, i, OCTETS); } else if (i < OCTETS) { sum += squares; }
        v[r] = mat2x4<f32>(v[r][0] * w[r][0], v[r][1] * w[r][1]);
      }
      store_inputs(v[r][0], v[r][1], i, index, i < OCTETS);
    }
  }
  if (NORM && TOKENS == 1u) { sum_begin(sum, index); }
  workgroupBarrier();
}
fn copy_piece(first: u32, index: u32) -> u32 { return 0u; }  // no pieces: see prologue_blocks
fn output_scale(token: u32) -> f32 {
  if (!NORM) { return 1.0; }
  if (TOKENS > 1u) { return inverseSqrt(sum_parts(token, INPUT_WIDTH / 8u) / f32(INPUT_WIDTH) + EPS); }
  return inverseSqrt(sum_end() / f32(INPUT_WIDTH) + EPS);
}
