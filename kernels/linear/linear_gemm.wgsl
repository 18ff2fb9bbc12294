// y[m, N] = x[m, K] @ W[N, K]^T, many tokens, f32: register-tiled GEMM.
// A workgroup computes a tile of TILE_M tokens x TILE_N rows, an invocation SIDE x SIDE of it in registers, in
// blocks of 4 x 4. Weights are dequantised once per tile into workgroup memory. The loads of the next iteration are issued
// before the products of this one.
// Split-K: a small tile needs few invocations, so a workgroup has SPLIT_K teams of TEAM_SIZE, and few tokens or rows
// still fill a GPU. In an iteration each team takes TILE_K of k; at the end the teams add up their sums.
// Needs K % 8 == 0, GROUP % 8 == 0, TILE_K % 8 == 0, TILE_M and TILE_N powers of two from 16 on. A ragged m, N or K is
// clamped on load and guarded on store.
// Parts: f16, (scales,) weight_*, epilogue_* (without a workgroup epilogue).
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const K: u32 = 32u;
const N: u32 = 4u;
const TILE_M: u32 = 64u;
const TILE_N: u32 = 64u;
const TILE_K: u32 = 16u;
const WORKGROUP: u32 = 128u;
const SIDE: u32 = 8u;  // tokens, and rows, of an invocation: 4 or 8
const DOWN: u32 = TILE_M / SIDE;  // invocations of a team along the tokens
const ACROSS: u32 = TILE_N / SIDE;  // and along the rows
const TEAM_SIZE: u32 = DOWN * ACROSS;
const SPLIT_K: u32 = WORKGROUP / TEAM_SIZE;
const STEP_K: u32 = SPLIT_K * TILE_K;  // k of an iteration
const LAST_K: u32 = (K - 1u) / STEP_K * STEP_K;  // the first k of the last iteration
const X_VEC4: u32 = TILE_M / 4u;
const W_VEC4: u32 = TILE_N / 4u;
const X_COUNT: u32 = STEP_K / 4u * X_VEC4;  // loads of x: 4 tokens x 4 k
const W_COUNT: u32 = STEP_K / 8u * W_VEC4;  // loads of W: 4 rows x 8 k
const X_LOADS: u32 = (X_COUNT + WORKGROUP - 1u) / WORKGROUP;
const W_LOADS: u32 = (W_COUNT + WORKGROUP - 1u) / WORKGROUP;
const SWIZZLE: u32 = max(1u, 32u / STEP_K);
struct RawRows { a: RawWeight8, b: RawWeight8, c: RawWeight8, d: RawWeight8 }
struct TileLoads { x: array<mat4x4<f32>, X_LOADS>, w: array<RawRows, W_LOADS> }  // an invocation's loads of one iteration
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;  // [m, K/4]
@group(0) @binding(8) var<uniform> step: Step;
var<workgroup> x_tile: array<vec4<f32>, max(STEP_K * X_VEC4, select(0u, 4u * WORKGROUP, SPLIT_K > 1u))>;  // [k][4 tokens]; at the end partial sums
var<workgroup> w_tile: array<vec4<f32>, STEP_K * W_VEC4>;  // [k][4 rows]
// Lanes that store different k of the same rows would meet in one bank: every 4 k the vec4s change places.
fn x_index(k: u32, quad: u32) -> u32 { return k * X_VEC4 + (quad ^ (k / 4u * SWIZZLE % min(8u, X_VEC4))); }
fn w_index(k: u32, quad: u32) -> u32 { return k * W_VEC4 + (quad ^ (k / 4u * SWIZZLE % min(8u, W_VEC4))); }
fn load_x(token: u32, k4: u32) -> vec4<f32> {
  if (K % STEP_K != 0u && k4 >= K / 4u) { return vec4<f32>(); }
  return x[min(token, step.rows - 1u) * (K / 4u) + k4];
}
fn clamp_k8(k8: u32) -> u32 { return select(k8, min(k8, K / 8u - 1u), K % STEP_K != 0u); }
fn rows_of(row: u32) -> vec4<u32> { return min(vec4<u32>(row, row + 1u, row + 2u, row + 3u), vec4<u32>(N - 1u)); }
fn load_tile(k0: u32, row0: u32, token0: u32, index: u32) -> TileLoads {
  var loads: TileLoads;
  for (var i = 0u; i < X_LOADS; i++) {
    let n = index + i * WORKGROUP;
    let k4 = k0 / 4u + n % (STEP_K / 4u);
    let t = token0 + n / (STEP_K / 4u) * 4u;
    loads.x[i] = mat4x4<f32>(load_x(t, k4), load_x(t + 1u, k4), load_x(t + 2u, k4), load_x(t + 3u, k4));
  }
  for (var i = 0u; i < W_LOADS; i++) {
    let n = index + i * WORKGROUP;
    let k8 = clamp_k8(k0 / 8u + n % (STEP_K / 8u));
    let r = rows_of(row0 + n / (STEP_K / 8u) * 4u);
    loads.w[i] = RawRows(load_weight8(r.x, k8), load_weight8(r.y, k8), load_weight8(r.z, k8), load_weight8(r.w, k8));
  }
  return loads;
}
fn stage_x(i: u32, v: mat4x4<f32>) {  // a column is a token
  let by_k = transpose(v);
  x_tile[i] = by_k[0]; x_tile[i + X_VEC4] = by_k[1]; x_tile[i + 2u * X_VEC4] = by_k[2]; x_tile[i + 3u * X_VEC4] = by_k[3];
}
fn stage_w(i: u32, v: mat4x4<f32>) {  // a column is a row of W
  let by_k = transpose(v);
  w_tile[i] = by_k[0]; w_tile[i + W_VEC4] = by_k[1]; w_tile[i + 2u * W_VEC4] = by_k[2]; w_tile[i + 3u * W_VEC4] = by_k[3];
}
fn stage_tile(loads: ptr<function, TileLoads>, k0: u32, row0: u32, index: u32) {
  for (var i = 0u; i < X_LOADS; i++) {
    let n = index + i * WORKGROUP;
    if (X_COUNT % WORKGROUP == 0u || n < X_COUNT) { stage_x(x_index(n % (STEP_K / 4u) * 4u, n / (STEP_K / 4u)), (*loads).x[i]); }
  }
  for (var i = 0u; i < W_LOADS; i++) {
    let n = index + i * WORKGROUP;
    if (W_COUNT % WORKGROUP == 0u || n < W_COUNT) {
      let k8 = n % (STEP_K / 8u);
      let quad = n / (STEP_K / 8u);
      let r = rows_of(row0 + 4u * quad);
      let k8_from = clamp_k8(k0 / 8u + k8);
      let raw = (*loads).w[i];
      let a = unpack_weight8(raw.a, r.x, k8_from); let b = unpack_weight8(raw.b, r.y, k8_from);
      let c = unpack_weight8(raw.c, r.z, k8_from); let d = unpack_weight8(raw.d, r.w, k8_from);
      stage_w(w_index(8u * k8, quad), mat4x4<f32>(a[0], b[0], c[0], d[0]));
      stage_w(w_index(8u * k8 + 4u, quad), mat4x4<f32>(a[1], b[1], c[1], d[1]));
    }
  }
}
fn multiply(c: mat4x4<f32>, a: vec4<f32>, w: vec4<f32>) -> mat4x4<f32> {  // a block: a column is a token
  return mat4x4<f32>(c[0] + a.x * w, c[1] + a.y * w, c[2] + a.z * w, c[3] + a.w * w);
}
fn epilogue4(token: u32, row: u32, v: vec4<f32>) {
  if (token < step.rows) { epilogue(token, row, v.xy); epilogue(token, row + 2u, v.zw); }
}
fn store_block(c: mat4x4<f32>, token: u32, row: u32, index: u32) {
  if (SPLIT_K == 1u) {
    epilogue4(token, row, c[0]); epilogue4(token + 1u, row, c[1]); epilogue4(token + 2u, row, c[2]); epilogue4(token + 3u, row, c[3]);
    return;
  }
  x_tile[index] = c[0];                  x_tile[index + WORKGROUP] = c[1];
  x_tile[index + 2u * WORKGROUP] = c[2]; x_tile[index + 3u * WORKGROUP] = c[3];
  workgroupBarrier();
  for (var j = index / TEAM_SIZE; j < 4u; j += SPLIT_K) {  // each team adds up some of the tokens
    var sum = vec4<f32>();
    for (var i = index % TEAM_SIZE; i < WORKGROUP; i += TEAM_SIZE) { sum += x_tile[j * WORKGROUP + i]; }
    epilogue4(token + j, row, sum);
  }
  workgroupBarrier();
}
// The vec4s (rows, tokens) of an invocation. 32 neighbours are 8 x 4; the bits of their numbers alternate, so that pairs
// read the same.
fn place(member: u32) -> vec2<u32> {
  if (ACROSS % 8u != 0u || DOWN % 4u != 0u) { return vec2<u32>(member % ACROSS, member / ACROSS); }
  let n = (member & 1u) | ((member >> 1u) & 2u) | ((member >> 2u) & 4u);
  let m = ((member >> 1u) & 1u) | ((member >> 2u) & 2u);
  const EIGHTS = max(1u, ACROSS / 8u);
  return vec2<u32>(member / 32u % EIGHTS * 8u + n, member / 32u / EIGHTS * 4u + m);
}
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let row0 = workgroup.x * TILE_N;
  let token0 = workgroup.y * TILE_M;
  let team_k = select(index / TEAM_SIZE * TILE_K, 0u, SPLIT_K == 1u);
  let own = place(index % TEAM_SIZE);
  var c00 = mat4x4<f32>(); var c01 = mat4x4<f32>(); var c10 = mat4x4<f32>(); var c11 = mat4x4<f32>();  // first, second tokens x rows
  var loads = load_tile(0u, row0, token0, index);
  for (var k0 = 0u; k0 < K; k0 += STEP_K) {
    stage_tile(&loads, k0, row0, index);
    workgroupBarrier();
    loads = load_tile(min(k0 + STEP_K, LAST_K), row0, token0, index);
    for (var k = team_k; k < team_k + TILE_K; k += 4u) {
      let x0 = x_index(k, own.y);
      let x1 = x_index(k, own.y + DOWN);
      let w0 = w_index(k, own.x);
      let w1 = w_index(k, own.x + ACROSS);
      for (var i = 0u; i < 4u; i++) {
        let a = x_tile[x0 + i * X_VEC4];
        let w = w_tile[w0 + i * W_VEC4];
        c00 = multiply(c00, a, w);
        if (SIDE == 8u) {
          let b = x_tile[x1 + i * X_VEC4];
          let v = w_tile[w1 + i * W_VEC4];
          c01 = multiply(c01, a, v);
          c10 = multiply(c10, b, w);
          c11 = multiply(c11, b, v);
        }
      }
    }
    workgroupBarrier();
  }
  let row = row0 + 4u * own.x;
  let token = token0 + 4u * own.y;
  store_block(c00, token, row, index);
  if (SIDE == 8u) {
    store_block(c01, token, row + 4u * ACROSS, index);
    store_block(c10, token + 4u * DOWN, row, index);
    store_block(c11, token + 4u * DOWN, row + 4u * ACROSS, index);
  }
}
