// Part of attend_split in a fused kernel of one row, whose queries, keys and values are as the linear leaves them. The lanes that
// share a position hold a whole head: they normalise and rotate it as `rotate` does, which saves a stage and its grid barrier.
// Every invocation must call turn_query and turn_key. The fused kernel calls stage_prefetch before it waits for the rows, to
// load weights and rotations.
// Needs ROPE_DIMS % 4 == 0; a QK norm is over a head.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const HEAD_DIM: u32 = 64u;
const LANES_PER_POSITION: u32 = 8u;  // lanes that share a position
const ROPE_DIMS: u32 = 4u;           // leading dimensions of a head that are rotated
const BY_LAYER: bool = false;        // layers of a fused kernel have different rotations: see layer_kind
const QK_NORM: bool = false;
const EPS: f32 = 1e-5;
const TEMPERATURE: f32 = 0.0;        // queries grow by its product with ln(1 + position / TEMPERATURE_RUN)
const TEMPERATURE_RUN: u32 = 1u;     // positions with the same temperature
@group(0) @binding(6) var<storage, read> rope: array<vec4<f32>>;  // [positions, ROPE_DIMS / 4] (cos, sin, cos, sin); BY_LAYER: several
@group(0) @binding(7) var<storage, read> norm: array<vec4<f32>>;  // [layers, of q and of k, HEAD_DIM]
@group(0) @binding(8) var<uniform> step: Step;
var<private> query_weights: LaneDims;
var<private> key_weights: LaneDims;
var<private> rotations: LaneDims;
fn stage_prefetch(index: u32) {
  let rope_dims = select(ROPE_DIMS, layer_kind().y, BY_LAYER);
  let rope_first = select(0u, layer_kind().z, BY_LAYER) / 2u + step.row[0].position * (ROPE_DIMS / 4u);
  for (var i = 0u; i < LANE_VEC4; i++) {
    let j = vec4_of(i, index % LANES_PER_POSITION);
    rotations[i] = vec4<f32>(1.0, 0.0, 1.0, 0.0);
    if (4u * j < rope_dims) { rotations[i] = rope[rope_first + j]; }
    if (QK_NORM) {
      query_weights[i] = norm[layer() * (HEAD_DIM / 2u) + j];
      key_weights[i] = norm[layer() * (HEAD_DIM / 2u) + HEAD_DIM / 4u + j];
    }
  }
}
fn rotate_dims(v: ptr<function, LaneDims>, weights: ptr<private, LaneDims>) {
  var scale = 1.0;
  if (QK_NORM) {
    var squares = 0.0;
    for (var i = 0u; i < LANE_VEC4; i++) { squares += dot((*v)[i], (*v)[i]); }
    for (var d = 1u; d < LANES_PER_POSITION; d <<= 1u) { squares += subgroupShuffleXor(squares, d); }
    scale = inverseSqrt(squares / f32(HEAD_DIM) + EPS);
  }
  for (var i = 0u; i < LANE_VEC4; i++) {
    var u = (*v)[i] * scale;
    if (QK_NORM) { u *= (*weights)[i]; }
    let r = rotations[i];
    (*v)[i] = vec4<f32>(u.x * r.x - u.y * r.y, u.x * r.y + u.y * r.x, u.z * r.z - u.w * r.w, u.z * r.w + u.w * r.z);
  }
}
fn turn_query(q: ptr<function, LaneDims>) {
  rotate_dims(q, &query_weights);
  if (TEMPERATURE > 0.0) {
    let growth = 1.0 + TEMPERATURE * log(1.0 + f32(step.row[0].position / TEMPERATURE_RUN));
    for (var i = 0u; i < LANE_VEC4; i++) { (*q)[i] *= growth; }
  }
}
fn turn_key(k: ptr<function, LaneDims>) { rotate_dims(k, &key_weights); }
