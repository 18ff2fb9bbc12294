// Into how many splits attend_split cuts the context of one token: one for every PLACES positions up to SOME_SPLITS, then
// for every 4 * PLACES up to MOST_SPLITS.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
const WINDOW: u32 = 0u;  // a token sees the last WINDOW positions, its own included; 0: all
const PLACES: u32 = 32u;
const SOME_SPLITS: u32 = 16u;
const MOST_SPLITS: u32 = 16u;
@group(0) @binding(8) var<uniform> step: Step;
fn split_count() -> u32 {
  let seen = select(step.pos + 1u, min(WINDOW, step.pos + 1u), WINDOW > 0u);
  return min(max(min((seen + PLACES - 1u) / PLACES, SOME_SPLITS), seen / (4u * PLACES)), MOST_SPLITS);
}
