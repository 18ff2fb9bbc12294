// For a fused kernel by Tint (gpu/fuse.py), whose grid barrier does not wait for stores in flight: without this NaN came three
// times in 1200 tokens of Llama 8B on an H200. What others read is stored twice, the second time as an atomic in `copies`,
// and both begin as NOT_STORED. Who loads that asks for the copy until it is there: its own cache may keep the line.
// After a time-out nobody asks again.
const NOT_STORED: u32 = 4294967295u;  // a NaN that no kernel computes from numbers
@group(0) @binding(2) var<storage, read_write> copies: array<atomic<u32>>;
fn late_word(i: u32) -> u32 {
  var word = atomicLoad(&copies[i]);
  for (var tries = 0u; word == NOT_STORED; tries++) {
    if (tries >= spin_limit || atomicLoad(&grid_barrier.timed_out) != 0u) { atomicStore(&grid_barrier.timed_out, 1u); break; }
    word = atomicLoad(&copies[i]);
  }
  return word;
}
