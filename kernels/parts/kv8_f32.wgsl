// The KV cache of a layer as f32, [KV_HEADS, capacity, HEAD_DIM]: key_oct/value_oct(i) = dimensions 8i..8i+7 by two 16-byte loads,
// to be widened when they have come.
alias Oct = mat2x4<f32>;
@group(0) @binding(1) var<storage, read> k_cache: array<Oct>;
@group(0) @binding(2) var<storage, read> v_cache: array<Oct>;
fn key_oct(i: u32) -> Oct { return k_cache[i]; }
fn value_oct(i: u32) -> Oct { return v_cache[i]; }
fn widen(w: Oct) -> mat2x4<f32> { return w; }
