// Scales of quantised weights, K / GROUP groups in a row. scale_at(row, g) = (scale, offset) of one group; load_scale
// loads it as it is stored, unpack_scale unpacks it after the loads have arrived.
// load_scales(row, b) does the same for the scales of a block of 32 weights, block_scales unpacks them.
// A super-block of SCALE_BITS == 8 has 256 weights: the f16 super-block scale (one for scales, one for offsets), then
// an int8 sub-scale for each group, followed by its sub-offset if there is one.
// load_scales needs GROUP % 32 == 0 or GROUP == 16. SCALE_BITS == 8 needs K % 256 == 0 and GROUP 16 or 32. Parts: f16.
const K: u32 = 32u;
const GROUP: u32 = 32u;
const HAS_OFFSET: bool = false;            // an offset follows each scale (asymmetric formats)
const SCALE_BITS: u32 = 16u;               // 32: f32, 16: f16, 8: super-blocks of int8 sub-scales
const VALUES: u32 = 1u + u32(HAS_OFFSET);  // of a group
const SUPER_BLOCK_WORDS: u32 = 1u + 64u / GROUP * VALUES;
const TWO_GROUPS: bool = GROUP == 16u;     // two groups in a block of 32
@group(0) @binding(7) var<storage, read> scales: array<u32>;
fn load_scale(row: u32, g: u32) -> vec2<u32> {
  if (SCALE_BITS == 8u) {
    let super_block = (row * (K / 256u) + g / (256u / GROUP)) * SUPER_BLOCK_WORDS;
    return vec2<u32>(scales[super_block], scales[super_block + 1u + g % (256u / GROUP) * VALUES / 4u]);
  }
  let i = (row * (K / GROUP) + g) * VALUES;
  if (SCALE_BITS == 16u) { return vec2<u32>(scales[i / 2u], 0u); }
  return vec2<u32>(scales[i], select(0u, scales[i + VALUES - 1u], HAS_OFFSET));
}
fn unpack_scale(raw: vec2<u32>, row: u32, g: u32) -> vec2<f32> {
  if (SCALE_BITS == 32u) { return bitcast<vec2<f32>>(raw); }
  if (SCALE_BITS == 8u) {
    let skip = g % (256u / GROUP) * VALUES % 4u * 8u;
    let sub_scales = bitcast<i32>(raw.y);
    let offset = select(0, extractBits(sub_scales, skip + 8u, 8u), HAS_OFFSET);
    return unpack_f16(raw.x) * vec2<f32>(f32(extractBits(sub_scales, skip, 8u)), f32(offset));
  }
  let two = unpack_f16(raw.x >> ((row * (K / GROUP) + g) * VALUES % 2u * 16u));
  return select(vec2<f32>(two.x, 0.0), two, HAS_OFFSET);
}
fn scale_at(row: u32, g: u32) -> vec2<f32> { return unpack_scale(load_scale(row, g), row, g); }
struct Scales { words: vec4<u32>, skip: u32 }  // skip: bits before the block's scales, in the only word or in the word of sub-scales
fn load_scales(row: u32, b: u32) -> Scales {
  if (SCALE_BITS == 8u) {
    let super_block = (row * (K / 256u) + b / 8u) * SUPER_BLOCK_WORDS;
    let j = b % 8u * (32u / GROUP * VALUES);
    return Scales(vec4<u32>(scales[super_block], scales[super_block + 1u + j / 4u], 0u, 0u), j % 4u * 8u);
  }
  let i = (row * (K / GROUP) + b * 32u / GROUP) * VALUES;
  var raw = Scales();
  if (SCALE_BITS == 16u) {
    raw = Scales(vec4<u32>(scales[i / 2u], 0u, 0u, 0u), i % 2u * 16u);
    if (HAS_OFFSET && TWO_GROUPS) { raw.words.y = scales[i / 2u + 1u]; }
    return raw;
  }
  raw.words.x = scales[i];
  if (HAS_OFFSET || TWO_GROUPS) { raw.words.y = scales[i + 1u]; }
  if (HAS_OFFSET && TWO_GROUPS) { raw.words.z = scales[i + 2u]; raw.words.w = scales[i + 3u]; }
  return raw;
}
fn block_scales(s: Scales) -> vec4<f32> {  // (scale, offset) of all 32 weights or of the first 16, then (scale, offset) of the last 16
  var found = bitcast<vec4<f32>>(s.words);
  if (SCALE_BITS == 16u) { found = vec4<f32>(unpack_f16(s.words.x >> s.skip), unpack_f16(s.words.y)); }
  if (SCALE_BITS == 8u) {
    let super_scale = unpack_f16(s.words.x);
    found = vec4<f32>(unpack4xI8(s.words.y >> s.skip)) * select(vec4<f32>(super_scale.x), vec4<f32>(super_scale, super_scale), HAS_OFFSET);
  }
  if (!HAS_OFFSET) { found = vec4<f32>(found.x, 0.0, found.y, 0.0); }
  return found;
}
