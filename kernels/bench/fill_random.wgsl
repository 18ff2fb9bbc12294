// y[WORDS] = random words (a PCG hash of the index), of which the bits of MASK are kept, with the bits of VALUE: synthetic
// weights for benchmarks without a model file.
// Grid-stride loop over the buffer. Needs nothing. Parts: none.
const WORDS: u32 = 1u;
const MASK: u32 = 4294967295u;
const VALUE: u32 = 0u;
const SEED: u32 = 1u;
const WORKGROUP: u32 = 256u;
@group(0) @binding(0) var<storage, read_write> y: array<u32>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>) {
  for (var i = id.x; i < WORDS; i += workgroups.x * WORKGROUP) {
    var state = (i + SEED) * 747796405u + 2891336453u;
    state = ((state >> ((state >> 28u) + 4u)) ^ state) * 277803737u;
    y[i] = (((state >> 22u) ^ state) & MASK) | VALUE;
  }
}
