// What a kernel by itself answers where one that is a stage of a larger kernel asks its surroundings (gpu/join.py).
fn layer() -> u32 { return 0u; }  // of the stacks that are bound: a stage runs for one layer after another
fn wait(index: u32) {}            // until the stages before this one are done
