// Role residual: residual(row, i, write) = vec4 i of a row of the residual stream.
const WIDTH: u32 = 4u;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;

fn residual(row: u32, i: u32, write: bool) -> vec4<f32> { return x[row * (WIDTH / 4u) + i]; }
