// Role subgroup_barrier: subgroup_barrier() orders what the lanes of a subgroup store in workgroup memory before what they load
// from it. WGSL has a barrier for the workgroup only.
fn subgroup_barrier() { workgroupBarrier(); }
