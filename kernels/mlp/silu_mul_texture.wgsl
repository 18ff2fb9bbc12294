// y[m, WIDTH] = silu(gate) * up in textures (CPU adapters): for models whose gate and up have different types and
// cannot be interleaved.
// One invocation per texel. Needs WIDTH % 4 == 0. Parts: none.
const WIDTH: u32 = 4u;  // values per token
const WORKGROUP: u32 = 8u;
@group(0) @binding(0) var y: texture_storage_2d<rgba32float, write>;
@group(0) @binding(5) var gate: texture_storage_2d<rgba32float, read>;
@group(0) @binding(6) var up: texture_storage_2d<rgba32float, read>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x >= WIDTH / 4u) { return; }
  let g = textureLoad(gate, id.xy);
  textureStore(y, id.xy, g / (1.0 + exp(-g)) * textureLoad(up, id.xy));
}
