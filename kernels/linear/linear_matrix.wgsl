// y[m, N] = x[m, K] @ W[N, K]^T, many tokens, or a few and a large W, x as f16 blocks: GEMM on subgroup matrices, f16 with f32 sums.
// A workgroup computes a tile of TILE_M tokens x TILE_N rows, a subgroup 16 * DOWN x 64 of it. The sums are 16 variables with
// names: drivers keep an array of matrices in memory, six times slower on an H200, and a struct of them 15 % slower. In an
// iteration 64 k of x and of W go to workgroup memory, W as f16 times its scales; the next iteration's loads are in flight
// meanwhile. Small tiles have TEAMS subgroups for the same sums, which take their shares of these 64 k. Results leave through
// workgroup memory, a strip of 16 tokens x 64 rows at a time. Where tiles do not fill a GPU, GRID_SPLIT workgroups share one,
// and linear_sum adds up what they store.
// Needs subgroups of 32 and f16 matrices of 16 x 16 x 16 (matrix_* makes them of smaller ones), DOWN 1, 2 or 4,
// TEAMS 1, 2 or 4, TILE_N % 64 == 0, WORKGROUP = 32 * TEAMS * TILE_M / (16 * DOWN) * TILE_N / 64, EPILOGUE_LANES 32, TOKENS 16,
// K % 64 == 0, GROUP % 32 == 0 or GROUP == 16. A ragged m or N is clamped on load and guarded on store.
// Parts: f16, matrix_*, half2, scales, halves_*, epilogue_*.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const K: u32 = 64u;
const N: u32 = 4u;
const GROUP: u32 = 32u;
const HAS_OFFSET: bool = false;
const TILE_M: u32 = 128u;
const TILE_N: u32 = 128u;
const DOWN: u32 = 4u;                                   // strips of a subgroup
const TEAMS: u32 = 1u;
const WORKGROUP: u32 = 128u;
const EPILOGUE_LANES: u32 = 32u;                        // invocations that share a workgroup epilogue, and their tokens
const TOKENS: u32 = 16u;
const GRID_SPLIT: u32 = 1u;                             // workgroups that share a tile
const SPLIT_ROWS: u32 = 0u;                             // token rows of a split's results
const PITCH: u32 = 9u;                                  // vec4s of a token's or row's 64 k, one of them padding
const STRIP_PITCH: u32 = 17u;                           // vec4s of a token's 64 sums, one of them padding
const STRIP: u32 = 16u * STRIP_PITCH;
const X_LOADS: u32 = (8u * TILE_M + WORKGROUP - 1u) / WORKGROUP;  // vec4s that an invocation loads in an iteration
const W_LOADS: u32 = (2u * TILE_N + WORKGROUP - 1u) / WORKGROUP;  // blocks of 32 k
const X_UNIT: f32 = 16.0;                               // blocks_f16 divides inputs by it, weights are multiplied by W_UNIT:
const W_UNIT: f32 = 16.0;                               // both stay in the range of f16
alias Left = subgroup_matrix_left<f16, 16, 16>;
alias Right = subgroup_matrix_right<f16, 16, 16>;
alias Result = subgroup_matrix_result<f32, 16, 16>;
struct Loads {  // an invocation's loads of one iteration: all are issued before the first is used
  x: array<vec4<u32>, X_LOADS>,
  w: array<Raw, W_LOADS>,
  w_scale: array<vec4<f32>, W_LOADS>,  // (scale, offset) of the first and of the second 16 k
}
struct Sources {  // where an invocation's loads begin
  x: array<u32, X_LOADS>,
  w_row: array<u32, W_LOADS>,
}
@group(0) @binding(5) var<storage, read> x: array<vec4<u32>>;  // f16 blocks [m][K/32][4], see blocks_f16
@group(0) @binding(8) var<uniform> step: Step;
var<workgroup> x_tile: array<vec4<u32>, TILE_M * PITCH>;  // f16 [token][64 k]
var<workgroup> w_tile: array<vec4<u32>, max(TILE_N * PITCH, WORKGROUP / 32u * STRIP)>;  // [row][64 k]; at the end a strip of each subgroup
var<private> strip: u32;         // where the strip begins that the subgroup stores
var<private> hidden: vec4<f32>;  // of epilogue_glu_blocks

fn hidden_at(i: u32) -> u32 { return strip + i / 32u * STRIP_PITCH + i % 32u / 4u * 2u; }
fn store_hidden(i: u32, v: f32) {  // called for four in this order, in the place of the sums that they are made of
  hidden = vec4<f32>(hidden.yzw, v);
  if (i % 4u == 3u) { w_tile[hidden_at(i)] = bitcast<vec4<u32>>(hidden); }
}
fn load_hidden(i: u32) -> vec4<f32> { return bitcast<vec4<f32>>(w_tile[hidden_at(i)]); }

fn tile_sources(row0: u32, token0: u32, index: u32) -> Sources {
  var at: Sources;
  for (var i = 0u; i < X_LOADS; i++) {
    let n = index + i * WORKGROUP;
    at.x[i] = min(token0 + n / 8u, step.rows - 1u) * (K / 8u) + n % 8u;
  }
  for (var i = 0u; i < W_LOADS; i++) { at.w_row[i] = min(row0 + (index + i * WORKGROUP) / 2u, N - 1u); }
  return at;
}

fn load_tile(first: u32, at: ptr<function, Sources>, index: u32) -> Loads {
  var loads: Loads;
  for (var i = 0u; i < X_LOADS; i++) { loads.x[i] = x[(*at).x[i] + 4u * first]; }
  let b = first + index % 2u;
  for (var i = 0u; i < W_LOADS; i++) {
    let row = (*at).w_row[i];
    loads.w[i] = load_raw(row, b);
    if (!OWN_SCALE) {
      let s = scale_at(row, b * 32u / GROUP);
      loads.w_scale[i] = vec4<f32>(s, s);
      if (GROUP == 16u) { loads.w_scale[i] = vec4<f32>(s, scale_at(row, b * 2u + 1u)); }
    }
  }
  return loads;
}

fn stage_tile(loads: ptr<function, Loads>, index: u32) {
  for (var i = 0u; i < X_LOADS; i++) {
    let n = index + i * WORKGROUP;
    if (n < 8u * TILE_M) { x_tile[n / 8u * PITCH + n % 8u] = (*loads).x[i]; }
  }
  for (var i = 0u; i < W_LOADS; i++) {
    let n = index + i * WORKGROUP;
    if (n < 2u * TILE_N) {
      var s = (*loads).w_scale[i];
      if (OWN_SCALE) { s = vec4<f32>(raw_scale((*loads).w[i])); }
      let h = halves((*loads).w[i], s * W_UNIT);
      let at = n / 2u * PITCH + n % 2u * 4u;
      w_tile[at] = h.p0; w_tile[at + 1u] = h.p1; w_tile[at + 2u] = h.p2; w_tile[at + 3u] = h.p3;
    }
  }
}

fn strip_sum(at: u32) -> vec4<f32> {  // over the teams
  var v = bitcast<vec4<f32>>(w_tile[at]);
  for (var t = 1u; t < TEAMS; t++) { v += bitcast<vec4<f32>>(w_tile[at + t * STRIP]); }
  return v * (X_UNIT / W_UNIT);
}

// All residuals are loaded before the first result is stored: one wait for memory instead of four.
fn store_eight(token: u32, row: u32, a: vec4<f32>, b: vec4<f32>, split: u32) {
  let t = min(token, step.rows - 1u);
  let r0 = residual_at(t, row); let r1 = residual_at(t, row + 2u); let r2 = residual_at(t, row + 4u); let r3 = residual_at(t, row + 6u);
  let to = split * SPLIT_ROWS + token;
  if (token < step.rows) {
    store_result(to, row, a.xy + r0); store_result(to, row + 2u, a.zw + r1);
    store_result(to, row + 4u, b.xy + r2); store_result(to, row + 6u, b.zw + r3);
  }
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32, @builtin(subgroup_id) subgroup: u32) {
  let row0 = workgroup.y * TILE_N;  // workgroups with the same weights run side by side
  let token0 = workgroup.x * TILE_M;
  let lane = index % 32u;
  let team = subgroup % TEAMS;
  let token1 = subgroup / TEAMS % (TILE_M / (16u * DOWN)) * 16u * DOWN;  // of the subgroup in the tile
  let row1 = subgroup / TEAMS / (TILE_M / (16u * DOWN)) * 64u;
  const PER_SPLIT = (K / 32u + GRID_SPLIT * 2u - 1u) / (GRID_SPLIT * 2u) * 2u;
  let begin = select(workgroup.z * PER_SPLIT, 0u, GRID_SPLIT == 1u);  // without splits the driver sees a constant
  let end = min(begin + PER_SPLIT, K / 32u);
  var c00: Result; var c01: Result; var c02: Result; var c03: Result;
  var c10: Result; var c11: Result; var c12: Result; var c13: Result;
  var c20: Result; var c21: Result; var c22: Result; var c23: Result;
  var c30: Result; var c31: Result; var c32: Result; var c33: Result;
  var at = tile_sources(row0, token0, index);
  var loads = load_tile(min(begin, K / 32u - 2u), &at, index);  // an empty split loads the last
  for (var first = begin; first < end; first += 2u) {
    stage_tile(&loads, index);
    workgroupBarrier();
    if (first + 2u < end) { loads = load_tile(first + 2u, &at, index); }
    for (var k = 0u; k < 8u / TEAMS; k += 2u) {
      let x_at = token1 * PITCH + team * (8u / TEAMS) + k;
      let w_at = row1 * PITCH + team * (8u / TEAMS) + k;
      let b0 = subgroupMatrixLoad<Right, col_major>(&w_tile, w_at, PITCH);
      let b1 = subgroupMatrixLoad<Right, col_major>(&w_tile, w_at + 16u * PITCH, PITCH);
      let b2 = subgroupMatrixLoad<Right, col_major>(&w_tile, w_at + 32u * PITCH, PITCH);
      let b3 = subgroupMatrixLoad<Right, col_major>(&w_tile, w_at + 48u * PITCH, PITCH);
      let a0 = subgroupMatrixLoad<Left, row_major>(&x_tile, x_at, PITCH);
      c00 = subgroupMatrixMultiplyAccumulate(a0, b0, c00); c01 = subgroupMatrixMultiplyAccumulate(a0, b1, c01);
      c02 = subgroupMatrixMultiplyAccumulate(a0, b2, c02); c03 = subgroupMatrixMultiplyAccumulate(a0, b3, c03);
      if (DOWN > 1u) {
        let a1 = subgroupMatrixLoad<Left, row_major>(&x_tile, x_at + 16u * PITCH, PITCH);
        c10 = subgroupMatrixMultiplyAccumulate(a1, b0, c10); c11 = subgroupMatrixMultiplyAccumulate(a1, b1, c11);
        c12 = subgroupMatrixMultiplyAccumulate(a1, b2, c12); c13 = subgroupMatrixMultiplyAccumulate(a1, b3, c13);
      }
      if (DOWN > 2u) {
        let a2 = subgroupMatrixLoad<Left, row_major>(&x_tile, x_at + 32u * PITCH, PITCH);
        c20 = subgroupMatrixMultiplyAccumulate(a2, b0, c20); c21 = subgroupMatrixMultiplyAccumulate(a2, b1, c21);
        c22 = subgroupMatrixMultiplyAccumulate(a2, b2, c22); c23 = subgroupMatrixMultiplyAccumulate(a2, b3, c23);
        let a3 = subgroupMatrixLoad<Left, row_major>(&x_tile, x_at + 48u * PITCH, PITCH);
        c30 = subgroupMatrixMultiplyAccumulate(a3, b0, c30); c31 = subgroupMatrixMultiplyAccumulate(a3, b1, c31);
        c32 = subgroupMatrixMultiplyAccumulate(a3, b2, c32); c33 = subgroupMatrixMultiplyAccumulate(a3, b3, c33);
      }
    }
    workgroupBarrier();
  }
  let own = subgroup * STRIP;
  strip = (subgroup - team) * STRIP;
  for (var i = 0u; i < DOWN; i++) {
    if (i == 0u) {
      subgroupMatrixStore<row_major>(&w_tile, own, c00, STRIP_PITCH); subgroupMatrixStore<row_major>(&w_tile, own + 4u, c01, STRIP_PITCH);
      subgroupMatrixStore<row_major>(&w_tile, own + 8u, c02, STRIP_PITCH); subgroupMatrixStore<row_major>(&w_tile, own + 12u, c03, STRIP_PITCH);
    } else if (i == 1u) {
      subgroupMatrixStore<row_major>(&w_tile, own, c10, STRIP_PITCH); subgroupMatrixStore<row_major>(&w_tile, own + 4u, c11, STRIP_PITCH);
      subgroupMatrixStore<row_major>(&w_tile, own + 8u, c12, STRIP_PITCH); subgroupMatrixStore<row_major>(&w_tile, own + 12u, c13, STRIP_PITCH);
    } else if (i == 2u) {
      subgroupMatrixStore<row_major>(&w_tile, own, c20, STRIP_PITCH); subgroupMatrixStore<row_major>(&w_tile, own + 4u, c21, STRIP_PITCH);
      subgroupMatrixStore<row_major>(&w_tile, own + 8u, c22, STRIP_PITCH); subgroupMatrixStore<row_major>(&w_tile, own + 12u, c23, STRIP_PITCH);
    } else {
      subgroupMatrixStore<row_major>(&w_tile, own, c30, STRIP_PITCH); subgroupMatrixStore<row_major>(&w_tile, own + 4u, c31, STRIP_PITCH);
      subgroupMatrixStore<row_major>(&w_tile, own + 8u, c32, STRIP_PITCH); subgroupMatrixStore<row_major>(&w_tile, own + 12u, c33, STRIP_PITCH);
    }
    workgroupBarrier();
    let token = token0 + token1 + 16u * i;
    for (var n = lane + 32u * team; n < 128u; n += 32u * TEAMS) {
      let sums = strip + n / 8u * STRIP_PITCH + n % 8u * 2u;
      store_eight(token + n / 8u, row0 + row1 + n % 8u * 8u, strip_sum(sums), strip_sum(sums + 1u), workgroup.z);
    }
    workgroup_epilogue(select(N, (row0 + row1) / 64u, team == 0u), token, lane);
    workgroupBarrier();
  }
}
