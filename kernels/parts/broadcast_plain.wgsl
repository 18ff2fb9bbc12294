// Role broadcast: broadcast_texels(lane, a, b) = TEXELS texels that all lanes need. Each lane loads all of them.
// For adapters without subgroups. The kernel declares TEXELS and texel, see broadcast_subgroup.
fn broadcast_texels(lane: u32, a: u32, b: u32) -> array<vec4<f32>, 16> {
  var texels = array<vec4<f32>, 16>();
  for (var i = 0u; i < TEXELS; i++) { texels[i] = texel(i, a, b); }
  return texels;
}
