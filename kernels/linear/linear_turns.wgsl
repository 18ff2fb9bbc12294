// y[N] = x[K] @ W[N, K]^T, one token, as a stage of a larger kernel (gpu/join.py) with fewer workgroups than the rows ask
// for: they take turns. LANES invocations share two rows and split K by blocks of 32, the weights by 16-byte loads (32
// weights of q4 each). Some are always on their way, the first ones before x is made ready: a block's place is filled with
// that of AHEAD rounds later, in the next rows at the end, as soon as it has been used.
// Parts: half, (scales, planes,) inputs, dot, out, reduce. Needs m == 1, K % 32 == 0 (q6: 64), GROUP % 32 == 0 or 16.
const K: u32 = 32u;
const N: u32 = 2u;
const LANES: u32 = 64u;
const WORKGROUP: u32 = 64u;
const BLOCKS: u32 = K / 32u;
const ROUNDS: u32 = (BLOCKS + LANES - 1u) / LANES;
const AHEAD: u32 = 4u;  // rounds on their way, as many as registers hold
const FIRST: u32 = min(ROUNDS, AHEAD);
const WHOLE: bool = BLOCKS % (LANES * FIRST) == 0u;
struct WeightPair { a: Weights, b: Weights }
fn fetch_pair(row: u32, b: u32) -> WeightPair {  // past the end: clamp the loads, emit guards the store
  let i = select(min(b, BLOCKS - 1u), b, WHOLE);
  return WeightPair(fetch(slot() * N + min(row, N - 1u), i), fetch(slot() * N + min(row + 1u, N - 1u), i));
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
  for (var j = 0u; j < FIRST; j++) { w[j] = fetch_pair(row, lane + j * LANES); }
  prepare(index);
  let rounds = ROUNDS + later();  // no constant: a driver that unrolls runs out of registers
  loop {
    var s = vec2<f32>();
    let more = row + stride - team < N;
    var i = 0u;
    loop {
      let last = FIRST == ROUNDS || i + FIRST >= rounds;
      let next = select(row, row + stride, last);
      let place = select(lane + (i + FIRST) * LANES, lane, last);
      for (var j = 0u; j < FIRST; j++) {
        let b = lane + (i + j) * LANES;
        if (WHOLE || b < BLOCKS) {
          let v = inputs(0u, b);
          s += vec2<f32>(dot32(v, w[j].a), dot32(v, w[j].b));
        }
        if (!last || more) { w[j] = fetch_pair(next, place + j * LANES); }
      }
      if (last) { break; }
      i += FIRST;
    }
    s = sum_lanes(s, index);
    if (lane == 0u) { emit(0u, row, s * factor()); }
    if (!more) { break; }
    row += stride;
    if (lane == 0u) { begin(0u, row); }
  }
}
