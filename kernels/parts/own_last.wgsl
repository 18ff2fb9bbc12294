// Role own: whose key and value a lane of attend_split gets by store_own, and for which positions: those of its token, for
// its position. own_position is the first of these positions; stores_own says who stores the token's in the KV cache. Parts: none.
const LANES_PER_POSITION: u32 = 8u;  // lanes that share a position
fn own_position(first: u32, stride: u32, end: u32, token: u32, slot: u32) -> u32 { return end - 1u; }
fn stores_own(index: u32, own: u32, stride: u32, end: u32) -> bool { return index < LANES_PER_POSITION; }
