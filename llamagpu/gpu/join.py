"""One kernel of several: stages run one after another on the same workgroups, which meet between them, for one layer
after another.

A dispatch that depends on the last one costs a launch and a trip to memory before it does anything. A meeting costs
less, and a stage has its first weights on their way before it (see parts/meet.wgsl).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from llamagpu.gpu.shaders import Const, compose, read

NAMES = re.compile(r"^(?:const|fn|struct|alias|var<private>|var<workgroup>) (\w+)", re.M)
BOUND = re.compile(r"^@group\(0\) @binding\(\d+\) var<([^>]+)> (\w+): ([^;]+);.*$", re.M)
SHARED = re.compile(r"^var<workgroup> (\w+): array<(.+), ([^,]+)>;.*$", re.M)
ENTRY = re.compile(r"^@compute @workgroup_size\(WORKGROUP\)\nfn main\((.*?)\) \{", re.M | re.S)
STRUCT = re.compile(r"^struct \w+ \{(.*)\}", re.M)
GIVEN = {"workgroup_id": "at", "num_workgroups": "grid", "local_invocation_index": "index"}


@dataclass(frozen=True, slots=True)
class Stage:
    """A whole kernel, and what it is given. A kernel that waits by itself takes turns by itself, too."""

    source: str
    buffers: dict[str, Any]
    grid: tuple[int | str, ...]  # x, y, z; a string is WGSL
    column: int | None = None  # which matrix of a layer: x, y, z or w of its row in the table; None: no weights
    variant: int = 0  # only layers whose row has this number there run it


def join(
    stages: Sequence[Stage], workgroups: int, subgroup: int, meeting: Any, layers: Any
) -> tuple[str, dict[str, Any]]:
    """The source of a kernel that runs the stages for each layer, and its buffers by name. The names of a stage get its
    number; buffers and workgroup memory are declared once, and what any stage writes is writable for all. `layers` is
    a table: how many, then for each layer and column the variant it takes (upper half) and the slot of its weights."""
    bound = [(mode, s.buffers[name]) for s in stages for mode, name, _ in BOUND.findall(s.source)]
    written = {identity(buffer) for mode, buffer in bound if "write" in mode}
    buffers: dict[str, Any] = {"meeting": meeting, "layers": layers}
    known: dict[tuple[Any, str], str] = {}  # names of buffers, by the type they are bound as
    memory: dict[tuple[str, str], list[str]] = {}  # sizes of workgroup memory, by name and type
    consts: dict[str, Const] = {"WORKGROUPS": workgroups, "SUBGROUP": subgroup, "TABLE": layers.size // 16}
    texts = [compose("meet", (), consts)]
    for number, stage in enumerate(stages):
        text = stage.source.replace(read("alone"), "")
        new = {name: f"{name}_{number}" for name in NAMES.findall(text)}
        for mode, name, kind in BOUND.findall(text):
            this = identity(stage.buffers[name])
            new[name] = known.setdefault((this, kind), f"{name}_{number}")
            declared = ""
            if new[name] not in buffers:
                mode = "storage, read_write" if this in written else mode
                declared = f"@group(0) @binding({len(buffers)}) var<{mode}> {name}: {kind};"
                buffers[new[name]] = stage.buffers[name]
            text = re.sub(rf"^@group\(0\) @binding\(\d+\) var<[^>]+> {name}:.*$", declared, text, flags=re.M)
        for name, kind, _ in SHARED.findall(text):
            memory.setdefault((name, kind), []).append(f"SIZE_{name}_{number}")
            new[name] = shared_name(name, kind)
            new[f"SIZE_{name}"] = f"SIZE_{name}_{number}"
        text = SHARED.sub(r"const SIZE_\1: u32 = \3;", text)
        entry = ENTRY.search(text)
        assert entry, "a kernel has an entry point"
        given = ", ".join(GIVEN[builtin] for builtin in re.findall(r"@builtin\((\w+)\)", entry[1]))
        text = text.replace(entry[0], "fn main(" + re.sub(r"@builtin\(\w+\) ", "", entry[1]) + ") {")
        text += call(f"main({given});", stage, workgroups, waits="wait(" in text)
        new["stage"] = f"stage_{number}"
        fields = {name for body in STRUCT.findall(text) for name in re.findall(r"(\w+):", body)}
        assert not fields & set(new), f"fields that are called like something else: {fields & set(new)}"
        names = re.compile(rf"(?<![\w.])({'|'.join(new)})\b")
        texts.append(names.sub(lambda found, new=new: new[found[1]], text))  # type: ignore[misc]
    for (name, kind), sizes in memory.items():
        texts.append(f"var<workgroup> {shared_name(name, kind)}: array<{kind}, {largest(sizes)}>;")
    size = re.search(r"const WORKGROUP: u32 = (\w+);", stages[0].source)
    assert size, "a kernel knows its size"
    texts.append(
        f"@compute @workgroup_size({size[1]})\n"
        "fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32,\n"
        "        @builtin(subgroup_size) lanes: u32) {\n  start(lanes, index);\n"
        f"  for (at_layer = 0u; at_layer < layers[0].x; at_layer++) {{\n{calls(stages)}  }}\n}}\n"
    )
    return "\n".join(texts), buffers


def calls(stages: Sequence[Stage]) -> str:
    """What is done for a layer. Stages of one column do not need each other's results: all meet after the last."""
    text = ""
    for column, step in groupby(enumerate(stages), lambda s: f"stage {s[0]}" if s[1].column is None else s[1].column):
        runs: dict[int, list[str]] = {}
        for number, stage in step:
            runs.setdefault(stage.variant, []).append(f"stage_{number}(group.x, index);")
        branches = {variant: " workgroupBarrier(); ".join(run) for variant, run in runs.items()}
        chosen = " else ".join(f"if (place >> 16u == {variant}u) {{ {run} }}" for variant, run in branches.items())
        run = chosen if len(branches) > 1 else branches[0]
        if isinstance(column, int):
            place = f"let place = layers[at_layer + 1u].{'xyzw'[column]};"
            run = f"{{\n    {place}\n    at_slot = place & 0xFFFFu;\n    {run}\n    }}"
        text += f"    {run}\n    arrive(index);\n"
    return text


def call(main: str, stage: Stage, workgroups: int, waits: bool) -> str:
    """A function that runs the stage's share of one of the workgroups."""
    x, y, z = (f"{count}u" if isinstance(count, int) else count for count in stage.grid)
    head = f"\nfn stage(number: u32, index: u32) {{\n  let all = vec3<u32>({x}, {y}, {z});\n"
    if waits:
        return head + (
            f"  let grid = vec3<u32>(min(all.x * all.y * all.z, {workgroups}u), 1u, 1u);\n"
            "  let at = vec3<u32>(number, 0u, 0u);\n"
            f"  if (number < grid.x) {{ {main} }} else {{ wait(index); }}\n}}\n"
        )
    return head.replace("all =", "grid =") + (
        "  wait(index);\n"
        f"  for (var i = number; i < grid.x * grid.y * grid.z; i += {workgroups}u) {{\n"
        "    let at = vec3<u32>(i % grid.x, i / grid.x % grid.y, i / (grid.x * grid.y));\n"
        f"    {main}\n  }}\n}}\n"
    )


def shared_name(name: str, kind: str) -> str:
    return name + re.sub(r"\W", "_", kind)


def largest(sizes: list[str]) -> str:
    return sizes[0] if len(sizes) == 1 else f"max({sizes[0]}, {largest(sizes[1:])})"


def identity(buffer: Any) -> Any:
    """The same for two bindings of the same bytes."""
    return (id(getattr(buffer, "buffer", buffer)), getattr(buffer, "offset", 0))
