// Role kv_store: store_pair writes a pair of dimensions of a key or value into the row's cell of an f16 KV cache. `row` is counted
// from the first row of the keys; the values follow the keys. Parts: f16.
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 2u;   // even
@group(0) @binding(1) var<storage, read_write> k_cache: array<u32>;  // [layers, KV_HEADS, capacity, HEAD_DIM] f16
@group(0) @binding(2) var<storage, read_write> v_cache: array<u32>;
fn store_pair(token: u32, cell: u32, row: u32, v: vec2<f32>) {
  let head = row / HEAD_DIM;
  let at = ((layer() * KV_HEADS + head % KV_HEADS) * step.capacity + cell) * HEAD_DIM + row % HEAD_DIM;
  if (head < KV_HEADS) { k_cache[at / 2u] = pack_f16(v); } else { v_cache[at / 2u] = pack_f16(v); }
}
