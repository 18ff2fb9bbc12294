// Role kv4: the KV cache of a layer as f32, [KV_HEADS, capacity, HEAD_DIM]. key4(i), value4(i) = dimensions
// 4i .. 4i + 3, one 16-byte load.
alias Raw4 = vec4<f32>;
@group(0) @binding(1) var<storage, read> k_cache: array<Raw4>;
@group(0) @binding(2) var<storage, read> v_cache: array<Raw4>;
fn widen(w: Raw4) -> vec4<f32> { return w; }
fn key4(i: u32) -> vec4<f32> { return widen(k_cache[i]); }
fn value4(i: u32) -> vec4<f32> { return widen(v_cache[i]); }
