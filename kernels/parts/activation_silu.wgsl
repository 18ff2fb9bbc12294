// Role activation: glu(gate, up) = silu(gate) * up (SwiGLU).
fn glu(gate: f32, up: f32) -> f32 { return gate / (1.0 + exp(-gate)) * up; }
