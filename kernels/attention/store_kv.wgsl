// Keys and values of the rows of a step, from f32 into their cells of a q8_0 KV cache.
// An invocation quantises up to 64 dimensions of a key or value, whose two scales are a word.
// Needs HEAD_DIM % 32 == 0. Parts: f16, kv_q8_0, int8_block_*.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 64u;  // a multiple of 32
const WORKGROUP: u32 = 64u;
@group(0) @binding(1) var<storage, read_write> k_cache: array<u32>;  // [KV_HEADS, pages]: see kv_q8_0
@group(0) @binding(2) var<storage, read_write> v_cache: array<u32>;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;        // [m, keys and values, KV_HEADS, HEAD_DIM]
@group(0) @binding(8) var<uniform> step: Step;
fn store(is_key: bool, at: u32, word: u32) { if (is_key) { k_cache[at] = word; } else { v_cache[at] = word; } }
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>) {
  let i = id.x + id.y * workgroups.x * WORKGROUP;
  let token = i / SCALE_WORDS / (2u * KV_HEADS);
  if (token >= step.rows) { return; }
  let head = i / SCALE_WORDS % (2u * KV_HEADS);
  let dim0 = i % SCALE_WORDS * 64u;
  let row = head % KV_HEADS * step.capacity + step.row[token].cell;
  var scales = vec2<f32>();
  for (var dim = dim0; dim < min(dim0 + 64u, HEAD_DIM); dim += 32u) {
    let first = (i / SCALE_WORDS * HEAD_DIM + dim) / 4u;
    var top = 0.0;
    for (var j = 0u; j < 8u; j++) { top = max(top, max_abs(x[first + j])); }
    for (var j = 0u; j < 8u; j++) { store(head < KV_HEADS, int8_word(row, dim) + j, to_int8(x[first + j], inverse_scale(top))); }
    scales[dim / 32u % 2u] = top / 127.0;
  }
  store(head < KV_HEADS, scale_word(row, dim0), pack_f16(scales));
}
