// y[m, N] = x[m, K] @ W[N, K]^T, many tokens, f32: register-tiled GEMM.
// A workgroup computes a tile of TILE_M tokens x TILE_N rows, an invocation 8 tokens x 4 rows of it in registers.
// Weights are dequantised once per tile into workgroup memory (16 KiB together with x).
// Needs K % 8 == 0 and GROUP % 8 == 0. A ragged m, N or K is clamped on load and guarded on store.
// Parts: f16, (scales,) weight_*, epilogue_* (without a workgroup epilogue).
struct Row { slot: u32, position: u32, token: u32, generated: u32 }  // a token row: sequence slot, position, token id, tokens generated so far
struct Step { rows: u32, segments: u32, capacity: u32, slots: u32, segment: array<vec4<u32>, 64>, row: array<Row, 4000> }  // see engine/step_inputs.py
const K: u32 = 32u;
const N: u32 = 4u;
const TILE_M: u32 = 64u;
const TILE_N: u32 = 64u;
const TILE_K: u32 = 32u;
const WORKGROUP: u32 = 128u;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;  // [m, K/4]
@group(0) @binding(8) var<uniform> step: Step;
var<workgroup> x_tile: array<vec4<f32>, TILE_K * TILE_M / 4u>;  // [k][4 tokens]
var<workgroup> w_tile: array<vec4<f32>, TILE_K * TILE_N / 4u>;  // [k][4 rows]
fn load_x(token: u32, k4: u32) -> vec4<f32> {
  if (k4 >= K / 4u) { return vec4<f32>(); }
  return x[min(token, step.rows - 1u) * (K / 4u) + k4];
}
fn load_w(row: u32, k8: u32) -> mat2x4<f32> {
  if (k8 >= K / 8u) { return mat2x4<f32>(); }
  return weight8(min(row, N - 1u), k8);
}
fn epilogue4(token: u32, row: u32, v: vec4<f32>) {
  if (token < step.rows) { epilogue(token, row, v.xy); epilogue(token, row + 2u, v.zw); }
}
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let row0 = workgroup.x * TILE_N;
  let token0 = workgroup.y * TILE_M;
  let thread_n = index % 16u;  // 4 rows of the tile; for loads also 4 tokens
  let thread_m = index / 16u;  // 8 tokens of the tile; for loads also 4 k of x, 8 k of W
  var c0 = vec4<f32>(); var c1 = vec4<f32>(); var c2 = vec4<f32>(); var c3 = vec4<f32>();
  var c4 = vec4<f32>(); var c5 = vec4<f32>(); var c6 = vec4<f32>(); var c7 = vec4<f32>();
  for (var k0 = 0u; k0 < K; k0 += TILE_K) {
    // every invocation stages 4 tokens x 4 k of x, transposed in registers
    let t = token0 + 4u * thread_n;
    let xs = transpose(mat4x4<f32>(load_x(t, k0 / 4u + thread_m), load_x(t + 1u, k0 / 4u + thread_m),
                                   load_x(t + 2u, k0 / 4u + thread_m), load_x(t + 3u, k0 / 4u + thread_m)));
    x_tile[(4u * thread_m) * 16u + thread_n] = xs[0];
    x_tile[(4u * thread_m + 1u) * 16u + thread_n] = xs[1];
    x_tile[(4u * thread_m + 2u) * 16u + thread_n] = xs[2];
    x_tile[(4u * thread_m + 3u) * 16u + thread_n] = xs[3];
    if (thread_m < TILE_K / 8u) {  // half of the invocations stage 4 rows x 8 k of W
      let r = row0 + 4u * thread_n;
      let a = load_w(r, k0 / 8u + thread_m);
      let b = load_w(r + 1u, k0 / 8u + thread_m);
      let c = load_w(r + 2u, k0 / 8u + thread_m);
      let d = load_w(r + 3u, k0 / 8u + thread_m);
      let low = transpose(mat4x4<f32>(a[0], b[0], c[0], d[0]));
      let high = transpose(mat4x4<f32>(a[1], b[1], c[1], d[1]));
      let i = 8u * thread_m * 16u + thread_n;
      w_tile[i] = low[0];        w_tile[i + 16u] = low[1];  w_tile[i + 32u] = low[2];  w_tile[i + 48u] = low[3];
      w_tile[i + 64u] = high[0]; w_tile[i + 80u] = high[1]; w_tile[i + 96u] = high[2]; w_tile[i + 112u] = high[3];
    }
    workgroupBarrier();
    for (var k = 0u; k < TILE_K; k++) {
      let a = x_tile[k * 16u + 2u * thread_m];
      let b = x_tile[k * 16u + 2u * thread_m + 1u];
      let w = w_tile[k * 16u + thread_n];
      c0 += a.x * w; c1 += a.y * w; c2 += a.z * w; c3 += a.w * w;
      c4 += b.x * w; c5 += b.y * w; c6 += b.z * w; c7 += b.w * w;
    }
    workgroupBarrier();
  }
  let row = row0 + 4u * thread_n;
  let token = token0 + 8u * thread_m;
  epilogue4(token, row, c0);      epilogue4(token + 1u, row, c1); epilogue4(token + 2u, row, c2); epilogue4(token + 3u, row, c3);
  epilogue4(token + 4u, row, c4); epilogue4(token + 5u, row, c5); epilogue4(token + 6u, row, c6); epilogue4(token + 7u, row, c7);
}
