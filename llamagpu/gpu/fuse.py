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

from llamagpu.gpu.buffers import AnyBuffer, Bindable, Buffer, BufferRange, nbytes
from llamagpu.gpu.caps import Caps
from llamagpu.gpu.shaders import Const, compose, read

GLOBAL_NAME = re.compile(r"^(?:const|fn|struct|alias|var<private>|var<workgroup>) (\w+)", re.M)
BOUND = re.compile(r"^@group\(0\) @binding\(\d+\) var<([^>]+)> (\w+): ([^;]+);.*$", re.M)
SHARED_ARRAY = re.compile(r"^var<workgroup> (\w+): array<(.+), ([^,]+)>;.*$", re.M)
ENTRY_POINT = re.compile(r"^@compute @workgroup_size\(WORKGROUP\)\nfn main\((.*?)\) \{", re.M | re.S)
STRUCT = re.compile(r"^struct (\w+) \{(.*)\}", re.M)
ALIAS = re.compile(r"^alias (\w+) = ([^;]+);", re.M)
COMMENT = re.compile(r" *//.*")
# With Caps.tint no workgroup reads what another one has stored there.
OWN_STORES = ("k_cache", "v_cache")
BUILTINS = {"workgroup_id": "workgroup", "num_workgroups": "grid", "local_invocation_index": "index"}


@dataclass(frozen=True, slots=True)
class Stage:
    """A composed kernel as one stage of a fused kernel.

    A kernel that calls wait() itself also strides over its rows itself; any other one is called in a grid-stride loop,
    after stage_prefetch() and wait().
    """

    source: str
    bindings: Mapping[str, Bindable]
    grid: tuple[int | str, ...]  # x, y, z; a string is a WGSL expression
    column: int | None = None  # which matrix of a layer, as the layer table counts them; None: no weights
    variant: int = 0  # only layers whose table entry has this variant run the stage
    last: bool = False  # only the last layer of the kernel runs the stage
    first: bool = False  # only the first one does


def fuse(
    stages: Sequence[Stage],
    workgroups: int,
    caps: Caps,
    barrier: AnyBuffer,
    layers: Buffer,
    rows: int = 1,
    copies: Buffer | None = None,
    by_buffer: bool = False,
) -> tuple[str, dict[str, Bindable]]:
    """The source of a kernel that runs the stages for each layer of `rows` token rows, and its bindings by name.

    The names of a stage get its number. Bindings, structs and workgroup memory are declared once. What any stage writes
    is writable for all and has one type (element_types); where the barrier is not measured it is coherent, and a wait
    ends with a fence; with Tint it is stored in `copies` as well (parts/late_stores.wgsl). `layers` is the layer table:
    the number of layers, then for each layer its layer_kind(), and for each column the variant (upper 16 bits) and the
    slab index of its weights (lower 16 bits), in whole vec4. With `by_buffer` ranges of one buffer share a binding, for
    adapters that allow few.
    """
    places = Places(stages, caps.binding_bytes if by_buffer else 0)
    types = element_types(stages, places, caps.tint)
    bindings: dict[str, Bindable] = {"grid_barrier": barrier, "layers": layers}
    known: dict[tuple[Any, str], str] = {}  # name of a binding, by its identity and the type it is bound as
    shared: dict[tuple[str, str], list[str]] = {}  # sizes of an array in workgroup memory, by its name and type
    safe = not caps.measured_barrier
    consts: dict[str, Const] = {"WORKGROUPS": workgroups, "SUBGROUP": caps.subgroup, "FENCE": safe}
    consts |= {"LAYER_ROWS": layers.size // 16, "TOKENS": rows}
    consts |= {"LAYER_VEC4": 2 + max((stage.column or 0) // 4 for stage in stages)}
    structs: dict[str, str] = {}  # name of a struct, by its fields: stages that share a binding share its type
    texts = [compose("grid_barrier", (), consts)]
    if caps.tint:
        assert copies is not None, "Tint needs copies"
        bindings["copies"] = copies
        texts.append(read("late_stores"))
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
            this, first_word, bound = places.find(stage.bindings[name], mode)
            declaration, written = "", False
            if this in types:
                target, element = element_type(text, wgsl_type), types[this]
                written = element.written
                mode, wgsl_type = "storage, read_write" if written else "storage, read", f"array<{element.wgsl_type}>"
                if target != element.wgsl_type or first_word or element.copied_at is not None:
                    repairs = f"fn repair_{name}(" in text and element.copied_at is not None
                    if repairs:
                        text = re.sub(rf"^fn (late|repair)_{name}\(.*$", "", text, flags=re.M)
                    declaration = accessors(name, target, element, first_word, repairs)
                    text = call_accessors(text, name)
                    renamed |= {f"{verb}_{name}": f"{verb}_{name}_{number}" for verb in ("load_from", "store_to")}
            renamed[name] = known.setdefault((this, wgsl_type), f"{name}_{number}")
            if renamed[name] not in bindings:
                # a line of its own: declarations begin with @group
                attribute = "@coherent\n" if safe and caps.coherent and written else ""
                declaration += f"{attribute}@group(0) @binding({len(bindings)}) var<{mode}> {name}: {wgsl_type};"
                bindings[renamed[name]] = bound
            elif nbytes(bound) > nbytes(bindings[renamed[name]]):  # of ranges with the same first byte the longer one
                bindings[renamed[name]] = bound
            text = re.sub(rf"^@group\(0\) @binding\(\d+\) var<[^>]+> {name}:.*$", declaration, text, flags=re.M)
        for name, wgsl_type, _ in SHARED_ARRAY.findall(text):
            shared.setdefault((name, wgsl_type), []).append(f"SIZE_{name}_{number}")
            renamed[name] = shared_name(name, wgsl_type)
            renamed[f"SIZE_{name}"] = f"SIZE_{name}_{number}"
        text = SHARED_ARRAY.sub(r"const SIZE_\1: u32 = \3;", text)
        entry = ENTRY_POINT.search(text)
        assert entry, "a kernel has an entry point"
        arguments = ", ".join(BUILTINS[builtin] for builtin in re.findall(r"@builtin\((\w+)\)", entry[1]))
        parameters = re.sub(r"@builtin\(\w+\) ", "", entry[1])
        text = text.replace(entry[0], f"fn main(layer_number: u32, {parameters}) {{")
        text += stage_function(f"main(layer_number, {arguments});", stage, workgroups, text)
        # by a parameter: a private variable would make the control flow around barriers non-uniform
        before, main, after = text.partition("fn main(")
        text = before + main + after.replace("layer_kind()", "layers[LAYER_VEC4 * layer_number + 1u]")
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
        "        @builtin(subgroup_size) lanes: u32) {\n  barrier_begin(lanes, workgroup.x, index);\n"
        f"  for (var i = 0u; i < layers[0].x; i++) {{\n    layer_index = i;\n{layer_body(stages)}  }}\n}}\n"
    )
    return "\n".join(texts), bindings


def storage_bindings(source: str) -> int:
    return source.count("var<storage")


class Places:
    """Where the bindings of stages are: each by itself, or by their buffers, whose ranges share a binding."""

    def __init__(self, stages: Sequence[Stage], most: int) -> None:
        """`most`: the largest binding that ranges may share, in bytes; 0: none do."""
        spans: dict[int, list[BufferRange]] = {}
        for stage in stages:
            for mode, name, _ in BOUND.findall(stage.source):
                binding = stage.bindings[name]
                if isinstance(binding, BufferRange) and mode != "uniform":
                    spans.setdefault(id(binding.buffer), []).append(binding)
        self.shared: dict[int, BufferRange] = {}
        for buffer, ranges in spans.items():
            first, end = min(each.offset for each in ranges), max(each.offset + each.size for each in ranges)
            if end - first <= most:
                self.shared[buffer] = BufferRange(ranges[0].buffer, first, end - first)

    def find(self, binding: Bindable, mode: str) -> tuple[tuple[int, int], int, Bindable]:
        """What identifies the binding that holds this one, this one's first word in it, and that binding."""
        if mode != "uniform" and isinstance(binding, BufferRange) and id(binding.buffer) in self.shared:
            owner = self.shared[id(binding.buffer)]
            return identity(owner), (binding.offset - owner.offset) // 4, owner
        return identity(binding), 0, binding


@dataclass(frozen=True, slots=True)
class Element:
    """Of the array that a binding is."""

    wgsl_type: str
    written: bool  # by a stage
    copied_at: int | None = None  # the first word of its copies: a buffer and that of the copies are laid out alike


def element_types(stages: Sequence[Stage], places: Places, copied: bool) -> dict[tuple[int, int], Element]:
    """The element of each binding that a stage writes or that ranges share. With `copied` all writes are copied.

    WGSL lets no two variables overlap if one is written, so there is one: the largest vector that a stage uses.
    """
    types: dict[tuple[int, int], set[str]] = {}
    words_at: dict[tuple[int, int], set[int]] = {}
    begins: dict[tuple[int, int], int] = {}
    written, own = set(), set()
    for stage in stages:
        for mode, name, wgsl_type in BOUND.findall(stage.source):
            this, first_word, bound = places.find(stage.bindings[name], mode)
            begins[this] = bound.offset // 4 if isinstance(bound, BufferRange) else 0
            if "write" in mode:
                written.add(this)
            if name in OWN_STORES:
                own.add(this)
            if wgsl_type.startswith("array<") and mode != "uniform":
                types.setdefault(this, set()).add(vector_of(element_type(stage.source, wgsl_type)))
                words_at.setdefault(this, set()).add(first_word)
    found: dict[tuple[int, int], Element] = {}
    for this, used in types.items():
        if this not in written and len(words_at[this]) == 1:
            continue
        copied_at = begins[this] if copied and this in written - own else None
        found[this] = Element(max(sorted(used), key=words), this in written, copied_at)
    return found


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


def accessors(name: str, target: str, element: Element, first_word: int, repairs: bool) -> str:
    """WGSL functions that load and store a `target` in an array of another element type, or further on in an array.

    `repairs`: the kernel calls late_NAME and repair_NAME (parts/late_stores.wgsl). Two invocations may store components
    of one vector: naga and Tint store a component alone.
    """
    count, size = words(target), words(element.wgsl_type)
    first = f"{first_word // size}u + " if first_word else ""
    copies = None if element.copied_at is None else element.copied_at + first_word
    stores = ""
    if count > size:
        parts = ", ".join(f"{name}[{first}{count // size}u * i + {k}u]" for k in range(count // size))
        load = f"{target}({parts})"
    elif count == size:
        load = cast(f"{name}[{first}i]", element.wgsl_type, target)
        stores = f"{name}[{first}i] = {cast('v', target, element.wgsl_type)};"
    else:
        at = [f"{name}[{first}({count}u * i + {k}u) / {size}u][({count}u * i + {k}u) % {size}u]" for k in range(count)]
        scalar = scalar_of(element.wgsl_type)
        load = f"{target}({', '.join(cast(place, scalar, scalar_of(target)) for place in at)})"
        stored = (cast(value, scalar_of(target), scalar) for value in components(target))
        stores = " ".join(f"{place} = {value};" for place, value in zip(at, stored, strict=True))
    text = ""
    if copies is None:
        text += f"fn load_from_{name}(i: u32) -> {target} {{ return {load}; }}\n"
    else:
        if repairs:
            text += f"fn load_from_{name}(i: u32) -> {target} {{ return {load}; }}\n"
            text += f"fn late_{name}(v: {target}) -> bool {{ return {seems_late(target)}; }}\n"
            word = f"{count}u * i + k"
            place = f"{name}[{first}({word}) / {size}u]" + (f"[({word}) % {size}u]" if size > 1 else "")
            late = cast(f"late_word({copies}u + {word})", "u32", scalar_of(element.wgsl_type))
            loop = f"for (var k = 0u; k < {count}u + uniform_zero(); k++)"  # not unrolled: a reader is rarely late
            text += f"fn repair_{name}(i: u32) {{ {loop} {{ {place} = {late}; }} }}\n"
        else:
            again = ", ".join(late_words(target, copies))
            body = f"let v = {load}; if ({is_late(target)}) {{ return {target}({again}); }} return v;"
            text += f"fn load_from_{name}(i: u32) -> {target} {{ {body} }}\n"
        bits = (cast(value, scalar_of(target), "u32") for value in components(target))
        stores += "".join(f" atomicStore(&copies[{copies}u + {count}u * i + {k}u], {v});" for k, v in enumerate(bits))
    if element.written and count <= size:
        text += f"fn store_to_{name}(i: u32, v: {target}) {{ {stores} }}\n"
    return text


def is_late(target: str) -> str:
    """A condition: whether a word of `v` is NOT_STORED."""
    count = words(target)
    if count == 1:
        return f"{cast('v', target, 'u32')} == NOT_STORED"
    rows = [f"v[{k}]" for k in range(count // 4)] if count > 4 else ["v"]
    row, bits = (f"vec{min(count, 4)}<{scalar}>" for scalar in (scalar_of(target), "u32"))
    return " || ".join(f"any({cast(each, row, bits)} == {bits}(NOT_STORED))" for each in rows)


def seems_late(target: str) -> str:
    """A condition: whether a number of `v` is NaN, by its bits: compilers may take numbers for finite. Of integers,
    whether a word is NOT_STORED."""
    if scalar_of(target) != "f32":
        return is_late(target)
    bits = f"vec{words(target)}<u32>" if words(target) > 1 else "u32"
    return f"any(({cast('v', target, bits)} & {bits}(0x7FFFFFFFu)) > {bits}(0x7F800000u))"


def late_words(target: str, copies: int) -> list[str]:
    """The words of element i by their copies."""
    count, scalar = words(target), scalar_of(target)
    return [cast(f"late_word({copies}u + {count}u * i + {k}u)", "u32", scalar) for k in range(count)]


def components(wgsl_type: str) -> list[str]:
    """Of a scalar or vector `v`."""
    count = words(wgsl_type)
    return ["v"] if count == 1 else [f"v[{k}]" for k in range(count)]


def cast(value: str, source: str, target: str) -> str:
    return value if source == target else f"bitcast<{target}>({value})"


def call_accessors(text: str, name: str) -> str:
    """Replace `name[i] = v;` by `store_to_name(i, v);` and `name[i]` by `load_from_name(i)`."""
    while found := re.search(rf"(?<![\w.]){name}\[", text):
        end, depth = found.end(), 1
        while depth:
            depth += {"[": 1, "]": -1}.get(text[end], 0)
            end += 1
        before, index, after = text[: found.start()], text[found.end() : end - 1], text[end:]
        if after.startswith(" = "):
            value, _, after = after.removeprefix(" = ").partition(";")
            text = f"{before}store_to_{name}({index}, {value});{after}"
        else:
            text = f"{before}load_from_{name}({index}){after}"
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
            calls.setdefault(stage.variant, []).append(f"stage_{number}(workgroup.x, index, i);")
        branches = {variant: " workgroupBarrier(); ".join(run) for variant, run in calls.items()}
        chosen = " else ".join(f"if (entry >> 16u == {variant}u) {{ {run} }}" for variant, run in branches.items())
        body = chosen if len(branches) > 1 else branches[0]
        if isinstance(column, int):
            entry = f"let entry = layers[LAYER_VEC4 * i + {2 + column // 4}u].{'xyzw'[column % 4]};"
            body = f"{{\n    {entry}\n    current_slab = entry & 0xFFFFu;\n    {body}\n    }}"
        call = f"    {body}\n    arrive(index);\n"
        only = "i + 1u == layers[0].x" if stage.last else "i == 0u" if stage.first else ""
        text += f"    if ({only}) {{\n{call}    }}\n" if only else call
    return text


def _column(numbered: tuple[int, Stage]) -> int | str:
    number, stage = numbered
    return f"stage {number}" if stage.column is None else stage.column


def stage_function(main: str, stage: Stage, workgroups: int, text: str) -> str:
    """A WGSL function that does one workgroup's share of the stage."""
    x, y, z = (f"{count}u" if isinstance(count, int) else count for count in stage.grid)
    head = f"\nfn stage(number: u32, index: u32, layer_number: u32) {{\n  let all = vec3<u32>({x}, {y}, {z});\n"
    if "wait(" in text:
        return head + (
            f"  let grid = vec3<u32>(min(all.x * all.y * all.z, {workgroups}u), 1u, 1u);\n"
            "  let workgroup = vec3<u32>(number, 0u, 0u);\n"
            f"  if (number < grid.x) {{ {main} }} else {{ wait(index); }}\n}}\n"
        )
    prefetch = "  stage_prefetch(index);\n" if "fn stage_prefetch(" in text else ""
    return head.replace("all =", "grid =") + (
        f"{prefetch}  wait(index);\n"
        f"  for (var i = number; i < grid.x * grid.y * grid.z; i += {workgroups}u) {{\n"
        "    let workgroup = vec3<u32>(i % grid.x, i / grid.x % grid.y, i / (grid.x * grid.y));\n"
        f"    {main}\n  }}\n}}\n"
    )


def shared_name(name: str, wgsl_type: str) -> str:
    return name + re.sub(r"\W", "_", wgsl_type)


def largest(sizes: list[str]) -> str:
    return sizes[0] if len(sizes) == 1 else f"max({sizes[0]}, {largest(sizes[1:])})"


def identity(binding: Bindable) -> tuple[int, int]:
    """Equal for two bindings that begin at the same byte."""
    if isinstance(binding, BufferRange):
        return id(binding.buffer), binding.offset
    return id(binding), 0
