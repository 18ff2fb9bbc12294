// y[invocation] = the result of ITERATIONS times eight independent multiply-adds without memory access: measures the
// peak arithmetic rate of the adapter. They are f32 vec4, or packed int8 dot products with INT8; 64 operations per
// iteration either way. The result for f32 is 64 (32 numbers that each tend to 2).
// Needs nothing. Parts: none.
const ITERATIONS: u32 = 1u;
const INT8: bool = false;
const WORKGROUP: u32 = 256u;
@group(0) @binding(0) var<storage, read_write> y: array<f32>;
@group(0) @binding(5) var<storage, read> x: array<vec4<f32>>;  // 0.5, 1.0 and the bits of a word: values that the compiler cannot fold
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (INT8) {
    let w = bitcast<u32>(x[0].z);
    var a = 1; var b = 2; var c = 3; var d = 4; var e = 5; var f = 6; var g = 7; var h = 8;
    for (var i = 0u; i < ITERATIONS; i++) {  // each multiplies its own sum, so that no two are the same
      a += dot4I8Packed(u32(a), w); b += dot4I8Packed(u32(b), w); c += dot4I8Packed(u32(c), w); d += dot4I8Packed(u32(d), w);
      e += dot4I8Packed(u32(e), w); f += dot4I8Packed(u32(f), w); g += dot4I8Packed(u32(g), w); h += dot4I8Packed(u32(h), w);
    }
    y[id.x] = f32((a ^ b ^ c ^ d ^ e ^ f ^ g ^ h) & 0xFFFF);
    return;
  }
  let p = vec4<f32>(x[0].x);
  let q = vec4<f32>(x[0].y);
  var a = q; var b = q + p; var c = p; var d = -q; var e = -p; var f = 3.0 * q; var g = 4.0 * q; var h = 5.0 * p;
  for (var i = 0u; i < ITERATIONS; i++) {
    a = fma(a, p, q); b = fma(b, p, q); c = fma(c, p, q); d = fma(d, p, q);
    e = fma(e, p, q); f = fma(f, p, q); g = fma(g, p, q); h = fma(h, p, q);
  }
  y[id.x] = dot(a + b + c + d + e + f + g + h, vec4<f32>(1.0));
}
