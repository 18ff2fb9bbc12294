// y = x, 16 bytes at a time, grid-stride: what the adapter's memory gives when nothing else is asked of it.
// Needs QUADS vec4 in both.
const QUADS: u32 = 1u;
const WORKGROUP: u32 = 256u;
@group(0) @binding(0) var<storage, read_write> y: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read> x: array<vec4<u32>>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
  for (var i = id.x; i < QUADS; i += groups.x * WORKGROUP) { y[i] = x[i]; }
}
