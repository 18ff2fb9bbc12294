// y[layer + 1, i] = y[layer, (i + SHIFT) % N] + 1: a stage (gpu/join.py) whose values have come from other workgroups,
// to find out whether workgroups that meet see each other's stores.
const N: u32 = 65536u;  // every crew has work for all of its workgroups
const SHIFT: u32 = 5171u;
const AT: u32 = 0u;      // words before the first row
const WORKGROUP: u32 = 256u;
@group(0) @binding(0) var<storage, read_write> y: array<u32>;  // [layers + 1, N], gaps between layers
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let i = group.x * WORKGROUP + index;
  let row = AT + layer() * (N + GAP);
  y[row + N + GAP + i] = y[later() + row + (i + SHIFT) % N] + 1u;
}
