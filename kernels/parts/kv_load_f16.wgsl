// Role kv_load: load_pair loads two dimensions of a key or value from a cell of an f16 KV cache, where store_pair
// (kv_store_f16) has put them; stored_pair is what a cell would hold of them. Parts: f16.
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 2u;   // even
@group(0) @binding(1) var<storage, read_write> k_cache: array<u32>;  // [layers, KV_HEADS, capacity, HEAD_DIM] f16
@group(0) @binding(2) var<storage, read_write> v_cache: array<u32>;
fn load_pair(cell: u32, row: u32) -> vec2<f32> {
  let head = row / HEAD_DIM;
  let at = ((layer() * KV_HEADS + head % KV_HEADS) * step.capacity + cell) * HEAD_DIM + row % HEAD_DIM;
  if (head < KV_HEADS) { return unpack_f16(k_cache[at / 2u]); }
  return unpack_f16(v_cache[at / 2u]);
}
// NVIDIA's compiler makes v of unpack_f16(pack_f16(v)), with Dawn: it does not know that a step has rows
fn stored_pair(v: vec2<f32>) -> vec2<f32> { return unpack_f16(pack_f16(v) ^ u32(step.rows == 0u)); }
