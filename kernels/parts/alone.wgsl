// What a kernel by itself answers where one that is a stage of a larger kernel asks its surroundings (gpu/join.py).
const GAP: u32 = 0u;              // words between what two layers hand on
fn layer() -> u32 { return 0u; }  // of those whose buffers are bound: a stage runs for one after another
fn slot() -> u32 { return 0u; }   // of its weights, among those of its types
fn wait(index: u32) {}            // until the stages before this one are done
fn later() -> u32 { return 0u; }  // to be added to the place of what they have made
