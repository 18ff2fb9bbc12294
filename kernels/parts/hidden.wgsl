// Role hidden: the results of a workgroup's epilogue on their way to int8 blocks, in workgroup memory.
const TOKENS: u32 = 1u;
var<workgroup> hidden: array<vec4<f32>, TOKENS * 8u>;

fn store_hidden(i: u32, v: f32) { hidden[i / 4u][i % 4u] = v; }
fn load_hidden(i: u32) -> vec4<f32> { return hidden[i / 4u]; }
