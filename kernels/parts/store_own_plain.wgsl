// Part of kv_own_f16: the row's own key and value come from kv_rows as they are. Without arrays of dimensions: with those of
// store_own_turned 3B's token takes a third longer with Dawn on an H200. late_kv_rows, repair_kv_rows: see parts/late_stores.wgsl.
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 64u;
const LANES_PER_POSITION: u32 = 8u;  // lanes that share a position
const TOKENS: u32 = 1u;  // rows of a layer in a fused kernel
@group(0) @binding(4) var<storage, read> kv_rows: array<vec4<f32>>;  // [layers or m, keys and values, KV_HEADS, HEAD_DIM], padded after each layer
fn late_kv_rows(v: vec4<f32>) -> bool { return false; }
fn repair_kv_rows(i: u32) {}
fn store_own(row: u32, kv_head: u32, token: u32, lane: u32, stores: bool) {
  for (var i = 0u; i < HEAD_DIM / 8u / LANES_PER_POSITION; i++) {
    let run = LANES_PER_POSITION * i + lane;
    let head = (layer() * TOKENS + token) * 2u * KV_HEADS + kv_head;
    let first = opaque_zero() + (layer() * LINE_PADDING + head * HEAD_DIM) / 4u + 2u * run;
    let second = first + KV_HEADS * HEAD_DIM / 4u;
    var repaired = false;
    loop {
      let a = kv_rows[first];
      let b = kv_rows[first + 1u];
      let c = kv_rows[second];
      let d = kv_rows[second + 1u];
      own_keys[i] = narrow(a, b);
      own_values[i] = narrow(c, d);
      if (repaired || !(late_kv_rows(a) || late_kv_rows(b) || late_kv_rows(c) || late_kv_rows(d))) { break; }
      repaired = true;
      for (var k = 0u; k < 4u + uniform_zero(); k++) { repair_kv_rows(select(first, second, k > 1u) + k % 2u); }
    }
    if (stores) { k_cache[row * (HEAD_DIM / 8u) + run] = own_keys[i]; v_cache[row * (HEAD_DIM / 8u) + run] = own_values[i]; }
  }
}
