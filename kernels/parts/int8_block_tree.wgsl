// Role int8_block, through workgroup memory.
// quantise_block(a, b, index) quantises 32 activations to an int8 block (as ggml's q8_1) of 12 words.
// Four neighbouring invocations bring eight values each. Words 0-3 are the even values as int8, words 4-7 the odd ones,
// words 8-11 are d = largest magnitude / 127, cut to 22 bits, and d * sum of the first 16 values, of the last 16 and of all 32, which
// symmetric and offset weights need. Invocation j of the four gets words j, 4 + j and 8 + j to store.
// Every invocation must call it.
const WORKGROUP: u32 = 64u;
struct Int8Block { even: u32, odd: u32, scale: u32 }
var<workgroup> block_tops: array<f32, WORKGROUP>;
var<workgroup> block_sums: array<i32, WORKGROUP>;
fn max_abs(v: vec4<f32>) -> f32 { let a = abs(v); return max(max(a.x, a.y), max(a.z, a.w)); }
fn to_int8(v: vec4<f32>, inverse_scale: f32) -> u32 {  // adding 1.5 * 2^23 rounds v * inverse_scale and leaves it in the last byte
  let b = bitcast<vec4<u32>>(v * inverse_scale + 12582912.0) & vec4<u32>(255u);
  return b.x | (b.y << 8u) | (b.z << 16u) | (b.w << 24u);
}
fn quantise_block(a: vec4<f32>, b: vec4<f32>, index: u32) -> Int8Block {
  let first_lane = index - index % 4u;
  workgroupBarrier();  // block_tops and block_sums of the last call have been read
  block_tops[index] = max(max_abs(a), max_abs(b));
  workgroupBarrier();
  let top = max(max(block_tops[first_lane], block_tops[first_lane + 1u]), max(block_tops[first_lane + 2u], block_tops[first_lane + 3u]));
  let inverse_scale = select(0.0, 127.0 / top, top > 0.0);
  let even = to_int8(vec4<f32>(a.xz, b.xz), inverse_scale);
  let odd = to_int8(vec4<f32>(a.yw, b.yw), inverse_scale);
  block_sums[index] = dot4I8Packed(even, 0x01010101u) + dot4I8Packed(odd, 0x01010101u);
  workgroupBarrier();
  let first = block_sums[first_lane] + block_sums[first_lane + 1u];
  let last = block_sums[first_lane + 2u] + block_sums[first_lane + 3u];
  let j = index % 4u;
  let factor = select(select(select(first + last, last, j == 2u), first, j == 1u), 1, j == 0u);
  let d = bitcast<f32>(bitcast<u32>(top / 127.0) & 0xFFFFFFFCu);  // 22 bits, see dot_int8
  return Int8Block(even, odd, bitcast<u32>(f32(factor) * d));
}
