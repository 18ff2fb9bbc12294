// make_record: 32 values to an int8 record of 12 words, four neighbouring invocations bringing eight values each:
// words 0-3 the even values as int8, 4-7 the odd ones, then d = largest magnitude / 127 and d times their sums (of the
// first 16, the last 16, all), which symmetric and offset weights need. Invocation j of the four gets words j, 4 + j and
// 8 + j to store. Every invocation must call it. This one: by subgroup shuffles.
struct Record { even: u32, odd: u32, scale: u32 }
fn largest(v: vec4<f32>) -> f32 { let a = abs(v); return max(max(a.x, a.y), max(a.z, a.w)); }
fn bytes(v: vec4<f32>, to: f32) -> u32 {  // v * to as int8: adding 1.5 * 2^23 rounds, and leaves it in the last byte
  let b = bitcast<vec4<u32>>(v * to + 12582912.0) & vec4<u32>(255u);
  return b.x | (b.y << 8u) | (b.z << 16u) | (b.w << 24u);
}
fn make_record(a: vec4<f32>, b: vec4<f32>, index: u32) -> Record {
  var top = max(largest(a), largest(b));
  top = max(top, subgroupShuffleXor(top, 1u));
  top = max(top, subgroupShuffleXor(top, 2u));
  let to = select(0.0, 127.0 / top, top > 0.0);
  let even = bytes(vec4<f32>(a.xz, b.xz), to);
  let odd = bytes(vec4<f32>(a.yw, b.yw), to);
  let own = dot4I8Packed(even, 0x01010101u) + dot4I8Packed(odd, 0x01010101u);
  let half = own + subgroupShuffleXor(own, 1u);  // of the 16 values this one belongs to
  let other = subgroupShuffleXor(half, 2u);
  let j = index % 4u;
  let first = select(half, other, j > 1u);
  let factor = select(select(select(half + other, half + other - first, j == 2u), first, j == 1u), 1, j == 0u);
  return Record(even, odd, bitcast<u32>(f32(factor) * (top / 127.0)));
}
