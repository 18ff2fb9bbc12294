// Role pages: where the positions of a sequence are in the KV cache. A page holds PAGE positions in neighbouring cells.
const PAGE: u32 = 64u;  // engine/pages.py has the same
@group(0) @binding(9) var<storage, read> table: array<u32>;  // [slots, step.pages]: the page of every PAGE positions
fn cell_of(slot: u32, position: u32) -> u32 { return table[slot * step.pages + position / PAGE] * PAGE + position % PAGE; }
