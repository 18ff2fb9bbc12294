// y[N] = x[K] @ W[N, K]^T, one token, for CPU adapters.
// One invocation computes 8 whole rows. Nothing is shared, so there is no barrier, and x is loaded once for 8 rows.
// Needs m == 1 and the conditions of the block part. Parts: f16, (scales,) block_*, epilogue_* (without a workgroup epilogue).
const K: u32 = 32u;
const N: u32 = 2u;
const WORKGROUP: u32 = 8u;
const ROWS: u32 = 8u;
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(num_workgroups) workgroups: vec3<u32>) {
  let row = ROWS * (id.x + id.y * workgroups.x * WORKGROUP);
  if (row >= N) { return; }
  let last = N - 1u;  // past the last row loads are clamped and the epilogue guards the store
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
  epilogue(0u, row, a);
  epilogue(0u, row + 2u, b);
  epilogue(0u, row + 4u, c);
  epilogue(0u, row + 6u, d);
}
