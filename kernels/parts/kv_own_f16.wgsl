// Part of kv_run_float, for an f16 KV cache and a step of one row, or with Tint of several: key_run and value_run load from the
// cache, newest_key and newest_value put the key and value in their place that store_own has made of a row of this step (see
// own_*) and one workgroup stores. So no workgroup of a fused kernel reads what another one has written to the cache.
// Needs HEAD_DIM % (8 * LANES_PER_POSITION) == 0. Parts: f16, store_own_*.
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
