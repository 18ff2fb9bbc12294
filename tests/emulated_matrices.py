"""Subgroup matrices by plain WGSL, so that the kernels that use them run on a software adapter.

A "subgroup" is 32 neighbouring invocations. Two lanes hold a row of a result, half of its numbers each, and what they
need to compute them: a row of a left matrix, half of the columns of a right one. Of matrices with 8 rows the lanes from
16 on hold the same as those before. f16 numbers are f32, rounded when they are stored. Numbers are unpacked when
they are loaded: in each product it would take a software adapter minutes to compile.
"""

import re

from llamagpu.gpu.shaders import for_tiles, matrix_calls

ALIAS = re.compile(r"^alias (\w+) = subgroup_matrix_(left|right|result)<\w+, (\d+), (\d+)>;\n", re.M)
ENTRY = re.compile(r", @builtin\(subgroup_id\) subgroup: u32(.*?\) \{\n)", re.S)
LOOP = re.compile(r"for \(var (\w+) = 0u; \1 < (\d+)u; \1\+\+\) \{([^{}]*)\}")
# Sizes are M and K; E, eights of K; H, the half of N columns that a lane holds; F, its fours
MATRICES = """
struct LEFT { v: array<vec4<f32>, 2u * Eu> }  // [K]
struct RIGHT { v: array<vec4<f32>, Ku * Fu> } // [K][N / 2]
struct RESULT { v: array<vec4<f32>, Fu> }       // [N / 2]
var<private> lane_of_32: u32;
fn four(words: vec2<u32>) -> vec4<f32> { return vec4<f32>(unpack_f16(words.x), unpack_f16(words.y)); }
fn row_at(at: u32, pitch: u32) -> u32 { return at + lane_of_32 / 2u % Mu * pitch; }
fn emulated_multiply_add(left: LEFT, right: RIGHT, c: RESULT) -> RESULT {
  var a = left;
  var b = right;
  var sum = c;
  for (var k = 0u; k < Ku; k++) {
    for (var q = 0u; q < Fu; q++) { sum.v[q] += a.v[k / 4u][k % 4u] * b.v[k * Fu + q]; }
  }
  return sum;
}

fn emulated_load_LEFT_row_major_TILE(at: u32, pitch: u32) -> LEFT {
  var m: LEFT;
  for (var i = 0u; i < Eu; i++) {
    let w = words_TILE(row_at(at, pitch) + i * EIGHT);
    m.v[2u * i] = four(w.xy);
    m.v[2u * i + 1u] = four(w.zw);
  }
  return m;
}
fn emulated_load_RIGHT_row_major_TILE(at: u32, pitch: u32) -> RIGHT {
  var m: RIGHT;
  for (var k = 0u; k < Ku; k++) {
    let w = words_TILE(at + k * pitch + lane_of_32 % 2u * (Fu / 2u) * EIGHT);
    for (var q = 0u; q < Fu; q++) {
      m.v[k * Fu + q] = four(select(w.xy, w.zw, q == 1u || (Fu == 1u && lane_of_32 % 2u == 1u)));
    }
  }
  return m;
}
fn emulated_load_RIGHT_col_major_TILE(at: u32, pitch: u32) -> RIGHT {
  var m: RIGHT;
  for (var n = 0u; n < Hu; n++) {
    for (var i = 0u; i < Eu; i++) {
      let w = words_TILE(at + (lane_of_32 % 2u * Hu + n) * pitch + i * EIGHT);
      for (var k = 0u; k < 8u; k++) { m.v[((8u * i + k) * Hu + n) / 4u][n % 4u] = unpack_f16(w[k / 2u])[k % 2u]; }
    }
  }
  return m;
}

fn emulated_load_RESULT_row_major_TILE(at: u32, pitch: u32) -> RESULT {
  var m: RESULT;
  let first = row_at(at, pitch) + lane_of_32 % 2u * Fu * EIGHT;
  for (var q = 0u; q < Fu; q++) { m.v[q] = bitcast<vec4<f32>>(words_TILE(first + q * EIGHT)); }
  return m;
}
fn emulated_store_row_major_TILE(at: u32, given: RESULT, pitch: u32) {
  var m = given;
  let first = row_at(at, pitch) + lane_of_32 % 2u * Fu * EIGHT;
  for (var q = 0u; q < Fu; q++) { put_TILE(first + q * EIGHT, bitcast<vec4<u32>>(m.v[q])); }
}
"""
# Of a result in f16
STORE_HALF = """
fn store_half_TILE(at: u32, given: RESULT, pitch: u32) {
  let v = given.v;
  let words = vec4<u32>(pack_f16(v[0].xy), pack_f16(v[0].zw), pack_f16(v[1].xy), pack_f16(v[1].zw));
  TILE[row_at(at, pitch) + lane_of_32 % 2u] = words;
}
"""
HALF_SCORE = "alias Score = subgroup_matrix_result<f16, 16, 16>;\n"
# By the elements of an array that hold eight f16, or four f32
FOUR_WORDS = {
    1: """
fn words_TILE(at: u32) -> vec4<u32> { return TILE[at]; }
fn put_TILE(at: u32, v: vec4<u32>) { TILE[at] = v; }
""",
    2: """
fn words_TILE(at: u32) -> vec4<u32> { return vec4<u32>(TILE[at], TILE[at + 1u]); }
fn put_TILE(at: u32, v: vec4<u32>) { TILE[at] = v.xy; TILE[at + 1u] = v.zw; }
""",
}
# f16_bits knows finite numbers only
INFINITIES = """
fn is_beyond(bits: vec2<u32>, first: u32) -> vec2<bool> { return (bits & vec2<u32>(0x7FFFFFFFu)) >= vec2<u32>(first); }
fn pack_any(v: vec2<f32>) -> u32 {
  let bits = bitcast<vec2<u32>>(v);
  let word = pack_f16(v);
  let h = vec2<u32>(word & 0xFFFFu, word >> 16u);
  let none = select(vec2<u32>(0x7C00u), vec2<u32>(0x7E00u), is_beyond(bits, 0x7F800001u)) | (h & vec2<u32>(0x8000u));
  let any = select(h, none, is_beyond(bits, 0x477FF000u));  // 65520 and more
  return any.x | (any.y << 16u);
}
fn unpack_any(word: u32) -> vec2<f32> {
  let bits = vec2<u32>(word << 16u, word & 0xFFFF0000u);
  let mantissa = (bits & vec2<u32>(0x03FF0000u)) >> vec2<u32>(3u);
  let none = bitcast<vec2<f32>>((bits & vec2<u32>(0x80000000u)) | vec2<u32>(0x7F800000u) | mantissa);
  return select(unpack_f16(word), none, is_beyond(bits, 0x7C000000u));
}
"""


def emulated(source: str, native_f16: bool) -> str:
    """The kernel without subgroup matrices and f16."""
    half_scores, source = HALF_SCORE in source, source.replace(HALF_SCORE, "alias Score = Result;\n")
    aliases = {kind.upper(): (name, int(columns), int(rows)) for name, kind, columns, rows in ALIAS.findall(source)}
    source, tiles = matrix_calls(ALIAS.sub("", source), "emulated_")
    if half_scores:  # all that is stored there
        source = source.replace("emulated_store_row_major_row_data(", "store_half_row_data(")
    source = ENTRY.sub(r"\1  let subgroup = index / 32u;\n  lane_of_32 = index % 32u;\n", source)
    source = source.replace("bitcast<vec2<f16>>(", "unpack_f16(").replace("bitcast<u32>(v * ", "pack_f16(v * ")
    source = re.sub(r"(\d\.\d+)h\b", r"\1", re.sub(r"\bf16\b(?![_(])", "f32", source))
    (_, k, m), (_, n, _) = aliases["LEFT"], aliases["RIGHT"]
    sizes = {"M": m, "K": k, "E": k // 8, "H": n // 2, "F": n // 8}
    functions = MATRICES + STORE_HALF.replace("TILE", "row_data") * half_scores
    functions = re.sub(r"\b([MKEHF])u\b", lambda found: f"{sizes[found[1]]}u", functions)
    functions = for_tiles(unrolled(functions), tiles)
    for kind, (name, _, _) in aliases.items():
        functions = functions.replace(kind, name)
    functions += "".join(FOUR_WORDS[eight].replace("TILE", tile) for tile, eight in tiles.items())
    if not native_f16:  # then pack2x16float may be missing, too
        source = re.sub(r"\bpack2x16float\(", "pack_any(", source)
        functions = functions.replace("unpack_f16(", "unpack_any(") + INFINITIES
    return source + functions


def unrolled(source: str) -> str:
    """Without loops, the innermost first: a software adapter takes five times as long to compile them."""

    def iterations(found: "re.Match[str]") -> str:
        name, count, body = found.groups()
        return "".join("«" + re.sub(rf"\b{name}\b", f"{i}u", body) + "»" for i in range(int(count)))

    while LOOP.search(source):
        source = LOOP.sub(iterations, source)
    return source.replace("«", "{").replace("»", "}")
