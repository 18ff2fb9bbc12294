// For a fused kernel by Tint (gpu/fuse.py), whose grid barrier does not wait for stores in flight: without this NaN came three
// times in 1200 tokens of Llama 8B on an H200. What others read is stored twice, the second time as an atomic in `copies`,
// and both begin as NOT_STORED. Who loads that asks for the copy until it is there: its own cache may keep the line.
// A kernel that has several loads in flight asks late_NAME(v) of them all, or of what it has computed from them, whether there
// is a NaN (of integers NOT_STORED); if so it calls repair_NAME(i), which stores the copy in NAME[i] for its own invocation, and loads again, once. A
// test after each load makes the next one wait (1B 2080 tokens a second on an H200, now 2370), and tests of all loads of
// prologue_merge cost registers that it does not have (1800). Elsewhere nothing is late.
// After a time-out nobody asks again, and what is late is 0.
const NOT_STORED: u32 = 4290805888u;  // a NaN that no kernel computes from numbers, with a byte of -128, which no int8 block has
@group(0) @binding(2) var<storage, read_write> copies: array<atomic<u32>>;
fn late_word(i: u32) -> u32 {
  var word = atomicLoad(&copies[i]);
  for (var tries = 0u; word == NOT_STORED; tries++) {
    if (tries >= spin_limit || atomicLoad(&grid_barrier.timed_out) != 0u) { atomicStore(&grid_barrier.timed_out, 1u); return 0u; }
    word = atomicLoad(&copies[i]);
  }
  return word;
}
