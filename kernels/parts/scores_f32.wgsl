// Role scores: scores leave the matrices of attend_matrix as f32. A row has three regions: scores of either half of a tile and, in
// place of the first ones, their weights; and the weights before them. A lane writes only where it has read: it takes
// 8 positions of each half, whose weights become neighbours.
alias Score = Result;
const REGIONS: u32 = 3u;
const PART: u32 = 8u;  // positions between the first ones of the two lanes
const FOURS: vec4<u32> = vec4<u32>(0u, 4u, 16u, 20u);  // first positions of a lane's scores
fn scores_at(regions: vec3<u32>, half: u32) -> u32 { return select(regions.x, regions.y, half == 1u); }  // of half of a tile
fn next_regions(regions: vec3<u32>) -> vec3<u32> { return regions.yzx; }
fn load_scores(regions: vec3<u32>, own: u32) -> Sixteen {
  return Sixteen(score4(regions.x + own), score4(regions.x + own + 1u), score4(regions.y + own), score4(regions.y + own + 1u));
}
fn weight_column(position: u32) -> u32 { return (position & 7u) | ((position & 8u) << 1u) | ((position & 16u) >> 1u); }  // of a tile
