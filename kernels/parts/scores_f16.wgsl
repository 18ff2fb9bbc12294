// Role scores: scores leave the matrices of attend_matrix as f16, which their sums are, too: half the bytes of f32. For scores of some
// tens: neighbours of 100 are 1/16 away. A row has two regions: one for the scores of a tile and, in their place, its weights, and
// one for the weights before them.
alias Score = subgroup_matrix_result<f16, 16, 16>;
const REGIONS: u32 = 2u;
const PART: u32 = 16u;  // positions between the first ones of the two lanes
const FOURS: vec4<u32> = vec4<u32>(0u, 4u, 8u, 12u);  // first positions of a lane's scores
fn scores_at(regions: vec3<u32>, half: u32) -> u32 { return regions.x + 2u * half; }  // of half of a tile
fn next_regions(regions: vec3<u32>) -> vec3<u32> { return regions.zyx; }
fn load_scores(regions: vec3<u32>, own: u32) -> Sixteen {
  let a = row_data[regions.x + own];
  let b = row_data[regions.x + own + 1u];
  return Sixteen(vec4<f32>(unpack_f16(a.x), unpack_f16(a.y)), vec4<f32>(unpack_f16(a.z), unpack_f16(a.w)),
    vec4<f32>(unpack_f16(b.x), unpack_f16(b.y)), vec4<f32>(unpack_f16(b.z), unpack_f16(b.w)));
}
fn weight_column(position: u32) -> u32 { return position; }  // of a tile
