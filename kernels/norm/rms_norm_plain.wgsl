// y[m, WIDTH] = x / rms(x), four values at a time, without the weight. With mul it is the unfused pair of kernels that
// is the baseline of rms_norm_vec4.
// One workgroup per row. No route takes this kernel. Needs WIDTH % 4 == 0. Parts: reduce_*.
const WIDTH: u32 = 4u;
const EPS: f32 = 1e-5;
const WORKGROUP: u32 = 64u;
@group(0) @binding(0) var<storage, read_write> y: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let row = workgroup.x * (WIDTH / 4u);
  var squares = 0.0;
  for (var i = index; i < WIDTH / 4u; i += WORKGROUP) { let v = x[row + i]; squares += dot(v, v); }
  let scale = inverseSqrt(sum_workgroup(squares, index) / f32(WIDTH) + EPS);
  for (var i = index; i < WIDTH / 4u; i += WORKGROUP) { y[row + i] = x[row + i] * scale; }
}
