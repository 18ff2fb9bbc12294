// Role turn: workgroup_row(first_row, row, row_offset) = the first row of the workgroup's turn. Compilers can see that
// it is the same for the whole workgroup, as WGSL demands where a barrier depends on it.
fn workgroup_row(first_row: u32, row: u32, row_offset: u32) -> u32 { return first_row; }
