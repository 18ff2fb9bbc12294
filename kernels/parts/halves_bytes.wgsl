// Role halves: halves makes 32 weights f16, times their scale, from the signed bytes of signed_planes: of every eight the pairs
// (0, 4), (1, 5), (2, 6) and (3, 7). A byte is the last bits of 1024. Parts: half2, planes_*.
fn byte_plane(v: vec4<u32>, s: vec4<f16>) -> vec4<u32> {
  let bits = (v & vec4<u32>(0x00FF00FFu)) ^ vec4<u32>(0x64806480u);
  return vec4<u32>(half2(bits.x, 1152.0h, s.xy), half2(bits.y, 1152.0h, s.xy), half2(bits.z, 1152.0h, s.zw), half2(bits.w, 1152.0h, s.zw));
}
fn halves(r: Raw, scale: vec4<f32>) -> Halves {  // (scale, offset) of the first and of the last 16
  let p = signed_planes(r);
  let s = vec4<f16>(scale * vec4<f32>(UNIT, 1.0, UNIT, 1.0));
  return Halves(byte_plane(p.even, s), byte_plane(p.odd, s), byte_plane(p.even >> vec4<u32>(8u), s), byte_plane(p.odd >> vec4<u32>(8u), s));
}
