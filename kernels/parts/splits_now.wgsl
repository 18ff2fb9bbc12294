// Into how many splits attend_split cuts the context of one token: one for every 32 positions up to 4, which inputs_merge
// takes at once, for every 64 up to 16, then for every 128 up to MOST_SPLITS.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
const WINDOW: u32 = 0u;  // a token sees the last WINDOW positions, its own included; 0: all
const MOST_SPLITS: u32 = 16u;
@group(0) @binding(8) var<uniform> step: Step;
fn split_count() -> u32 {
  let seen = select(step.pos + 1u, min(WINDOW, step.pos + 1u), WINDOW > 0u);
  let some = max(min((seen + 31u) / 32u, 4u), min((seen + 63u) / 64u, 16u));
  return min(max(some, seen / 128u), MOST_SPLITS);
}
