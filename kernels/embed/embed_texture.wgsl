// y[m, K] = the dequantised rows of an embedding table in a texture, for the tokens of the step, into a texture.
// One invocation per 8 values of one token. A table of several shards takes one dispatch each, which writes the tokens
// whose rows are in the shard.
// Needs K % 8 == 0 and GROUP % 8 == 0. Parts: texture_*.
const GROUP: u32 = 8u;  // k that share one scale
const N: u32 = 1u;      // rows of this shard
const ROW0: u32 = 0u;   // the shard's first row in the table
const WORKGROUP: u32 = 8u;
@group(0) @binding(0) var y: texture_storage_2d<rgba32float, write>;
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
@group(0) @binding(8) var<uniform> step: Step;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let row = step.row[id.y].token - ROW0;  // wraps around below ROW0, and then is not < N
  if (2u * id.x >= textureDimensions(y).x || row >= N) { return; }
  let g = row / 8u;  // row of the texture
  let groups_before = 8u * id.x / GROUP;
  let e = load8(id.x * TEXELS_PER_8 + select(0u, 4u * groups_before, HAS_SCALES), g);
  var v = weights4(e, row % 8u, 0u) * prescale(vec4<f32>(1.0));
  var u = weights4(e, row % 8u, 1u) * prescale(vec4<f32>(1.0));
  if (HAS_SCALES) {
    let t = (groups_before + 1u) * (GROUP / 8u * TEXELS_PER_8 + 4u) - 4u + row % 8u / 4u;
    let scale = bitcast<vec4<f32>>(textureLoad(w, vec2<u32>(t, g)))[row % 4u];
    let offset = bitcast<vec4<f32>>(textureLoad(w, vec2<u32>(t + 2u, g)))[row % 4u];
    v = v * scale + offset;
    u = u * scale + offset;
  }
  textureStore(y, vec2<u32>(2u * id.x, id.y), v);
  textureStore(y, vec2<u32>(2u * id.x + 1u, id.y), u);
}
