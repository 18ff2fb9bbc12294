// Part of kv_own_f16, where attention rotates the row's own key: key and value come from load_own. Every invocation must call
// store_own. Parts: own_rows.
const HEAD_DIM: u32 = 64u;
const LANES_PER_POSITION: u32 = 8u;  // lanes that share a position
fn store_own(row: u32, kv_head: u32, token: u32, lane: u32, stores: bool) {
  var k: LaneDims;
  var v: LaneDims;
  load_own(&k, &v, kv_head, token, lane);
  for (var i = 0u; i < HEAD_DIM / 8u / LANES_PER_POSITION; i++) {
    let run = LANES_PER_POSITION * i + lane;
    own_keys[i] = narrow(k[2u * i], k[2u * i + 1u]);
    own_values[i] = narrow(v[2u * i], v[2u * i + 1u]);
    if (stores) { k_cache[row * (HEAD_DIM / 8u) + run] = own_keys[i]; v_cache[row * (HEAD_DIM / 8u) + run] = own_values[i]; }
  }
}
