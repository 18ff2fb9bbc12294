// ring[CHECKS + slot] = 1 where a logit of the slot's segment is NaN or infinite, else 0: sampling ignores what is no number.
// One workgroup per segment. Needs nothing. Parts: none.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const VOCAB: u32 = 1u;
const CHECKS: u32 = 0u;  // where the words of all slots begin
const WORKGROUP: u32 = 256u;
@group(0) @binding(1) var<storage, read_write> ring: array<u32>;
@group(0) @binding(5) var<storage, read> logits: array<f32>;  // [segments, VOCAB]
@group(0) @binding(8) var<uniform> step: Step;
var<workgroup> wrong: atomic<u32>;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  if (index == 0u) { atomicStore(&wrong, 0u); }
  workgroupBarrier();
  var own = 0u;
  for (var i = index; i < VOCAB; i += WORKGROUP) {  // by its bits: a compiler may assume that there is no NaN
    let bits = bitcast<u32>(logits[workgroup.x * VOCAB + i]);
    own |= select(0u, 1u, (bits & 0x7F800000u) == 0x7F800000u);
  }
  if (own == 1u) { atomicStore(&wrong, 1u); }
  workgroupBarrier();
  if (index == 0u) { ring[CHECKS + step.segment[workgroup.x].z] = atomicLoad(&wrong); }
}
