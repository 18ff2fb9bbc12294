// Grid barrier of a fused kernel (gpu/fuse.py): a workgroup arrives after its stores, and waits before it loads what
// others have stored. Every invocation must call both. A wait without an arrival before it does not wait. Arrivals
// are counted and never reset, so that the number of an arrival says which barrier it belongs to.
// No cache line may be read before all of it has been written: a workgroup may keep it in a cache that a fence does not
// clear. The offset of a buffer in a line is unknown, so inter-stage buffers have LINE_PADDING words before, between
// and after the rows of layers.
// With FENCE a wait ends with a fence. It holds up the weights in flight (13 % of SmolLM2's token on an H200), so GPUs
// on which the numbers were measured to be right go without. Always, indices read after the barrier add opaque_zero(),
// so that the compiler cannot hoist the loads: it is 0, but not known before the wait is over.
// Tint's storageBarrier orders stores for the workgroup only, and one still in flight could be missed: see late_stores.
// Needs WORKGROUPS (a power of two) workgroups that run at the same time. Where they do not, a wait times out after
// spin_limit spins, and the results are wrong. The first one adds POISON to the arrivals, which ends the waits of all
// others, and no workgroup waits again.
const WORKGROUPS: u32 = 1u;
const TOKENS: u32 = 1u;         // token rows of a step, at most
const LINE_PADDING: u32 = 64u;  // words, more than a cache line
const POISON: u32 = 1073741824u;  // far more arrivals than between two barriers, and a multiple of WORKGROUPS
const SUBGROUP: u32 = 32u;        // lanes of a subgroup, as probed
const FENCE: bool = true;
struct GridBarrier { arrivals: atomic<u32>, timed_out: atomic<u32>, spin_limit: u32 }  // spin_limit: loads of arrivals in one wait
@group(0) @binding(0) var<storage, read_write> grid_barrier: GridBarrier;
const LAYER_ROWS: u32 = 1u;
const LAYER_VEC4: u32 = 2u;  // of a layer in the table
@group(0) @binding(1) var<uniform> layers: array<vec4<u32>, LAYER_ROWS>;  // [0].x: number of layers; then each layer, see gpu/fuse.py
var<private> arrived: bool = false;
var<private> gave_up: bool = false;  // no wait any more
var<private> spin_limit: u32;
var<private> goal: u32;  // arrivals at which the wait is over
var<private> layer_index: u32;
var<private> workgroup_number: u32;
var<workgroup> zero_shared: u32;  // opaque zero, see above
var<private> zero: u32;
var<private> current_slab: u32;
fn layer() -> u32 { return layer_index; }
fn layer_kind() -> vec4<u32> { return layers[LAYER_VEC4 * layer_index + 1u]; }
fn slab_index() -> u32 { return current_slab; }
fn first_workgroup() -> bool { return workgroup_number == 0u; }
fn row_index(row: u32) -> u32 { return select(0u, row, TOKENS > 1u); }  // of one row: a constant index keeps the load off the critical path
fn barrier_begin(lanes: u32, workgroup: u32, index: u32) {  // a driver may use another subgroup size for so large a kernel
  let present = countOneBits(subgroupBallot(true));
  if (lanes != SUBGROUP || present.x + present.y + present.z + present.w != SUBGROUP) { atomicStore(&grid_barrier.timed_out, 1u); }
  if (index == 0u) { gave_up = atomicLoad(&grid_barrier.timed_out) != 0u; }
  spin_limit = grid_barrier.spin_limit;
  workgroup_number = workgroup;
}
fn arrive(index: u32) {
  storageBarrier();
  if (index == 0u) { goal = (atomicAdd(&grid_barrier.arrivals, 1u) / WORKGROUPS + 1u) * WORKGROUPS; }
  arrived = true;
}
fn wait(index: u32) {
  if (index == 0u) {
    var spins = 0u;
    var seen = goal;
    if (arrived && !gave_up) { seen = atomicLoad(&grid_barrier.arrivals); }
    while (i32(seen - goal) < 0 && !gave_up) {
      spins++;
      gave_up = spins >= spin_limit;
      if (gave_up && atomicExchange(&grid_barrier.timed_out, 1u) == 0u) { atomicAdd(&grid_barrier.arrivals, POISON); }
      seen = atomicLoad(&grid_barrier.arrivals);
    }
    gave_up = gave_up || (i32(seen - goal) >= 0 && seen - goal >= POISON / 2u);
    zero_shared = (seen - goal + WORKGROUPS) >> 31u;  // 0, since no workgroup is a whole barrier behind; the compiler cannot know that
  }
  arrived = false;
  if (FENCE) { storageBarrier(); }
  workgroupBarrier();  // without an arrival, too: every invocation must come here, as far as a compiler can see
  zero = zero_shared;
}
fn opaque_zero() -> u32 { return zero; }
fn uniform_zero() -> u32 { return layers[0].x >> 31u; }  // is 0 for all invocations, before a wait too; not known to the compiler either
