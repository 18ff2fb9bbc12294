// y[N] = x[K] @ W[N, K]^T, one token, as a stage of a larger kernel (gpu/join.py) with fewer workgroups than the rows ask
// for: they take turns. LANES invocations share two rows and split K by blocks of 32, the weights by 16-byte loads (32
// weights of q4 each). The first weights are on their way before x is made ready, a turn's before the sums of the last.
// Parts: half, (scales, planes,) inputs, dot, out, reduce. Needs m == 1, K % 32 == 0 (q6: 64), GROUP % 32 == 0 or 16.
const K: u32 = 32u;
const N: u32 = 2u;
const LANES: u32 = 64u;
const WORKGROUP: u32 = 64u;
const BLOCKS: u32 = K / 32u;
const ROUNDS: u32 = (BLOCKS + LANES - 1u) / LANES;  // a constant, so that the driver unrolls
const FIRST: u32 = min(ROUNDS, 4u);                 // rounds that are loaded early
const WHOLE: bool = BLOCKS % LANES == 0u;
struct WeightPair { a: Weights, b: Weights }
fn fetch_pair(row: u32, b: u32) -> WeightPair {  // past the end: clamp the loads, emit guards the store
  let i = select(min(b, BLOCKS - 1u), b, WHOLE);
  return WeightPair(fetch(layer() * N + min(row, N - 1u), i), fetch(layer() * N + min(row + 1u, N - 1u), i));
}
fn fetch_first(w: ptr<function, array<WeightPair, FIRST>>, row: u32, lane: u32) {
  for (var i = 0u; i < FIRST; i++) { (*w)[i] = fetch_pair(row, lane + i * LANES); }
}
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) index: u32) {
  let lane = index % LANES;
  let team = 2u * (index / LANES);
  let stride = groups.x * groups.y * 2u * (WORKGROUP / LANES);
  var row = (group.x + group.y * groups.x) * 2u * (WORKGROUP / LANES) + team;
  if (lane == 0u) { begin(0u, row); }
  var w: array<WeightPair, FIRST>;
  fetch_first(&w, row, lane);
  prepare(index);
  loop {
    var s = vec2<f32>();
    for (var i = 0u; i < ROUNDS; i++) {
      let b = lane + i * LANES;
      if (WHOLE || b < BLOCKS) {
        let v = inputs(0u, b);
        if (i < FIRST) { s += vec2<f32>(dot32(v, w[i].a), dot32(v, w[i].b)); }
        else { let p = fetch_pair(row, b); s += vec2<f32>(dot32(v, p.a), dot32(v, p.b)); }
      }
    }
    let more = row + stride - team < N;
    if (more) { fetch_first(&w, row + stride, lane); }
    s = sum_lanes(s, index);
    if (lane == 0u) { emit(0u, row, s * factor()); }
    if (!more) { break; }
    row += stride;
    if (lane == 0u) { begin(0u, row); }
  }
}
