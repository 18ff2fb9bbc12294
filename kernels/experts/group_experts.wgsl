// Groups the choices of all tokens by expert: y = TILES tiles (expert, first, count, 0), then the choices in groups. A
// choice is token * USED + rank, a tile up to TOKENS choices of one expert, from the first one on. Tiles that are not
// needed have a count of 0.
// One workgroup. The order within a group is any one.
// Needs EXPERTS <= 1024. Parts: none.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const EXPERTS: u32 = 8u;
const USED: u32 = 2u;
const TOKENS: u32 = 8u;
const TILES: u32 = 8u;
const WORKGROUP: u32 = 256u;
@group(0) @binding(0) var<storage, read_write> y: array<u32>;
@group(0) @binding(5) var<storage, read> x: array<vec2<u32>>;  // [m, USED] (expert, f32 weight)
@group(0) @binding(8) var<uniform> step: Step;
var<workgroup> counts: array<atomic<u32>, EXPERTS>;  // choices of an expert
var<workgroup> places: array<atomic<u32>, EXPERTS>;  // where its next one goes
var<workgroup> used_tiles: u32;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(local_invocation_index) index: u32) {
  for (var i = index; i < EXPERTS; i += WORKGROUP) { atomicStore(&counts[i], 0u); }
  workgroupBarrier();
  for (var i = index; i < step.rows * USED; i += WORKGROUP) { atomicAdd(&counts[x[i].x], 1u); }
  workgroupBarrier();
  for (var expert = index; expert < EXPERTS; expert += WORKGROUP) {
    var first = 0u;
    var tile = 0u;
    for (var before = 0u; before < expert; before++) {
      let count = atomicLoad(&counts[before]);
      first += count;
      tile += (count + TOKENS - 1u) / TOKENS;
    }
    atomicStore(&places[expert], first);
    let count = atomicLoad(&counts[expert]);
    for (var i = 0u; i < count; i += TOKENS) {
      y[4u * tile] = expert;
      y[4u * tile + 1u] = first + i;
      y[4u * tile + 2u] = min(TOKENS, count - i);
      tile++;
    }
    if (expert == EXPERTS - 1u) { used_tiles = tile; }
  }
  workgroupBarrier();
  for (var i = used_tiles + index; i < TILES; i += WORKGROUP) { y[4u * i + 2u] = 0u; }
  for (var i = index; i < step.rows * USED; i += WORKGROUP) {
    y[4u * TILES + atomicAdd(&places[x[i].x], 1u)] = i;
  }
}
