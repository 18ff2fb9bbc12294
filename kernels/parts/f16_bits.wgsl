// Role f16: unpack_f16 and pack_f16 convert two f16 in a word to two f32 and back, by integer arithmetic. For adapters
// without exact f16 conversions. Exact for every finite f16, subnormals included (no f32 subnormal occurs, which some
// adapters flush to 0).
fn unpack_f16(word: u32) -> vec2<f32> {
  let h = vec2<u32>(word & 0xFFFFu, word >> 16u);
  let m = h & vec2<u32>(0x7FFFu);
  let normal = bitcast<vec2<f32>>((m << vec2<u32>(13u)) + vec2<u32>(0x38000000u));
  let v = select(normal, vec2<f32>(m) * 5.9604644775390625e-8, m < vec2<u32>(0x400u));
  return bitcast<vec2<f32>>(bitcast<vec2<u32>>(v) | ((h & vec2<u32>(0x8000u)) << vec2<u32>(16u)));
}
fn pack_f16(v: vec2<f32>) -> u32 {  // rounds to nearest even, like pack2x16float
  let a = min(abs(v), vec2<f32>(65504.0));
  let b = bitcast<vec2<u32>>(a);
  let normal = (b - vec2<u32>(0x38000000u) + vec2<u32>(0xFFFu) + ((b >> vec2<u32>(13u)) & vec2<u32>(1u))) >> vec2<u32>(13u);
  let h = select(normal, vec2<u32>(round(a * 16777216.0)), b < vec2<u32>(0x38800000u))
        | ((bitcast<vec2<u32>>(v) >> vec2<u32>(16u)) & vec2<u32>(0x8000u));
  return h.x | (h.y << 16u);
}
