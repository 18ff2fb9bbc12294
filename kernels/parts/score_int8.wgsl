enable f16;
// Role score, the arithmetic of attend_tile: here queries and keys in int8 with one scale for a head's row, values in
// f16.
// stage_key stores a key in workgroup memory. query is an owner's share of a query row, products its product with a
// key, for two rows; scale_scores turns the sum over all owners into scores. broadcast_weights fetches the exponentials
// of another lane.
// begin_sum begins the sum over the values of a kv tile, end_sum adds it to the total v.
// vec4_of(i, own): the vec4 of the head that is the owner's vec4 i.
// smooth_keys: some dimensions of keys are much larger than others. One scale for all would leave few levels for the
// others, so keys are divided, and queries multiplied, by the square root of the largest magnitude of each dimension in
// the first kv tile (half the squared error with SmolLM2).
// Needs HEAD_DIM a power of two, subgroups of HEAD_DIM / 8 lanes or more, WORKGROUP % (HEAD_DIM / 8) == 0.
// Parts: int8_block_*.
alias Sum = i32;
alias Value4 = vec4<f16>;
struct Query { v: array<u32, OWN_VEC4>, query_scale: f32 }
struct Rows { a: array<vec4<f16>, OWN_VEC4>, b: array<vec4<f16>, OWN_VEC4> }
fn vec4_of(i: u32, own: u32) -> u32 { return 2u * (own + OWNERS * (i / 2u)) + i % 2u; }
var<workgroup> keys: array<vec2<u32>, KV_TILE * HEAD_VEC8>;
var<workgroup> key_scales: array<f32, KV_TILE>;
var<workgroup> key_maxima: array<vec4<f32>, 2u * WORKGROUP>;
var<workgroup> query_smoothing: array<vec4<f32>, HEAD_VEC4>;  // factors of queries
var<private> key_smoothing: mat2x4<f32>;  // factors of keys, for the run of 8 dimensions that this invocation stages
fn smooth_keys(loads: ptr<function, array<Raw8, LOADS>>, index: u32) {
  var a = vec4<f32>();
  var b = vec4<f32>();
  for (var i = 0u; i < LOADS; i++) {
    let k = widen((*loads)[i]);
    a = max(a, abs(k[0]));
    b = max(b, abs(k[1]));
  }
  key_maxima[2u * index] = a;
  key_maxima[2u * index + 1u] = b;
  workgroupBarrier();
  if (index < HEAD_VEC4) {
    var top = vec4<f32>();
    for (var i = index; i < 2u * WORKGROUP; i += HEAD_VEC4) { top = max(top, key_maxima[i]); }
    query_smoothing[index] = sqrt(max(top, vec4<f32>(1e-6)));
  }
  workgroupBarrier();
  key_smoothing = mat2x4<f32>(1.0 / query_smoothing[2u * index % HEAD_VEC4], 1.0 / query_smoothing[(2u * index + 1u) % HEAD_VEC4]);
}
fn stage_key(n: u32, key: mat2x4<f32>) {  // run n of 8 dimensions; all runs of a key lie in one subgroup
  let k = mat2x4<f32>(key[0] * key_smoothing[0], key[1] * key_smoothing[1]);
  var top = max(max_abs(k[0]), max_abs(k[1]));
  for (var d = 1u; d < HEAD_VEC8; d <<= 1u) { top = max(top, subgroupShuffleXor(top, d)); }
  let inverse_scale = select(0.0, 127.0 / top, top > 0.0);
  if (KV_TILE * HEAD_VEC8 % WORKGROUP == 0u || n < KV_TILE * HEAD_VEC8) {
    keys[n] = vec2<u32>(to_int8(k[0], inverse_scale), to_int8(k[1], inverse_scale));
    if (n % HEAD_VEC8 == 0u) { key_scales[n / HEAD_VEC8] = top / 127.0; }
  }
}
fn query(v: ptr<function, array<vec4<f32>, OWN_VEC4>>, own: u32) -> Query {
  var top = 0.0;
  for (var i = 0u; i < OWN_VEC4; i++) {
    (*v)[i] *= query_smoothing[vec4_of(i, own)];
    top = max(top, max_abs((*v)[i]));
  }
  for (var d = 1u; d < OWNERS; d <<= 1u) { top = max(top, subgroupShuffleXor(top, d)); }
  var q: Query;
  q.query_scale = top / 127.0;
  let inverse_scale = select(0.0, 127.0 / top, top > 0.0);
  for (var i = 0u; i < OWN_VEC4; i++) { q.v[i] = to_int8((*v)[i], inverse_scale); }
  return q;
}
fn products(q: ptr<function, Query>, r: ptr<function, Query>, tile_position: u32, own: u32) -> vec2<i32> {
  var sums = vec2<i32>();
  for (var i = 0u; i < OWN_VEC4; i += 2u) {
    let k = keys[tile_position * HEAD_VEC8 + own + OWNERS * (i / 2u)];
    sums.x += dot4I8Packed((*q).v[i], k.x) + dot4I8Packed((*q).v[i + 1u], k.y);
    sums.y += dot4I8Packed((*r).v[i], k.x) + dot4I8Packed((*r).v[i + 1u], k.y);
  }
  return sums;
}
fn scale_scores(sums: vec4<i32>, query_scale: f32, tile_position: u32) -> vec4<f32> {
  return vec4<f32>(sums) * query_scale * vec4<f32>(key_scales[tile_position], key_scales[tile_position + 1u], key_scales[tile_position + 2u], key_scales[tile_position + 3u]);
}
fn broadcast_weights(v: vec4<f32>, lane: u32) -> vec4<f16> {
  let w = subgroupShuffle(vec2<u32>(pack2x16float(v.xy), pack2x16float(v.zw)), lane);
  return vec4<f16>(vec4<f32>(unpack2x16float(w.x), unpack2x16float(w.y)));
}
fn begin_sum(v: vec4<f32>) -> vec4<f16> { return vec4<f16>(); }
fn end_sum(v: vec4<f32>, sum: vec4<f16>) -> vec4<f32> { return v + vec4<f32>(sum); }
