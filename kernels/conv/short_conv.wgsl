// A gated short convolution, in layers without attention: from the rows b | c | x of a token to
// y[m, DIM] = c * (the sum over j < TAPS of w[j] * (b * x), of the position TAPS - 1 - j before).
// b * x goes into the row's cell of the KV cache, as kv_store does it, for later steps. That of a row of the same step is
// computed again, and rounded as it is stored: a result does not depend on which rows share its step.
// Eight values per invocation, grid folded over x and y. Writes f32, or blocks with TO_BLOCKS.
// Needs DIM == 2 * KV_HEADS * HEAD_DIM, for blocks DIM % 32 == 0, and one segment for each sequence. Parts: f16, blocks_*, pages,
// kv_store_*, kv_load_*; grid_barrier (or unfused).
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const DIM: u32 = 2u;
const TAPS: u32 = 3u;            // positions that a token sees, its own included
const TO_BLOCKS: bool = false;
const TOKENS: u32 = 1u;          // rows of a layer in a fused kernel
const BLOCKS: u32 = DIM / 32u;
const RUNS: u32 = (DIM + 7u) / 8u;  // of a token: eight values, the last one perhaps fewer
const WORKGROUP: u32 = 64u;
@group(0) @binding(0) var<storage, read_write> y: array<u32>;  // [layers or m, DIM] f32, padded after each layer; or blocks
@group(0) @binding(5) var<storage, read> x: array<vec2<f32>>;  // [layers or m][b | c | x][DIM], padded after each layer
@group(0) @binding(6) var<storage, read> w: array<vec2<f32>>;  // [layers, TAPS, DIM]
@group(0) @binding(8) var<uniform> step: Step;
fn gated(b: u32) -> vec2<f32> { return x[b] * x[b + DIM]; }
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>,
        @builtin(local_invocation_index) index: u32) {
  let run = (workgroup.x + workgroup.y * workgroups.x) * WORKGROUP + index;
  let i = min(run, step.rows * RUNS - 1u);
  let token = i / RUNS;
  let row = step.row[token];
  let base = opaque_zero() + layer() * (TOKENS * 3u * DIM + LINE_PADDING) / 2u;
  let taps = layer() * TAPS * DIM / 2u;
  var v = array<vec2<f32>, 4>();
  for (var p = 0u; p < 4u; p++) {
    let dim = i % RUNS * 8u + 2u * p;
    if (dim >= DIM) { continue; }
    let own = gated(base + (token * 3u * DIM + dim) / 2u);
    v[p] = own * w[taps + ((TAPS - 1u) * DIM + dim) / 2u];
    if (run == i) { store_pair(token, row.cell, dim, own); }
  }
  for (var back = 1u; back < min(TAPS, row.position + 1u); back++) {
    let in_step = back <= token && step.row[token - back].slot == row.slot;
    var cell = 0u;
    if (!in_step) { cell = cell_of(row.slot, row.position - back); }
    for (var p = 0u; p < 4u; p++) {
      let dim = i % RUNS * 8u + 2u * p;
      if (dim >= DIM) { continue; }
      var before = vec2<f32>();
      if (in_step) { before = stored_pair(gated(base + ((token - back) * 3u * DIM + dim) / 2u)); } else { before = load_pair(cell, dim); }
      v[p] += before * w[taps + ((TAPS - 1u - back) * DIM + dim) / 2u];
    }
  }
  for (var p = 0u; p < 4u; p++) {
    let dim = i % RUNS * 8u + 2u * p;
    if (dim >= DIM) { continue; }
    v[p] *= x[base + (token * 3u * DIM + DIM + dim) / 2u];
    if (run == i && !TO_BLOCKS) {
      let at = layer() * (TOKENS * DIM + LINE_PADDING) + token * DIM + dim;
      y[at] = bitcast<u32>(v[p].x);
      y[at + 1u] = bitcast<u32>(v[p].y);
    }
  }
  if (TO_BLOCKS) {
    let first = layer() * (block_word(TOKENS, 0u, BLOCKS) + LINE_PADDING) + block_word(token, i % RUNS / 4u, BLOCKS);
    store_block(first, BLOCKS, vec4<f32>(v[0], v[1]), vec4<f32>(v[2], v[3]), index, run == i);
  }
}
