// Role int8_block, by subgroup shuffles.
// quantise_block(a, b, index) quantises 32 activations to an int8 block (as ggml's q8_1) of 12 words.
// Four neighbouring invocations bring eight values each. Words 0-3 are the even values as int8, words 4-7 the odd ones,
// words 8-11 are d = largest magnitude / 127, cut to 22 bits, and d * sum of the first 16 values, of the last 16 and of all 32, which
// symmetric and offset weights need. Invocation j of the four gets words j, 4 + j and 8 + j to store.
// Every invocation must call it.
struct Int8Block { even: u32, odd: u32, scale: u32 }
fn max_abs(v: vec4<f32>) -> f32 { let a = abs(v); return max(max(a.x, a.y), max(a.z, a.w)); }
fn to_int8(v: vec4<f32>, inverse_scale: f32) -> u32 {  // adding 1.5 * 2^23 rounds v * inverse_scale and leaves it in the last byte
  let b = bitcast<vec4<u32>>(v * inverse_scale + 12582912.0) & vec4<u32>(255u);
  return b.x | (b.y << 8u) | (b.z << 16u) | (b.w << 24u);
}
fn quantise_block(a: vec4<f32>, b: vec4<f32>, index: u32) -> Int8Block {
  var top = max(max_abs(a), max_abs(b));
  top = max(top, subgroupShuffleXor(top, 1u));
  top = max(top, subgroupShuffleXor(top, 2u));
  let inverse_scale = select(0.0, 127.0 / top, top > 0.0);
  let even = to_int8(vec4<f32>(a.xz, b.xz), inverse_scale);
  let odd = to_int8(vec4<f32>(a.yw, b.yw), inverse_scale);
  let own = dot4I8Packed(even, 0x01010101u) + dot4I8Packed(odd, 0x01010101u);
  let half = own + subgroupShuffleXor(own, 1u);  // sum of the 16 values that these belong to
  let other = subgroupShuffleXor(half, 2u);
  let j = index % 4u;
  let first = select(half, other, j > 1u);
  let factor = select(select(select(half + other, half + other - first, j == 2u), first, j == 1u), 1, j == 0u);
  let d = bitcast<f32>(bitcast<u32>(top / 127.0) & 0xFFFFFFFCu);  // 22 bits, see dot_int8
  return Int8Block(even, odd, bitcast<u32>(f32(factor) * d));
}
