// Role hidden: the results of a workgroup's epilogue on their way to blocks, in workgroup memory.
const TOKENS: u32 = 1u;
var<workgroup> hidden: array<f32, TOKENS * 32u>;

fn store_hidden(i: u32, v: f32) { hidden[i] = v; }
fn load_hidden(i: u32) -> vec4<f32> { return vec4<f32>(hidden[i], hidden[i + 1u], hidden[i + 2u], hidden[i + 3u]); }
