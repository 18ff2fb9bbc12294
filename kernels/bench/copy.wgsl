// y[VEC4S] = x[VEC4S], 16 bytes at a time, in a grid-stride loop: measures the memory bandwidth of the adapter.
// Needs VEC4S vec4 in both buffers. Parts: none.
const VEC4S: u32 = 1u;
const WORKGROUP: u32 = 256u;
@group(0) @binding(0) var<storage, read_write> y: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read> x: array<vec4<u32>>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>) {
  for (var i = id.x; i < VEC4S; i += workgroups.x * WORKGROUP) { y[i] = x[i]; }
}
