// Role f16: unpack_f16 and pack_f16 convert two f16 in a word to two f32 and back, by the adapter's own conversion.
fn unpack_f16(word: u32) -> vec2<f32> { return unpack2x16float(word); }
fn pack_f16(v: vec2<f32>) -> u32 { return pack2x16float(clamp(v, vec2<f32>(-65504.0), vec2<f32>(65504.0))); }
