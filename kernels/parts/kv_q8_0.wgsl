// The layout of a q8_0 KV cache, for the parts of roles kv4, kv8 and kv_run and for store_kv. A page of a KV head is int8
// [PAGE, HEAD_DIM], then f16 scales [PAGE, HEAD_DIM / 32]; those of a cell fill whole words, so that no two cells share one.
// Pages follow each other, then KV heads, then layers: `row` is the cell counted through all of them. Parts: f16.
const HEAD_DIM: u32 = 64u;  // a multiple of 32
const PAGE: u32 = 64u;  // engine/pages.py has the same
const SCALE_WORDS: u32 = (HEAD_DIM + 63u) / 64u;  // of a cell
const PAGE_WORDS: u32 = PAGE * (HEAD_DIM / 4u + SCALE_WORDS);
fn int8_word(row: u32, dim: u32) -> u32 { return row / PAGE * PAGE_WORDS + row % PAGE * (HEAD_DIM / 4u) + dim / 4u; }
fn scale_word(row: u32, dim: u32) -> u32 { return row / PAGE * PAGE_WORDS + PAGE * (HEAD_DIM / 4u) + row % PAGE * SCALE_WORDS + dim / 64u; }
fn scale_of(word: u32, dim: u32) -> f32 { let s = unpack_f16(word); return select(s.x, s.y, dim / 32u % 2u == 1u); }
fn inverse_scale(top: f32) -> f32 { return select(0.0, 127.0 / top, top > 1e-20); }  // top: the largest magnitude of 32 dimensions
fn int8_to_f32(word: u32) -> vec4<f32> {  // each byte becomes the last bits of 2^23, as in dot_f32
  let b = word ^ 0x80808080u;
  return bitcast<vec4<f32>>((vec4<u32>(b, b >> 8u, b >> 16u, b >> 24u) & vec4<u32>(0xFFu)) | vec4<u32>(0x4B000000u)) - 8388736.0;
}
