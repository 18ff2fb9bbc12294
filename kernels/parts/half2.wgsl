// Two f16 in a word: half2 makes (bits - zero) * scale + offset of them, s = (scale, offset).
const HAS_OFFSET: bool = false;
fn half2(bits: u32, zero: f16, s: vec2<f16>) -> u32 {
  let v = bitcast<vec2<f16>>(bits) - vec2<f16>(zero);
  if (HAS_OFFSET) { return bitcast<u32>(v * vec2<f16>(s.x) + vec2<f16>(s.y)); }
  return bitcast<u32>(v * vec2<f16>(s.x));
}
