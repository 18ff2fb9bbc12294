// Role stage: staged_inputs(token, b) are the inputs as they lie in memory. Parts: inputs_*.
fn load_inputs(first: u32, index: u32) {}
fn stage_inputs(buffer: u32, index: u32) {}
fn staged_inputs(token: u32, b: u32, buffer: u32) -> Inputs { return inputs(min(token, step.rows - 1u), b); }
