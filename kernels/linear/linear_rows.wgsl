// y[N] = x[K] @ W[N, K]^T, one token, for adapters that are a CPU: an invocation makes 8 whole rows, nothing is shared,
// so there is no barrier and x is loaded once for 8 rows. Parts: half, (scales,) block, out.
// Needs m == 1 and what the block part needs.
const K: u32 = 32u;
const N: u32 = 2u;
const WORKGROUP: u32 = 8u;
const ROWS: u32 = 8u;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>) {
  let row = ROWS * (id.x + id.y * groups.x * WORKGROUP);
  if (row >= N) { return; }
  let last = N - 1u;  // past the end: clamp the loads, emit guards the store
  var a = vec2<f32>();
  var b = vec2<f32>();
  var c = vec2<f32>();
  var d = vec2<f32>();
  for (var i = 0u; i < K / BLOCK; i++) {
    a += dot_block(row, min(row + 1u, last), i);
    b += dot_block(min(row + 2u, last), min(row + 3u, last), i);
    c += dot_block(min(row + 4u, last), min(row + 5u, last), i);
    d += dot_block(min(row + 6u, last), min(row + 7u, last), i);
  }
  emit(0u, row, a);
  emit(0u, row + 2u, b);
  emit(0u, row + 4u, c);
  emit(0u, row + 6u, d);
}
