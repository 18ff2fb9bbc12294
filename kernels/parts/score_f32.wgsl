// Role score, the arithmetic of attend_tile: here everything in f32.
// stage_key stores a key in workgroup memory. query is an owner's share of a query row, products its product with a
// key, for two rows; scale_scores turns the sum over all owners into scores. broadcast_weights fetches the exponentials
// of another lane.
// begin_sum begins the sum over the values of a kv tile, end_sum adds it to the total v. smooth_keys does nothing.
// vec4_of(i, own): the vec4 of the head that is the owner's vec4 i. Four of eight owners begin with the second vec4 of
// a run, so that all eight read different banks.
alias Sum = f32;
alias Value4 = vec4<f32>;
struct Query { v: array<vec4<f32>, OWN_VEC4>, query_scale: f32 }
struct Rows { a: array<vec4<f32>, OWN_VEC4>, b: array<vec4<f32>, OWN_VEC4> }
fn vec4_of(i: u32, own: u32) -> u32 { return 2u * (own + OWNERS * (i / 2u)) + (i + own / 4u) % 2u; }
var<workgroup> keys: array<vec4<f32>, KV_TILE * HEAD_VEC4>;
fn smooth_keys(loads: ptr<function, array<Raw8, LOADS>>, index: u32) {}
fn stage_key(n: u32, k: mat2x4<f32>) {  // run n of 8 dimensions
  if (KV_TILE * HEAD_VEC8 % WORKGROUP == 0u || n < KV_TILE * HEAD_VEC8) { keys[2u * n] = k[0]; keys[2u * n + 1u] = k[1]; }
}
fn query(v: ptr<function, array<vec4<f32>, OWN_VEC4>>, own: u32) -> Query { return Query(*v, 1.0); }
fn products(q: ptr<function, Query>, r: ptr<function, Query>, tile_position: u32, own: u32) -> vec2<f32> {
  var sums = vec2<f32>();
  for (var i = 0u; i < OWN_VEC4; i++) {
    let k = keys[tile_position * HEAD_VEC4 + vec4_of(i, own)];
    sums += vec2<f32>(dot((*q).v[i], k), dot((*r).v[i], k));
  }
  return sums;
}
fn scale_scores(sums: vec4<f32>, query_scale: f32, tile_position: u32) -> vec4<f32> { return sums; }
fn broadcast_weights(v: vec4<f32>, lane: u32) -> vec4<f32> { return subgroupShuffle(v, lane); }
fn begin_sum(v: vec4<f32>) -> vec4<f32> { return v; }
fn end_sum(v: vec4<f32>, sum: vec4<f32>) -> vec4<f32> { return sum; }
