// Role pair: weight_pair, two BF16 weights in a word: the upper halves of two f32.
fn weight_pair(word: u32) -> vec2<f32> { return bitcast<vec2<f32>>(vec2<u32>(word << 16u, word & 0xFFFF0000u)); }
