// Role texture: f32 weights in a texture. Texture row g holds matrix rows 8g .. 8g + 7, 8 k at a time: texel 2r + h has
// k 4h .. 4h + 3 of row r. load8(t, g) takes 8 k of the 8 rows, weights4 4 k of one row. No prescale, see texture_q4.
const TEXELS_PER_8: u32 = 16u;  // texels of 8 k
const HAS_SCALES: bool = false;
@group(0) @binding(6) var w: texture_storage_2d<rgba32uint, read>;
struct Weights8 { t: u32, g: u32 }
fn load8(t: u32, g: u32) -> Weights8 { return Weights8(t, g); }
fn weights4(e: Weights8, row: u32, half: u32) -> vec4<f32> {  // k 4 half .. 4 half + 3 of a row
  return bitcast<vec4<f32>>(textureLoad(w, vec2<u32>(e.t + 2u * row + half, e.g)));
}
fn prescale(x: vec4<f32>) -> vec4<f32> { return x; }
fn first_texel(k: u32) -> u32 { return k / 8u * TEXELS_PER_8; }
fn scale_texel(k: u32) -> u32 { return 0u; }
