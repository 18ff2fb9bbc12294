// y[layer + LAYER_OFFSET] = residual[layer] + x / rms(x) * weight: the norm after feed forward of the last layer of a fused
// kernel, where no buffer may be written that was read (add_rms_norm adds in place). Of the others it is in the prologue of
// the next linear (prologue_sum_norm).
// One token, one workgroup. Needs nothing. Parts: reduce_*; grid_barrier (or unfused).
const WIDTH: u32 = 1u;
const EPS: f32 = 1e-5;
const LAYER_OFFSET: u32 = 0u;
const WORKGROUP: u32 = 64u;
const ITERATIONS: u32 = (WIDTH + WORKGROUP - 1u) / WORKGROUP;
@group(0) @binding(0) var<storage, read_write> y: array<f32>;    // [layers + LAYER_OFFSET, WIDTH], padded after each layer
@group(0) @binding(1) var<storage, read> residual: array<f32>;   // [layers, WIDTH], padded after each layer
@group(0) @binding(5) var<storage, read> x: array<f32>;          // [layers, WIDTH], padded after each layer
@group(0) @binding(9) var<storage, read> norm: array<f32>;       // [layers, WIDTH]
fn first_of(layer: u32) -> u32 { return layer * (WIDTH + LINE_PADDING); }
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(local_invocation_index) index: u32) {
  let from_first = opaque_zero() + first_of(layer());
  let into_first = first_of(layer() + LAYER_OFFSET);
  var v: array<f32, ITERATIONS>;
  var sum: array<f32, ITERATIONS>;  // loaded with x: one wait for memory instead of two
  var squares = 0.0;
  for (var r = 0u; r < ITERATIONS; r++) {
    let i = min(index + r * WORKGROUP, WIDTH - 1u);
    v[r] = x[from_first + i];
    sum[r] = residual[from_first + i];
    if (index + r * WORKGROUP < WIDTH) { squares += v[r] * v[r]; }
  }
  let scale = inverseSqrt(sum_workgroup(squares, index) / f32(WIDTH) + EPS);
  for (var r = 0u; r < ITERATIONS; r++) {
    let i = index + r * WORKGROUP;
    if (i < WIDTH) { y[into_first + i] = sum[r] + v[r] * scale * norm[layer() * WIDTH + i]; }
  }
}
