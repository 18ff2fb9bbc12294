// Role tile, f32 x and weights: load_tile(first, _, loads, at, index) loads what an invocation stages of the TILE_K k from block `first`
// on, stage_tile stores it in x_tile and w_tile, each number as the sum of two f16: hi, and in the second plane lo, what is left of
// it. These are 21 bits of x from 0.5 and of W from 0.01 on, and of smaller ones all down to 2^-22 and 2^-28.
// tile_sources are the places where the loads begin.
// Needs TILE_K 32, TERMS 3, GROUP % 8 == 0. Parts: weight_*; linear_matrix.
const K: u32 = 64u;
const N: u32 = 4u;
const TILE_M: u32 = 128u;
const TILE_N: u32 = 128u;
const WORKGROUP: u32 = 128u;
const X_UNIT: f32 = 4.0;  // hi up to a quarter of a million: more would cost bits of small numbers
const X_LOADS: u32 = (4u * TILE_M + WORKGROUP - 1u) / WORKGROUP;  // eights of k that an invocation loads in an iteration
const W_LOADS: u32 = (4u * TILE_N + WORKGROUP - 1u) / WORKGROUP;
struct Loads {  // an invocation's loads of one iteration: all are issued before the first is used
  x: array<mat2x4<f32>, X_LOADS>,
  w: array<RawWeight8, W_LOADS>,
}
struct Sources {  // where an invocation's loads begin
  x: array<u32, X_LOADS>,
  w_row: array<u32, W_LOADS>,
}
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;  // [m, K/4]

fn tile_sources(row0: u32, token0: u32, index: u32) -> Sources {
  var at: Sources;
  for (var i = 0u; i < X_LOADS; i++) {
    let n = index + i * WORKGROUP;
    at.x[i] = min(token0 + n / 4u, step.rows - 1u) * (K / 4u) + n % 4u * 2u;
  }
  for (var i = 0u; i < W_LOADS; i++) { at.w_row[i] = min(row0 + (index + i * WORKGROUP) / 4u, N - 1u); }
  return at;
}

fn load_tile(first: u32, place: u32, loads: ptr<function, Loads>, at: ptr<function, Sources>, index: u32) {
  for (var i = 0u; i < X_LOADS; i++) {
    let from_x = (*at).x[i] + 8u * first;
    (*loads).x[i] = mat2x4<f32>(x[from_x], x[from_x + 1u]);
  }
  for (var i = 0u; i < W_LOADS; i++) { (*loads).w[i] = load_weight8((*at).w_row[i], 4u * first + index % 4u); }
}

// The first 11 bits of a number, but no more than f16 has. lo, the rest, is infinite for numbers beyond twice the largest f16, and NaN
// for what is no number. A mask, since an H200's compiler makes v of unpack2x16float(pack2x16float(v)), and the rest 0.
fn hi_of(v: vec4<f32>) -> vec4<f32> {
  return clamp(bitcast<vec4<f32>>(bitcast<vec4<u32>>(v) & vec4<u32>(0xFFFFE000u)), vec4<f32>(-65504.0), vec4<f32>(65504.0));
}
fn to_halves(v: mat2x4<f32>) -> vec4<u32> {  // not pack_f16, which makes numbers of infinities
  return vec4<u32>(pack2x16float(v[0].xy), pack2x16float(v[0].zw), pack2x16float(v[1].xy), pack2x16float(v[1].zw));
}

fn stage_tile(first: u32, loads: ptr<function, Loads>, at: ptr<function, Sources>, index: u32) {
  for (var i = 0u; i < X_LOADS; i++) {
    let n = index + i * WORKGROUP;
    let v = (*loads).x[i] * (1.0 / X_UNIT);
    let hi = mat2x4<f32>(hi_of(v[0]), hi_of(v[1]));
    if (n < 4u * TILE_M) {
      x_tile[n / 4u * PITCH + n % 4u] = to_halves(hi);
      x_tile[X_PLANE + n / 4u * PITCH + n % 4u] = to_halves(v - hi);
    }
  }
  for (var i = 0u; i < W_LOADS; i++) {
    let n = index + i * WORKGROUP;
    let v = unpack_weight8((*loads).w[i], (*at).w_row[i], 4u * first + index % 4u) * W_UNIT;
    let hi = mat2x4<f32>(hi_of(v[0]), hi_of(v[1]));
    if (n < 4u * TILE_N) {
      w_tile[n / 4u * PITCH + n % 4u] = to_halves(hi);
      w_tile[W_PLANE + n / 4u * PITCH + n % 4u] = to_halves(v - hi);
    }
  }
}
