// y[m, WIDTH/32] = int8 blocks x as f16 blocks, for linear_matrix: 32 values in four vec4s, which hold of every eight the pairs
// (0, 4), (1, 5), (2, 6) and (3, 7). Values are divided by X_UNIT and cut at the largest f16, that is, beyond a million. An invocation makes a vec4. Needs WIDTH % 32 == 0. Parts: f16.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const WIDTH: u32 = 32u;
const BLOCKS: u32 = WIDTH / 32u;
const WORKGROUP: u32 = 256u;
const X_UNIT: f32 = 16.0;  // as in linear_matrix
@group(0) @binding(0) var<storage, read_write> y: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read> x: array<vec4<u32>>;  // planes [m][even, odd, (d, d * sums)][WIDTH/32]
@group(0) @binding(8) var<uniform> step: Step;
fn pair(word: u32, d: f32) -> u32 { return pack_f16(vec2<f32>(unpack4xI8(word).xz) * (d / X_UNIT)); }  // bytes 0 and 2
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) grid: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let i = (workgroup.y * grid.x + workgroup.x) * WORKGROUP + index;
  if (i >= step.rows * BLOCKS * 4u) { return; }
  let p = i % 4u;
  let at = i / 4u / BLOCKS * 3u * BLOCKS + i / 4u % BLOCKS;
  let d = bitcast<f32>(x[at + 2u * BLOCKS].x);
  let v = x[at + p % 2u * BLOCKS] >> vec4<u32>(p / 2u * 8u);
  y[i] = vec4<u32>(pair(v.x, d), pair(v.y, d), pair(v.z, d), pair(v.w, d));
}
