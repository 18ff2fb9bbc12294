// Tiled f32 weights: image row g holds rows 8g .. 8g+7, in steps of 8 k: texel 2r + h has k 4h .. 4h+3 of row r.
const STEP: u32 = 16u;  // texels of 8 k
const SCALED: bool = false;
@group(0) @binding(6) var w: texture_storage_2d<rgba32uint, read>;
struct Eight { t: u32, g: u32 }
fn eight(t: u32, g: u32) -> Eight { return Eight(t, g); }
fn four(e: Eight, row: u32, half: u32) -> vec4<f32> {  // k 4 half .. 4 half + 3 of a row
  return bitcast<vec4<f32>>(textureLoad(w, vec2<u32>(e.t + 2u * row + half, e.g)));
}
fn weigh(x: vec4<f32>) -> vec4<f32> { return x; }
fn first_texel(k: u32) -> u32 { return k / 8u * STEP; }
fn scale_texel(k: u32) -> u32 { return 0u; }
