// Role sinks: the softmax of a head has one score more, without a value: it begins with that score.
const SINK_TOTAL: f32 = 1.0;  // exp(score - top)
@group(0) @binding(7) var<storage, read> sinks: array<f32>;  // [HEADS]
fn sink(head: u32) -> f32 { return sinks[head]; }
