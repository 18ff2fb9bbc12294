// y[layer + 1, i] = y[layer, (i + SHIFT) % N] + 1: barrier litmus test, one stage of a fused kernel (gpu/fuse.py).
// Each layer reads values that other workgroups stored in the layer before. A wrong sum shows that a grid barrier does
// not make stores visible.
// One invocation per value. Needs N % WORKGROUP == 0. Parts: grid_barrier (or unfused).
const N: u32 = 65536u;       // gives all workgroups of every grid size work
const SHIFT: u32 = 5171u;
const FIRST_WORD: u32 = 0u;  // words before the first row
const WORKGROUP: u32 = 256u;
@group(0) @binding(0) var<storage, read_write> y: array<u32>;  // [layers + 1, N], padded after each layer
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let i = workgroup.x * WORKGROUP + index;
  let row = FIRST_WORD + layer() * (N + LINE_PADDING);
  y[row + N + LINE_PADDING + i] = y[opaque_zero() + row + (i + SHIFT) % N] + 1u;
}
