// Role kv_run: the KV cache of a layer as q8_0, by runs of 16 dimensions, one 16-byte load and one of their scale, that a
// lane of attend_split holds: run LANES_PER_POSITION * i + lane of a position is the lane's run i. key_run and value_run load
// one, dot_run multiplies it with queries, add_run adds it to the lane's sums.
// OWN_ROW: for a step of one row. Its own key and value come from load_own, each workgroup quantises them for itself, and one
// stores them: a kernel, or a grid barrier, less than with store_kv.
// Needs LANES_PER_POSITION % 4 == 0. Parts: f16, kv_q8_0, own_rows, int8_block_*.
const HEAD_DIM: u32 = 64u;  // a multiple of 32
const LANES_PER_POSITION: u32 = 8u;  // lanes that share a position
const SUBGROUP: u32 = 32u;
const RUN: u32 = 16u;  // dimensions
const RUNS: u32 = HEAD_DIM / RUN / LANES_PER_POSITION;  // of a lane
const OWN_ROW: bool = false;
alias LaneDims = array<vec4<f32>, RUNS * RUN / 4u>;
struct RawRun { words: vec4<u32>, scales: u32 }
@group(0) @binding(1) var<storage, read_write> k_cache: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read_write> v_cache: array<vec4<u32>>;
var<private> own_keys: array<RawRun, RUNS>;
var<private> own_values: array<RawRun, RUNS>;
fn key_run(row: u32, run: u32) -> RawRun {
  let at = scale_word(row, RUN * run);
  return RawRun(k_cache[int8_word(row, RUN * run) / 4u], k_cache[at / 4u][at % 4u]);
}
fn value_run(row: u32, run: u32) -> RawRun {
  let at = scale_word(row, RUN * run);
  return RawRun(v_cache[int8_word(row, RUN * run) / 4u], v_cache[at / 4u][at % 4u]);
}
fn select_run(stored: RawRun, own: RawRun, newest: bool) -> RawRun {
  if (!OWN_ROW) { return stored; }
  return RawRun(select(stored.words, own.words, newest), select(stored.scales, own.scales, newest));
}
fn newest_key(key: RawRun, i: u32, newest: bool) -> RawRun { return select_run(key, own_keys[i], newest); }
fn newest_value(value: RawRun, i: u32, newest: bool) -> RawRun { return select_run(value, own_values[i], newest); }
fn dot_run(q: ptr<function, LaneDims>, i: u32, w: RawRun, lane: u32) -> f32 {
  let low = dot((*q)[4u * i], int8_to_f32(w.words.x)) + dot((*q)[4u * i + 1u], int8_to_f32(w.words.y));
  let high = dot((*q)[4u * i + 2u], int8_to_f32(w.words.z)) + dot((*q)[4u * i + 3u], int8_to_f32(w.words.w));
  return scale_of(w.scales, RUN * lane) * (low + high);
}
fn add_run(sums: ptr<function, LaneDims>, i: u32, e: f32, w: RawRun, lane: u32) {
  let scaled = e * scale_of(w.scales, RUN * lane);
  (*sums)[4u * i] += scaled * int8_to_f32(w.words.x);
  (*sums)[4u * i + 1u] += scaled * int8_to_f32(w.words.y);
  (*sums)[4u * i + 2u] += scaled * int8_to_f32(w.words.z);
  (*sums)[4u * i + 3u] += scaled * int8_to_f32(w.words.w);
}
// Dimensions 8 * (LANES_PER_POSITION * i + lane) .. + 7 of the sums: half of a run of another lane.
fn eight(sums: ptr<function, LaneDims>, i: u32, lane: u32, index: u32) -> mat2x4<f32> {
  let holder = index % SUBGROUP - lane + i % 2u * (LANES_PER_POSITION / 2u) + lane / 2u;
  let first = 4u * (i / 2u);
  let a = subgroupShuffle((*sums)[first], holder);
  let b = subgroupShuffle((*sums)[first + 1u], holder);
  let c = subgroupShuffle((*sums)[first + 2u], holder);
  let d = subgroupShuffle((*sums)[first + 3u], holder);
  let upper = lane % 2u == 1u;
  return mat2x4<f32>(select(a, c, upper), select(b, d, upper));
}
fn quantised(a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32>, lane: u32) -> RawRun {  // 2 lanes hold 32 dimensions, 4 a word of scales
  var top = max(max(max_abs(a), max_abs(b)), max(max_abs(c), max_abs(d)));
  top = max(top, subgroupShuffleXor(top, 1u));
  let other = subgroupShuffleXor(top, 2u);
  let tops = select(vec2<f32>(top, other), vec2<f32>(other, top), lane % 4u > 1u);
  let s = inverse_scale(top);
  return RawRun(vec4<u32>(to_int8(a, s), to_int8(b, s), to_int8(c, s), to_int8(d, s)), pack_f16(tops / 127.0));
}
fn store_own(row: u32, kv_head: u32, token: u32, lane: u32, stores: bool) {
  if (!OWN_ROW) { return; }
  var k: LaneDims;
  var v: LaneDims;
  load_own(&k, &v, kv_head, token, lane);
  for (var i = 0u; i < RUNS; i++) {
    let dim = RUN * (LANES_PER_POSITION * i + lane);
    let key = quantised(k[4u * i], k[4u * i + 1u], k[4u * i + 2u], k[4u * i + 3u], lane);
    let value = quantised(v[4u * i], v[4u * i + 1u], v[4u * i + 2u], v[4u * i + 3u], lane);
    own_keys[i] = key;
    own_values[i] = value;
    if (stores) {
      k_cache[int8_word(row, dim) / 4u] = key.words;
      v_cache[int8_word(row, dim) / 4u] = value.words;
    }
    for (var w = 0u; w < LANES_PER_POSITION / 4u; w++) {  // one lane stores all scales: words of a vec4 must not come from two
      let scales = vec2<u32>(subgroupShuffleDown(key.scales, 4u * w), subgroupShuffleDown(value.scales, 4u * w));
      let at = scale_word(row, dim) + w;
      if (stores && lane == 0u) { k_cache[at / 4u][at % 4u] = scales.x; v_cache[at / 4u][at % 4u] = scales.y; }
    }
  }
}
