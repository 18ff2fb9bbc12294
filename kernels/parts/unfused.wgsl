// The functions of grid_barrier for a kernel that is not a stage of a fused kernel; gpu/shaders.py puts this file first
// where one of them is called.
const LINE_PADDING: u32 = 0u;  // words after the row of a layer in an inter-stage buffer
fn layer() -> u32 { return 0u; }  // among the layers whose buffers are bound; a stage runs for one after another
fn slab_index() -> u32 { return 0u; }  // of its weights, in the slab of all layers with the same storage
fn wait(index: u32) {}  // for the stages before this one
fn opaque_zero() -> u32 { return 0u; }  // to be added to the indices of what they have stored
fn row_index(row: u32) -> u32 { return row; }  // of the step's token rows
