enable f16;
// What attend_tile multiplies, here queries and keys as int8 with one scale for a whole head's row, values in f16: keys in
// workgroup memory, an owner's share of a query and of its product with a key, the sum of all shares as a score; the
// exponentials another lane has (spread), and the sum of values that they are multiplied with, from its beginning (start)
// to the long sum v (joined). quad_of: which quad of dimensions an owner's quad i is. even_out: some dimensions of keys are
// much larger than others, and one scale for all would leave the others few steps; so keys are divided, and queries
// multiplied, by the square root of the largest that the first places have in each dimension (half the squared error with
// SmolLM2). Needs HEAD_DIM a power of two, subgroups of HEAD_DIM / 8 lanes or more, WORKGROUP % (HEAD_DIM / 8) == 0.
alias Sum = i32;
alias Real4 = vec4<f16>;
struct Query { v: array<u32, OWN>, unit: f32 }
struct Rows { a: array<vec4<f16>, OWN>, b: array<vec4<f16>, OWN> }
fn quad_of(i: u32, own: u32) -> u32 { return 2u * (own + SHARE * (i / 2u)) + i % 2u; }
var<workgroup> keys: array<vec2<u32>, PLACES * OCTS>;
var<workgroup> key_units: array<f32, PLACES>;
var<workgroup> largest_of: array<vec4<f32>, 2u * WORKGROUP>;
var<workgroup> up: array<vec4<f32>, QUADS>;
var<workgroup> down: array<vec4<f32>, QUADS>;
fn magnitude(v: vec4<f32>) -> f32 { let a = abs(v); return max(max(a.x, a.y), max(a.z, a.w)); }
fn bytes(v: vec4<f32>, to: f32) -> u32 { return pack4xI8(vec4<i32>(round(v * to))); }
fn even_out(loads: ptr<function, array<Oct, LOADS>>, index: u32) {
  var a = vec4<f32>();
  var b = vec4<f32>();
  for (var i = 0u; i < LOADS; i++) {
    let k = widen((*loads)[i]);
    a = max(a, abs(k[0]));
    b = max(b, abs(k[1]));
  }
  largest_of[2u * index] = a;
  largest_of[2u * index + 1u] = b;
  workgroupBarrier();
  if (index < QUADS) {
    var top = vec4<f32>();
    for (var i = index; i < 2u * WORKGROUP; i += QUADS) { top = max(top, largest_of[i]); }
    let root = sqrt(max(top, vec4<f32>(1e-6)));
    up[index] = root;
    down[index] = 1.0 / root;
  }
  workgroupBarrier();
}
fn put_key(n: u32, key: mat2x4<f32>) {  // run n of 8 dimensions; all of a key's lie in one subgroup
  let k = mat2x4<f32>(key[0] * down[2u * n % QUADS], key[1] * down[(2u * n + 1u) % QUADS]);
  var top = max(magnitude(k[0]), magnitude(k[1]));
  for (var d = 1u; d < OCTS; d <<= 1u) { top = max(top, subgroupShuffleXor(top, d)); }
  let to = select(0.0, 127.0 / top, top > 0.0);
  if (PLACES * OCTS % WORKGROUP == 0u || n < PLACES * OCTS) {
    keys[n] = vec2<u32>(bytes(k[0], to), bytes(k[1], to));
    if (n % OCTS == 0u) { key_units[n / OCTS] = top / 127.0; }
  }
}
fn query(v: ptr<function, array<vec4<f32>, OWN>>, own: u32) -> Query {
  var top = 0.0;
  for (var i = 0u; i < OWN; i++) {
    (*v)[i] *= up[quad_of(i, own)];
    top = max(top, magnitude((*v)[i]));
  }
  for (var d = 1u; d < SHARE; d <<= 1u) { top = max(top, subgroupShuffleXor(top, d)); }
  var q: Query;
  q.unit = top / 127.0;
  let to = select(0.0, 127.0 / top, top > 0.0);
  for (var i = 0u; i < OWN; i++) { q.v[i] = bytes((*v)[i], to); }
  return q;
}
fn products(q: ptr<function, Query>, r: ptr<function, Query>, place: u32, own: u32) -> vec2<i32> {
  var sums = vec2<i32>();
  for (var i = 0u; i < OWN; i += 2u) {
    let k = keys[place * OCTS + own + SHARE * (i / 2u)];
    sums.x += dot4I8Packed((*q).v[i], k.x) + dot4I8Packed((*q).v[i + 1u], k.y);
    sums.y += dot4I8Packed((*r).v[i], k.x) + dot4I8Packed((*r).v[i + 1u], k.y);
  }
  return sums;
}
fn scaled(sums: vec4<i32>, unit: f32, place: u32) -> vec4<f32> {
  return vec4<f32>(sums) * unit * vec4<f32>(key_units[place], key_units[place + 1u], key_units[place + 2u], key_units[place + 3u]);
}
fn spread(v: vec4<f32>, lane: u32) -> vec4<f16> {
  let w = subgroupShuffle(vec2<u32>(pack2x16float(v.xy), pack2x16float(v.zw)), lane);
  return vec4<f16>(vec4<f32>(unpack2x16float(w.x), unpack2x16float(w.y)));
}
fn start(v: vec4<f32>) -> vec4<f16> { return vec4<f16>(); }
fn joined(v: vec4<f32>, sum: vec4<f16>) -> vec4<f32> { return v + vec4<f32>(sum); }
