// y[m, N] = x[m, K] @ W[N, K]^T, many tokens, x as int8 records: a workgroup makes TILE_M tokens x TILE_N rows, an
// invocation 8 x 4 of them, with packed int8 dot products; two blocks of 32 k per turn, weights taken apart once per
// tile. A small tile needs few invocations: then several teams take turns of k side by side and add up at the end, so
// that few tokens or rows still fill a GPU. Parts: half, scales, planes, out. Needs TILE_M 32 or 64, TILE_N 16, 32 or
// 64, K % 64 == 0, GROUP % 32 == 0 or GROUP == 16; a ragged m or N is clamped on load and guarded on store.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
const K: u32 = 64u;
const N: u32 = 4u;
const GROUP: u32 = 32u;
const PAIR: bool = false;
const TILE_M: u32 = 64u;
const TILE_N: u32 = 64u;
const WORKGROUP: u32 = 128u;
const SPAN: u32 = min(GROUP, 32u);  // k under one scale of both sides: 16 or 32
const X_QUADS: u32 = TILE_M / 4u;
const W_QUADS: u32 = TILE_N / 4u;
const TEAM: u32 = W_QUADS * TILE_M / 8u;
const TEAMS: u32 = WORKGROUP / TEAM;
const X_LOADS: u32 = TEAMS * 4u * X_QUADS;  // of 4 tokens, one plane of one block each
const W_LOADS: u32 = TEAMS * 2u * W_QUADS;  // of 4 rows of one block each
const X_SCALES: u32 = TEAMS * 64u / SPAN * TILE_M;
const W_SCALES: u32 = TEAMS * 64u / SPAN * TILE_N;
const X_ROUNDS: u32 = (X_LOADS + WORKGROUP - 1u) / WORKGROUP;
const W_ROUNDS: u32 = (W_LOADS + WORKGROUP - 1u) / WORKGROUP;
const W_SHIFT: u32 = WORKGROUP - X_LOADS % WORKGROUP;  // the invocations that load no x begin with the weights
const X_SCALE_ROUNDS: u32 = (X_SCALES + WORKGROUP - 1u) / WORKGROUP;
const W_SCALE_ROUNDS: u32 = (W_SCALES + WORKGROUP - 1u) / WORKGROUP;
struct Four { a: vec4<u32>, b: vec4<u32>, c: vec4<u32>, d: vec4<u32> }
struct FourRaw { a: Raw, b: Raw, c: Raw, d: Raw }
struct Turn {  // what an invocation brings to a turn, all on its way before the first of it is waited for
  x: array<Four, X_ROUNDS>,
  w: array<FourRaw, W_ROUNDS>,
  x_scale: array<vec2<f32>, X_SCALE_ROUNDS>,
  w_scale: array<vec2<f32>, W_SCALE_ROUNDS>,
}
@group(0) @binding(5) var<storage, read> x: array<vec4<u32>>;  // [m, K/32] records of 3: even, odd, (d, d * sums)
@group(0) @binding(8) var<uniform> step: Step;
// [2 blocks a team][8 words][4 tokens]; words: 16 k of even, odd, then 16 more. At the end it is what half of the teams hands over.
var<workgroup> x_tile: array<vec4<u32>, max(TEAMS * 16u * X_QUADS, select(0u, 4u * WORKGROUP, TEAMS > 1u))>;
var<workgroup> w_tile: array<vec4<u32>, TEAMS * 16u * W_QUADS>;  // [2 blocks a team][8 words][4 rows]
var<workgroup> x_scale: array<vec2<f32>, TEAMS * 64u / SPAN * TILE_M>;  // [span][token] (d, d * sum)
var<workgroup> w_scale: array<vec2<f32>, TEAMS * 64u / SPAN * TILE_N>;  // [span][row] (scale, offset)
fn dots(a: u32, b: vec4<u32>) -> vec4<i32> {
  return vec4<i32>(dot4I8Packed(a, b.x), dot4I8Packed(a, b.y), dot4I8Packed(a, b.z), dot4I8Packed(a, b.w));
}
// words 0, 1, 4, 5 of a block come from the even plane, 2, 3, 6, 7 from the odd one: its first 16 k, then its last
fn stage_x(i: u32, f: Four) {
  x_tile[i] = vec4<u32>(f.a.x, f.b.x, f.c.x, f.d.x);
  x_tile[i + X_QUADS] = vec4<u32>(f.a.y, f.b.y, f.c.y, f.d.y);
  x_tile[i + 4u * X_QUADS] = vec4<u32>(f.a.z, f.b.z, f.c.z, f.d.z);
  x_tile[i + 5u * X_QUADS] = vec4<u32>(f.a.w, f.b.w, f.c.w, f.d.w);
}
fn stage_w(i: u32, f: Four) {
  w_tile[i] = vec4<u32>(f.a.x, f.b.x, f.c.x, f.d.x);
  w_tile[i + W_QUADS] = vec4<u32>(f.a.y, f.b.y, f.c.y, f.d.y);
  w_tile[i + 4u * W_QUADS] = vec4<u32>(f.a.z, f.b.z, f.c.z, f.d.z);
  w_tile[i + 5u * W_QUADS] = vec4<u32>(f.a.w, f.b.w, f.c.w, f.d.w);
}
fn load(b0: u32, row0: u32, token0: u32, index: u32) -> Turn {  // past the last block: the scales of x are zeros
  var turn: Turn;
  for (var i = 0u; i < X_ROUNDS; i++) {
    let n = index + i * WORKGROUP;
    if (n < X_LOADS) {
      let t = vec4<u32>(token0 + 4u * (n % X_QUADS)) + vec4<u32>(0u, 1u, 2u, 3u);
      let b = min(b0 + n / X_QUADS / 2u, K / 32u - 1u);
      let r = (min(t, vec4<u32>(step.m - 1u)) * (K / 32u) + b) * 3u + n / X_QUADS % 2u;
      turn.x[i] = Four(x[r.x], x[r.y], x[r.z], x[r.w]);
    }
  }
  for (var i = 0u; i < W_ROUNDS; i++) {
    let n = (index + W_SHIFT) % WORKGROUP + i * WORKGROUP;
    if (n < W_LOADS) {
      let r = min(vec4<u32>(row0 + 4u * (n % W_QUADS)) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(N - 1u));
      let b = min(b0 + n / W_QUADS, K / 32u - 1u);
      turn.w[i] = FourRaw(load_raw(r.x, b), load_raw(r.y, b), load_raw(r.z, b), load_raw(r.w, b));
    }
  }
  for (var i = 0u; i < X_SCALE_ROUNDS; i++) {
    let n = index + i * WORKGROUP;
    let k = b0 * 32u + n / TILE_M * SPAN;
    let d = bitcast<vec4<f32>>(x[(min(token0 + n % TILE_M, step.m - 1u) * (K / 32u) + min(k, K - 1u) / 32u) * 3u + 2u]);
    let found = vec2<f32>(d.x, select(d.w, select(d.y, d.z, k % 32u == 16u), SPAN == 16u));
    turn.x_scale[i] = select(vec2<f32>(), found, k < K);
  }
  for (var i = 0u; i < W_SCALE_ROUNDS; i++) {
    let n = index + i * WORKGROUP;
    let k = min(b0 * 32u + n / TILE_N * SPAN, K - 1u);
    turn.w_scale[i] = scale_at(min(row0 + n % TILE_N, N - 1u), k / GROUP);
  }
  return turn;
}
fn stage(turn: ptr<function, Turn>, index: u32) {
  for (var i = 0u; i < X_ROUNDS; i++) {
    let n = index + i * WORKGROUP;
    if (n < X_LOADS) { stage_x(n / X_QUADS / 2u * 8u * X_QUADS + n / X_QUADS % 2u * 2u * X_QUADS + n % X_QUADS, (*turn).x[i]); }
  }
  for (var i = 0u; i < W_ROUNDS; i++) {
    let n = (index + W_SHIFT) % WORKGROUP + i * WORKGROUP;
    if (n < W_LOADS) {
      let p0 = planes((*turn).w[i].a); let p1 = planes((*turn).w[i].b);
      let p2 = planes((*turn).w[i].c); let p3 = planes((*turn).w[i].d);
      let at = n / W_QUADS * 8u * W_QUADS + n % W_QUADS;
      stage_w(at, Four(p0.even, p1.even, p2.even, p3.even));
      stage_w(at + 2u * W_QUADS, Four(p0.odd, p1.odd, p2.odd, p3.odd));
    }
  }
  for (var i = 0u; i < X_SCALE_ROUNDS; i++) {
    let n = index + i * WORKGROUP;
    if (n < X_SCALES) { x_scale[n] = (*turn).x_scale[i]; }
  }
  for (var i = 0u; i < W_SCALE_ROUNDS; i++) {
    let n = index + i * WORKGROUP;
    if (n < W_SCALES) { w_scale[n] = (*turn).w_scale[i]; }
  }
}
fn scaled(s: vec4<i32>, x: vec2<f32>, scale: vec4<f32>, offset: vec4<f32>) -> vec4<f32> {
  let v = scale * (x.x * vec4<f32>(s) - ZERO * x.y);
  if (PAIR) { return v + offset * x.y; }
  return v;
}
fn emit4(token: u32, row: u32, v: vec4<f32>) {
  if (token < step.m) { emit(token, row, v.xy); emit(token, row + 2u, v.zw); }
}
fn hand(i: u32, v: vec4<f32>) { x_tile[i] = bitcast<vec4<u32>>(v); }
fn taken(i: u32) -> vec4<f32> { return bitcast<vec4<f32>>(x_tile[i]); }
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let row0 = group.x * TILE_N;
  let token0 = group.y * TILE_M;
  let team = index / TEAM;
  let quad = index % W_QUADS;
  let part = index % TEAM / W_QUADS;
  var c0 = vec4<f32>(); var c1 = vec4<f32>(); var c2 = vec4<f32>(); var c3 = vec4<f32>();
  var c4 = vec4<f32>(); var c5 = vec4<f32>(); var c6 = vec4<f32>(); var c7 = vec4<f32>();
  const AHEAD = TEAMS > 1u;  // a large tile has no registers for the turn to come
  var turn: Turn;
  if (AHEAD) { turn = load(0u, row0, token0, index); }
  for (var b0 = 0u; b0 < K / 32u; b0 += 2u * TEAMS) {
    if (!AHEAD) { turn = load(b0, row0, token0, index); }
    stage(&turn, index);
    workgroupBarrier();
    if (AHEAD) { turn = load(b0 + 2u * TEAMS, row0, token0, index); }
    for (var span = team * (64u / SPAN); span < (team + 1u) * (64u / SPAN); span++) {  // the k under one scale
      var s0 = vec4<i32>(); var s1 = vec4<i32>(); var s2 = vec4<i32>(); var s3 = vec4<i32>();
      var s4 = vec4<i32>(); var s5 = vec4<i32>(); var s6 = vec4<i32>(); var s7 = vec4<i32>();
      for (var word = 0u; word < SPAN / 4u; word++) {
        let i = SPAN / 4u * span + word;
        let a = x_tile[i * X_QUADS + 2u * part];
        let b = x_tile[i * X_QUADS + 2u * part + 1u];
        let w = w_tile[i * W_QUADS + quad];
        s0 += dots(a.x, w); s1 += dots(a.y, w); s2 += dots(a.z, w); s3 += dots(a.w, w);
        s4 += dots(b.x, w); s5 += dots(b.y, w); s6 += dots(b.z, w); s7 += dots(b.w, w);
      }
      let r = TILE_N * span + 4u * quad;
      let scale = vec4<f32>(w_scale[r].x, w_scale[r + 1u].x, w_scale[r + 2u].x, w_scale[r + 3u].x);
      let offset = vec4<f32>(w_scale[r].y, w_scale[r + 1u].y, w_scale[r + 2u].y, w_scale[r + 3u].y);
      let t = TILE_M * span + 8u * part;
      c0 += scaled(s0, x_scale[t], scale, offset);      c1 += scaled(s1, x_scale[t + 1u], scale, offset);
      c2 += scaled(s2, x_scale[t + 2u], scale, offset); c3 += scaled(s3, x_scale[t + 3u], scale, offset);
      c4 += scaled(s4, x_scale[t + 4u], scale, offset); c5 += scaled(s5, x_scale[t + 5u], scale, offset);
      c6 += scaled(s6, x_scale[t + 6u], scale, offset); c7 += scaled(s7, x_scale[t + 7u], scale, offset);
    }
    workgroupBarrier();
  }
  for (var half = TEAMS / 2u; half > 0u; half >>= 1u) {  // the upper half of the teams hands over to the lower
    let i = index % (half * TEAM);
    if (team >= half && team < 2u * half) {
      hand(i, c0);        hand(i + 64u, c1);  hand(i + 128u, c2); hand(i + 192u, c3);
      hand(i + 256u, c4); hand(i + 320u, c5); hand(i + 384u, c6); hand(i + 448u, c7);
    }
    workgroupBarrier();
    if (team < half) {
      c0 += taken(i);        c1 += taken(i + 64u);  c2 += taken(i + 128u); c3 += taken(i + 192u);
      c4 += taken(i + 256u); c5 += taken(i + 320u); c6 += taken(i + 384u); c7 += taken(i + 448u);
    }
    workgroupBarrier();
  }
  let row = row0 + 4u * quad;
  let token = token0 + 8u * part;
  if (team == 0u) {
    emit4(token, row, c0);      emit4(token + 1u, row, c1); emit4(token + 2u, row, c2); emit4(token + 3u, row, c3);
    emit4(token + 4u, row, c4); emit4(token + 5u, row, c5); emit4(token + 6u, row, c6); emit4(token + 7u, row, c7);
  }
  finish(group.x, token0, index);
}
