// Two f16 in a word <-> two f32, by the adapter's own conversion.
fn halves(word: u32) -> vec2<f32> { return unpack2x16float(word); }
fn pack_halves(v: vec2<f32>) -> u32 { return pack2x16float(clamp(v, vec2<f32>(-65504.0), vec2<f32>(65504.0))); }
