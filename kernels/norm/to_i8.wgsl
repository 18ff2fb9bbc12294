// y = x as int8 records (see make_record), eight values per invocation, grid folded over x and y. For producers that
// cannot make records themselves. Parts: record. Needs WIDTH % 32 == 0.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
const WIDTH: u32 = 32u;  // values per token
const WORKGROUP: u32 = 64u;
@group(0) @binding(0) var<storage, read_write> y: array<u32>;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(8) var<uniform> step: Step;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) index: u32) {
  let u = (group.x + group.y * groups.x) * WORKGROUP + index;
  let i = min(u, step.m * (WIDTH / 8u) - 1u);
  let r = make_record(x[2u * i], x[2u * i + 1u], index);
  let at = 12u * (i / 4u) + index % 4u;
  if (u == i) { y[at] = r.even; y[at + 4u] = r.odd; y[at + 8u] = r.scale; }
}
