// spread: TEXELS texels that all lanes need; each loads them all. For adapters without subgroups; see spread_subgroup.
fn spread(lane: u32, a: u32, b: u32) -> array<vec4<f32>, 16> {
  var all = array<vec4<f32>, 16>();
  for (var i = 0u; i < TEXELS; i++) { all[i] = texel(i, a, b); }
  return all;
}
