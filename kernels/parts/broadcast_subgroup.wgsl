// Role broadcast: broadcast_texels(lane, a, b) = TEXELS texels that all lanes need.
// llvmpipe would load each texel for every lane (45 instructions for 8 lanes). Here a lane loads one of them, or a few,
// and a subgroup broadcast (4 instructions) gives it to the others. Every lane must call it.
// The kernel declares TEXELS, 16 at most, and texel(i, a, b), which loads the i-th texel.
const WORKGROUP: u32 = 8u;  // one subgroup: 4, 8 or 16 lanes
const LOADS: u32 = (TEXELS + WORKGROUP - 1u) / WORKGROUP;
fn broadcast_texels(lane: u32, a: u32, b: u32) -> array<vec4<f32>, 16> {
  var own = array<vec4<f32>, 4>();
  for (var j = 0u; j < LOADS; j++) { own[j] = texel(j * WORKGROUP + lane, a, b); }
  return array<vec4<f32>, 16>(
    subgroupBroadcast(own[0u / WORKGROUP], 0u % WORKGROUP), subgroupBroadcast(own[1u / WORKGROUP], 1u % WORKGROUP),
    subgroupBroadcast(own[2u / WORKGROUP], 2u % WORKGROUP), subgroupBroadcast(own[3u / WORKGROUP], 3u % WORKGROUP),
    subgroupBroadcast(own[4u / WORKGROUP], 4u % WORKGROUP), subgroupBroadcast(own[5u / WORKGROUP], 5u % WORKGROUP),
    subgroupBroadcast(own[6u / WORKGROUP], 6u % WORKGROUP), subgroupBroadcast(own[7u / WORKGROUP], 7u % WORKGROUP),
    subgroupBroadcast(own[8u / WORKGROUP], 8u % WORKGROUP), subgroupBroadcast(own[9u / WORKGROUP], 9u % WORKGROUP),
    subgroupBroadcast(own[10u / WORKGROUP], 10u % WORKGROUP), subgroupBroadcast(own[11u / WORKGROUP], 11u % WORKGROUP),
    subgroupBroadcast(own[12u / WORKGROUP], 12u % WORKGROUP), subgroupBroadcast(own[13u / WORKGROUP], 13u % WORKGROUP),
    subgroupBroadcast(own[14u / WORKGROUP], 14u % WORKGROUP), subgroupBroadcast(own[15u / WORKGROUP], 15u % WORKGROUP));
}
