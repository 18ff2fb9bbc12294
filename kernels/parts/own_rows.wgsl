// Part of store_own_turned and kv_run_q8_0: load_own(k, v, kv_head, token, lane) loads a lane's dimensions of the row's own key
// and value from kv_rows, where the qkv linear or `rotate` has left them. Every invocation must call it. late_kv_rows,
// repair_kv_rows: see parts/late_stores.wgsl. Parts: heads_*.
const HEADS: u32 = 1u;
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 64u;
const RAW: bool = false;  // a row of kv_rows has the queries first
const TOKENS: u32 = 1u;   // rows of a layer in a fused kernel
const HEADS_BEFORE: u32 = select(0u, HEADS, RAW);
@group(0) @binding(4) var<storage, read> kv_rows: array<vec4<f32>>;  // [layers or m, (queries,) keys and values, KV_HEADS, HEAD_DIM], padded after each layer
fn late_kv_rows(v: vec4<f32>) -> bool { return false; }
fn repair_kv_rows(i: u32) {}
fn load_own(k: ptr<function, LaneDims>, v: ptr<function, LaneDims>, kv_head: u32, token: u32, lane: u32) {
  let head = (layer() * TOKENS + token) * (HEADS_BEFORE + 2u * KV_HEADS) + HEADS_BEFORE + kv_head;
  let first = opaque_zero() + (layer() * LINE_PADDING + head * HEAD_DIM) / 4u;
  let second = first + KV_HEADS * HEAD_DIM / 4u;
  var repaired = false;
  loop {
    for (var i = 0u; i < LANE_VEC4; i++) {
      (*k)[i] = kv_rows[first + vec4_of(i, lane)];
      (*v)[i] = kv_rows[second + vec4_of(i, lane)];
    }
    var late = false;
    for (var i = 0u; i < LANE_VEC4; i++) { late = late || late_kv_rows((*k)[i]) || late_kv_rows((*v)[i]); }
    if (repaired || !late) { break; }
    repaired = true;
    for (var i = 0u; i < 2u * LANE_VEC4 + uniform_zero(); i++) { repair_kv_rows(select(first, second, i >= LANE_VEC4) + vec4_of(i % LANE_VEC4, lane)); }
  }
  turn_key(k);
}
