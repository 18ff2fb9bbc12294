// Role pair: weight_pair, two f16 weights in a word. Parts: f16.
fn weight_pair(word: u32) -> vec2<f32> { return unpack_f16(word); }
