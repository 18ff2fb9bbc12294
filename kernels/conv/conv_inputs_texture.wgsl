// The inputs b * x of a short convolution, texture backend (CPU adapters): from the rows b | c | x of a token into its cell of the
// cache texture, where short_conv_texture reads them.
// One invocation per texel, tokens in y. Needs WIDTH % 4 == 0. Parts: none.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const WIDTH: u32 = 4u;            // dimensions
const TEXTURE_ROWS: u32 = 8192u;  // cells below each other in the cache texture; the next block of them is to the right
const WORKGROUP: u32 = 8u;
const VEC4S: u32 = WIDTH / 4u;
@group(0) @binding(1) var cache: texture_storage_2d<rgba32float, write>;  // row = cell, [VEC4S]
@group(0) @binding(5) var x: texture_storage_2d<rgba32float, read>;       // [m, b | c | x]
@group(0) @binding(8) var<uniform> step: Step;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x >= VEC4S) { return; }
  let cell = step.row[id.y].cell;
  let gated = textureLoad(x, id.xy) * textureLoad(x, vec2<u32>(2u * VEC4S + id.x, id.y));
  textureStore(cache, vec2<u32>(cell / TEXTURE_ROWS * VEC4S + id.x, cell % TEXTURE_ROWS), gated);
}
