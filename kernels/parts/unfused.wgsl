// The functions of grid_barrier for a kernel that is not a stage of a fused kernel; gpu/shaders.py puts this file first
// where one of them is called.
const LINE_PADDING: u32 = 0u;  // words after the row of a layer in an inter-stage buffer
fn layer() -> u32 { return 0u; }  // index of the layer among those whose buffers are bound
fn layer_kind() -> vec4<u32> { return vec4<u32>(); }  // what differs between layers: window, rotated dimensions, first pair of the RoPE table
fn slab_index() -> u32 { return 0u; }  // index of the layer's weights in their slab
fn first_workgroup() -> bool { return true; }  // whether this one stores what all compute
fn wait(index: u32) {}  // waits for the stages before this one
fn opaque_zero() -> u32 { return 0u; }  // is added to the indices of values that they have stored
fn uniform_zero() -> u32 { return 0u; }  // keeps the bound of a loop from being a constant
fn row_index(row: u32) -> u32 { return row; }  // index of a token row of the step
