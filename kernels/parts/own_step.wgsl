// Role own (see own_last), for several rows of a fused step by Tint: a lane gets those of a row of the step that has the last of its
// positions, every stride-th from `first` on, if there is one: no workgroup may read what another one has stored in the cache.
// Needs stride >= rows of the step. Parts: none.
const LANES_PER_POSITION: u32 = 8u;  // lanes that share a position
fn own_position(first: u32, stride: u32, end: u32, token: u32, slot: u32) -> u32 {
  let back = (max(end - 1u, first) - first) % stride;  // rows of the sequence between that row and the token's
  let row = step.row[token - min(back, token)];
  return select(end, end - 1u - back, first < end && back <= token && row.slot == slot && row.position + back + 1u == end);
}
fn stores_own(index: u32, own: u32, stride: u32, end: u32) -> bool { return index < stride * LANES_PER_POSITION && own + 1u == end; }
