// Role kv_store: store_pair writes a pair of dimensions of a key or value into the row's cell of an f32 KV cache. `row` is counted
// from the first row of the keys; the values follow the keys.
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 2u;   // even
@group(0) @binding(1) var<storage, read_write> k_cache: array<u32>;  // [layers, KV_HEADS, capacity, HEAD_DIM] f32
@group(0) @binding(2) var<storage, read_write> v_cache: array<u32>;
fn store_pair(token: u32, cell: u32, row: u32, v: vec2<f32>) {
  let head = row / HEAD_DIM;
  let at = ((layer() * KV_HEADS + head % KV_HEADS) * step.capacity + cell) * HEAD_DIM + row % HEAD_DIM;
  if (head < KV_HEADS) { k_cache[at] = bitcast<u32>(v.x); k_cache[at + 1u] = bitcast<u32>(v.y); } else { v_cache[at] = bitcast<u32>(v.x); v_cache[at + 1u] = bitcast<u32>(v.y); }
}
