// Role halves: load_raw(row, b) loads 32 f16 weights of a row, 64 bytes; halves gives them, times `scale`: of every eight the
// pairs (0, 4), (1, 5), (2, 6) and (3, 7). It stands for `scales` as well: floats have none.
// Needs K % 32 == 0. Parts: f16, pair_*, half2.
const K: u32 = 32u;
const OWN_SCALE: bool = true;  // there is no other
const W_UNIT: f32 = 1.0;       // all f16 weights stay in range
const HAS_OFFSET: bool = false;
struct Raw { a: vec4<u32>, b: vec4<u32>, c: vec4<u32>, d: vec4<u32> }  // an eight each
@group(0) @binding(6) var<storage, read> w: array<vec4<u32>>;
fn load_raw(row: u32, b: u32) -> Raw {
  let i = 4u * (row * (K / 32u) + b);
  return Raw(w[i], w[i + 1u], w[i + 2u], w[i + 3u]);
}
fn raw_scale(r: Raw) -> f32 { return 1.0; }
fn scale_at(row: u32, g: u32) -> vec2<f32> { return vec2<f32>(); }
fn pairs(e: vec4<u32>, scale: f32) -> vec4<u32> {
  let a = weight_pair(e.x) * scale; let b = weight_pair(e.y) * scale; let c = weight_pair(e.z) * scale; let d = weight_pair(e.w) * scale;
  return vec4<u32>(pack_f16(vec2<f32>(a.x, c.x)), pack_f16(vec2<f32>(a.y, c.y)), pack_f16(vec2<f32>(b.x, d.x)), pack_f16(vec2<f32>(b.y, d.y)));
}
fn halves(r: Raw, scale: vec4<f32>) -> Halves {
  let a = pairs(r.a, scale.x); let b = pairs(r.b, scale.x); let c = pairs(r.c, scale.x); let d = pairs(r.d, scale.x);
  return Halves(vec4<u32>(a.x, b.x, c.x, d.x), vec4<u32>(a.y, b.y, c.y, d.y), vec4<u32>(a.z, b.z, c.z, d.z), vec4<u32>(a.w, b.w, c.w, d.w));
}
