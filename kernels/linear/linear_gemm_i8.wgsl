// y[m, N] = x[m, K] @ W[N, K]^T, many tokens, x as int8 records: a workgroup makes TILE_M tokens x TILE_N rows, an
// invocation 8 x 4 of them, with packed int8 dot products; two blocks of 32 k per turn, weights taken apart once per
// tile. Parts: half, scales, planes, out. Needs K % 64 == 0, GROUP % 32 == 0 or GROUP == 16; a ragged m or N is clamped
// on load and guarded on store.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
const K: u32 = 64u;
const N: u32 = 4u;
const GROUP: u32 = 32u;
const PAIR: bool = false;
const TILE_M: u32 = 64u;
const TILE_N: u32 = 64u;
const WORKGROUP: u32 = 128u;
const SPAN: u32 = min(GROUP, 32u);  // k under one scale of both sides: 16 or 32
@group(0) @binding(5) var<storage, read> x: array<vec4<u32>>;  // [m, K/32] records of 3: even, odd, (d, d * sums)
@group(0) @binding(8) var<uniform> step: Step;
var<workgroup> x_tile: array<vec4<u32>, 256>;      // [2 blocks][8 words][4 tokens]; words: 16 k of even, odd, then 16 more
var<workgroup> w_tile: array<vec4<u32>, 256>;      // [2 blocks][8 words][4 rows]
var<workgroup> x_scale: array<vec2<f32>, 64u * 64u / SPAN>;  // [span][token] (d, d * sum)
var<workgroup> w_scale: array<vec2<f32>, 64u * 64u / SPAN>;  // [span][row] (scale, offset)
fn dots(a: u32, b: vec4<u32>) -> vec4<i32> {
  return vec4<i32>(dot4I8Packed(a, b.x), dot4I8Packed(a, b.y), dot4I8Packed(a, b.z), dot4I8Packed(a, b.w));
}
fn stage(i: u32, a: vec4<u32>, b: vec4<u32>, c: vec4<u32>, d: vec4<u32>, weights: bool) {
  // words 0, 1, 4, 5 of a block come from the even plane, 2, 3, 6, 7 from the odd one: its first 16 k, then its last
  let w0 = vec4<u32>(a.x, b.x, c.x, d.x); let w1 = vec4<u32>(a.y, b.y, c.y, d.y);
  let w2 = vec4<u32>(a.z, b.z, c.z, d.z); let w3 = vec4<u32>(a.w, b.w, c.w, d.w);
  if (weights) { w_tile[i] = w0; w_tile[i + 16u] = w1; w_tile[i + 64u] = w2; w_tile[i + 80u] = w3; }
  else { x_tile[i] = w0; x_tile[i + 16u] = w1; x_tile[i + 64u] = w2; x_tile[i + 80u] = w3; }
}
fn scaled(s: vec4<i32>, x: vec2<f32>, scale: vec4<f32>, offset: vec4<f32>) -> vec4<f32> {
  let v = scale * (x.x * vec4<f32>(s) - ZERO * x.y);
  if (PAIR) { return v + offset * x.y; }
  return v;
}
fn emit4(token: u32, row: u32, v: vec4<f32>) {
  if (token < step.m) { emit(token, row, v.xy); emit(token, row + 2u, v.zw); }
}
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let row0 = group.x * TILE_N;
  let token0 = group.y * TILE_M;
  let quad = index % 16u;
  let part = index / 16u;
  var c0 = vec4<f32>(); var c1 = vec4<f32>(); var c2 = vec4<f32>(); var c3 = vec4<f32>();
  var c4 = vec4<f32>(); var c5 = vec4<f32>(); var c6 = vec4<f32>(); var c7 = vec4<f32>();
  for (var b0 = 0u; b0 < K / 32u; b0 += 2u) {
    if (part < 4u) {  // 64 invocations: 4 tokens, one plane of one block each
      let block = part / 2u;
      let plane = part % 2u;
      let t = vec4<u32>(token0 + 4u * quad) + vec4<u32>(0u, 1u, 2u, 3u);
      let i = (min(t, vec4<u32>(step.m - 1u)) * (K / 32u) + b0 + block) * 3u + plane;
      stage(block * 128u + plane * 32u + quad, x[i.x], x[i.y], x[i.z], x[i.w], false);
    } else if (part < 6u) {  // 32 invocations: 4 rows of one block each
      let block = part - 4u;
      let r = min(vec4<u32>(row0 + 4u * quad) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(N - 1u));
      let p0 = planes(load_raw(r.x, b0 + block)); let p1 = planes(load_raw(r.y, b0 + block));
      let p2 = planes(load_raw(r.z, b0 + block)); let p3 = planes(load_raw(r.w, b0 + block));
      stage(block * 128u + quad, p0.even, p1.even, p2.even, p3.even, true);
      stage(block * 128u + 32u + quad, p0.odd, p1.odd, p2.odd, p3.odd, true);
    }
    for (var i = index; i < 64u * 64u / SPAN; i += WORKGROUP) {
      let k = b0 * 32u + i / 64u * SPAN;
      let d = bitcast<vec4<f32>>(x[(min(token0 + i % 64u, step.m - 1u) * (K / 32u) + k / 32u) * 3u + 2u]);
      x_scale[i] = vec2<f32>(d.x, select(d.w, select(d.y, d.z, k % 32u == 16u), SPAN == 16u));
      w_scale[i] = scale_at(min(row0 + i % 64u, N - 1u) * (K / GROUP) + k / GROUP);
    }
    workgroupBarrier();
    for (var span = 0u; span < 64u / SPAN; span++) {  // the k under one scale
      var s0 = vec4<i32>(); var s1 = vec4<i32>(); var s2 = vec4<i32>(); var s3 = vec4<i32>();
      var s4 = vec4<i32>(); var s5 = vec4<i32>(); var s6 = vec4<i32>(); var s7 = vec4<i32>();
      for (var word = 0u; word < SPAN / 4u; word++) {
        let i = (SPAN / 4u * span + word) * 16u;
        let a = x_tile[i + 2u * part];
        let b = x_tile[i + 2u * part + 1u];
        let w = w_tile[i + quad];
        s0 += dots(a.x, w); s1 += dots(a.y, w); s2 += dots(a.z, w); s3 += dots(a.w, w);
        s4 += dots(b.x, w); s5 += dots(b.y, w); s6 += dots(b.z, w); s7 += dots(b.w, w);
      }
      let r = 64u * span + 4u * quad;
      let scale = vec4<f32>(w_scale[r].x, w_scale[r + 1u].x, w_scale[r + 2u].x, w_scale[r + 3u].x);
      let offset = vec4<f32>(w_scale[r].y, w_scale[r + 1u].y, w_scale[r + 2u].y, w_scale[r + 3u].y);
      let t = 64u * span + 8u * part;
      c0 += scaled(s0, x_scale[t], scale, offset);      c1 += scaled(s1, x_scale[t + 1u], scale, offset);
      c2 += scaled(s2, x_scale[t + 2u], scale, offset); c3 += scaled(s3, x_scale[t + 3u], scale, offset);
      c4 += scaled(s4, x_scale[t + 4u], scale, offset); c5 += scaled(s5, x_scale[t + 5u], scale, offset);
      c6 += scaled(s6, x_scale[t + 6u], scale, offset); c7 += scaled(s7, x_scale[t + 7u], scale, offset);
    }
    workgroupBarrier();
  }
  let row = row0 + 4u * quad;
  let token = token0 + 8u * part;
  emit4(token, row, c0);      emit4(token + 1u, row, c1); emit4(token + 2u, row, c2); emit4(token + 3u, row, c3);
  emit4(token + 4u, row, c4); emit4(token + 5u, row, c5); emit4(token + 6u, row, c6); emit4(token + 7u, row, c7);
}
