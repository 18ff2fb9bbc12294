// Role split_count: the number of splits into which attend_split cuts the context of each of a step's rows, by the
// longest. One for every SHORT_SPLIT positions up to 4, which prologue_merge takes at once, for every 64 up to 16, then for every
// 128 up to MAX_SPLITS. splits_of(window) is the same for a window that the caller knows. Parts: grid_barrier.
struct Row { slot: u32, position: u32, token: u32, cell: u32 }  // a token row: sequence slot, position, token id, cell of the KV cache
struct Step { rows: u32, segments: u32, capacity: u32, pages: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const TOKENS: u32 = 1u;
const WINDOW: u32 = 0u;  // a token sees the last WINDOW positions, its own included; 0: all
const BY_LAYER: bool = false;  // layers have different windows: see layer_kind
const MAX_SPLITS: u32 = 16u;
const SHORT_SPLIT: u32 = 32u;
@group(0) @binding(8) var<uniform> step: Step;
fn splits_of(window: u32) -> u32 {
  var end = step.row[0].position + 1u;
  if (TOKENS > 1u) { for (var i = 1u; i < min(step.rows, TOKENS); i++) { end = max(end, step.row[i].position + 1u); } }
  let seen = select(end, min(window, end), window > 0u);
  let short_context = max(min((seen + SHORT_SPLIT - 1u) / SHORT_SPLIT, 4u), min((seen + 63u) / 64u, 16u));
  return min(max(short_context, seen / 128u), MAX_SPLITS);
}
fn split_count() -> u32 { return splits_of(select(WINDOW, layer_kind().x, BY_LAYER)); }
