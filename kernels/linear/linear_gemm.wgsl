// y[m, N] = x[m, K] @ W[N, K]^T, many tokens: a workgroup makes TILE_M tokens x TILE_N rows, an invocation 8 x 4 of
// them in registers; weights are dequantised once per tile into workgroup memory (16 KiB with x).
// Parts: half, (scales,) weight, out. Needs K % 8 == 0 and GROUP % 8 == 0; a ragged m, N or K is clamped on load and guarded on store.
struct Step { pos: u32, m: u32, capacity: u32, count: u32 }  // first position, tokens, positions a head's cache holds, tokens picked
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
  return x[min(token, step.m - 1u) * (K / 4u) + k4];
}
fn load_w(row: u32, k8: u32) -> mat2x4<f32> {
  if (k8 >= K / 8u) { return mat2x4<f32>(); }
  return weight8(min(row, N - 1u), k8);
}
fn emit4(token: u32, row: u32, v: vec4<f32>) {
  if (token < step.m) { emit(token, row, v.xy); emit(token, row + 2u, v.zw); }
}
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let row0 = group.x * TILE_N;
  let token0 = group.y * TILE_M;
  let quad = index % 16u;
  let part = index / 16u;
  var c0 = vec4<f32>(); var c1 = vec4<f32>(); var c2 = vec4<f32>(); var c3 = vec4<f32>();
  var c4 = vec4<f32>(); var c5 = vec4<f32>(); var c6 = vec4<f32>(); var c7 = vec4<f32>();
  for (var k0 = 0u; k0 < K; k0 += TILE_K) {
    // every invocation: 4 tokens x 4 k of x, transposed in registers
    let t = token0 + 4u * quad;
    let xs = transpose(mat4x4<f32>(load_x(t, k0 / 4u + part), load_x(t + 1u, k0 / 4u + part),
                                   load_x(t + 2u, k0 / 4u + part), load_x(t + 3u, k0 / 4u + part)));
    x_tile[(4u * part) * 16u + quad] = xs[0];
    x_tile[(4u * part + 1u) * 16u + quad] = xs[1];
    x_tile[(4u * part + 2u) * 16u + quad] = xs[2];
    x_tile[(4u * part + 3u) * 16u + quad] = xs[3];
    if (part < TILE_K / 8u) {  // half of them: 4 rows x 8 k of the weights
      let r = row0 + 4u * quad;
      let a = load_w(r, k0 / 8u + part);
      let b = load_w(r + 1u, k0 / 8u + part);
      let c = load_w(r + 2u, k0 / 8u + part);
      let d = load_w(r + 3u, k0 / 8u + part);
      let low = transpose(mat4x4<f32>(a[0], b[0], c[0], d[0]));
      let high = transpose(mat4x4<f32>(a[1], b[1], c[1], d[1]));
      let i = 8u * part * 16u + quad;
      w_tile[i] = low[0];        w_tile[i + 16u] = low[1];  w_tile[i + 32u] = low[2];  w_tile[i + 48u] = low[3];
      w_tile[i + 64u] = high[0]; w_tile[i + 80u] = high[1]; w_tile[i + 96u] = high[2]; w_tile[i + 112u] = high[3];
    }
    workgroupBarrier();
    for (var k = 0u; k < TILE_K; k++) {
      let a = x_tile[k * 16u + 2u * part];
      let b = x_tile[k * 16u + 2u * part + 1u];
      let w = w_tile[k * 16u + quad];
      c0 += a.x * w; c1 += a.y * w; c2 += a.z * w; c3 += a.w * w;
      c4 += b.x * w; c5 += b.y * w; c6 += b.z * w; c7 += b.w * w;
    }
    workgroupBarrier();
  }
  let row = row0 + 4u * quad;
  let token = token0 + 8u * part;
  emit4(token, row, c0);      emit4(token + 1u, row, c1); emit4(token + 2u, row, c2); emit4(token + 3u, row, c3);
  emit4(token + 4u, row, c4); emit4(token + 5u, row, c5); emit4(token + 6u, row, c6); emit4(token + 7u, row, c7);
}
