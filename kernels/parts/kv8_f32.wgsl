// Role kv8: the KV cache of a layer as f32, [KV_HEADS, capacity, HEAD_DIM]. key8(i), value8(i) = raw dimensions
// 8i .. 8i + 7, two 16-byte loads. widen returns them, after the loads have arrived.
alias Raw8 = mat2x4<f32>;
@group(0) @binding(1) var<storage, read> k_cache: array<Raw8>;
@group(0) @binding(2) var<storage, read> v_cache: array<Raw8>;
fn key8(i: u32) -> Raw8 { return k_cache[i]; }
fn value8(i: u32) -> Raw8 { return v_cache[i]; }
fn widen(w: Raw8) -> mat2x4<f32> { return w; }
