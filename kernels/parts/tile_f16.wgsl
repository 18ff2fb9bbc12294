// Role tile, x as f16 blocks: load_tile(first, place, loads, at, index) loads what an invocation stages of the TILE_K k from block
// `first` on, the place-th of a round (see block_scale_one), stage_tile stores it in x_tile and w_tile, W as f16 times its scales.
// tile_sources are the places where the loads begin.
// Needs TILE_K 64, TERMS 1, ROW_LANES 2 or 8, WORKGROUP % ROW_LANES == 0. Parts: halves_*, block_scale_*; linear_matrix.
const K: u32 = 64u;
const N: u32 = 4u;
const TILE_M: u32 = 128u;
const TILE_N: u32 = 128u;
const WORKGROUP: u32 = 128u;
const X_LOADS: u32 = (8u * TILE_M + WORKGROUP - 1u) / WORKGROUP;  // vec4s that an invocation loads in an iteration
const W_LOADS: u32 = (ROW_LANES * TILE_N + WORKGROUP - 1u) / WORKGROUP;
const BLOCK_LANES: u32 = ROW_LANES / 2u;  // invocations that share a block
struct Halves { e0: vec4<u32>, e1: vec4<u32>, e2: vec4<u32>, e3: vec4<u32> }  // the eights of an invocation, all of a block or the first only
struct Loads {  // an invocation's loads of one iteration: all are issued before the first is used
  x: array<vec4<u32>, X_LOADS>,
  w: array<Raw, W_LOADS>,
  w_scale: array<BlockScale, W_LOADS>,
}
struct Sources {  // where an invocation's loads begin
  x: array<u32, X_LOADS>,
  w_row: array<u32, W_LOADS>,
}
@group(0) @binding(5) var<storage, read> x: array<vec4<u32>>;  // f16 blocks [m][K/32][4], see blocks_f16

fn tile_sources(row0: u32, token0: u32, index: u32) -> Sources {
  var at: Sources;
  for (var i = 0u; i < X_LOADS; i++) {
    let n = index + i * WORKGROUP;
    at.x[i] = min(token0 + n / 8u, step.rows - 1u) * (K / 8u) + n % 8u;
  }
  for (var i = 0u; i < W_LOADS; i++) { at.w_row[i] = min(row0 + (index + i * WORKGROUP) / ROW_LANES, N - 1u); }
  return at;
}

fn load_tile(first: u32, place: u32, loads: ptr<function, Loads>, at: ptr<function, Sources>, index: u32) {
  for (var i = 0u; i < W_LOADS; i++) {
    let row = (*at).w_row[i];
    (*loads).w_scale[i] = load_block_scale((*loads).w_scale[i], row, first, place, index % ROW_LANES / BLOCK_LANES);
    (*loads).w[i] = load_lane(row, first, index % ROW_LANES);
  }
  for (var i = 0u; i < X_LOADS; i++) { (*loads).x[i] = x[(*at).x[i] + 4u * first]; }
}

// The first halves of the conditions tell the driver where all invocations have something to stage.
fn stage_tile(first: u32, loads: ptr<function, Loads>, at: ptr<function, Sources>, index: u32) {
  for (var i = 0u; i < X_LOADS; i++) {
    let n = index + i * WORKGROUP;
    if (8u * TILE_M % WORKGROUP == 0u || n < 8u * TILE_M) { x_tile[n / 8u * PITCH + n % 8u] = (*loads).x[i]; }
  }
  for (var i = 0u; i < W_LOADS; i++) {
    let n = index + i * WORKGROUP;
    if (ROW_LANES * TILE_N % WORKGROUP == 0u || n < ROW_LANES * TILE_N) {
      let s = block_scale((*loads).w_scale[i], index % ROW_LANES / BLOCK_LANES);
      let h = halves((*loads).w[i], s * W_UNIT, index % ROW_LANES);
      let to = n / ROW_LANES * PITCH + n % ROW_LANES * (8u / ROW_LANES);
      w_tile[to] = h.e0;
      if (ROW_LANES == 2u) { w_tile[to + 1u] = h.e1; w_tile[to + 2u] = h.e2; w_tile[to + 3u] = h.e3; }
    }
  }
}
