// Role rows: a stage's rows are those of a matrix, the only one of its layer.
// Result `row` is made of row slab_row(row, b) + row of the slab, whose block row_block(b) belongs to block b of the
// inputs.
const N: u32 = 2u;
const CHOOSES: bool = false;
fn slab_row(row: u32, b: u32) -> u32 { return slab_index() * N; }
fn row_block(b: u32) -> u32 { return b; }
fn choose_experts(index: u32) {}
fn weigh_experts(index: u32) {}
fn weigh_results(row: u32, v: vec2<f32>) -> vec2<f32> { return v; }
