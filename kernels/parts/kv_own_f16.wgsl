// Part of kv_run_float, for a step of one row and an f16 KV cache: the row's own key and value come from kv_rows, and one
// workgroup stores them. So no workgroup of a fused kernel reads what another one has written to the cache. late_kv_rows, repair_kv_rows: see
// parts/late_stores.wgsl.
// Needs HEAD_DIM % (8 * LANES_PER_POSITION) == 0. Parts: f16.
const KV_HEADS: u32 = 1u;
const HEAD_DIM: u32 = 64u;
const LANES_PER_POSITION: u32 = 8u;  // lanes that share a position
const TOKENS: u32 = 1u;  // rows of a layer in a fused kernel
alias Raw8 = vec4<u32>;
@group(0) @binding(1) var<storage, read_write> k_cache: array<vec4<u32>>;  // [layers, KV_HEADS, capacity, HEAD_DIM] f16
@group(0) @binding(2) var<storage, read_write> v_cache: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> kv_rows: array<vec4<f32>>;  // [layers or m, keys and values, KV_HEADS, HEAD_DIM], padded after each layer
var<private> own_keys: array<vec4<u32>, HEAD_DIM / 8u / LANES_PER_POSITION>;
var<private> own_values: array<vec4<u32>, HEAD_DIM / 8u / LANES_PER_POSITION>;
fn widen(w: Raw8) -> mat2x4<f32> { return mat2x4<f32>(vec4<f32>(unpack_f16(w.x), unpack_f16(w.y)), vec4<f32>(unpack_f16(w.z), unpack_f16(w.w))); }
fn narrow(a: vec4<f32>, b: vec4<f32>) -> Raw8 { return Raw8(pack_f16(a.xy), pack_f16(a.zw), pack_f16(b.xy), pack_f16(b.zw)); }
fn key_run(row: u32, run: u32) -> Raw8 { return k_cache[row * (HEAD_DIM / 8u) + run]; }
fn value_run(row: u32, run: u32) -> Raw8 { return v_cache[row * (HEAD_DIM / 8u) + run]; }
fn newest_key(key: Raw8, i: u32, newest: bool) -> Raw8 { return select(key, own_keys[i], newest); }
fn newest_value(value: Raw8, i: u32, newest: bool) -> Raw8 { return select(value, own_values[i], newest); }
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
