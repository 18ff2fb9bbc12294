// The KV cache of a layer as f32, [KV_HEADS, capacity, HEAD_DIM]: key8/value8(i) = dimensions 8i..8i+7, two 16-byte loads.
@group(0) @binding(1) var<storage, read> k_cache: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> v_cache: array<vec4<f32>>;
fn key8(i: u32) -> mat2x4<f32> { return mat2x4<f32>(k_cache[2u * i], k_cache[2u * i + 1u]); }
fn value8(i: u32) -> mat2x4<f32> { return mat2x4<f32>(v_cache[2u * i], v_cache[2u * i + 1u]); }
