// Group scales of q4 and q8 weights, rows of K / GROUP groups. scale_at: (scale, offset) of one group. load_scales: those of
// a block of 32 weights as they lie, to be taken apart by block_scales when they have come. Parts: half. load_scales needs
// GROUP % 32 == 0 or 16; SCALE_BITS == 8 needs K % 256 == 0 and groups of 16 or 32.
const K: u32 = 32u;
const GROUP: u32 = 32u;
const PAIR: bool = false;     // an offset follows each scale (asymmetric formats)
const SCALE_BITS: u32 = 16u;  // 32: f32, 16: f16, 8: by 256 weights a record, two f16 steps and int8 multiples of them
const VALUES: u32 = 1u + u32(PAIR);
const RECORD: u32 = 1u + 64u / GROUP * VALUES;  // words
const TWO: bool = GROUP == 16u;               // two groups in a block
@group(0) @binding(7) var<storage, read> scales: array<u32>;
fn scale_at(row: u32, g: u32) -> vec2<f32> {
  if (SCALE_BITS == 8u) {
    let record = (row * (K / 256u) + g / (256u / GROUP)) * RECORD;
    let j = g % (256u / GROUP) * VALUES;
    let four = bitcast<i32>(scales[record + 1u + j / 4u]);
    let offset = select(0, extractBits(four, j % 4u * 8u + 8u, 8u), PAIR);
    return halves(scales[record]) * vec2<f32>(f32(extractBits(four, j % 4u * 8u, 8u)), f32(offset));
  }
  let i = (row * (K / GROUP) + g) * VALUES;
  if (SCALE_BITS == 32u) { return bitcast<vec2<f32>>(vec2<u32>(scales[i], select(0u, scales[i + VALUES - 1u], PAIR))); }
  let two = halves(scales[i / 2u] >> (i % 2u * 16u));
  return select(vec2<f32>(two.x, 0.0), two, PAIR);
}
struct Scales { words: vec4<u32>, skip: u32 }  // skip: bits before the block's own, of the only word or of the multiples
fn load_scales(row: u32, b: u32) -> Scales {
  if (SCALE_BITS == 8u) {
    let record = (row * (K / 256u) + b / 8u) * RECORD;
    let j = b % 8u * (32u / GROUP * VALUES);
    return Scales(vec4<u32>(scales[record], scales[record + 1u + j / 4u], 0u, 0u), j % 4u * 8u);
  }
  let i = (row * (K / GROUP) + b * 32u / GROUP) * VALUES;
  var found = Scales();
  if (SCALE_BITS == 16u) {
    found = Scales(vec4<u32>(scales[i / 2u], 0u, 0u, 0u), i % 2u * 16u);
    if (PAIR && TWO) { found.words.y = scales[i / 2u + 1u]; }
    return found;
  }
  found.words.x = scales[i];
  if (PAIR || TWO) { found.words.y = scales[i + 1u]; }
  if (PAIR && TWO) { found.words.z = scales[i + 2u]; found.words.w = scales[i + 3u]; }
  return found;
}
fn block_scales(s: Scales) -> vec4<f32> {  // (scale, offset) of the first 16 or of all, then of the last 16
  var found = bitcast<vec4<f32>>(s.words);
  if (SCALE_BITS == 16u) { found = vec4<f32>(halves(s.words.x >> s.skip), halves(s.words.y)); }
  if (SCALE_BITS == 8u) {
    let step = halves(s.words.x);
    found = vec4<f32>(unpack4xI8(s.words.y >> s.skip)) * select(vec4<f32>(step.x), vec4<f32>(step, step), PAIR);
  }
  if (!PAIR) { found = vec4<f32>(found.x, 0.0, found.y, 0.0); }
  return found;
}
