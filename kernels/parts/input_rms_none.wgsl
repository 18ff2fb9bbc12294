// Role input_rms: the inputs of prologue_blocks are normalised.
fn load_input_rms(index: u32) {}
fn output_scale(token: u32) -> f32 { return 1.0; }
