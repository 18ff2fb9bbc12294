// Fills x from its vec4 FIRST on, all of y, and their copies with NOT_STORED (parts/late_stores.wgsl).
// Grid-stride loops. Needs sizes of whole vec4s. Parts: none.
const NOT_STORED: u32 = 4290805888u;
const X_VEC4S: u32 = 1u;
const Y_VEC4S: u32 = 1u;
const FIRST: u32 = 0u;
const WORKGROUP: u32 = 256u;
@group(0) @binding(0) var<storage, read_write> x: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> y: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> x_copies: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> y_copies: array<vec4<u32>>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>) {
  let stride = workgroups.x * WORKGROUP;
  for (var i = id.x; i < max(X_VEC4S, Y_VEC4S); i += stride) {
    if (i >= FIRST && i < X_VEC4S) {
      x[i] = vec4<u32>(NOT_STORED);
      x_copies[i] = vec4<u32>(NOT_STORED);
    }
    if (i < Y_VEC4S) {
      y[i] = vec4<u32>(NOT_STORED);
      y_copies[i] = vec4<u32>(NOT_STORED);
    }
  }
}
