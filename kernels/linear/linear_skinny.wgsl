// y[m, N] = x[m, K] @ W[N, K]^T, up to 16 tokens and q4 or q6 weights: a skinny GEMM on subgroup matrices, f16 with f32 sums.
// x stays in registers: each of TEAMS subgroups keeps SLICE k of all tokens, in 16 matrices, and multiplies them by one strip
// of 16 rows of W after another. Neighbouring lanes load the SLICE k of a row, 128 bytes of q4 by eight of them (see strip_*). A
// lane converts a quarter of its weights at a time, two pairs of two eights of each block, so that the quarters of a strip are
// 64 k wide. They, and x in the same order, pass through the subgroup's own part of workgroup memory. Its elements are vec2s:
// of 16 bytes of a block of x there a lane has 8, which it stores alone (16 rows of 8B on an H200 3498 us; with vec4s, whose halves
// lanes exchange, 3842).
// The sums of the teams are added up, and where K is longer than TEAMS * SLICE, linear_sum adds up what GRID_SPLIT workgroups store.
// w and scales are read_write, though nothing is stored: drivers move a load of read-only memory down to its first use, past
// barriers, so that nothing hides its latency (28672 x 4096 on an H200, a script's kernel: 48.8 us instead of 42.7).
// Needs 16 tokens at most, subgroups of 32 and f16 matrices of 16 x 16 x 16, f16 that keeps subnormals, what strip_* needs,
// K = GRID_SPLIT * TEAMS * SLICE, TEAMS from 4 to 16, WORKGROUP = 32 * TEAMS, TEAMS * 2304 + 2048 bytes of workgroup memory,
// N % 16 == 0 (a gated unit: % 64), TOKENS 16, EPILOGUE_ROWS 16 or 32. Parts: f16, strip_*, subgroup_barrier_*, epilogue_*.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const K: u32 = 1024u;
const N: u32 = 16u;
const GROUP: u32 = 32u;
const HAS_OFFSET: bool = false;
const SCALE_BITS: u32 = 16u;
const SLICE: u32 = 256u;
const TEAMS: u32 = 4u;
const WORKGROUP: u32 = 128u;
const TOKENS: u32 = 16u;
const EPILOGUE_ROWS: u32 = 16u;                         // of a workgroup epilogue
const UNIT: u32 = EPILOGUE_ROWS / 16u;                  // strips of it
const GRID_SPLIT: u32 = 1u;                             // workgroups that share k
const SPLIT_ROWS: u32 = 0u;                             // token rows of a split's results
const W_UNIT: f16 = 16.0h;                              // as in linear_matrix: inputs are divided by it
const PITCH: u32 = 18u;                                 // vec2s of a row's 64 k, two of them padding
const OWN: u32 = 16u * PITCH;                           // of a subgroup
const SUM_PITCH: u32 = 10u;                             // vec2s of a token's 16 sums, two of them padding
alias Left = subgroup_matrix_left<f16, 16, 16>;
alias Right = subgroup_matrix_right<f16, 16, 16>;
alias Result = subgroup_matrix_result<f32, 16, 16>;
@group(0) @binding(5) var<storage, read> x: array<vec4<u32>>;             // f16 blocks [m][K/32][4], see blocks_f16
@group(0) @binding(8) var<uniform> step: Step;
var<workgroup> tile: array<vec2<u32>, TEAMS * OWN>;  // of each subgroup f16 [token or row][64 k]; at the end of a strip its sums
var<workgroup> hidden: array<f32, TOKENS * 32u>;     // of epilogue_glu_blocks
var<private> magic: u32;  // the exponent of 1024 twice, in a register: with a constant drivers take two instructions for (v & mask) | magic
fn store_hidden(i: u32, v: f32) { hidden[i] = v; }
fn load_hidden(i: u32) -> vec4<f32> { return vec4<f32>(hidden[i], hidden[i + 1u], hidden[i + 2u], hidden[i + 3u]); }

fn scaled(bits: u32, zero: f16, s: f16) -> u32 {
  let v = bitcast<vec2<f16>>(bits) - vec2<f16>(zero);
  return bitcast<u32>(v * vec2<f16>(s));
}
// A token's SLICE k are 512 bytes: 16 lanes load two of the four vec4s of its eight blocks, whole sectors of memory.
struct Inputs { v: array<vec4<u32>, 8> }
fn load_inputs(lane: u32, b: u32, j: u32) -> Inputs {  // eights j and j + 1 of blocks; b: the first one
  var inputs: Inputs;
  for (var i = 0u; i < 8u; i++) {
    let token = min(2u * i + lane / 16u, step.rows - 1u);
    inputs.v[i] = x[(token * (K / 32u) + b + lane / 2u % 8u) * 4u + j + lane % 2u];
  }
  return inputs;
}
// Of two neighbouring eights the pairs p and p + 2, each by the lane that has it.
fn stage_inputs(own: u32, lane: u32, inputs: Inputs, p: u32) {
  for (var i = 0u; i < 8u; i++) {
    tile[own + (2u * i + lane / 16u) * PITCH + lane % 16u] = vec2<u32>(inputs.v[i][p], inputs.v[i][p + 2u]);
  }
}
fn store_quarter(at: u32, v: vec4<u32>) { tile[at] = v.xy; tile[at + 1u] = v.zw; }
fn strip_row(n: u32, workgroup: u32, workgroups: u32) -> u32 {  // of the n-th strip of a workgroup
  return ((workgroup + n / UNIT * workgroups) * UNIT + n % UNIT) * 16u;
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>, @builtin(local_invocation_index) index: u32, @builtin(subgroup_id) subgroup: u32) {
  let lane = index % 32u;
  magic = select(0x64006400u, 0u, lane == 32u + step.rows);  // which it is not, but the driver cannot know
  let own = subgroup * OWN;
  let at = own + lane / ROW_LANES * PITCH + 2u * lane_block(lane);
  let first = (workgroup.z * TEAMS + subgroup) * (SLICE / 32u);  // block
  let b = first + lane_block(lane);
  let skip = scale_skip(b);
  let token = index / 8u;   // of the invocation's results, where it has some
  let pair = index % 8u;
  var loads = load_strip(min(strip_row(0u, workgroup.y, workgroups.y), N - 16u) + lane / ROW_LANES, b);
  let low = load_inputs(lane, first, 0u);
  let high = load_inputs(lane, first, 2u);
  stage_inputs(own, lane, low, 0u);
  subgroup_barrier();
  let x0 = subgroupMatrixLoad<Left, row_major>(&tile, own, PITCH);
  let x1 = subgroupMatrixLoad<Left, row_major>(&tile, own + 4u, PITCH);
  let x2 = subgroupMatrixLoad<Left, row_major>(&tile, own + 8u, PITCH);
  let x3 = subgroupMatrixLoad<Left, row_major>(&tile, own + 12u, PITCH);
  subgroup_barrier();
  stage_inputs(own, lane, low, 1u);
  subgroup_barrier();
  let x4 = subgroupMatrixLoad<Left, row_major>(&tile, own, PITCH);
  let x5 = subgroupMatrixLoad<Left, row_major>(&tile, own + 4u, PITCH);
  let x6 = subgroupMatrixLoad<Left, row_major>(&tile, own + 8u, PITCH);
  let x7 = subgroupMatrixLoad<Left, row_major>(&tile, own + 12u, PITCH);
  subgroup_barrier();
  stage_inputs(own, lane, high, 0u);
  subgroup_barrier();
  let x8 = subgroupMatrixLoad<Left, row_major>(&tile, own, PITCH);
  let x9 = subgroupMatrixLoad<Left, row_major>(&tile, own + 4u, PITCH);
  let x10 = subgroupMatrixLoad<Left, row_major>(&tile, own + 8u, PITCH);
  let x11 = subgroupMatrixLoad<Left, row_major>(&tile, own + 12u, PITCH);
  subgroup_barrier();
  stage_inputs(own, lane, high, 1u);
  subgroup_barrier();
  let x12 = subgroupMatrixLoad<Left, row_major>(&tile, own, PITCH);
  let x13 = subgroupMatrixLoad<Left, row_major>(&tile, own + 4u, PITCH);
  let x14 = subgroupMatrixLoad<Left, row_major>(&tile, own + 8u, PITCH);
  let x15 = subgroupMatrixLoad<Left, row_major>(&tile, own + 12u, PITCH);
  subgroup_barrier();
  let one = 1u + (step.rows >> 16u);  // a driver that can count the strips unrolls eight, to 80 KB of code
  for (var n = 0u; strip_row(n, workgroup.y, workgroups.y) < N; n = n * one + 1u) {
    let row = strip_row(n, workgroup.y, workgroups.y) + 2u * pair;
    if (index < 128u) { epilogue_prefetch(min(token, step.rows - 1u), row); }
    let s = strip_scales(loads, skip);
    var sum = Result();
    stage(at, loads, 0u, s);
    subgroup_barrier();
    let w0 = subgroupMatrixLoad<Right, col_major>(&tile, own, PITCH);
    let w1 = subgroupMatrixLoad<Right, col_major>(&tile, own + 4u, PITCH);
    let w2 = subgroupMatrixLoad<Right, col_major>(&tile, own + 8u, PITCH);
    let w3 = subgroupMatrixLoad<Right, col_major>(&tile, own + 12u, PITCH);
    sum = subgroupMatrixMultiplyAccumulate(x0, w0, sum);
    sum = subgroupMatrixMultiplyAccumulate(x1, w1, sum);
    sum = subgroupMatrixMultiplyAccumulate(x2, w2, sum);
    sum = subgroupMatrixMultiplyAccumulate(x3, w3, sum);
    subgroup_barrier();
    stage(at, loads, 1u, s);
    subgroup_barrier();
    let w4 = subgroupMatrixLoad<Right, col_major>(&tile, own, PITCH);
    let w5 = subgroupMatrixLoad<Right, col_major>(&tile, own + 4u, PITCH);
    let w6 = subgroupMatrixLoad<Right, col_major>(&tile, own + 8u, PITCH);
    let w7 = subgroupMatrixLoad<Right, col_major>(&tile, own + 12u, PITCH);
    sum = subgroupMatrixMultiplyAccumulate(x4, w4, sum);
    sum = subgroupMatrixMultiplyAccumulate(x5, w5, sum);
    sum = subgroupMatrixMultiplyAccumulate(x6, w6, sum);
    sum = subgroupMatrixMultiplyAccumulate(x7, w7, sum);
    subgroup_barrier();
    stage(at, loads, 2u, s);
    subgroup_barrier();
    let w8 = subgroupMatrixLoad<Right, col_major>(&tile, own, PITCH);
    let w9 = subgroupMatrixLoad<Right, col_major>(&tile, own + 4u, PITCH);
    let w10 = subgroupMatrixLoad<Right, col_major>(&tile, own + 8u, PITCH);
    let w11 = subgroupMatrixLoad<Right, col_major>(&tile, own + 12u, PITCH);
    sum = subgroupMatrixMultiplyAccumulate(x8, w8, sum);
    sum = subgroupMatrixMultiplyAccumulate(x9, w9, sum);
    sum = subgroupMatrixMultiplyAccumulate(x10, w10, sum);
    sum = subgroupMatrixMultiplyAccumulate(x11, w11, sum);
    subgroup_barrier();
    stage(at, loads, 3u, s);
    loads = load_strip(min(strip_row(n + 1u, workgroup.y, workgroups.y), N - 16u) + lane / ROW_LANES, b);
    subgroup_barrier();
    let w12 = subgroupMatrixLoad<Right, col_major>(&tile, own, PITCH);
    let w13 = subgroupMatrixLoad<Right, col_major>(&tile, own + 4u, PITCH);
    let w14 = subgroupMatrixLoad<Right, col_major>(&tile, own + 8u, PITCH);
    let w15 = subgroupMatrixLoad<Right, col_major>(&tile, own + 12u, PITCH);
    sum = subgroupMatrixMultiplyAccumulate(x12, w12, sum);
    sum = subgroupMatrixMultiplyAccumulate(x13, w13, sum);
    sum = subgroupMatrixMultiplyAccumulate(x14, w14, sum);
    sum = subgroupMatrixMultiplyAccumulate(x15, w15, sum);
    subgroup_barrier();
    subgroupMatrixStore<row_major>(&tile, own, sum, SUM_PITCH);
    workgroupBarrier();
    var v = vec2<f32>();
    if (index < 128u) {
      for (var t = 0u; t < TEAMS; t++) { v += bitcast<vec2<f32>>(tile[t * OWN + token * SUM_PITCH + pair]); }
    }
    workgroupBarrier();
    if (index < 128u && token < step.rows) { epilogue(workgroup.z * SPLIT_ROWS + token, row, v); }
    if (n % UNIT == UNIT - 1u) { workgroup_epilogue(row / (16u * UNIT), 0u, step.rows, index); }
  }
}
