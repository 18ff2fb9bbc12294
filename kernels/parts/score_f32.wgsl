// What attend_tile multiplies, here everything in f32: keys in workgroup memory, an owner's share of a query and of its
// product with a key, the sum of all shares as a score; the exponentials another lane has (spread), and the sum of values
// that they are multiplied with, from its beginning (start) to the long sum v (joined). quad_of: which quad of dimensions
// an owner's quad i is; of eight owners four begin with the second, so that together they read different banks.
alias Sum = f32;
alias Real4 = vec4<f32>;
struct Query { v: array<vec4<f32>, OWN>, unit: f32 }
struct Rows { a: array<vec4<f32>, OWN>, b: array<vec4<f32>, OWN> }
fn quad_of(i: u32, own: u32) -> u32 { return 2u * (own + SHARE * (i / 2u)) + (i + own / 4u) % 2u; }
var<workgroup> keys: array<vec4<f32>, PLACES * QUADS>;
fn even_out(loads: ptr<function, array<Oct, LOADS>>, index: u32) {}
fn put_key(n: u32, k: mat2x4<f32>) {  // run n of 8 dimensions
  if (PLACES * OCTS % WORKGROUP == 0u || n < PLACES * OCTS) { keys[2u * n] = k[0]; keys[2u * n + 1u] = k[1]; }
}
fn query(v: ptr<function, array<vec4<f32>, OWN>>, own: u32) -> Query { return Query(*v, 1.0); }
fn products(q: ptr<function, Query>, r: ptr<function, Query>, place: u32, own: u32) -> vec2<f32> {
  var sums = vec2<f32>();
  for (var i = 0u; i < OWN; i++) {
    let k = keys[place * QUADS + quad_of(i, own)];
    sums += vec2<f32>(dot((*q).v[i], k), dot((*r).v[i], k));
  }
  return sums;
}
fn scaled(sums: vec4<f32>, unit: f32, place: u32) -> vec4<f32> { return sums; }
fn spread(v: vec4<f32>, lane: u32) -> vec4<f32> { return subgroupShuffle(v, lane); }
fn start(v: vec4<f32>) -> vec4<f32> { return v; }
fn joined(v: vec4<f32>, sum: vec4<f32>) -> vec4<f32> { return sum; }
