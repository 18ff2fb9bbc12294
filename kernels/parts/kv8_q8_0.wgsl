// Role kv8: the KV cache of a layer as q8_0. key8(i), value8(i) = raw dimensions 8i .. 8i + 7, a load of 8 bytes and one of
// their scale. widen converts them to f32, after the loads have arrived. Parts: f16, kv_q8_0.
const HEAD_DIM: u32 = 64u;  // a multiple of 32
struct Raw8 { words: vec2<u32>, scales: u32, dim: u32 }
@group(0) @binding(1) var<storage, read> k_cache: array<vec2<u32>>;
@group(0) @binding(2) var<storage, read> v_cache: array<vec2<u32>>;
fn key8(i: u32) -> Raw8 {
  let row = i / (HEAD_DIM / 8u);
  let dim = 8u * (i % (HEAD_DIM / 8u));
  let at = scale_word(row, dim);
  return Raw8(k_cache[int8_word(row, dim) / 2u], k_cache[at / 2u][at % 2u], dim);
}
fn value8(i: u32) -> Raw8 {
  let row = i / (HEAD_DIM / 8u);
  let dim = 8u * (i % (HEAD_DIM / 8u));
  let at = scale_word(row, dim);
  return Raw8(v_cache[int8_word(row, dim) / 2u], v_cache[at / 2u][at % 2u], dim);
}
fn widen(w: Raw8) -> mat2x4<f32> { return mat2x4<f32>(int8_to_f32(w.words.x), int8_to_f32(w.words.y)) * scale_of(w.scales, w.dim); }
