// Part of kv_run_float, as kv_own_f16, where attention rotates the row's own key: key and value come from load_own, and one
// workgroup stores them. So no workgroup of a fused kernel reads what another one has written to the cache.
// (kv_own_f16 does without arrays of dimensions: with them 3B's token takes a third longer with Dawn on an H200.)
// Needs HEAD_DIM % (8 * LANES_PER_POSITION) == 0. Parts: f16, own_rows.
const HEAD_DIM: u32 = 64u;
const LANES_PER_POSITION: u32 = 8u;  // lanes that share a position
alias Raw8 = vec4<u32>;
@group(0) @binding(1) var<storage, read_write> k_cache: array<vec4<u32>>;  // [layers, KV_HEADS, capacity, HEAD_DIM] f16
@group(0) @binding(2) var<storage, read_write> v_cache: array<vec4<u32>>;
var<private> own_keys: array<vec4<u32>, HEAD_DIM / 8u / LANES_PER_POSITION>;
var<private> own_values: array<vec4<u32>, HEAD_DIM / 8u / LANES_PER_POSITION>;
fn widen(w: Raw8) -> mat2x4<f32> { return mat2x4<f32>(vec4<f32>(unpack_f16(w.x), unpack_f16(w.y)), vec4<f32>(unpack_f16(w.z), unpack_f16(w.w))); }
fn narrow(a: vec4<f32>, b: vec4<f32>) -> Raw8 { return Raw8(pack_f16(a.xy), pack_f16(a.zw), pack_f16(b.xy), pack_f16(b.zw)); }
fn key_run(row: u32, run: u32) -> Raw8 { return k_cache[row * (HEAD_DIM / 8u) + run]; }
fn value_run(row: u32, run: u32) -> Raw8 { return v_cache[row * (HEAD_DIM / 8u) + run]; }
fn newest_key(key: Raw8, i: u32, newest: bool) -> Raw8 { return select(key, own_keys[i], newest); }
fn newest_value(value: Raw8, i: u32, newest: bool) -> Raw8 { return select(value, own_values[i], newest); }
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
