// Role strip: a lane's share of a strip of 16 rows of q4 weights, one block of every fourth row. load_strip(row, b) loads block b of
// rows row, row + 4, row + 8 and row + 12, strip_scales(loads, skip) makes their scales f16, and stage stores quarter p of the weights
// as f16 in tile, from `at` on: of the first two eights of a block, or with p > 1 of the last two, the pairs p % 2 and p % 2 + 2, of which
// pair i is (i, i + 4). lane_block is the lane's first block of the subgroup's eight.
// w and scales are read_write on purpose, see linear_skinny. Needs GROUP 32, f16 scales without offsets; linear_skinny.
const K: u32 = 1024u;
const ROW_LANES: u32 = 8u;  // lanes that share a row
@group(0) @binding(6) var<storage, read_write> w: array<vec4<u32>>;  // q4 [N][K/32]
@group(0) @binding(7) var<storage, read_write> scales: array<u32>;   // f16 [N][K/32], two in a word
struct Loads { q0: vec4<u32>, q1: vec4<u32>, q2: vec4<u32>, q3: vec4<u32>, scales: vec4<u32> }  // 32 weights of every fourth row
fn lane_block(lane: u32) -> u32 { return lane % 8u; }
fn scale_skip(b: u32) -> u32 { return b % 2u * 16u; }  // bits before the scale in a word with two
fn load_strip(row: u32, b: u32) -> Loads {  // block b of rows row, row + 4, row + 8 and row + 12
  let i = row * (K / 32u) + b;
  const FOUR = K / 8u;  // blocks of four rows
  let s = vec4<u32>(scales[i / 2u], scales[(i + FOUR) / 2u], scales[(i + 2u * FOUR) / 2u], scales[(i + 3u * FOUR) / 2u]);
  return Loads(w[i], w[i + FOUR], w[i + 2u * FOUR], w[i + 3u * FOUR], s);
}
fn strip_scales(loads: Loads, skip: u32) -> vec4<f16> {
  let words = loads.scales >> vec4<u32>(skip);
  return vec4<f16>(bitcast<vec2<f16>>(words.x).x, bitcast<vec2<f16>>(words.y).x, bitcast<vec2<f16>>(words.z).x, bitcast<vec2<f16>>(words.w).x) * W_UNIT;
}
// A nibble is the last bits of 1024 or, without a shift, the four before.
fn quarter(q: vec4<u32>, p: u32, scale: f16) -> vec4<u32> {
  let high = p % 2u == 1u;
  let two = select(q.xy, q.zw, p >= 2u);
  let v = (vec4<u32>(two.x, two.x >> 8u, two.y, two.y >> 8u) & vec4<u32>(select(0x000F000Fu, 0x00F000F0u, high))) | vec4<u32>(magic);
  let zero = select(1032.0h, 1152.0h, high);
  let s = select(scale, scale * 0.0625h, high);
  return vec4<u32>(scaled(v.x, zero, s), scaled(v.y, zero, s), scaled(v.z, zero, s), scaled(v.w, zero, s));
}
fn stage(at: u32, l: Loads, p: u32, s: vec4<f16>) {
  store_quarter(at, quarter(l.q0, p, s.x));
  store_quarter(at + 4u * PITCH, quarter(l.q1, p, s.y));
  store_quarter(at + 8u * PITCH, quarter(l.q2, p, s.z));
  store_quarter(at + 12u * PITCH, quarter(l.q3, p, s.w));
}
