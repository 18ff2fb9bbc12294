// Role input_rms: the blocks of prologue_blocks are not divided by the rms of their row (see epilogue_sum_blocks). The results of the
// linear are divided by it: output_scale(token) = 1 / rms, from the sums of squares of the blocks.
// Every invocation must call load_input_rms; the caller puts a barrier between it and output_scale. late_squares, repair_squares: see
// parts/late_stores.wgsl. Needs WORKGROUP % SUBGROUP == 0. Parts: grid_barrier (or unfused).
const K: u32 = 32u;
const TOKENS: u32 = 1u;
const EPS: f32 = 1e-5;
const FIRST_NORMALISED: bool = false;  // those of layer 0 are normalised, and nobody writes their sums of squares
const WORKGROUP: u32 = 64u;
const SUBGROUP: u32 = 32u;
@group(0) @binding(9) var<storage, read> squares: array<f32>;  // [layers, TOKENS, K / 32], padded after each layer
var<workgroup> inverse_rms: array<f32, TOKENS>;
fn late_squares(v: f32) -> bool { return false; }
fn repair_squares(i: u32) {}
fn load_input_rms(index: u32) {
  let normalised = FIRST_NORMALISED && layer() == 0u;
  for (var token0 = 0u; token0 < TOKENS; token0 += WORKGROUP / SUBGROUP) {  // the same iterations for all lanes, as subgroupAdd needs
    let token = token0 + index / SUBGROUP;
    let first = opaque_zero() + layer() * (TOKENS * (K / 32u) + LINE_PADDING) + min(token, step.rows - 1u) * (K / 32u);
    var sum = 0.0;
    for (var i0 = 0u; i0 < K / 32u; i0 += SUBGROUP) {
      let i = i0 + index % SUBGROUP;
      let at = first + min(i, K / 32u - 1u);
      var square = squares[at];
      if (late_squares(square) && !normalised) { repair_squares(at); square = squares[at]; }
      sum += select(0.0, square, i < K / 32u);
    }
    sum = subgroupAdd(sum);
    if (index % SUBGROUP == 0u && token < TOKENS) { inverse_rms[token] = select(inverseSqrt(sum / f32(K) + EPS), 1.0, normalised); }
  }
}

fn output_scale(token: u32) -> f32 { return inverse_rms[token]; }
