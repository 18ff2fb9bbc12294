// Copies a page of a layer's KV cache to another page, of all KV heads.
// One workgroup per KV head, keys and values in y. Needs nothing. Parts: none.
const PAGES: u32 = 1u;       // of the cache
const PAGE_VEC4S: u32 = 1u;  // of one page and KV head
const WORKGROUP: u32 = 256u;
@group(0) @binding(1) var<storage, read_write> k_cache: array<vec4<u32>>;  // [KV heads, PAGES, PAGE_VEC4S]
@group(0) @binding(2) var<storage, read_write> v_cache: array<vec4<u32>>;
@group(0) @binding(8) var<uniform> pair: vec2<u32>;                        // (page, its copy)
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let page = (workgroup.x * PAGES + pair.x) * PAGE_VEC4S;
  let copy = (workgroup.x * PAGES + pair.y) * PAGE_VEC4S;
  for (var i = index; i < PAGE_VEC4S; i += WORKGROUP) {
    if (workgroup.y == 0u) { k_cache[copy + i] = k_cache[page + i]; } else { v_cache[copy + i] = v_cache[page + i]; }
  }
}
