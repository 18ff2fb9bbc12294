// silu(gate) * up, the rows of gate and up being interleaved, as int8 records (see make_record): a workgroup makes
// a whole block of 32 values of TOKENS tokens. v = (gate, up) (+ bias). Parts: record.
// Needs a workgroup that covers 64 consecutive rows; N % 64 == 0.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
const N: u32 = 64u;      // rows of this part of the matrix
const ROW0: u32 = 0u;    // its first row in the whole matrix
const WIDTH: u32 = 64u;  // rows of the whole matrix
const TOKENS: u32 = 1u;
const BIAS: bool = false;
const WORKGROUP: u32 = 64u;
@group(0) @binding(0) var<storage, read_write> y: array<u32>;  // [m, WIDTH / 64] records
@group(0) @binding(4) var<storage, read> bias: array<f32>;
@group(0) @binding(8) var<uniform> step: Step;
var<workgroup> hidden: array<f32, TOKENS * 32u>;
fn begin(token: u32, row: u32) {}
fn emit(token: u32, row: u32, v: vec2<f32>) {
  var gu = v;
  if (BIAS) { gu += vec2<f32>(bias[ROW0 + row], bias[ROW0 + row + 1u]); }
  hidden[token % TOKENS * 32u + row / 2u % 32u] = gu.x / (1.0 + exp(-gu.x)) * gu.y;
}
fn hidden4(i: u32) -> vec4<f32> { return vec4<f32>(hidden[i], hidden[i + 1u], hidden[i + 2u], hidden[i + 3u]); }
fn finish(group: u32, token0: u32, index: u32) {
  workgroupBarrier();
  for (var u = 0u; u < 4u * TOKENS; u += WORKGROUP) {  // quarters of records; the same rounds for all
    let i = min(u + index, 4u * TOKENS - 1u);
    let r = make_record(hidden4(8u * i), hidden4(8u * i + 4u), index);
    let token = token0 + i / 4u;
    let at = 12u * (token * (WIDTH / 64u) + ROW0 / 64u + group) + index % 4u;
    if (u + index == i && group < N / 64u && (TOKENS == 1u || token < step.m)) {
      y[at] = r.even; y[at + 4u] = r.odd; y[at + 8u] = r.scale;
    }
  }
}
