// short_conv for the texture backend (CPU adapters), after conv_inputs_texture:
// y[m, WIDTH] = c * (the sum over j < TAPS of w[j] * the input of the position TAPS - 1 - j before).
// One invocation per texel, tokens in y. Needs WIDTH % 4 == 0. Parts: pages.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const WIDTH: u32 = 4u;            // dimensions
const TAPS: u32 = 3u;             // positions that a token sees, its own included
const TEXTURE_ROWS: u32 = 8192u;  // cells below each other in the cache texture; the next block of them is to the right
const WORKGROUP: u32 = 8u;
const VEC4S: u32 = WIDTH / 4u;
@group(0) @binding(0) var y: texture_storage_2d<rgba32float, write>;     // [m, VEC4S]
@group(0) @binding(1) var cache: texture_storage_2d<rgba32float, read>;  // row = cell, [VEC4S]
@group(0) @binding(5) var x: texture_storage_2d<rgba32float, read>;      // [m, b | c | x]
@group(0) @binding(6) var w: texture_storage_2d<rgba32float, read>;      // [1, TAPS, VEC4S]
@group(0) @binding(8) var<uniform> step: Step;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x >= VEC4S) { return; }
  let row = step.row[id.y];
  var sum = vec4<f32>();
  for (var back = 0u; back < min(TAPS, row.position + 1u); back++) {
    let cell = cell_of(row.slot, row.position - back);
    let input = textureLoad(cache, vec2<u32>(cell / TEXTURE_ROWS * VEC4S + id.x, cell % TEXTURE_ROWS));
    sum += input * textureLoad(w, vec2<u32>((TAPS - 1u - back) * VEC4S + id.x, 0u));
  }
  textureStore(y, id.xy, sum * textureLoad(x, vec2<u32>(VEC4S + id.x, id.y)));
}
