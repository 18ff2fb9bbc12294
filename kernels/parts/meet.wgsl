// All workgroups of a kernel meet: arrive once what the others will read is stored, wait before reading theirs. Arrivals
// are counted and never set back, so an arrival's number says which meeting it belongs to. Every invocation must call
// both; a wait without an arrival before it returns at once. No line of memory may be read before all of it has been
// written: a workgroup may keep it in a cache that a fence does not clear. Nobody knows where in a line a buffer begins, so
// there is a gap before, between and after the rows that layers hand on.
// A wait ends without a fence, which would hold up the weights that are on their way (12 % of SmolLM2's token on an H200).
// Instead, the place of all that is read then contains later(): 0, but not known before the wait is over.
// Needs WORKGROUPS (a power of two) workgroups that run at the same time: where they do not, waits are given up after some
// time, and the results are wrong.
const WORKGROUPS: u32 = 1u;
const GAP: u32 = 64u;       // words, more than a line
const SUBGROUP: u32 = 32u;  // lanes of a subgroup, as probed
struct Meeting { arrivals: atomic<u32>, given_up: atomic<u32>, patience: u32 }  // patience: looks at the count, some 0.5 us each
@group(0) @binding(0) var<storage, read_write> meeting: Meeting;
const TABLE: u32 = 1u;
@group(0) @binding(1) var<uniform> layers: array<vec4<u32>, TABLE>;  // how many, in x; then for each its places (see join.py)
var<private> arrived: bool = false;
var<private> goal: u32;
var<private> at_layer: u32;
var<workgroup> beyond: u32;
var<private> after: u32;
var<private> at_slot: u32;
fn layer() -> u32 { return at_layer; }
fn slot() -> u32 { return at_slot; }
fn start(lanes: u32, index: u32) {  // a driver may choose other subgroups for so large a kernel
  if (lanes != SUBGROUP && index == 0u) { atomicStore(&meeting.given_up, 1u); }
}
fn arrive(index: u32) {
  storageBarrier();
  if (index == 0u) { goal = (atomicAdd(&meeting.arrivals, 1u) / WORKGROUPS + 1u) * WORKGROUPS; }
  arrived = true;
}
fn wait(index: u32) {
  if (!arrived) { return; }
  arrived = false;
  if (index == 0u) {
    var looks = 0u;
    var seen = atomicLoad(&meeting.arrivals);
    while (i32(seen - goal) < 0) {
      looks++;
      if (looks % 1024u == 0u && (looks >= meeting.patience || atomicLoad(&meeting.given_up) != 0u)) {
        atomicStore(&meeting.given_up, 1u);
        break;
      }
      seen = atomicLoad(&meeting.arrivals);
    }
    beyond = (seen - goal + WORKGROUPS) >> 31u;  // 0, since nobody is a meeting behind, but no compiler knows
  }
  workgroupBarrier();
  after = beyond;
}
fn later() -> u32 { return after; }
