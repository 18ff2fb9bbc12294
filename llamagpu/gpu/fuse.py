"""Fuses kernels into one persistent kernel with grid barriers between the stages.

A dispatch that depends on the last one costs a launch and a round trip to memory before it does anything. A grid
barrier costs less, and a stage loads its first weights before it waits (parts/grid_barrier.wgsl).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

from llamagpu.gpu.buffers import AnyBuffer, Bindable, Buffer, BufferRange
from llamagpu.gpu.caps import Caps
from llamagpu.gpu.shaders import Const, compose, read

GLOBAL_NAME = re.compile(r"^(?:const|fn|struct|alias|var<private>|var<workgroup>) (\w+)", re.M)
BOUND = re.compile(r"^@group\(0\) @binding\(\d+\) var<([^>]+)> (\w+): ([^;]+);.*$", re.M)
SHARED_ARRAY = re.compile(r"^var<workgroup> (\w+): array<(.+), ([^,]+)>;.*$", re.M)
ENTRY_POINT = re.compile(r"^@compute @workgroup_size\(WORKGROUP\)\nfn main\((.*?)\) \{", re.M | re.S)
STRUCT = re.compile(r"^struct (\w+) \{(.*)\}", re.M)
ALIAS = re.compile(r"^alias (\w+) = ([^;]+);", re.M)
COMMENT = re.compile(r" *//.*")
BUILTINS = {"workgroup_id": "workgroup", "num_workgroups": "grid", "local_invocation_index": "index"}


@dataclass(frozen=True, slots=True)
class Stage:
    """A composed kernel as one stage of a fused kernel.

    A kernel that calls wait() itself also strides over its rows itself; any other one is called in a grid-stride loop.
    """

    source: str
    bindings: Mapping[str, Bindable]
    grid: tuple[int | str, ...]  # x, y, z; a string is a WGSL expression
    column: int | None = None  # which matrix of a layer: x, y, z or w of its row in the layer table; None: no weights
    variant: int = 0  # only layers whose table entry has this variant run the stage


def fuse(
    stages: Sequence[Stage], workgroups: int, caps: Caps, barrier: AnyBuffer, layers: Buffer, rows: int = 1
) -> tuple[str, dict[str, Bindable]]:
    """The source of a kernel that runs the stages for each layer of `rows` token rows, and its bindings by name.

    The names of a stage get its number. Bindings, structs and workgroup memory are declared once. What any stage writes
    is writable for all and has one type (element_types); where the barrier is not measured it is coherent, and a wait
    ends with a fence. `layers` is the layer table: the number of layers, then for each layer and column the variant
    (upper 16 bits) and the slab index of its weights (lower 16 bits).
    """
    written = element_types(stages)
    bindings: dict[str, Bindable] = {"grid_barrier": barrier, "layers": layers}
    known: dict[tuple[Any, str], str] = {}  # name of a binding, by its identity and the type it is bound as
    shared: dict[tuple[str, str], list[str]] = {}  # sizes of an array in workgroup memory, by its name and type
    safe = not caps.measured_barrier
    consts: dict[str, Const] = {"WORKGROUPS": workgroups, "SUBGROUP": caps.subgroup, "FENCE": safe}
    consts |= {"LAYER_ROWS": layers.size // 16, "TOKENS": rows}
    structs: dict[str, str] = {}  # name of a struct, by its fields: stages that share a binding share its type
    texts = [compose("grid_barrier", (), consts)]
    for number, stage in enumerate(stages):
        text = COMMENT.sub("", stage.source.replace(read("unfused"), ""))
        renamed = {name: f"{name}_{number}" for name in GLOBAL_NAME.findall(text)}
        fields: set[str] = set()
        for name, body in STRUCT.findall(text):
            fields |= set(re.findall(r"(\w+):", body))
            renamed[name] = structs.setdefault(rename(body, renamed), renamed[name])
            if renamed[name] != f"{name}_{number}":
                text = re.sub(rf"^struct {name} .*$", "", text, flags=re.M)
        for mode, name, wgsl_type in BOUND.findall(text):
            this, declaration = identity(stage.bindings[name]), ""
            if this in written:
                target = element_type(text, wgsl_type)
                mode, wgsl_type = "storage, read_write", f"array<{written[this]}>"
                if target != written[this]:
                    declaration = accessors(name, target, written[this])
                    text = call_accessors(text, name)
                    renamed |= {f"{verb}_{name}": f"{verb}_{name}_{number}" for verb in ("load", "store")}
            renamed[name] = known.setdefault((this, wgsl_type), f"{name}_{number}")
            if renamed[name] not in bindings:
                # a line of its own: declarations begin with @group
                attribute = "@coherent\n" if safe and caps.coherent and this in written else ""
                declaration += f"{attribute}@group(0) @binding({len(bindings)}) var<{mode}> {name}: {wgsl_type};"
                bindings[renamed[name]] = stage.bindings[name]
            text = re.sub(rf"^@group\(0\) @binding\(\d+\) var<[^>]+> {name}:.*$", declaration, text, flags=re.M)
        for name, wgsl_type, _ in SHARED_ARRAY.findall(text):
            shared.setdefault((name, wgsl_type), []).append(f"SIZE_{name}_{number}")
            renamed[name] = shared_name(name, wgsl_type)
            renamed[f"SIZE_{name}"] = f"SIZE_{name}_{number}"
        text = SHARED_ARRAY.sub(r"const SIZE_\1: u32 = \3;", text)
        entry = ENTRY_POINT.search(text)
        assert entry, "a kernel has an entry point"
        arguments = ", ".join(BUILTINS[builtin] for builtin in re.findall(r"@builtin\((\w+)\)", entry[1]))
        text = text.replace(entry[0], "fn main(" + re.sub(r"@builtin\(\w+\) ", "", entry[1]) + ") {")
        text += stage_function(f"main({arguments});", stage, workgroups, strides_itself="wait(" in text)
        renamed["stage"] = f"stage_{number}"
        assert not fields & set(renamed), f"struct fields that have the name of something else: {fields & set(renamed)}"
        texts.append(rename(text, renamed))
    for (name, wgsl_type), sizes in shared.items():
        texts.append(f"var<workgroup> {shared_name(name, wgsl_type)}: array<{wgsl_type}, {largest(sizes)}>;")
    size = re.search(r"const WORKGROUP: u32 = (\w+);", stages[0].source)
    assert size, "a kernel declares its workgroup size"
    texts.append(
        f"@compute @workgroup_size({size[1]})\n"
        "fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) index: u32,\n"
        "        @builtin(subgroup_size) lanes: u32) {\n  barrier_begin(lanes, index);\n"
        f"  for (var i = 0u; i < layers[0].x; i++) {{\n    layer_index = i;\n{layer_body(stages)}  }}\n}}\n"
    )
    return "\n".join(texts), bindings


def element_types(stages: Sequence[Stage]) -> dict[tuple[int, int], str]:
    """For each buffer that a stage writes, by its identity: the element type that the fused kernel binds it as.

    WGSL lets no two variables overlap if one is written, so there is one: the largest vector that a stage uses.
    """
    types: dict[tuple[int, int], set[str]] = {}
    written = set()
    for stage in stages:
        for mode, name, wgsl_type in BOUND.findall(stage.source):
            this = identity(stage.bindings[name])
            if "write" in mode:
                written.add(this)
            if wgsl_type.startswith("array<"):
                types.setdefault(this, set()).add(vector_of(element_type(stage.source, wgsl_type)))
    return {this: max(sorted(types[this]), key=words) for this in written}


def element_type(source: str, array: str) -> str:
    """Of `array<T>`, T without aliases."""
    element = array.removeprefix("array<").removesuffix(">")
    aliases: dict[str, str] = dict(ALIAS.findall(source))
    return aliases.get(element, element)


def words(wgsl_type: str) -> int:
    """32-bit words of a scalar, vector or matrix."""
    kind, _, component = wgsl_type.partition("<")
    return prod(map(int, re.findall(r"\d", kind))) if component else 1


def scalar_of(wgsl_type: str) -> str:
    return wgsl_type.rpartition("<")[2].rstrip(">")


def vector_of(wgsl_type: str) -> str:
    return f"vec4<{scalar_of(wgsl_type)}>" if words(wgsl_type) > 4 else wgsl_type


def accessors(name: str, target: str, element: str) -> str:
    """WGSL functions that load and store a `target` in an array of another element type.

    Two invocations may store components of one vector: every backend of naga stores a component alone.
    """
    count, size = words(target), words(element)
    if count > size:
        parts = ", ".join(f"{name}[{count // size}u * i + {k}u]" for k in range(count // size))
        return f"fn load_{name}(i: u32) -> {target} {{ return {target}({parts}); }}\n"
    at = [f"{name}[({count}u * i + {k}u) / {size}u][({count}u * i + {k}u) % {size}u]" for k in range(count)]
    values = ["v"] if count == 1 else [f"v[{k}]" for k in range(count)]
    loads = ", ".join(cast(place, scalar_of(element), scalar_of(target)) for place in at)
    stored = (cast(value, scalar_of(target), scalar_of(element)) for value in values)
    stores = " ".join(f"{place} = {value};" for place, value in zip(at, stored, strict=True))
    return (
        f"fn load_{name}(i: u32) -> {target} {{ return {target}({loads}); }}\n"
        f"fn store_{name}(i: u32, v: {target}) {{ {stores} }}\n"
    )


def cast(value: str, source: str, target: str) -> str:
    return value if source == target else f"bitcast<{target}>({value})"


def call_accessors(text: str, name: str) -> str:
    """Replace `name[i] = v;` by `store_name(i, v);` and `name[i]` by `load_name(i)`."""
    while found := re.search(rf"(?<![\w.]){name}\[", text):
        end, depth = found.end(), 1
        while depth:
            depth += {"[": 1, "]": -1}.get(text[end], 0)
            end += 1
        before, index, after = text[: found.start()], text[found.end() : end - 1], text[end:]
        if after.startswith(" = "):
            value, _, after = after.removeprefix(" = ").partition(";")
            text = f"{before}store_{name}({index}, {value});{after}"
        else:
            text = f"{before}load_{name}({index}){after}"
    return text


def rename(text: str, names: Mapping[str, str]) -> str:
    """Replace names, but not the fields of a struct that follow a dot."""
    return re.sub(rf"(?<![\w.])({'|'.join(names)})\b", lambda found: names[found[1]], text)


def layer_body(stages: Sequence[Stage]) -> str:
    """The calls for one layer. Stages of one column do not read each other's results: one barrier follows them all."""
    text = ""
    for column, members in groupby(enumerate(stages), _column):
        calls: dict[int, list[str]] = {}
        for number, stage in members:
            calls.setdefault(stage.variant, []).append(f"stage_{number}(workgroup.x, index);")
        branches = {variant: " workgroupBarrier(); ".join(run) for variant, run in calls.items()}
        chosen = " else ".join(f"if (entry >> 16u == {variant}u) {{ {run} }}" for variant, run in branches.items())
        body = chosen if len(branches) > 1 else branches[0]
        if isinstance(column, int):
            entry = f"let entry = layers[i + 1u].{'xyzw'[column]};"
            body = f"{{\n    {entry}\n    current_slab = entry & 0xFFFFu;\n    {body}\n    }}"
        text += f"    {body}\n    arrive(index);\n"
    return text


def _column(numbered: tuple[int, Stage]) -> int | str:
    number, stage = numbered
    return f"stage {number}" if stage.column is None else stage.column


def stage_function(main: str, stage: Stage, workgroups: int, strides_itself: bool) -> str:
    """A WGSL function that does one workgroup's share of the stage."""
    x, y, z = (f"{count}u" if isinstance(count, int) else count for count in stage.grid)
    head = f"\nfn stage(number: u32, index: u32) {{\n  let all = vec3<u32>({x}, {y}, {z});\n"
    if strides_itself:
        return head + (
            f"  let grid = vec3<u32>(min(all.x * all.y * all.z, {workgroups}u), 1u, 1u);\n"
            "  let workgroup = vec3<u32>(number, 0u, 0u);\n"
            f"  if (number < grid.x) {{ {main} }} else {{ wait(index); }}\n}}\n"
        )
    return head.replace("all =", "grid =") + (
        "  wait(index);\n"
        f"  for (var i = number; i < grid.x * grid.y * grid.z; i += {workgroups}u) {{\n"
        "    let workgroup = vec3<u32>(i % grid.x, i / grid.x % grid.y, i / (grid.x * grid.y));\n"
        f"    {main}\n  }}\n}}\n"
    )


def shared_name(name: str, wgsl_type: str) -> str:
    return name + re.sub(r"\W", "_", wgsl_type)


def largest(sizes: list[str]) -> str:
    return sizes[0] if len(sizes) == 1 else f"max({sizes[0]}, {largest(sizes[1:])})"


def identity(binding: Bindable) -> tuple[int, int]:
    """Equal for two bindings of the same bytes."""
    if isinstance(binding, BufferRange):
        return id(binding.buffer), binding.offset
    return id(binding), 0
