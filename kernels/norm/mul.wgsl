// y[m, WIDTH] = x * weight, four values at a time: the second half of an unfused norm, see rms_norm_plain.
// One workgroup per row. No route takes this kernel. Needs WIDTH % 4 == 0. Parts: none.
const WIDTH: u32 = 4u;
const WORKGROUP: u32 = 64u;
@group(0) @binding(0) var<storage, read_write> y: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read> w: array<vec4<f32>>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let row = workgroup.x * (WIDTH / 4u);
  for (var i = index; i < WIDTH / 4u; i += WORKGROUP) { y[row + i] = x[row + i] * w[i]; }
}
