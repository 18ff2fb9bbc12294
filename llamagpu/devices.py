"""Lists the adapters, and the dispatches of the plans that a loaded model runs."""

import textwrap
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any

from llamagpu.engine.engine import Engine
from llamagpu.engine.routes import Attention, ExpertLinear, Linear, Prologue, RowWise
from llamagpu.errors import LlamaGpuError, NoAdapter
from llamagpu.files.storage import Storage
from llamagpu.gpu.caps import FEATURES, MINIMUM_LIMITS, Grid, Library, below_minimum
from llamagpu.gpu.choice import choose_adapter, list_adapters
from llamagpu.gpu.device import Dispatch
from llamagpu.gpu.recorder import Step
from llamagpu.gpu.webgpu import Adapter
from llamagpu.verify.verify import verified_line

PROMPT_ROWS = (4, 16, 512)  # token rows of the prefill steps that are listed: short prompts, a chunk of a long one
COLUMNS = 120
SHAPES = (Linear, ExpertLinear, Attention, RowWise)


class BadDispatch(LlamaGpuError):
    """--wgsl names a dispatch that no plan has."""

    exit_code = 2


# Adapters


@dataclass(frozen=True, slots=True)
class Device:
    library: str  # --backend
    number: int  # --device
    name: str
    type: str
    backend: str
    driver: str
    chosen: bool
    why: str
    library_why: str  # why its implementation is the chosen one
    features: list[str]
    limits: dict[str, int]
    missing: str  # what does not run on it, and why
    matrix: str  # the f16 subgroup matrices that kernels use: "16x16", "16x8", "8x8"; empty: none
    verified: str


def list_devices(wanted: str | None) -> list[Device]:
    """The adapters of wgpu, then those of Dawn."""
    listed = cache(list_adapters)
    chosen, library_why = choose_adapter(wanted, listed)
    found = list(enumerate(listed(Library.WGPU)))
    with suppress(NoAdapter):
        found += enumerate(listed(Library.DAWN))
    return [describe(i, adapter, adapter is chosen, wanted, library_why) for i, adapter in found]


def why_no_dawn() -> str:
    """Why Dawn has no adapters here."""
    try:
        return "" if list_adapters(Library.DAWN) else "it finds no adapter"
    except NoAdapter as error:
        return error.cause


def describe(number: int, adapter: Adapter, chosen: bool, wanted: str | None, library_why: str) -> Device:
    info = adapter.info
    return Device(
        library=info["library"],
        number=number,
        name=info["device"],
        type=info["adapter_type"],
        backend=info["backend_type"],
        driver=info["description"],
        chosen=chosen,
        why=reason(info["adapter_type"], wanted) if chosen else "",
        library_why=library_why if chosen else "",
        features=[feature for feature in FEATURES if feature in adapter.features],
        limits={name: adapter.limits[name] for name in MINIMUM_LIMITS},
        missing=missing(adapter.features, adapter.limits),
        matrix=next(iter(adapter.matrices), ""),
        verified=verified_line(info),
    )


def missing(features: Collection[str], limits: Mapping[str, int]) -> str:
    """What does not run on an adapter, and why; empty if everything does."""
    if short := below_minimum(limits):
        return f"cannot be used: {short}"
    if "subgroup" not in features:
        return "no subgroups: attend_split, attend_tile, attend_int8 and fused decode do not run"
    return ""


def reason(adapter_type: str, wanted: str | None) -> str:
    if wanted:
        return f"--device {wanted}"
    return "a software adapter, the only kind here" if adapter_type == "CPU" else "the best kind found"


def device_lines(found: list[Device]) -> Iterator[str]:
    for d in found:
        used = f"  <- used: {d.why}; {d.library}: {d.library_why}" if d.chosen else ""
        matrices = f"matrices of {d.matrix}" if d.matrix else ""
        facts = ", ".join(filter(None, (d.type, d.backend, d.driver, d.library, matrices)))  # some name no driver
        yield f"{d.number}: {d.name} ({facts}){used}"
        yield f"   features: {', '.join(d.features) or 'none'}"
        limits = (f"{name.removeprefix('max-')} {value}" for name, value in d.limits.items())
        yield f"   limits: {', '.join(limits)}"
        if d.missing:
            yield f"   {d.missing}"
        yield f"   {d.verified}"
    if why := why_no_dawn():
        yield f"dawn: {why}"


# Dispatches


@dataclass(frozen=True, slots=True)
class PlannedDispatch:
    """One dispatch of a step that the engine would run."""

    id: str  # "ROWS.NUMBER"; "ROWS@POSITION.NUMBER" at the end of the context
    rows: int
    position: int
    dispatch: Dispatch

    @property
    def step(self) -> str:
        return self.id.rpartition(".")[0]

    @property
    def grid(self) -> Grid:
        return self.dispatch.grid_for(self.rows, self.position)

    def as_json(self) -> dict[str, Any]:
        d = self.dispatch
        return {
            "id": self.id,
            "rows": self.rows,
            "position": self.position,
            "op": d.op,
            "layer": d.layer,
            "kernel": d.kernel,
            "shape": {"type": type(d.shape).__name__, **asdict(d.shape)} if isinstance(d.shape, SHAPES) else None,
            "needs": d.needs,
            "grid": self.grid,
            "consts": dict(d.consts),
            "bindings": {name: resource.label for name, resource in d.bindings.items()},
        }


def planned_dispatches(engine: Engine) -> list[PlannedDispatch]:
    """The dispatches of the plans that the engine runs for one sequence: decode, prefill of PROMPT_ROWS rows, sampling.

    Decode is listed a second time where its plan at the end of the context differs.
    """
    model, last = engine.model, engine.settings.context - 1
    decode, far = Step(model.plan(1)), Step(model.plan(1, last), 1, last)
    steps = {"1": decode} | ({f"1@{last}": far} if launches(far) != launches(decode) else {})
    steps |= {str(rows): Step(model.plan(rows), rows) for rows in (min(rows, model.chunk) for rows in PROMPT_ROWS)}
    steps |= {"greedy": Step(model.sample_plan(greedy=True)), "sample": Step(model.sample_plan(greedy=False))}
    return [
        PlannedDispatch(f"{name}.{i}", step.rows, step.position, dispatch)
        for name, step in steps.items()
        for i, dispatch in enumerate(step.plan.dispatches)
    ]


def launches(step: Step) -> list[tuple[str, Grid]]:
    return [(d.source, d.grid_for(step.rows, step.position)) for d in step.plan.dispatches]


def find_dispatch(planned: list[PlannedDispatch], id: str) -> Dispatch:
    for found in planned:
        if found.id == id:
            return found.dispatch
    steps = ", ".join(dict.fromkeys(f"{found.step}.N" for found in planned))
    raise BadDispatch(f"there is no dispatch {id!r}", f"`llamagpu devices --kernels` lists them: {steps}")


def dispatch_lines(engine: Engine, planned: list[PlannedDispatch]) -> Iterator[str]:
    """A table for each step, with equal layers shown once, at most COLUMNS wide."""
    settings, model = engine.settings, engine.model
    decode = "fused" if model.fused else "unfused"
    facts = f"precision {model.precision}, KV cache {settings.kv_type}, {settings.backend}, {decode} decode"
    yield f"{engine.gpu.name}: {facts}"
    for name, members in groupby(planned, lambda found: found.step):
        shown = collapse_layers(list(members))
        yield ""
        yield step_title(name, shown[0][0])
        cells = [
            (found.id, d.op, layer_text(d, count), d.kernel, "x".join(map(str, found.grid)), shape_text(d))
            for found, count in shown
            for d in (found.dispatch,)
        ]
        headings = ("id", "op", "layer", "kernel", "grid", "shape")
        widths = [max(len(row[i]) for row in (headings, *cells)) for i in range(len(headings))]
        yield table_line(headings, widths)
        for row, (found, _) in zip(cells, shown, strict=True):
            yield table_line(row, widths)
            indent = " " * (4 + widths[0])
            yield from textwrap.wrap(details(found.dispatch), COLUMNS, initial_indent=indent, subsequent_indent=indent)


def table_line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  " + "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def step_title(name: str, first: PlannedDispatch) -> str:
    if name in ("greedy", "sample"):
        return "Sampling the likeliest token" if name == "greedy" else "Sampling"
    return f"Step of {first.rows} row{'s' * (first.rows > 1)} of one sequence at position {first.position}"


def collapse_layers(members: list[PlannedDispatch]) -> list[tuple[PlannedDispatch, int]]:
    """Drop the dispatches of layers that equal an earlier layer. Each one kept has the number of equal layers."""
    layers: dict[int, list[PlannedDispatch]] = {}
    for found in members:
        if found.dispatch.layer is not None:
            layers.setdefault(found.dispatch.layer, []).append(found)
    kernels = {layer: tuple((f.dispatch.op, f.dispatch.source, f.grid) for f in own) for layer, own in layers.items()}
    counts = Counter(kernels.values())
    first = {kernel: layer for layer, kernel in reversed(kernels.items())}
    return [
        (found, 1 if layer is None else counts[kernels[layer]])
        for found in members
        for layer in (found.dispatch.layer,)
        if layer is None or first[kernels[layer]] == layer
    ]


def layer_text(dispatch: Dispatch, count: int) -> str:
    if dispatch.layer is None:
        return "-"
    return f"{dispatch.layer} x{count}" if count > 1 else str(dispatch.layer)


def shape_text(dispatch: Dispatch) -> str:
    shape = dispatch.shape
    if isinstance(shape, ExpertLinear):
        return f"{shape_text(replace(dispatch, shape=shape.linear))}, {shape.used} of {shape.experts} experts"
    if isinstance(shape, Linear):
        has_scales = not shape.storage.two_bytes and shape.storage is not Storage.TEXTURE_F32
        matrix = f"{shape.n}x{shape.k} {shape.storage}" + (f"/{shape.group}" if has_scales else "")
        return matrix if dispatch.op == "embedding" else f"{matrix}, {shape.inputs} x"
    if isinstance(shape, Attention):
        return f"{shape.heads} heads, {shape.kv_heads} KV heads, head_dim {shape.head_dim}"
    return f"width {shape.width}" if isinstance(shape, RowWise) else ""


def details(dispatch: Dispatch) -> str:
    """The prologue and epilogue of the kernel, and the condition of its route."""
    shape, found = dispatch.shape, []
    if isinstance(shape, ExpertLinear):
        shape = shape.linear
    if isinstance(shape, Linear) and dispatch.op != "embedding":
        found += [] if shape.prologue is Prologue.NONE else [f"{shape.prologue} prologue"]
        found.append(f"{shape.epilogue.removeprefix('epilogue_')} epilogue")
    if isinstance(shape, Attention):
        found += [f"window {shape.window}"] * (shape.window > 0) + [f"{shape.splits} splits"] * (shape.splits > 1)
    needs = "" if dispatch.needs == "-" else f"needs {dispatch.needs}"
    return "; ".join(text for text in (", ".join(found), needs) if text)
