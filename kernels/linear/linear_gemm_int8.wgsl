// y[m, N] = x[m, K] @ W[N, K]^T, many tokens, x as int8 blocks: GEMM by packed int8 dot products (dot4I8Packed).
// A workgroup computes a tile of TILE_M tokens x TILE_N rows, an invocation 8 tokens x 4 rows of it in registers.
// Weights are unpacked once per tile.
// Split-K: a small tile needs few invocations, so a workgroup has SPLIT_K split-K teams of TEAM_SIZE, and few tokens or
// rows still fill a GPU. In an iteration each team takes two blocks of 32 k; at the end the teams add up their sums.
// Needs TILE_M 32 or 64, TILE_N 16, 32 or 64, K % 64 == 0, GROUP % 32 == 0 or GROUP == 16. A ragged m or N is clamped
// on load and guarded on store.
// Parts: f16, scales, planes_*, epilogue_*.
struct Row { slot: u32, position: u32, token: u32, generated: u32 }  // a token row: sequence slot, position, token id, tokens generated so far
struct Step { rows: u32, segments: u32, capacity: u32, slots: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const K: u32 = 64u;
const N: u32 = 4u;
const GROUP: u32 = 32u;
const HAS_OFFSET: bool = false;
const TILE_M: u32 = 64u;
const TILE_N: u32 = 64u;
const WORKGROUP: u32 = 128u;
const SPAN: u32 = min(GROUP, 32u);                     // k that share one scale of x and one of W: 16 or 32
const X_VEC4: u32 = TILE_M / 4u;
const W_VEC4: u32 = TILE_N / 4u;
const TEAM_SIZE: u32 = W_VEC4 * TILE_M / 8u;
const SPLIT_K: u32 = WORKGROUP / TEAM_SIZE;
const X_LOADS: u32 = SPLIT_K * 4u * X_VEC4;            // a load: 4 tokens of one plane (even or odd) of a block
const W_LOADS: u32 = SPLIT_K * 2u * W_VEC4;            // a load: 4 rows of a block
const X_SCALES: u32 = SPLIT_K * 64u / SPAN * TILE_M;
const W_SCALES: u32 = SPLIT_K * 64u / SPAN * TILE_N;
const X_ITERATIONS: u32 = (X_LOADS + WORKGROUP - 1u) / WORKGROUP;
const W_ITERATIONS: u32 = (W_LOADS + WORKGROUP - 1u) / WORKGROUP;
const W_SHIFT: u32 = WORKGROUP - X_LOADS % WORKGROUP;  // invocations without a load of x take the first loads of W
const X_SCALE_ITERATIONS: u32 = (X_SCALES + WORKGROUP - 1u) / WORKGROUP;
const W_SCALE_ITERATIONS: u32 = (W_SCALES + WORKGROUP - 1u) / WORKGROUP;
struct FourVectors { a: vec4<u32>, b: vec4<u32>, c: vec4<u32>, d: vec4<u32> }
struct FourRaw { a: Raw, b: Raw, c: Raw, d: Raw }
struct TileLoads {  // an invocation's loads of one iteration: all are issued before the first is used
  x: array<FourVectors, X_ITERATIONS>,
  w: array<FourRaw, W_ITERATIONS>,
  x_scale: array<vec2<f32>, X_SCALE_ITERATIONS>,
  w_scale: array<vec2<f32>, W_SCALE_ITERATIONS>,
}
@group(0) @binding(5) var<storage, read> x: array<vec4<u32>>;  // int8 blocks, planes [m][even, odd, (d, d * sums)][K/32]
@group(0) @binding(8) var<uniform> step: Step;
// [2 blocks per team][8 words][4 tokens]; words 0-3 hold the first 16 k of a block, 2 words even and 2 odd, words 4-7 the
// last 16 k. At the end it holds the partial sums of half of the teams.
var<workgroup> x_tile: array<vec4<u32>, max(SPLIT_K * 16u * X_VEC4, select(0u, 4u * WORKGROUP, SPLIT_K > 1u))>;
var<workgroup> w_tile: array<vec4<u32>, SPLIT_K * 16u * W_VEC4>;          // [2 blocks per team][8 words][4 rows], as x_tile
var<workgroup> x_scale: array<vec2<f32>, SPLIT_K * 64u / SPAN * TILE_M>;  // [span][token] (d, d * sum)
var<workgroup> w_scale: array<vec2<f32>, SPLIT_K * 64u / SPAN * TILE_N>;  // [span][row] (scale, offset)
fn dots(a: u32, b: vec4<u32>) -> vec4<i32> {
  return vec4<i32>(dot4I8Packed(a, b.x), dot4I8Packed(a, b.y), dot4I8Packed(a, b.z), dot4I8Packed(a, b.w));
}
// words 0, 1, 4, 5 of a block come from the even plane, words 2, 3, 6, 7 from the odd one
fn stage_x(i: u32, f: FourVectors) {
  x_tile[i] = vec4<u32>(f.a.x, f.b.x, f.c.x, f.d.x);
  x_tile[i + X_VEC4] = vec4<u32>(f.a.y, f.b.y, f.c.y, f.d.y);
  x_tile[i + 4u * X_VEC4] = vec4<u32>(f.a.z, f.b.z, f.c.z, f.d.z);
  x_tile[i + 5u * X_VEC4] = vec4<u32>(f.a.w, f.b.w, f.c.w, f.d.w);
}
fn stage_w(i: u32, f: FourVectors) {
  w_tile[i] = vec4<u32>(f.a.x, f.b.x, f.c.x, f.d.x);
  w_tile[i + W_VEC4] = vec4<u32>(f.a.y, f.b.y, f.c.y, f.d.y);
  w_tile[i + 4u * W_VEC4] = vec4<u32>(f.a.z, f.b.z, f.c.z, f.d.z);
  w_tile[i + 5u * W_VEC4] = vec4<u32>(f.a.w, f.b.w, f.c.w, f.d.w);
}
fn load_tile(b0: u32, row0: u32, token0: u32, index: u32) -> TileLoads {  // past the last block the scales of x are 0
  var loads: TileLoads;
  for (var i = 0u; i < X_ITERATIONS; i++) {
    let n = index + i * WORKGROUP;
    if (n < X_LOADS) {
      let t = vec4<u32>(token0 + 4u * (n % X_VEC4)) + vec4<u32>(0u, 1u, 2u, 3u);
      let b = min(b0 + n / X_VEC4 / 2u, K / 32u - 1u);
      let r = (3u * min(t, vec4<u32>(step.rows - 1u)) + n / X_VEC4 % 2u) * (K / 32u) + b;
      loads.x[i] = FourVectors(x[r.x], x[r.y], x[r.z], x[r.w]);
    }
  }
  for (var i = 0u; i < W_ITERATIONS; i++) {
    let n = (index + W_SHIFT) % WORKGROUP + i * WORKGROUP;
    if (n < W_LOADS) {
      let r = min(vec4<u32>(row0 + 4u * (n % W_VEC4)) + vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(N - 1u));
      let b = min(b0 + n / W_VEC4, K / 32u - 1u);
      loads.w[i] = FourRaw(load_raw(r.x, b), load_raw(r.y, b), load_raw(r.z, b), load_raw(r.w, b));
    }
  }
  for (var i = 0u; i < X_SCALE_ITERATIONS; i++) {
    let n = index + i * WORKGROUP;
    let k = b0 * 32u + n / TILE_M * SPAN;
    let d = bitcast<vec4<f32>>(x[(3u * min(token0 + n % TILE_M, step.rows - 1u) + 2u) * (K / 32u) + min(k, K - 1u) / 32u]);
    let found = vec2<f32>(d.x, select(d.w, select(d.y, d.z, k % 32u == 16u), SPAN == 16u));
    loads.x_scale[i] = select(vec2<f32>(), found, k < K);
  }
  for (var i = 0u; i < W_SCALE_ITERATIONS; i++) {
    let n = index + i * WORKGROUP;
    let k = min(b0 * 32u + n / TILE_N * SPAN, K - 1u);
    loads.w_scale[i] = scale_at(min(row0 + n % TILE_N, N - 1u), k / GROUP);
  }
  return loads;
}
fn stage_tile(loads: ptr<function, TileLoads>, index: u32) {
  for (var i = 0u; i < X_ITERATIONS; i++) {
    let n = index + i * WORKGROUP;
    if (n < X_LOADS) { stage_x(n / X_VEC4 / 2u * 8u * X_VEC4 + n / X_VEC4 % 2u * 2u * X_VEC4 + n % X_VEC4, (*loads).x[i]); }
  }
  for (var i = 0u; i < W_ITERATIONS; i++) {
    let n = (index + W_SHIFT) % WORKGROUP + i * WORKGROUP;
    if (n < W_LOADS) {
      let p0 = planes((*loads).w[i].a); let p1 = planes((*loads).w[i].b);
      let p2 = planes((*loads).w[i].c); let p3 = planes((*loads).w[i].d);
      let tile_index = n / W_VEC4 * 8u * W_VEC4 + n % W_VEC4;
      stage_w(tile_index, FourVectors(p0.even, p1.even, p2.even, p3.even));
      stage_w(tile_index + 2u * W_VEC4, FourVectors(p0.odd, p1.odd, p2.odd, p3.odd));
    }
  }
  for (var i = 0u; i < X_SCALE_ITERATIONS; i++) {
    let n = index + i * WORKGROUP;
    if (n < X_SCALES) { x_scale[n] = (*loads).x_scale[i]; }
  }
  for (var i = 0u; i < W_SCALE_ITERATIONS; i++) {
    let n = index + i * WORKGROUP;
    if (n < W_SCALES) { w_scale[n] = (*loads).w_scale[i]; }
  }
}
fn scaled(s: vec4<i32>, x: vec2<f32>, scale: vec4<f32>, offset: vec4<f32>) -> vec4<f32> {
  let v = scale * (x.x * vec4<f32>(s) - ZERO * x.y);
  if (HAS_OFFSET) { return v + offset * x.y; }
  return v;
}
fn epilogue4(token: u32, row: u32, v: vec4<f32>) {
  if (token < step.rows) { epilogue(token, row, v.xy); epilogue(token, row + 2u, v.zw); }
}
fn store_partial(i: u32, v: vec4<f32>) { x_tile[i] = bitcast<vec4<u32>>(v); }
fn load_partial(i: u32) -> vec4<f32> { return bitcast<vec4<f32>>(x_tile[i]); }
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let row0 = workgroup.x * TILE_N;
  let token0 = workgroup.y * TILE_M;
  let team = index / TEAM_SIZE;
  let thread_n = index % W_VEC4;  // 4 rows of the tile
  let thread_m = index % TEAM_SIZE / W_VEC4;  // 8 tokens of the tile
  var c0 = vec4<f32>(); var c1 = vec4<f32>(); var c2 = vec4<f32>(); var c3 = vec4<f32>();
  var c4 = vec4<f32>(); var c5 = vec4<f32>(); var c6 = vec4<f32>(); var c7 = vec4<f32>();
  const PREFETCH = SPLIT_K > 1u;  // a large tile leaves no registers for the next iteration's loads
  var loads: TileLoads;
  if (PREFETCH) { loads = load_tile(0u, row0, token0, index); }
  for (var b0 = 0u; b0 < K / 32u; b0 += 2u * SPLIT_K) {
    if (!PREFETCH) { loads = load_tile(b0, row0, token0, index); }
    stage_tile(&loads, index);
    workgroupBarrier();
    if (PREFETCH) { loads = load_tile(b0 + 2u * SPLIT_K, row0, token0, index); }
    for (var span = team * (64u / SPAN); span < (team + 1u) * (64u / SPAN); span++) {  // k that share one scale
      var s0 = vec4<i32>(); var s1 = vec4<i32>(); var s2 = vec4<i32>(); var s3 = vec4<i32>();
      var s4 = vec4<i32>(); var s5 = vec4<i32>(); var s6 = vec4<i32>(); var s7 = vec4<i32>();
      for (var word = 0u; word < SPAN / 4u; word++) {
        let i = SPAN / 4u * span + word;
        let a = x_tile[i * X_VEC4 + 2u * thread_m];
        let b = x_tile[i * X_VEC4 + 2u * thread_m + 1u];
        let w = w_tile[i * W_VEC4 + thread_n];
        s0 += dots(a.x, w); s1 += dots(a.y, w); s2 += dots(a.z, w); s3 += dots(a.w, w);
        s4 += dots(b.x, w); s5 += dots(b.y, w); s6 += dots(b.z, w); s7 += dots(b.w, w);
      }
      let r = TILE_N * span + 4u * thread_n;
      let scale = vec4<f32>(w_scale[r].x, w_scale[r + 1u].x, w_scale[r + 2u].x, w_scale[r + 3u].x);
      let offset = vec4<f32>(w_scale[r].y, w_scale[r + 1u].y, w_scale[r + 2u].y, w_scale[r + 3u].y);
      let t = TILE_M * span + 8u * thread_m;
      c0 += scaled(s0, x_scale[t], scale, offset);      c1 += scaled(s1, x_scale[t + 1u], scale, offset);
      c2 += scaled(s2, x_scale[t + 2u], scale, offset); c3 += scaled(s3, x_scale[t + 3u], scale, offset);
      c4 += scaled(s4, x_scale[t + 4u], scale, offset); c5 += scaled(s5, x_scale[t + 5u], scale, offset);
      c6 += scaled(s6, x_scale[t + 6u], scale, offset); c7 += scaled(s7, x_scale[t + 7u], scale, offset);
    }
    workgroupBarrier();
  }
  for (var half = SPLIT_K / 2u; half > 0u; half >>= 1u) {  // the lower half of the teams adds the sums of the upper half
    let i = index % (half * TEAM_SIZE);
    if (team >= half && team < 2u * half) {
      store_partial(i, c0);        store_partial(i + 64u, c1);  store_partial(i + 128u, c2); store_partial(i + 192u, c3);
      store_partial(i + 256u, c4); store_partial(i + 320u, c5); store_partial(i + 384u, c6); store_partial(i + 448u, c7);
    }
    workgroupBarrier();
    if (team < half) {
      c0 += load_partial(i);        c1 += load_partial(i + 64u);  c2 += load_partial(i + 128u); c3 += load_partial(i + 192u);
      c4 += load_partial(i + 256u); c5 += load_partial(i + 320u); c6 += load_partial(i + 384u); c7 += load_partial(i + 448u);
    }
    workgroupBarrier();
  }
  let row = row0 + 4u * thread_n;
  let token = token0 + 8u * thread_m;
  if (team == 0u) {
    epilogue4(token, row, c0);      epilogue4(token + 1u, row, c1); epilogue4(token + 2u, row, c2); epilogue4(token + 3u, row, c3);
    epilogue4(token + 4u, row, c4); epilogue4(token + 5u, row, c5); epilogue4(token + 6u, row, c6); epilogue4(token + 7u, row, c7);
  }
  workgroup_epilogue(workgroup.x, token0, index);
}
