// Role kv4: the KV cache of a layer as q8_0. key4(i), value4(i) = dimensions 4i .. 4i + 3, two 4-byte loads.
// Parts: f16, kv_q8_0.
const HEAD_DIM: u32 = 64u;  // a multiple of 32
const HEAD_VEC4: u32 = HEAD_DIM / 4u;
@group(0) @binding(1) var<storage, read> k_cache: array<u32>;
@group(0) @binding(2) var<storage, read> v_cache: array<u32>;
fn key4(i: u32) -> vec4<f32> {
  let row = i / HEAD_VEC4;
  let dim = 4u * (i % HEAD_VEC4);
  return int8_to_f32(k_cache[int8_word(row, dim)]) * scale_of(k_cache[scale_word(row, dim)], dim);
}
fn value4(i: u32) -> vec4<f32> {
  let row = i / HEAD_VEC4;
  let dim = 4u * (i % HEAD_VEC4);
  return int8_to_f32(v_cache[int8_word(row, dim)]) * scale_of(v_cache[scale_word(row, dim)], dim);
}
