// y = keys and values as int8, in the order in which attend_int8 reads them: a record for every kv tile of 64 positions.
// A kv tile is a page: sequences that share it share its record. A workgroup quantises one kv tile of one KV head. Invocation (tx, ty) takes positions 4ty .. 4ty + 3 and dimensions
// 8tx .. 8tx + 7 and those 64 further on.
// Keys and values have one scale for a position. Some dimensions are much larger than others, and one scale for all would
// leave few levels for the others: all are divided by the square root of the largest magnitude of their dimension in the
// sequence's first kv tile (half the squared error with SmolLM2). attend_int8 multiplies queries and results by it.
// Record, in vec4s: keys [16 dimensions][position], values + 128 [16 positions][dimension], scales of keys, reciprocal scales
// of values, square roots of keys and of values. Words of keys and values change places in pairs, and positions and
// dimensions are in the order of attend_int8's invocations.
// Needs HEAD_DIM 64 or 128, subgroups of 8 lanes. Parts: f16, kv8_*, pages, int8_block_*.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 64u;
const WINDOW: u32 = 0u;  // a token sees the last WINDOW positions, its own included; 0: all
const WORKGROUP: u32 = 128u;
const KV_TILE: u32 = 64u;  // = PAGE
const RUNS: u32 = HEAD_DIM / 64u;  // runs of 8 dimensions of an invocation
const HEAD_VEC4: u32 = HEAD_DIM / 4u;
const HEAD_VEC8: u32 = HEAD_DIM / 8u;
const RECORD: u32 = 8u * HEAD_DIM + 32u + 2u * HEAD_VEC4;  // vec4s
@group(0) @binding(0) var<storage, read_write> y: array<u32>;  // [KV_HEADS, pages] records
@group(0) @binding(8) var<uniform> step: Step;
var<workgroup> tops: array<vec4<f32>, 32u * HEAD_VEC4>;  // [ty][keys, values][dimension]: largest magnitudes
var<workgroup> roots: array<vec4<f32>, 2u * HEAD_VEC4>;  // [keys, values][dimension]
fn max_abs8(a: mat2x4<f32>, k: mat2x4<f32>) -> mat2x4<f32> { return mat2x4<f32>(max(a[0], abs(k[0])), max(a[1], abs(k[1]))); }
fn divided(k: mat2x4<f32>, i: u32) -> mat2x4<f32> { return mat2x4<f32>(k[0] / roots[i], k[1] / roots[i + 1u]); }
fn find_roots(base: u32, last: u32, index: u32) {
  let tx = index % 8u;
  let ty = index / 8u;
  for (var u = 0u; u < RUNS; u++) {
    var k = mat2x4<f32>();
    var v = mat2x4<f32>();
    for (var i = 0u; i < 4u; i++) {
      let at = (base + min(4u * ty + i, last)) * HEAD_VEC8 + tx + 8u * u;
      k = max_abs8(k, widen(key8(at)));
      v = max_abs8(v, widen(value8(at)));
    }
    let at = 2u * (ty * HEAD_VEC4 + tx + 8u * u);
    tops[at] = k[0]; tops[at + 1u] = k[1];
    tops[at + HEAD_VEC4] = v[0]; tops[at + HEAD_VEC4 + 1u] = v[1];
  }
  workgroupBarrier();
  if (index < 2u * HEAD_VEC4) {
    var top = vec4<f32>(1e-6);
    for (var i = index; i < 32u * HEAD_VEC4; i += 2u * HEAD_VEC4) { top = max(top, tops[i]); }
    roots[index] = sqrt(top);
  }
  workgroupBarrier();
}
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let tx = index % 8u;
  let g = index / 8u;
  let segment = step.segment[workgroup.z];  // first row, rows, slot, first position
  let p0 = workgroup.y * KV_TILE;
  let last = segment.w + segment.y - 1u;
  let seen = select(0u, segment.w + 1u - min(WINDOW, segment.w + 1u), WINDOW > 0u);  // the first position that a row sees
  if (segment.y == 0u || p0 > last || p0 + KV_TILE <= seen) { return; }
  let base = workgroup.x * step.capacity;
  let page = cell_of(segment.z, p0);
  let record = 4u * RECORD * (workgroup.x * ((step.capacity + PAGE - 1u) / PAGE) + page / PAGE);
  find_roots(base + cell_of(segment.z, 0u), last, index);
  var bytes: array<vec2<u32>, 4u * RUNS>;  // of values: [run][position]
  for (var i = 0u; i < 4u; i++) {
    var k: array<mat2x4<f32>, RUNS>;
    var v: array<mat2x4<f32>, RUNS>;
    var top = vec2<f32>();
    for (var u = 0u; u < RUNS; u++) {
      let at = (base + page + min(4u * g + i, last - p0)) * HEAD_VEC8 + tx + 8u * u;
      k[u] = divided(widen(key8(at)), 2u * (tx + 8u * u));
      v[u] = divided(widen(value8(at)), 2u * (tx + 8u * u) + HEAD_VEC4);
      top = max(top, vec2<f32>(max(max_abs(k[u][0]), max_abs(k[u][1])), max(max_abs(v[u][0]), max_abs(v[u][1]))));
    }
    for (var d = 1u; d < 8u; d <<= 1u) { top = max(top, subgroupShuffleXor(top, d)); }
    top = max(top, vec2<f32>(1e-20));
    let inverse_scale = 127.0 / top;
    for (var u = 0u; u < RUNS; u++) {
      let at = record + 4u * ((tx / 2u + 4u * u) * KV_TILE + (i + 4u * (g / 8u)) * 8u + g % 8u) + 2u * (tx % 2u);
      y[at + 1u] = to_int8(k[u][0], inverse_scale.x);
      y[at] = to_int8(k[u][1], inverse_scale.x);
      bytes[4u * u + i] = vec2<u32>(to_int8(v[u][0], inverse_scale.y), to_int8(v[u][1], inverse_scale.y)) ^ vec2<u32>(0x80808080u);
    }
    if (tx == 0u) {
      let at = record + 32u * HEAD_DIM + 4u * g + i;
      y[at] = bitcast<u32>(top.x / 127.0);
      y[at + KV_TILE] = bitcast<u32>(inverse_scale.y);
    }
  }
  for (var u = 0u; u < RUNS; u++) {
    for (var e = 0u; e < 8u; e++) {
      let shift = 8u * (e % 4u);
      let b = (vec4<u32>(bytes[4u * u][e / 4u], bytes[4u * u + 1u][e / 4u], bytes[4u * u + 2u][e / 4u], bytes[4u * u + 3u][e / 4u]) >> vec4<u32>(shift)) & vec4<u32>(255u);
      let at = record + 16u * HEAD_DIM + 4u * (g / 4u * HEAD_DIM + 64u * u + 8u * e + tx) + ((g % 4u) ^ 1u);
      y[at] = b.x | (b.y << 8u) | (b.z << 16u) | (b.w << 24u);
    }
  }
  for (var i = index; i < 2u * HEAD_DIM; i += WORKGROUP) { y[record + 32u * HEAD_DIM + 2u * KV_TILE + i] = bitcast<u32>(roots[i / 4u][i % 4u]); }
}
