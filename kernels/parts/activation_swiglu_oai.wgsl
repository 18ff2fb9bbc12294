// Role activation: glu(gate, up) = gate sigmoid(1.702 gate) (up + 1) of gate and up between bounds, as gpt-oss has it.
fn glu(gate: f32, up: f32) -> f32 {
  let bounded = min(gate, 7.0);
  return bounded / (1.0 + exp(-1.702 * bounded)) * (clamp(up, -7.0, 7.0) + 1.0);
}
