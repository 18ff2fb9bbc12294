// Role activation: glu(gate, up) = gelu(gate) * up (GeGLU), with the tanh approximation: 1 + tanh(u) = 2 / (1 + exp(-2u)).
fn glu(gate: f32, up: f32) -> f32 { return gate / (1.0 + exp(-gate * (1.5957691216057308 + 0.07135481627260025 * gate * gate))) * up; }
