// y[N] = x[K] @ W[N, K]^T, one token, for adapters that are a CPU: an invocation makes 8 whole rows. Nothing is shared,
// there is no barrier, and all loads are image loads: llvmpipe fetches 16 bytes for each of 4 lanes in 30 instructions,
// where a storage buffer takes it a loop over the lanes (150 ns). Parts: tile, out.
// Needs m == 1, K and GROUP % STRIDE == 0. Longer strides run faster and take longer to compile.
const GROUP: u32 = 32u;   // k under one scale
const STRIDE: u32 = 32u;  // k of one turn of the loop, 16 or 32
const WORKGROUP: u32 = 8u;
@group(0) @binding(5) var x: texture_storage_2d<rgba32float, read>;  // [1, K/4]
struct Sums { a: vec4<f32>, b: vec4<f32>, inputs: vec4<f32> }  // rows 0-3, rows 4-7, of the inputs themselves
fn row(e: Eight, r: u32, v: vec4<f32>, u: vec4<f32>) -> f32 { return dot(four(e, r, 0u), v) + dot(four(e, r, 1u), u); }
fn add_eight(s: Sums, t: u32, g: u32, k: u32) -> Sums {
  let e = eight(t, g);
  let v = textureLoad(x, vec2<u32>(k / 4u, 0u));
  let u = textureLoad(x, vec2<u32>(k / 4u + 1u, 0u));
  let p = weigh(v);
  let q = weigh(u);
  return Sums(
    s.a + vec4<f32>(row(e, 0u, p, q), row(e, 1u, p, q), row(e, 2u, p, q), row(e, 3u, p, q)),
    s.b + vec4<f32>(row(e, 4u, p, q), row(e, 5u, p, q), row(e, 6u, p, q), row(e, 7u, p, q)),
    s.inputs + (v + u));
}
fn scales(t: u32, g: u32) -> vec4<f32> { return bitcast<vec4<f32>>(textureLoad(w, vec2<u32>(t, g))); }
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let g = id.x;
  var a = vec4<f32>();
  var b = vec4<f32>();
  let end = textureDimensions(w).x;  // not a constant K: one pipeline serves attn_output and ffn_down
  for (var k = 0u; first_texel(k) < end; k += STRIDE) {
    let t = first_texel(k);
    var s = add_eight(Sums(), t, g, k);
    s = add_eight(s, t + STEP, g, k + 8u);
    if (STRIDE > 16u) {
      s = add_eight(s, t + 2u * STEP, g, k + 16u);
      s = add_eight(s, t + 3u * STEP, g, k + 24u);
    }
    if (SCALED) {
      let f = scale_texel(k);
      let sum = dot(s.inputs, vec4<f32>(1.0));
      a += s.a * scales(f, g) + sum * scales(f + 2u, g);
      b += s.b * scales(f + 1u, g) + sum * scales(f + 3u, g);
    } else {
      a += s.a;
      b += s.b;
    }
  }
  emit8(0u, 8u * g, a, b);
}
