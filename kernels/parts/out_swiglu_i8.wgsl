// silu(gate) * up, the rows of gate and up being interleaved, as int8 records (see make_record): a workgroup makes
// RECORDS whole blocks of 32 values of one token. v = (gate, up) (+ bias). Parts: record.
// Needs a workgroup that covers 64 * RECORDS consecutive rows and has 4 * RECORDS invocations or more; N % 64 == 0.
const N: u32 = 64u;      // rows of this part of the matrix
const ROW0: u32 = 0u;    // its first row in the whole matrix
const RECORDS: u32 = 1u;
const BIAS: bool = false;
@group(0) @binding(0) var<storage, read_write> y: array<u32>;
@group(0) @binding(4) var<storage, read> bias: array<f32>;
var<workgroup> hidden: array<f32, 32u * RECORDS>;
fn begin(token: u32, row: u32) {}
fn emit(token: u32, row: u32, v: vec2<f32>) {
  var gu = v;
  if (BIAS) { gu += vec2<f32>(bias[ROW0 + row], bias[ROW0 + row + 1u]); }
  hidden[row / 2u % (32u * RECORDS)] = gu.x / (1.0 + exp(-gu.x)) * gu.y;
}
fn hidden4(i: u32) -> vec4<f32> { return vec4<f32>(hidden[i], hidden[i + 1u], hidden[i + 2u], hidden[i + 3u]); }
fn finish(group: u32, index: u32) {
  workgroupBarrier();
  let block = group * RECORDS + index / 4u;
  let i = 8u * min(index, 4u * RECORDS - 1u);
  let r = make_record(hidden4(i), hidden4(i + 4u), index);
  let at = 12u * (ROW0 / 64u + block) + index % 4u;
  if (index < 4u * RECORDS && block < N / 64u) { y[at] = r.even; y[at + 4u] = r.odd; y[at + 8u] = r.scale; }
}
