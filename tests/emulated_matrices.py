"""Subgroup matrices by plain WGSL, so that the kernels that use them run on a software adapter.

A "subgroup" is 32 neighbouring invocations. Two lanes hold a row of a matrix: of a left one all 16 numbers, of a result
8 each. A right matrix stays where it lies until it is multiplied. f16 numbers are f32, rounded when they are stored.
"""

import re

LOAD = re.compile(r"subgroupMatrixLoad<(Left|Right|Result), (row|col)_major>\(&(\w+), ")
STORE = re.compile(r"subgroupMatrixStore<row_major>\(&(\w+), ")
ALIASES = re.compile(r"^alias (?:Left|Right|Result) = .*\n", re.M)
ENTRY = re.compile(r", @builtin\(subgroup_id\) subgroup: u32(.*?\) \{\n)", re.S)
TYPES = """
struct Left { a: vec4<u32>, b: vec4<u32> }
struct Right { at: u32, pitch: u32, tile: u32, transposed: bool }
struct Result { a: vec4<f32>, b: vec4<f32> }
var<private> lane_of_32: u32;
fn half_of(words: vec4<u32>, i: u32) -> f32 {
  let two = select(words.xy, words.zw, i % 8u >= 4u);
  return unpack_f16(select(two.x, two.y, i % 4u >= 2u) >> (16u * (i % 2u))).x;
}
fn right(tile: u32, transposed: bool, at: u32, pitch: u32) -> Right { return Right(at, pitch, tile, transposed); }
fn multiply(a: Left, b: Right, c: Result) -> Result {
  var result = c;
  let zero = step.rows >> 31u;  // loops that are not unrolled: minutes less to compile
  for (var j = zero; j < 8u; j++) {
    let n = lane_of_32 % 2u * 8u + j;
    var sum = 0.0;
    for (var k = zero; k < 16u; k++) {
      let row = select(k, n, b.transposed);
      let column = select(n, k, b.transposed);
      let weight = half_of(tile_word(b.tile, b.at + row * b.pitch + column / 8u), column);
      sum += half_of(select(a.a, a.b, k >= 8u), k) * weight;
    }
    let place = vec4<u32>(0u, 1u, 2u, 3u);
    result.a += select(vec4<f32>(), vec4<f32>(sum), vec4<u32>(j) == place);
    result.b += select(vec4<f32>(), vec4<f32>(sum), vec4<u32>(j) == place + 4u);
  }
  return result;
}
"""
TILE = """
fn load_left_NAME(at: u32, pitch: u32) -> Left {
  let first = at + lane_of_32 / 2u * pitch;
  return Left(NAME[first], NAME[first + 1u]);
}
fn load_result_NAME(at: u32, pitch: u32) -> Result {
  let first = at + lane_of_32 / 2u * pitch + lane_of_32 % 2u * 2u;
  return Result(bitcast<vec4<f32>>(NAME[first]), bitcast<vec4<f32>>(NAME[first + 1u]));
}
fn store_NAME(at: u32, c: Result, pitch: u32) {
  let first = at + lane_of_32 / 2u * pitch + lane_of_32 % 2u * 2u;
  NAME[first] = bitcast<vec4<u32>>(c.a);
  NAME[first + 1u] = bitcast<vec4<u32>>(c.b);
}
"""


def emulated(source: str) -> str:
    """The kernel without subgroup matrices and f16."""
    tiles = sorted({found[-1] for found in LOAD.findall(source)} | set(STORE.findall(source)))
    words = "".join(f"  if (tile == {i}u) {{ return {name}[at]; }}\n" for i, name in enumerate(tiles))
    words = f"fn tile_word(tile: u32, at: u32) -> vec4<u32> {{\n{words}  return vec4<u32>();\n}}\n"

    def load(found: "re.Match[str]") -> str:
        kind, order, name = found.groups()
        if kind == "Right":
            return f"right({tiles.index(name)}u, {str(order == 'col').lower()}, "
        return f"load_{kind.lower()}_{name}("

    source = LOAD.sub(load, source)
    source = STORE.sub(r"store_\1(", source).replace("subgroupMatrixMultiplyAccumulate(", "multiply(")
    source = ENTRY.sub(r"\1  let subgroup = index / 32u;\n  lane_of_32 = index % 32u;\n", ALIASES.sub("", source))
    source = source.replace("bitcast<vec2<f16>>(", "unpack_f16(").replace("bitcast<u32>(v * ", "pack_f16(v * ")
    source = re.sub(r"(\d\.\d+)h\b", r"\1", re.sub(r"\bf16\b(?![_(])", "f32", source))
    return source + TYPES + words + "".join(TILE.replace("NAME", name) for name in tiles)
