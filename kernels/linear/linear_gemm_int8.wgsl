// y[m, N] = x[m, K] @ W[N, K]^T, many tokens, x as int8 blocks: GEMM by packed int8 dot products (dot4I8Packed).
// A workgroup computes a tile of TILE_M tokens x TILE_N rows, an invocation 4 tokens x 8 rows of it in registers.
// Weights are unpacked once per tile, into signed bytes. The next iteration's loads are in flight during the dot products.
// Split-K: a small tile needs few invocations, so a workgroup has SPLIT_K split-K teams of TEAM_SIZE. In an iteration
// each team takes two blocks of 32 k; at the end the teams add up their sums. Where that does not fill a GPU either,
// GRID_SPLIT workgroups share a tile, and linear_sum adds up what they store.
// Needs TILE_M 16, 32 or 64, TILE_N 64, K % 64 == 0, GROUP % 32 == 0 or GROUP == 16. A
// ragged m or N is clamped on load and guarded on store.
// Parts: f16, scales, planes_*, epilogue_*.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const K: u32 = 64u;
const N: u32 = 4u;
const GROUP: u32 = 32u;
const HAS_OFFSET: bool = false;
const TILE_M: u32 = 64u;
const TILE_N: u32 = 64u;
const WORKGROUP: u32 = 128u;
const GRID_SPLIT: u32 = 1u;                             // workgroups that share a tile
const SPLIT_ROWS: u32 = 0u;                             // token rows of a split's results
const SPAN: u32 = min(GROUP, 32u);                      // k that share one scale of x and one of W: 16 or 32
const THREADS_M: u32 = TILE_M / 4u;
const THREADS_N: u32 = TILE_N / 8u;
const TEAM_SIZE: u32 = THREADS_M * THREADS_N;
const SPLIT_K: u32 = WORKGROUP / TEAM_SIZE;
const BLOCKS: u32 = 2u * SPLIT_K;                       // blocks of 32 k in an iteration
const SPANS: u32 = BLOCKS * 32u / SPAN;
const PADDING: u32 = select(1u, 2u, BLOCKS == 2u);      // planes start at different banks
const X_PLANE: u32 = TILE_M + PADDING;
const W_PLANE: u32 = TILE_N + PADDING;
const W_TILE: u32 = 2u * BLOCKS * X_PLANE;              // where the weights begin
const TILE_VEC4S: u32 = max(W_TILE + 2u * BLOCKS * W_PLANE, max(8u * TILE_M, select(0u, 4u * WORKGROUP, SPLIT_K > 1u)));
const X_LOADS: u32 = (2u * BLOCKS * TILE_M + WORKGROUP - 1u) / WORKGROUP;  // of an invocation in an iteration
const W_LOADS: u32 = (BLOCKS * TILE_N + WORKGROUP - 1u) / WORKGROUP;
const X_SCALES: u32 = (SPANS * TILE_M + WORKGROUP - 1u) / WORKGROUP;
const W_SCALES: u32 = (SPANS * TILE_N + WORKGROUP - 1u) / WORKGROUP;
const SUM_ZERO: i32 = 0x4B400000i;                      // the bits of MAGIC: an integer below 2^22 added to them is added to the number
const MAGIC: f32 = 12582912.0;
struct TileLoads {  // an invocation's loads of one iteration: all are issued before the first is used
  x: array<vec4<u32>, X_LOADS>,
  w: array<Raw, W_LOADS>,
  x_scale: array<f32, X_SCALES>,
  x_sum: array<f32, X_SCALES>,
  w_scale: array<vec2<f32>, W_SCALES>,
}
struct Sources {  // where an invocation's loads begin
  x: array<u32, X_LOADS>,
  w_row: array<u32, W_LOADS>,
  x_scale: array<u32, X_SCALES>,
  w_scale_row: array<u32, W_SCALES>,
}
const RAGGED: bool = (K / 32u) % BLOCKS != 0u;          // the last iteration has fewer blocks
struct Sums {  // of 4 tokens and two times 4 rows
  a0: vec4<i32>, a1: vec4<i32>, a2: vec4<i32>, a3: vec4<i32>,
  b0: vec4<i32>, b1: vec4<i32>, b2: vec4<i32>, b3: vec4<i32>,
}
@group(0) @binding(5) var<storage, read> x: array<vec4<u32>>;  // int8 blocks, planes [m][even, odd, (d, d * sums)][K/32]
@group(0) @binding(8) var<uniform> step: Step;
// A vec4 is 16 k of a token or row: [block][even, odd][slot], x and then W. At the end it holds partial sums and `hidden`.
var<workgroup> tile: array<vec4<u32>, TILE_VEC4S>;
var<workgroup> x_scale: array<f32, SPANS * TILE_M>;  // [span][token] d
var<workgroup> w_scale: array<f32, SPANS * TILE_N>;  // [span][row]
var<workgroup> x_sum: array<f32, select(4u, SPANS * TILE_M, HAS_OFFSET)>;     // [span][token] d * sum
var<workgroup> w_offset: array<f32, select(4u, SPANS * TILE_N, HAS_OFFSET)>;  // [span][row]

fn x_scale4(i: u32) -> vec4<f32> { return vec4<f32>(x_scale[i], x_scale[i + 1u], x_scale[i + 2u], x_scale[i + 3u]); }
fn w_scale4(i: u32) -> vec4<f32> { return vec4<f32>(w_scale[i], w_scale[i + 1u], w_scale[i + 2u], w_scale[i + 3u]); }
fn x_sum4(i: u32) -> vec4<f32> { return vec4<f32>(x_sum[i], x_sum[i + 1u], x_sum[i + 2u], x_sum[i + 3u]); }
fn w_offset4(i: u32) -> vec4<f32> { return vec4<f32>(w_offset[i], w_offset[i + 1u], w_offset[i + 2u], w_offset[i + 3u]); }

// `hidden` for epilogue_glu_blocks: an invocation stores values 2t, 2t + 1, 2t + 16 and 2t + 17 of a token's 32 together, as vec4 t.
var<private> hidden: vec4<f32>;

fn store_hidden(i: u32, v: f32) {  // called in this order
  hidden = vec4<f32>(hidden.yzw, v);
  if (i % 2u == 1u && i % 32u >= 16u) { tile[i / 32u * 8u + i % 16u / 2u] = bitcast<vec4<u32>>(hidden); }
}

fn load_hidden(i: u32) -> vec4<f32> {
  let at = i / 32u * 8u + i % 16u / 2u;
  let a = bitcast<vec4<f32>>(tile[at]);
  let b = bitcast<vec4<f32>>(tile[at + 1u]);
  return select(vec4<f32>(a.xy, b.xy), vec4<f32>(a.zw, b.zw), i % 32u >= 16u);
}

// An invocation takes four neighbouring tokens, and twice four neighbouring rows. Slots permute them, so that
// neighbouring invocations read neighbouring vec4s: of every 4 * fours, slot e * fours + q is element e of the q-th four.
fn from_slot(slot: u32, fours: u32) -> u32 { return slot / (4u * fours) * 4u * fours + slot % fours * 4u + slot % (4u * fours) / fours; }
fn four_slot(four: u32, fours: u32) -> u32 { return four / fours * 4u * fours + four % fours; }
const X_FOURS: u32 = min(8u, TILE_M / 4u);
const W_FOURS: u32 = 8u;

fn tile_sources(row0: u32, token0: u32, index: u32) -> Sources {
  var at: Sources;
  for (var i = 0u; i < X_LOADS; i++) {
    let n = index + i * WORKGROUP;
    let token = min(token0 + from_slot(min(n / (2u * BLOCKS), TILE_M - 1u), X_FOURS), step.rows - 1u);
    at.x[i] = (3u * token + n / BLOCKS % 2u) * (K / 32u) + n % BLOCKS;
  }
  for (var i = 0u; i < W_LOADS; i++) {
    at.w_row[i] = min(row0 + from_slot(min((index + i * WORKGROUP) / BLOCKS, TILE_N - 1u), W_FOURS), N - 1u);
  }
  for (var i = 0u; i < X_SCALES; i++) {
    at.x_scale[i] = (3u * min(token0 + (index + i * WORKGROUP) % TILE_M, step.rows - 1u) + 2u) * (K / 32u);
  }
  for (var i = 0u; i < W_SCALES; i++) { at.w_scale_row[i] = min(row0 + (index + i * WORKGROUP) % TILE_N, N - 1u); }
  return at;
}

fn load_tile(first: u32, at: ptr<function, Sources>, index: u32) -> TileLoads {  // past the last block the scales of x are 0
  var loads: TileLoads;
  let b0 = select(min(first, K / 32u - BLOCKS), first, RAGGED);
  for (var i = 0u; i < X_LOADS; i++) {
    let last = K / 32u - 1u - (index + i * WORKGROUP) % BLOCKS;
    loads.x[i] = x[(*at).x[i] + select(b0, min(b0, last), RAGGED)];
  }
  for (var i = 0u; i < W_LOADS; i++) {
    let b = b0 + (index + i * WORKGROUP) % BLOCKS;
    loads.w[i] = load_raw((*at).w_row[i], select(b, min(b, K / 32u - 1u), RAGGED));
  }
  for (var i = 0u; i < X_SCALES; i++) {
    let k = b0 * 32u + (index + i * WORKGROUP) / TILE_M * SPAN;
    let j = (*at).x_scale[i] + select(k, min(k, K - 1u), RAGGED) / 32u;
    loads.x_scale[i] = bitcast<f32>(select(x[j].x, 0u, RAGGED && k >= K));
    if (HAS_OFFSET) {
      let sums = bitcast<vec4<f32>>(x[j]);
      loads.x_sum[i] = select(select(sums.w, select(sums.y, sums.z, k % 32u == 16u), SPAN == 16u), 0.0, RAGGED && k >= K);
    }
  }
  for (var i = 0u; i < W_SCALES; i++) {
    let k = b0 * 32u + (index + i * WORKGROUP) / TILE_N * SPAN;
    if (!OWN_SCALE) { loads.w_scale[i] = scale_at((*at).w_scale_row[i], select(k, min(k, K - 1u), RAGGED) / GROUP); }
  }
  return loads;
}

fn stage_tile(loads: ptr<function, TileLoads>, index: u32) {
  for (var i = 0u; i < X_LOADS; i++) {
    let n = index + i * WORKGROUP;
    if (n < 2u * BLOCKS * TILE_M) { tile[(2u * (n % BLOCKS) + n / BLOCKS % 2u) * X_PLANE + n / (2u * BLOCKS)] = (*loads).x[i]; }
  }
  for (var i = 0u; i < W_LOADS; i++) {
    let n = index + i * WORKGROUP;
    if (n < BLOCKS * TILE_N) {
      let p = signed_planes((*loads).w[i]);
      let at = W_TILE + n % BLOCKS * 2u * W_PLANE + n / BLOCKS;
      tile[at] = p.even.yxwz;  // a dot product whose operands come from the same register bank waits
      tile[at + W_PLANE] = p.odd.yxwz;
      if (OWN_SCALE) { w_scale[n % BLOCKS * TILE_N + from_slot(n / BLOCKS, W_FOURS)] = raw_scale((*loads).w[i]); }
    }
  }
  for (var i = 0u; i < X_SCALES; i++) {
    let n = index + i * WORKGROUP;
    if (n < SPANS * TILE_M) {
      x_scale[n] = (*loads).x_scale[i];  // 22 bits: d * MAGIC is exact
      if (HAS_OFFSET) { x_sum[n] = (*loads).x_sum[i]; }
    }
  }
  for (var i = 0u; i < W_SCALES; i++) {
    let n = index + i * WORKGROUP;
    if (!OWN_SCALE && n < SPANS * TILE_N) {
      w_scale[n] = (*loads).w_scale[i].x * UNIT;
      if (HAS_OFFSET) { w_offset[n] = (*loads).w_scale[i].y; }
    }
  }
}

fn dot8(a: vec2<u32>, w: vec2<u32>) -> i32 { return dot4I8Packed(a.x, w.y) + dot4I8Packed(a.y, w.x); }
fn dot16(a: vec4<u32>, w: vec4<u32>) -> i32 { return dot8(a.xy, w.xy) + dot8(a.zw, w.zw); }

fn add_plane(s: ptr<function, Sums>, x_at: u32, w_at: u32, w_at2: u32) {  // 16 k of the 4 tokens and 8 rows
  let w0 = tile[w_at]; let w1 = tile[w_at + W_FOURS]; let w2 = tile[w_at + 2u * W_FOURS]; let w3 = tile[w_at + 3u * W_FOURS];
  let w4 = tile[w_at2]; let w5 = tile[w_at2 + W_FOURS]; let w6 = tile[w_at2 + 2u * W_FOURS]; let w7 = tile[w_at2 + 3u * W_FOURS];
  let v0 = tile[x_at]; let v1 = tile[x_at + X_FOURS]; let v2 = tile[x_at + 2u * X_FOURS]; let v3 = tile[x_at + 3u * X_FOURS];
  (*s).a0 += vec4<i32>(dot16(v0, w0), dot16(v0, w1), dot16(v0, w2), dot16(v0, w3));
  (*s).b0 += vec4<i32>(dot16(v0, w4), dot16(v0, w5), dot16(v0, w6), dot16(v0, w7));
  (*s).a1 += vec4<i32>(dot16(v1, w0), dot16(v1, w1), dot16(v1, w2), dot16(v1, w3));
  (*s).b1 += vec4<i32>(dot16(v1, w4), dot16(v1, w5), dot16(v1, w6), dot16(v1, w7));
  (*s).a2 += vec4<i32>(dot16(v2, w0), dot16(v2, w1), dot16(v2, w2), dot16(v2, w3));
  (*s).b2 += vec4<i32>(dot16(v2, w4), dot16(v2, w5), dot16(v2, w6), dot16(v2, w7));
  (*s).a3 += vec4<i32>(dot16(v3, w0), dot16(v3, w1), dot16(v3, w2), dot16(v3, w3));
  (*s).b3 += vec4<i32>(dot16(v3, w4), dot16(v3, w5), dot16(v3, w6), dot16(v3, w7));
}

fn half_of(v: vec4<u32>, high: bool) -> vec2<u32> { return select(v.xy, v.zw, high); }

fn add_half_plane(s: ptr<function, Sums>, x_at: u32, w_at: u32, w_at2: u32, high: bool) {  // 8 k, for groups of 16
  let w0 = half_of(tile[w_at], high); let w1 = half_of(tile[w_at + W_FOURS], high);
  let w2 = half_of(tile[w_at + 2u * W_FOURS], high); let w3 = half_of(tile[w_at + 3u * W_FOURS], high);
  let w4 = half_of(tile[w_at2], high); let w5 = half_of(tile[w_at2 + W_FOURS], high);
  let w6 = half_of(tile[w_at2 + 2u * W_FOURS], high); let w7 = half_of(tile[w_at2 + 3u * W_FOURS], high);
  let v0 = half_of(tile[x_at], high); let v1 = half_of(tile[x_at + X_FOURS], high);
  let v2 = half_of(tile[x_at + 2u * X_FOURS], high); let v3 = half_of(tile[x_at + 3u * X_FOURS], high);
  (*s).a0 += vec4<i32>(dot8(v0, w0), dot8(v0, w1), dot8(v0, w2), dot8(v0, w3));
  (*s).b0 += vec4<i32>(dot8(v0, w4), dot8(v0, w5), dot8(v0, w6), dot8(v0, w7));
  (*s).a1 += vec4<i32>(dot8(v1, w0), dot8(v1, w1), dot8(v1, w2), dot8(v1, w3));
  (*s).b1 += vec4<i32>(dot8(v1, w4), dot8(v1, w5), dot8(v1, w6), dot8(v1, w7));
  (*s).a2 += vec4<i32>(dot8(v2, w0), dot8(v2, w1), dot8(v2, w2), dot8(v2, w3));
  (*s).b2 += vec4<i32>(dot8(v2, w4), dot8(v2, w5), dot8(v2, w6), dot8(v2, w7));
  (*s).a3 += vec4<i32>(dot8(v3, w0), dot8(v3, w1), dot8(v3, w2), dot8(v3, w3));
  (*s).b3 += vec4<i32>(dot8(v3, w4), dot8(v3, w5), dot8(v3, w6), dot8(v3, w7));
}

fn scaled(s: vec4<i32>, d: f32, zero: f32, scale: vec4<f32>, c: vec4<f32>) -> vec4<f32> {  // c + s * d * scale
  return fma(fma(bitcast<vec4<f32>>(s), vec4<f32>(d), vec4<f32>(zero)), scale, c);
}

// All residuals are loaded before the first result is stored: one wait for memory instead of 16.
fn residual4(token: u32, row: u32) -> vec4<f32> {
  let t = min(token, step.rows - 1u);
  return vec4<f32>(residual_at(t, row), residual_at(t, row + 2u));
}

fn store4(token: u32, row: u32, v: vec4<f32>, split: u32) {
  if (token < step.rows) { store_result(split * SPLIT_ROWS + token, row, v.xy); store_result(split * SPLIT_ROWS + token, row + 2u, v.zw); }
}

fn store_partial(i: u32, v: vec4<f32>) { tile[i] = bitcast<vec4<u32>>(v); }
fn load_partial(i: u32) -> vec4<f32> { return bitcast<vec4<f32>>(tile[i]); }
struct Totals {  // as Sums
  a0: vec4<f32>, a1: vec4<f32>, a2: vec4<f32>, a3: vec4<f32>,
  b0: vec4<f32>, b1: vec4<f32>, b2: vec4<f32>, b3: vec4<f32>,
}
struct Place { x_slot: u32, w_slot: u32, w_slot2: u32, thread_m: u32, thread_n: u32 }  // of an invocation in the tile

fn add_span(c: ptr<function, Totals>, span: u32, high: bool, p: Place) {  // k that share one scale; high: the second 16 of a block
  let block = span * SPAN / 32u;
  let x_at = 2u * block * X_PLANE + p.x_slot;
  let w_at = 2u * block * W_PLANE + p.w_slot;
  let w_at2 = 2u * block * W_PLANE + p.w_slot2;
  const ZEROS = vec4<i32>(SUM_ZERO, SUM_ZERO, SUM_ZERO, SUM_ZERO);
  var s = Sums(ZEROS, ZEROS, ZEROS, ZEROS, ZEROS, ZEROS, ZEROS, ZEROS);
  if (SPAN == 32u) {
    add_plane(&s, x_at, w_at, w_at2);
    add_plane(&s, x_at + X_PLANE, w_at + W_PLANE, w_at2 + W_PLANE);
  } else {
    add_half_plane(&s, x_at, w_at, w_at2, high);
    add_half_plane(&s, x_at + X_PLANE, w_at + W_PLANE, w_at2 + W_PLANE, high);
  }
  let scale = w_scale4(span * TILE_N + 4u * p.thread_n);
  let scale2 = w_scale4(span * TILE_N + 4u * (p.thread_n + THREADS_N));
  let d = x_scale4(span * TILE_M + 4u * p.thread_m);
  let zero = d * -MAGIC;
  (*c).a0 = scaled(s.a0, d.x, zero.x, scale, (*c).a0); (*c).b0 = scaled(s.b0, d.x, zero.x, scale2, (*c).b0);
  (*c).a1 = scaled(s.a1, d.y, zero.y, scale, (*c).a1); (*c).b1 = scaled(s.b1, d.y, zero.y, scale2, (*c).b1);
  (*c).a2 = scaled(s.a2, d.z, zero.z, scale, (*c).a2); (*c).b2 = scaled(s.b2, d.z, zero.z, scale2, (*c).b2);
  (*c).a3 = scaled(s.a3, d.w, zero.w, scale, (*c).a3); (*c).b3 = scaled(s.b3, d.w, zero.w, scale2, (*c).b3);
  if (HAS_OFFSET) {
    let offset = w_offset4(span * TILE_N + 4u * p.thread_n);
    let offset2 = w_offset4(span * TILE_N + 4u * (p.thread_n + THREADS_N));
    let sum = x_sum4(span * TILE_M + 4u * p.thread_m);
    (*c).a0 += offset * sum.x; (*c).a1 += offset * sum.y; (*c).a2 += offset * sum.z; (*c).a3 += offset * sum.w;
    (*c).b0 += offset2 * sum.x; (*c).b1 += offset2 * sum.y; (*c).b2 += offset2 * sum.z; (*c).b3 += offset2 * sum.w;
  }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let row0 = workgroup.x * TILE_N;
  let token0 = workgroup.y * TILE_M;
  let team = index / TEAM_SIZE;
  // 32 neighbouring invocations are 8 x 4 of the tile; their bits alternate, so that pairs share operands
  let lane = index % 32u;
  let thread_n = (lane & 1u) + ((lane >> 1u) & 2u) + ((lane >> 2u) & 4u);
  let thread_m = index % TEAM_SIZE / 32u * 4u + ((lane >> 1u) & 1u) + ((lane >> 2u) & 2u);
  let place = Place(four_slot(thread_m, X_FOURS), W_TILE + four_slot(thread_n, W_FOURS),
                    W_TILE + four_slot(thread_n + THREADS_N, W_FOURS), thread_m, thread_n);
  var c = Totals();
  const PER_SPLIT = (K / 32u + GRID_SPLIT * BLOCKS - 1u) / (GRID_SPLIT * BLOCKS) * BLOCKS;
  let begin = select(workgroup.z * PER_SPLIT, 0u, GRID_SPLIT == 1u);  // without splits the driver sees a constant
  let end = min(begin + PER_SPLIT, K / 32u);
  var at = tile_sources(row0, token0, index);
  var loads = load_tile(begin, &at, index);
  for (var first = begin; first < end; first += BLOCKS) {
    stage_tile(&loads, index);
    workgroupBarrier();
    loads = load_tile(first + BLOCKS, &at, index);
    // written out: as a loop it is 12 % slower on an H200
    add_span(&c, team * (64u / SPAN), false, place);
    add_span(&c, team * (64u / SPAN) + 1u, SPAN == 16u, place);
    if (SPAN == 16u) { add_span(&c, team * 4u + 2u, false, place); add_span(&c, team * 4u + 3u, true, place); }
    workgroupBarrier();
  }
  for (var half = SPLIT_K / 2u; half > 0u; half >>= 1u) {  // the lower half of the teams adds the sums of the upper half
    let size = half * TEAM_SIZE;
    let i = index % size;
    if (team >= half && team < 2u * half) {
      store_partial(i, c.a0); store_partial(i + size, c.a1); store_partial(i + 2u * size, c.a2); store_partial(i + 3u * size, c.a3);
      store_partial(i + 4u * size, c.b0); store_partial(i + 5u * size, c.b1); store_partial(i + 6u * size, c.b2); store_partial(i + 7u * size, c.b3);
    }
    workgroupBarrier();
    if (team < half) {
      c.a0 += load_partial(i); c.a1 += load_partial(i + size); c.a2 += load_partial(i + 2u * size); c.a3 += load_partial(i + 3u * size);
      c.b0 += load_partial(i + 4u * size); c.b1 += load_partial(i + 5u * size); c.b2 += load_partial(i + 6u * size); c.b3 += load_partial(i + 7u * size);
    }
    workgroupBarrier();
  }
  let row = row0 + 4u * thread_n;
  let row2 = row + 4u * THREADS_N;
  let token = token0 + 4u * thread_m;
  if (team == 0u) {
    c.a0 += residual4(token, row); c.a1 += residual4(token + 1u, row); c.a2 += residual4(token + 2u, row); c.a3 += residual4(token + 3u, row);
    c.b0 += residual4(token, row2); c.b1 += residual4(token + 1u, row2); c.b2 += residual4(token + 2u, row2); c.b3 += residual4(token + 3u, row2);
    let split = workgroup.z;
    store4(token, row, c.a0, split); store4(token, row2, c.b0, split);
    store4(token + 1u, row, c.a1, split); store4(token + 1u, row2, c.b1, split);
    store4(token + 2u, row, c.a2, split); store4(token + 2u, row2, c.b2, split);
    store4(token + 3u, row, c.a3, split); store4(token + 3u, row2, c.b3, split);
  }
  workgroup_epilogue(workgroup.x, token0, step.rows, index);
}
