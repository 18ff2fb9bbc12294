// Role dot, quantised weights, int8 blocks: fetch(row, b) loads 32 weights of a row and their scales, dot32 multiplies:
// integers with integers (dot4I8Packed), then their sum with the scales of both sides.
// unpack and add_dot are the same for several tokens: unpack once, then add_dot(sum, v, u) = sum + dot product.
// Needs GROUP % 32 == 0 or GROUP == 16. Parts: scales, planes_*, inputs_int8 or prologue_int8.
const K: u32 = 32u;
const GROUP: u32 = 32u;
const HAS_OFFSET: bool = false;
struct Weights { raw: Raw, s: Scales }
fn fetch(row: u32, b: u32) -> Weights { return Weights(load_raw(row, b), load_scales(row, b)); }
fn dot32(v: Inputs, w: Weights) -> f32 {
  let p = planes(w.raw);
  let low = dot4I8Packed(p.even.x, v.even.x) + dot4I8Packed(p.even.y, v.even.y)
          + dot4I8Packed(p.odd.x, v.odd.x) + dot4I8Packed(p.odd.y, v.odd.y);
  let high = dot4I8Packed(p.even.z, v.even.z) + dot4I8Packed(p.even.w, v.even.w)
           + dot4I8Packed(p.odd.z, v.odd.z) + dot4I8Packed(p.odd.w, v.odd.w);
  if (SCALE_BITS == 8u && HAS_OFFSET != TWO_GROUPS) {  // sub-scales multiply the integer sum before it becomes f32
    let super_scale = unpack_f16(w.s.words.x);
    let a = extractBits(bitcast<i32>(w.s.words.y >> w.s.skip), 0u, 8u);
    let b = extractBits(bitcast<i32>(w.s.words.y >> w.s.skip), 8u, 8u);
    if (HAS_OFFSET) { return super_scale.x * v.scale.x * f32(a * (low + high)) + super_scale.y * f32(b) * v.scale.w; }
    return super_scale.x * (v.scale.x * f32(a * low + b * high) - ZERO * (f32(a) * v.scale.y + f32(b) * v.scale.z));
  }
  let s = block_scales(w.s);
  if (GROUP == 16u) {
    let sum = s.x * (v.scale.x * f32(low) - ZERO * v.scale.y) + s.z * (v.scale.x * f32(high) - ZERO * v.scale.z);
    if (HAS_OFFSET) { return sum + s.y * v.scale.y + s.w * v.scale.z; }
    return sum;
  }
  let sum = s.x * (v.scale.x * f32(low + high) - ZERO * v.scale.w);
  if (HAS_OFFSET) { return sum + s.y * v.scale.w; }
  return sum;
}
struct Unpacked { p: Planes, s: vec4<f32> }  // s: block_scales
fn unpack(w: Weights) -> Unpacked { return Unpacked(signed_planes(w.raw), block_scales(w.s) * vec4<f32>(UNIT, 1.0, UNIT, 1.0)); }
// Integer sums begin at the bits of MAGIC = 1.5 * 2^23, so that their bits are a float already: converting is slower. The scale of
// an int8 block has 22 bits, so that its product with MAGIC is exact.
const FIRST_BITS: i32 = 0x4B400000;
const MAGIC: f32 = 12582912.0;
fn add_dot(sum: f32, v: Inputs, u: Unpacked) -> f32 {
  let d = v.scale.x;
  let zero = d * -MAGIC;
  let low = FIRST_BITS + dot4I8Packed(u.p.even.x, v.even.x) + dot4I8Packed(u.p.even.y, v.even.y)
          + dot4I8Packed(u.p.odd.x, v.odd.x) + dot4I8Packed(u.p.odd.y, v.odd.y);
  let high = dot4I8Packed(u.p.even.z, v.even.z) + dot4I8Packed(u.p.even.w, v.even.w)
           + dot4I8Packed(u.p.odd.z, v.odd.z) + dot4I8Packed(u.p.odd.w, v.odd.w);
  if (GROUP == 16u) {
    let first = fma(u.s.x, fma(bitcast<f32>(low), d, zero), sum);
    let found = fma(u.s.z, fma(bitcast<f32>(FIRST_BITS + high), d, zero), first);
    if (HAS_OFFSET) { return fma(u.s.y, v.scale.y, fma(u.s.w, v.scale.z, found)); }
    return found;
  }
  let found = fma(u.s.x, fma(bitcast<f32>(low + high), d, zero), sum);
  if (HAS_OFFSET) { return fma(u.s.y, v.scale.w, found); }
  return found;
}
