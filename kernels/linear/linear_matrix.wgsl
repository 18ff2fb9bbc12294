// y[m, N] = x[m, K] @ W[N, K]^T, many tokens, or a few and a large W: GEMM on subgroup matrices, f16 with f32 sums.
// A workgroup computes a tile of TILE_M tokens x TILE_N rows, a subgroup 16 * DOWN x EPILOGUE_ROWS of it. The sums are 16 variables
// with names: drivers keep an array of matrices in memory, six times slower on an H200, and a struct of them 15 % slower. In an
// iteration TILE_K k of x and of W go to workgroup memory as f16; the next iteration's loads are in flight meanwhile. Where K is a
// multiple of 256, a round of iterations takes eight blocks of 32 k, so that their scales can be loaded at once. With
// TERMS 3 every number is the sum of two f16, hi + lo, and a product hi * hi + lo * hi + hi * lo. Small tiles have TEAMS
// subgroups for the same sums, which take their shares of these k. Results leave through workgroup memory, a strip of 16
// tokens x EPILOGUE_ROWS at a time. Where tiles do not fill a GPU, GRID_SPLIT workgroups share one, and linear_sum adds up
// what they store.
// Needs subgroups of 32 and f16 matrices of 16 x 16 x 16 (matrix_* makes them of smaller ones), DOWN 1, 2 or 4, TEAMS 1 or 2,
// EPILOGUE_ROWS 64, or 32 with DOWN 1, TILE_N % EPILOGUE_ROWS == 0, EPILOGUE_LANES 32, TOKENS 16, K % 64 == 0 and
// WORKGROUP = 32 * TEAMS * TILE_M / (16 * DOWN) * TILE_N / EPILOGUE_ROWS. A ragged m or N is clamped on load and guarded on store.
// Parts: f16, matrix_*, tile_* with what it needs, epilogue_*.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const K: u32 = 64u;
const N: u32 = 4u;
const TILE_M: u32 = 128u;
const TILE_N: u32 = 128u;
const TILE_K: u32 = 64u;                                // see tile_*
const TERMS: u32 = 1u;                                  // 1 or 3
const DOWN: u32 = 4u;                                   // strips of a subgroup
const EPILOGUE_ROWS: u32 = 64u;                         // of a subgroup: 64 or 32
const TEAMS: u32 = 1u;
const WORKGROUP: u32 = 128u;
const EPILOGUE_LANES: u32 = 32u;                        // invocations that share a workgroup epilogue, and their tokens
const TOKENS: u32 = 16u;
const GRID_SPLIT: u32 = 1u;                             // workgroups that share a tile
const SPLIT_ROWS: u32 = 0u;                             // token rows of a split's results
const PITCH: u32 = TILE_K / 8u + 1u;                    // vec4s of a token's or row's k, one of them padding
const X_PLANE: u32 = TILE_M * PITCH;                    // vec4s of hi, before lo
const W_PLANE: u32 = TILE_N * PITCH;
const PLANES: u32 = select(1u, 2u, TERMS == 3u);
const STRIP_PITCH: u32 = EPILOGUE_ROWS / 4u + 1u;       // vec4s of a token's sums, one of them padding
const STRIP: u32 = 16u * STRIP_PITCH;
const X_UNIT: f32 = 16.0;                               // inputs are divided by it, weights multiplied by W_UNIT:
const W_UNIT: f32 = 16.0;                               // both stay in the range of f16
alias Left = subgroup_matrix_left<f16, 16, 16>;
alias Right = subgroup_matrix_right<f16, 16, 16>;
alias Result = subgroup_matrix_result<f32, 16, 16>;
@group(0) @binding(8) var<uniform> step: Step;
var<workgroup> x_tile: array<vec4<u32>, PLANES * X_PLANE>;  // f16 [hi, lo][token][TILE_K]
var<workgroup> w_tile: array<vec4<u32>, max(PLANES * W_PLANE, WORKGROUP / 32u * STRIP)>;  // [hi, lo][row][TILE_K]; at the end a strip of each subgroup
var<private> strip: u32;         // where the strip begins that the subgroup stores
var<private> hidden: vec4<f32>;  // of epilogue_glu_blocks

fn hidden_at(i: u32) -> u32 { return strip + i / 32u * STRIP_PITCH + i % (EPILOGUE_ROWS / 2u) / 4u * 2u; }
fn store_hidden(i: u32, v: f32) {  // called for four in this order, in the place of the sums that they are made of
  hidden = vec4<f32>(hidden.yzw, v);
  if (i % 4u == 3u) { w_tile[hidden_at(i)] = bitcast<vec4<u32>>(hidden); }
}
fn load_hidden(i: u32) -> vec4<f32> { return bitcast<vec4<f32>>(w_tile[hidden_at(i)]); }

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
  let row1 = subgroup / TEAMS / (TILE_M / (16u * DOWN)) * EPILOGUE_ROWS;
  const SHARE = TILE_K / 8u / TEAMS;  // vec4s of k that a team takes in an iteration
  const BLOCKS = TILE_K / 32u;  // of an iteration
  const ROUND = select(BLOCKS, 8u, K % 256u == 0u && TERMS == 1u);  // blocks of a round, whose iterations drivers unroll
  const PER_SPLIT = (K / 32u + GRID_SPLIT * ROUND - 1u) / (GRID_SPLIT * ROUND) * ROUND;
  let begin = select(workgroup.z * PER_SPLIT, 0u, GRID_SPLIT == 1u);  // without splits the driver sees a constant
  let end = min(begin + PER_SPLIT, K / 32u);
  var c00: Result; var c01: Result; var c02: Result; var c03: Result;
  var c10: Result; var c11: Result; var c12: Result; var c13: Result;
  var c20: Result; var c21: Result; var c22: Result; var c23: Result;
  var c30: Result; var c31: Result; var c32: Result; var c33: Result;
  var at = tile_sources(row0, token0, index);
  var loads: Loads;
  load_tile(min(begin, K / 32u - BLOCKS), 0u, &loads, &at, index);  // an empty split loads the last
  for (var round = begin; round < end; round += ROUND) {
    for (var place = 0u; place < ROUND; place += BLOCKS) {
      stage_tile(round + place, &loads, &at, index);
      workgroupBarrier();
      let next = round + place + BLOCKS;
      if (DOWN == 1u) {  // also after the last: a condition costs tiles of 16 x 32 6 %, and its lack those with DOWN > 1 6 to 16 %
        load_tile(min(next, K / 32u - BLOCKS), (place + BLOCKS) % ROUND, &loads, &at, index);
      } else if (place + BLOCKS < ROUND || next < end) {
        load_tile(next, (place + BLOCKS) % ROUND, &loads, &at, index);
      }
      for (var term = 0u; term < TERMS; term++) {
        let x_from = token1 * PITCH + team * SHARE + select(0u, X_PLANE, term == 1u);
        let w_from = row1 * PITCH + team * SHARE + select(0u, W_PLANE, term == 2u);
        for (var k = 0u; k < SHARE; k += 2u) {
          let x_at = x_from + k;
          let w_at = w_from + k;
          let b0 = subgroupMatrixLoad<Right, col_major>(&w_tile, w_at, PITCH);
          let b1 = subgroupMatrixLoad<Right, col_major>(&w_tile, w_at + 16u * PITCH, PITCH);
          if (EPILOGUE_ROWS == 32u) {
            let a0 = subgroupMatrixLoad<Left, row_major>(&x_tile, x_at, PITCH);
            c00 = subgroupMatrixMultiplyAccumulate(a0, b0, c00); c01 = subgroupMatrixMultiplyAccumulate(a0, b1, c01);
            continue;
          }
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
      }
      workgroupBarrier();
    }
  }
  let own = subgroup * STRIP;
  strip = (subgroup - team) * STRIP;
  for (var i = 0u; i < DOWN; i++) {
    if (i == 0u) {
      subgroupMatrixStore<row_major>(&w_tile, own, c00, STRIP_PITCH); subgroupMatrixStore<row_major>(&w_tile, own + 4u, c01, STRIP_PITCH);
      if (EPILOGUE_ROWS == 64u) { subgroupMatrixStore<row_major>(&w_tile, own + 8u, c02, STRIP_PITCH); subgroupMatrixStore<row_major>(&w_tile, own + 12u, c03, STRIP_PITCH); }
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
    const EIGHTS = EPILOGUE_ROWS / 8u;  // of a token
    for (var n = lane + 32u * team; n < 16u * EIGHTS; n += 32u * TEAMS) {
      let sums = strip + n / EIGHTS * STRIP_PITCH + n % EIGHTS * 2u;
      store_eight(token + n / EIGHTS, row0 + row1 + n % EIGHTS * 8u, strip_sum(sums), strip_sum(sums + 1u), workgroup.z);
    }
    workgroup_epilogue(select(N, (row0 + row1) / EPILOGUE_ROWS, team == 0u), token, step.rows, lane);
    workgroupBarrier();
  }
}
