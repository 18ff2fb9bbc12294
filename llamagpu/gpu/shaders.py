"""Composes WGSL kernels from their files.

A kernel is its parts, in order, followed by the kernel file (kernels/README.md). It declares every shape as
`const NAME: type = default;`, and the host sets these constants by name, so that a pipeline is made for one shape and
the driver sees plain numbers. Declarations of one line (const, struct, alias, binding) may be in several files of a
composition: the first is kept.
"""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

Const = int | float | bool

CONST = re.compile(r"^const (\w+): (u32|f32|bool) = ([^;]+);", re.M)
BINDING = re.compile(r"^@group\(0\) @binding\((\d+)\) var(?:<([^>]+)>)? (\w+):", re.M)
SUBGROUP_OPERATION = re.compile(r"\bsubgroup[A-Z]\w*\(")
ENTRY = re.compile(r"^(@compute @workgroup_size\(\w+\)\nfn main\([^)]*(?:\([^)]*\)[^)]*)*)\) \{\n", re.M)
MATRIX_ACCESS = re.compile(r"subgroupMatrix(Load|Store)<(?:(\w+), )?(row_major|col_major)>\(&(\w+), ")
MATRIX_ARRAY = re.compile(r"^var<workgroup> (\w+): array<vec([24])<u32>", re.M)
FUSED_CALLS = re.compile(
    r"(?<!fn )\b(layer\(\)|slab_index\(\)|wait\(index)"
)  # defined by unfused.wgsl outside of a fused kernel


def kernel_root() -> Path:
    package = Path(__file__).resolve().parent.parent
    inside = package / "_kernels"  # in a wheel; a checkout has them beside the package
    return inside if inside.is_dir() else package.parent / "kernels"


@cache
def kernel_files() -> dict[str, Path]:
    return {path.stem: path for path in sorted(kernel_root().glob("*/*.wgsl"))}


@cache
def read(name: str) -> str:
    return kernel_files()[name].read_text()


def compose(kernel: str, parts: tuple[str, ...], consts: Mapping[str, Const]) -> str:
    """The kernel's source: parts, then the kernel file, repeated declarations dropped, constants set."""
    texts = {name: read(name) for name in (*parts, kernel)}
    for name in parts:
        if name.startswith("matrix_"):
            texts[name], texts[kernel] = split_matrices(texts[name], texts[kernel])
    return _compose(kernel, tuple(texts.values()), tuple(consts.items()))


@cache  # every layer asks for the same ones
def _compose(kernel: str, texts: tuple[str, ...], items: tuple[tuple[str, Const], ...]) -> str:
    consts = dict(items)
    seen: set[str] = set()
    lines = []
    text = "\n".join(texts)
    if FUSED_CALLS.search(text):
        text = read("unfused") + "\n" + text
    for line in text.splitlines():
        name = declared_name(line)
        if name in seen:
            continue
        if name:
            seen.add(name)
        lines.append(line)
    source = "\n".join(lines)
    unknown = set(consts) - {found.group(1) for found in CONST.finditer(source)}
    if unknown:
        raise KeyError(f"{kernel}: no constant {', '.join(sorted(unknown))}")
    return CONST.sub(lambda found: _set_const(found, consts), source)


@cache
def split_matrices(part: str, kernel: str) -> tuple[str, str]:
    """The part and the kernel, which calls the part's functions: its 16 x 16 matrices are made of smaller ones."""
    kernel, tiles = matrix_calls(kernel)
    return for_tiles(part, tiles), kernel


def matrix_calls(source: str, prefix: str = "") -> tuple[str, dict[str, int]]:
    """The kernel with calls of WGSL functions in place of those on subgroup matrices; the arrays they load and store,
    with the elements that hold eight f16.

    An array is part of a function's name: its length is part of its type, so no function takes them all.
    """

    def call(found: "re.Match[str]") -> str:
        action, matrix, order, tile = found.groups()
        return f"{prefix}{'_'.join(filter(None, (action.lower(), matrix, order, tile)))}("

    used = {found[3] for found in MATRIX_ACCESS.findall(source)}
    tiles = {name: 4 // int(words) for name, words in sorted(MATRIX_ARRAY.findall(source)) if name in used}
    assert used == set(tiles), "matrices are in arrays of vec2<u32> or vec4<u32>"
    source = MATRIX_ACCESS.sub(call, source).replace("subgroupMatrixMultiplyAccumulate(", f"{prefix}multiply_add(")
    return source, tiles


def for_tiles(text: str, tiles: Mapping[str, int]) -> str:
    """The paragraphs with functions for TILE once for each of the tiles; those for results where an element is a vec4.

    EIGHT is the number of elements that hold eight f16.
    """
    written = []
    for paragraph in text.split("\n\n"):
        if "_TILE" not in paragraph:
            written.append(paragraph)
            continue
        fits = {tile: eight for tile, eight in tiles.items() if eight == 1 or "Result" not in paragraph}
        written += [paragraph.replace("TILE", tile).replace("EIGHT", f"{eight}u") for tile, eight in fits.items()]
    return "\n".join(written)


def declared_name(line: str) -> str | None:
    """The name that a declaration of one line introduces; None for any other line."""
    if line.startswith("const "):
        return line[6 : line.index(":")]
    if line.startswith(("struct ", "alias ")):
        return line.split()[1]
    found = BINDING.match(line)
    return found.group(3) if found else None


def _set_const(found: "re.Match[str]", consts: Mapping[str, Const]) -> str:
    name, wgsl_type, _ = found.groups()
    if name not in consts:
        return found.group(0)
    value = consts[name]
    text = {"bool": str(bool(value)).lower(), "f32": repr(float(value))}.get(wgsl_type) or f"{value:d}u"
    return f"const {name}: {wgsl_type} = {text};"


def constants(name: str) -> dict[str, int]:
    """The u32 constants of a kernel file that are plain numbers: tile sizes are read from the file, never typed
    twice.
    """
    return dict(_constants(name))


@cache  # as everything that a plan asks for, for each of its dispatches
def _constants(name: str) -> dict[str, int]:
    return {n: int(v[:-1]) for n, wgsl_type, v in CONST.findall(read(name)) if wgsl_type == "u32" and v[:-1].isdigit()}


@cache
def binding_numbers(source: str) -> Mapping[str, int]:
    """Name -> binding number, so that bind groups are built by name."""
    return {name: int(number) for number, _, name in BINDING.findall(source)}


@cache
def uses_subgroups(source: str) -> bool:
    return SUBGROUP_OPERATION.search(source) is not None


@cache
def check_subgroups(source: str, lanes: int) -> str:
    """The kernel, with a check that its subgroups have `lanes` lanes; the word `status` tells if they have not.

    Drivers choose the size by kernel. Some report a fixed one as `subgroup_size`, so the lanes are counted too.
    """
    number = max(binding_numbers(source).values()) + 1
    entry = ENTRY.search(source)
    assert entry, "a kernel has an entry point"
    checked = (
        f"{entry[1]}, @builtin(subgroup_size) subgroup_lanes: u32) {{\n"
        "  let subgroup_active = countOneBits(subgroupBallot(true));\n"
        "  let subgroup_count = subgroup_active.x + subgroup_active.y + subgroup_active.z + subgroup_active.w;\n"
        f"  if (subgroup_lanes != {lanes}u || subgroup_count != {lanes}u) {{ atomicStore(&status, 1u); }}\n"
    )
    binding = f"@group(0) @binding({number}) var<storage, read_write> status: atomic<u32>;\n"
    return source[: entry.start()] + binding + checked + source[entry.end() :]
