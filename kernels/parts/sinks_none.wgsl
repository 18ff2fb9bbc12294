// Role sinks: the softmax begins without a score.
const SINK_TOTAL: f32 = 0.0;
fn sink(head: u32) -> f32 { return -1e30; }
