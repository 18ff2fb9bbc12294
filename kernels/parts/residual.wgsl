// Role residual: residual(row, i) = vec4 i of a row of the residual stream, which keep_residual need not store. Parts: grid_barrier (or unfused).
const WIDTH: u32 = 4u;
const TOKENS: u32 = 1u;  // rows of a layer in a fused kernel
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;  // [layers or 1][TOKENS or m, WIDTH], padded after each layer

fn residual(row: u32, i: u32) -> vec4<f32> {
  return x[opaque_zero() + layer() * ((TOKENS * WIDTH + LINE_PADDING) / 4u) + row * (WIDTH / 4u) + i];
}
fn keep_residual(row: u32, i: u32, v: vec4<f32>) {}
