// y[t, K] = row tokens[t] of a tiled embedding table, dequantised into an image. One invocation = 8 values of one token.
// A table split by rows is looked up part by part: each writes the tokens it holds. Parts: tile. Needs K and GROUP % 8 == 0.
const GROUP: u32 = 8u; // k under one scale
const N: u32 = 1u;     // rows of this part
const ROW0: u32 = 0u;  // its first row
const WORKGROUP: u32 = 8u;
@group(0) @binding(0) var y: texture_storage_2d<rgba32float, write>;
@group(0) @binding(5) var<storage, read> tokens: array<u32>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let row = tokens[id.y] - ROW0;  // below ROW0 it wraps round and is not < N
  if (2u * id.x >= textureDimensions(y).x || row >= N) { return; }
  let g = row / 8u;
  let before = 8u * id.x / GROUP;  // groups
  let e = eight(id.x * STEP + select(0u, 4u * before, SCALED), g);
  var v = four(e, row % 8u, 0u) * weigh(vec4<f32>(1.0));
  var u = four(e, row % 8u, 1u) * weigh(vec4<f32>(1.0));
  if (SCALED) {
    let t = (before + 1u) * (GROUP / 8u * STEP + 4u) - 4u + row % 8u / 4u;
    let scale = bitcast<vec4<f32>>(textureLoad(w, vec2<u32>(t, g)))[row % 4u];
    let offset = bitcast<vec4<f32>>(textureLoad(w, vec2<u32>(t + 2u, g)))[row % 4u];
    v = v * scale + offset;
    u = u * scale + offset;
  }
  textureStore(y, vec2<u32>(2u * id.x, id.y), v);
  textureStore(y, vec2<u32>(2u * id.x + 1u, id.y), u);
}
