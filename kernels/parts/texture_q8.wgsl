// Role texture: q8 weights in a texture. Texture row g holds matrix rows 8g .. 8g + 7, 8 k at a time: texel 0 has a
// word of 4 bytes (k 0-3) of each of rows 0-3, texel 1 of rows 4-7; texels 2 and 3 the same for k 4-7. After the texels
// of every GROUP k come 4 texels: 8 scales and 8 offsets in f32. weight = byte * scale + offset, the byte unsigned.
// load8(t, g) loads 8 k of the 8 rows, weights4 unpacks 4 k of one row. prescale: see texture_q4.
const GROUP: u32 = 32u;        // k that share one scale
const TEXELS_PER_8: u32 = 4u;  // texels of 8 k
const HAS_SCALES: bool = true;
@group(0) @binding(6) var w: texture_storage_2d<rgba32uint, read>;
struct Weights8 { a: vec4<u32>, b: vec4<u32>, c: vec4<u32>, d: vec4<u32> }
fn load8(t: u32, g: u32) -> Weights8 {
  return Weights8(textureLoad(w, vec2<u32>(t, g)), textureLoad(w, vec2<u32>(t + 1u, g)),
                  textureLoad(w, vec2<u32>(t + 2u, g)), textureLoad(w, vec2<u32>(t + 3u, g)));
}
fn weights4(e: Weights8, row: u32, half: u32) -> vec4<f32> {  // k 4 half .. 4 half + 3 of a row
  let low = select(e.a[row % 4u], e.b[row % 4u], row >= 4u);
  let high = select(e.c[row % 4u], e.d[row % 4u], row >= 4u);
  let word = select(low, high, half == 1u);
  return vec4<f32>(vec4<i32>(vec4<u32>(word, word, word >> 16u, word >> 16u) & vec4<u32>(0xFFu, 0xFF00u, 0xFFu, 0xFF00u)));
}
fn prescale(x: vec4<f32>) -> vec4<f32> { return x * vec4<f32>(1.0, 0.00390625, 1.0, 0.00390625); }
fn first_texel(k: u32) -> u32 { return k / 8u * TEXELS_PER_8 + k / GROUP * 4u; }
fn scale_texel(k: u32) -> u32 { return (k / GROUP + 1u) * (GROUP / 8u * TEXELS_PER_8 + 4u) - 4u; }
