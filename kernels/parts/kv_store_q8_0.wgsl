// Role kv_store: store_pair leaves a pair of dimensions of a key or value as f32, for store_kv or attend_split to
// quantise: no invocation has all 32 that share a scale. `row` is counted from the first row of the keys; the values follow.
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 2u;   // even
const TOKENS: u32 = 1u;
@group(0) @binding(1) var<storage, read_write> kv_rows: array<vec2<f32>>;  // [layers or m, keys and values, KV_HEADS, HEAD_DIM], padded after each layer
fn store_pair(token: u32, cell: u32, row: u32, v: vec2<f32>) {
  kv_rows[(layer() * LINE_PADDING + (layer() * TOKENS + token) * 2u * KV_HEADS * HEAD_DIM + row) / 2u] = v;
}
