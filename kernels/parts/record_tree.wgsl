// make_record: 32 values to an int8 record of 12 words, four neighbouring invocations bringing eight values each:
// words 0-3 the even values as int8, 4-7 the odd ones, then d = largest magnitude / 127 and d times their sums (of the
// first 16, the last 16, all), which symmetric and offset weights need. Invocation j of the four gets words j, 4 + j and
// 8 + j to store. Every invocation must call it. This one: through workgroup memory.
const WORKGROUP: u32 = 64u;
struct Record { even: u32, odd: u32, scale: u32 }
var<workgroup> record_tops: array<f32, WORKGROUP>;
var<workgroup> record_sums: array<i32, WORKGROUP>;
fn largest(v: vec4<f32>) -> f32 { let a = abs(v); return max(max(a.x, a.y), max(a.z, a.w)); }
fn bytes(v: vec4<f32>, to: f32) -> u32 {  // v * to as int8: adding 1.5 * 2^23 rounds, and leaves it in the last byte
  let b = bitcast<vec4<u32>>(v * to + 12582912.0) & vec4<u32>(255u);
  return b.x | (b.y << 8u) | (b.z << 16u) | (b.w << 24u);
}
fn make_record(a: vec4<f32>, b: vec4<f32>, index: u32) -> Record {
  let team = index - index % 4u;
  workgroupBarrier();  // the last record's parts have been read
  record_tops[index] = max(largest(a), largest(b));
  workgroupBarrier();
  let top = max(max(record_tops[team], record_tops[team + 1u]), max(record_tops[team + 2u], record_tops[team + 3u]));
  let to = select(0.0, 127.0 / top, top > 0.0);
  let even = bytes(vec4<f32>(a.xz, b.xz), to);
  let odd = bytes(vec4<f32>(a.yw, b.yw), to);
  record_sums[index] = dot4I8Packed(even, 0x01010101u) + dot4I8Packed(odd, 0x01010101u);
  workgroupBarrier();
  let first = record_sums[team] + record_sums[team + 1u];
  let last = record_sums[team + 2u] + record_sums[team + 3u];
  let j = index % 4u;
  let factor = select(select(select(first + last, last, j == 2u), first, j == 1u), 1, j == 0u);
  return Record(even, odd, bitcast<u32>(f32(factor) * (top / 127.0)));
}
