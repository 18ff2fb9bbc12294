// The inputs of a linear of one token, made in the kernel itself by every workgroup: x * weight, or x as it is; 1 / rms(x)
// is left to `factor`, so that nobody waits for the sum. Saves the norm's own dispatch.
// prepare must be called by every invocation. Parts: inputs_made, (record,) reduce. Needs K % 32 == 0, WORKGROUP % 4 == 0.
const K: u32 = 32u;
const NORM: bool = true;
const READY: bool = false;  // an earlier stage has made them, and they are still there
const EPS: f32 = 1e-5;
const WORKGROUP: u32 = 64u;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;     // [layers, K], gaps between layers
@group(0) @binding(9) var<storage, read> norm: array<vec4<f32>>;  // [layers, K]
const ROUNDS_IN: u32 = (K / 8u + WORKGROUP - 1u) / WORKGROUP;  // of eight values for each invocation
fn place_in(index: u32, round: u32) -> u32 { return layer() * (K / 4u) + 2u * min(index + round * WORKGROUP, K / 8u - 1u); }
fn prepare(index: u32) {
  if (READY) { return; }
  var w: array<mat2x4<f32>, ROUNDS_IN>;
  if (NORM) {
    for (var r = 0u; r < ROUNDS_IN; r++) { let i = place_in(index, r); w[r] = mat2x4<f32>(norm[i], norm[i + 1u]); }
  }
  wait(index);
  var v: array<mat2x4<f32>, ROUNDS_IN>;
  let gaps = later() + layer() * (GAP / 4u);
  for (var r = 0u; r < ROUNDS_IN; r++) { let i = gaps + place_in(index, r); v[r] = mat2x4<f32>(x[i], x[i + 1u]); }
  var sum = 0.0;
  for (var r = 0u; r < ROUNDS_IN; r++) {
    let i = index + r * WORKGROUP;
    if (NORM) {
      if (i < K / 8u) { sum += dot(v[r][0], v[r][0]) + dot(v[r][1], v[r][1]); }
      v[r] = mat2x4<f32>(v[r][0] * w[r][0], v[r][1] * w[r][1]);
    }
    keep(v[r][0], v[r][1], i, index, i < K / 8u);
  }
  if (NORM) { sum_begin(sum, index); }
  workgroupBarrier();
}
fn factor() -> f32 { return select(1.0, inverseSqrt(sum_end() / f32(K) + EPS), NORM); }
