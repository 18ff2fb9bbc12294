// The KV cache of a layer as f16, [KV_HEADS, capacity, HEAD_DIM]: key4/value4(i) = dimensions 4i..4i+3, 8 bytes.
alias Quad = vec2<u32>;
@group(0) @binding(1) var<storage, read> k_cache: array<Quad>;
@group(0) @binding(2) var<storage, read> v_cache: array<Quad>;
fn widen(w: Quad) -> vec4<f32> { return vec4<f32>(halves(w.x), halves(w.y)); }
fn key4(i: u32) -> vec4<f32> { return widen(k_cache[i]); }
fn value4(i: u32) -> vec4<f32> { return widen(v_cache[i]); }
