// y[m, WIDTH] = SCALE * x in textures (CPU adapters): embeddings of architectures that scale them.
// One invocation per texel. Needs WIDTH % 4 == 0. Parts: none.
const WIDTH: u32 = 4u;  // values per token
const SCALE: f32 = 1.0;
const WORKGROUP: u32 = 8u;
@group(0) @binding(0) var y: texture_storage_2d<rgba32float, write>;
@group(0) @binding(5) var x: texture_storage_2d<rgba32float, read>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x < WIDTH / 4u) { textureStore(y, id.xy, SCALE * textureLoad(x, id.xy)); }
}
