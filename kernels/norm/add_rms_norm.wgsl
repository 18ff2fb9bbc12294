// y[m, WIDTH] += x / rms(x) * weight, row by row: the norm after attention or feed forward, added to the residual stream.
// One workgroup per row. Needs nothing. Parts: reduce_*.
const WIDTH: u32 = 1u;
const EPS: f32 = 1e-5;
const WORKGROUP: u32 = 256u;
const ITERATIONS: u32 = (WIDTH + WORKGROUP - 1u) / WORKGROUP;
@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(5) var<storage, read> x: array<f32>;
@group(0) @binding(6) var<storage, read> w: array<f32>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let row = workgroup.x * WIDTH;
  var v: array<f32, ITERATIONS>;
  var sum: array<f32, ITERATIONS>;     // loaded with x, as the weights: one wait for memory instead of two
  var weight: array<f32, ITERATIONS>;
  var squares = 0.0;
  for (var r = 0u; r < ITERATIONS; r++) {
    let i = min(index + r * WORKGROUP, WIDTH - 1u);
    v[r] = x[row + i];
    sum[r] = y[row + i];
    weight[r] = w[i];
    if (index + r * WORKGROUP < WIDTH) { squares += v[r] * v[r]; }
  }
  let scale = inverseSqrt(sum_workgroup(squares, index) / f32(WIDTH) + EPS);
  for (var r = 0u; r < ITERATIONS; r++) {
    let i = index + r * WORKGROUP;
    if (i < WIDTH) { y[row + i] = sum[r] + v[r] * scale * weight[r]; }
  }
}
