"""Where a step's time goes: a GPU timestamp between all dispatches of one prefill and some decode steps, in
the pass they would share anyway. What the timestamps themselves cost is measured and taken off."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llamagpu.engine.llama import Transformer
from llamagpu.engine.tiled import TiledTransformer
from llamagpu.engine.weights import Part
from llamagpu.errors import LlamaGpuError
from llamagpu.gpu.device import Dispatch, nbytes
from llamagpu.gpu.recorder import Step
from llamagpu.gpu.timing import Span, Stopwatch, copy_bandwidth, peak_flops, warm_up

REPEATS = 5


@dataclass(frozen=True, slots=True)
class Slice:
    """One dispatch."""

    kernel: str
    op: str  # what it is for: "ffn_down", "attention", ...
    layer: int | None  # None: before the first or after the last
    start_ns: float  # since the pass began, as measured
    ns: float  # as measured
    net_ns: float  # less its share of what the timestamps cost
    flops: float
    bytes: float  # that it cannot avoid to read or write


@dataclass(frozen=True, slots=True)
class Phase:
    name: str  # "prefill of 512 at 0", "8 tokens at 128"
    steps: int  # decoded tokens, or one prefill: what times are given per
    tokens: int
    slices: tuple[Slice, ...]
    plain_ns: float  # the same pass without timestamps inside
    stamped_ns: float
    host: Span
    joined_ns: float | None = None  # as it runs, where the layers are one kernel: that has no times between its stages

    @property
    def net_ns(self) -> float:
        return sum(s.net_ns for s in self.slices)

    @property
    def overhead(self) -> str:
        plain, stamped = self.plain_ns / 1e3, self.stamped_ns / 1e3
        taken = (self.stamped_ns - self.net_ns) / 1e3 / max(1, len(self.slices))
        joined = f"{self.joined_ns / 1e3:.1f} us as it runs, layers joined; with " if self.joined_ns else ""
        return (
            f"{joined}{len(self.slices)} dispatches: {plain:.1f} us without timestamps between them, {stamped:.1f} us "
            f"with ({stamped / plain - 1:+.1%}); {taken:.2f} us are taken off each below"
        )


@dataclass(frozen=True, slots=True)
class Profile:
    model: str
    adapter: str
    driver: str
    precision: str
    copy: float  # bytes/s
    f32_peak: float  # operations/s
    i8_peak: float
    phases: tuple[Phase, ...]


@dataclass(slots=True)
class Total:
    """Several slices together."""

    name: str
    count: int = 0
    ns: float = 0.0
    net_ns: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0

    def add(self, s: Slice) -> None:
        self.count += 1
        self.ns += s.ns
        self.net_ns += s.net_ns
        self.flops += s.flops
        self.bytes += s.bytes


def totals(slices: Iterable[Slice], by: str) -> list[Total]:
    """Grouped by "kernel", "op" or "layer"; layers in order, the others largest first."""
    found: dict[str, Total] = {}
    for s in slices:
        layer = "-" if s.layer is None else str(s.layer)
        name = {"op": f"{s.op} ({s.kernel})", "kernel": s.kernel, "layer": layer}[by]
        found.setdefault(name, Total(name)).add(s)
    rows = list(found.values())
    if by == "layer":
        return sorted(rows, key=lambda t: (t.name == "-", int(t.name) if t.name != "-" else 0))
    return sorted(rows, key=lambda t: -t.net_ns)


def profile(model: Transformer, name: str, n_prompt: int, n_gen: int, depth: int, copy: float | None = None) -> Profile:
    gpu, watch = model.gpu, Stopwatch(model.gpu)
    if watch.stamps is None:
        raise LlamaGpuError(
            f"{gpu.info['device']} has no timestamps inside passes",
            "`bench` works without them, on the host's clock",
        )
    phases, joined_ns = [], None
    if n_gen and model.joined:
        start = max(1, depth)
        model.history = [0] * start
        model.room_for(n_gen)
        joined_ns = quickest(model, watch, 1, start, model.steps(start, n_gen, model.choose()))
    model.part_layers()
    if n_prompt:
        m = min(n_prompt, model.chunk)
        model.history = [0] * depth
        model.room_for(m)
        gpu.write(model.tokens, np.zeros(m, np.uint32))
        phases.append(phase(model, watch, f"prefill of {m} at {depth}", m, depth, [(model.plan(m, depth), m, depth)]))
    if n_gen:
        start = max(1, depth)
        model.history = [0] * start
        model.room_for(n_gen)
        steps = model.steps(start, n_gen, model.choose())
        phases.append(replace(phase(model, watch, f"{n_gen} tokens at {start}", 1, start, steps), joined_ns=joined_ns))
    return Profile(
        name, gpu.info["device"], gpu.info["description"], "fast" if model.fast else "high",
        copy or copy_bandwidth(gpu), peak_flops(gpu, False), peak_flops(gpu, True), tuple(phases),
    )  # fmt: skip


def rewind(model: Transformer, m: int, pos: int) -> None:
    model.gpu.write(model.step, np.array([pos, m, model.capacity, 0], np.uint32))


def quickest(model: Transformer, watch: Stopwatch, m: int, pos: int, steps: list[Step]) -> float:
    """Nanoseconds of the pass, warm, without timestamps inside."""

    def plain() -> float:
        rewind(model, m, pos)
        return watch.pass_ns(steps)

    warm_up(model.gpu, plain)
    return min(plain() for _ in range(REPEATS))


def phase(model: Transformer, watch: Stopwatch, name: str, m: int, pos: int, steps: list[Step]) -> Phase:
    """`steps` again and again from the same position; the quickest run of each kind."""

    def stamped() -> tuple[np.ndarray[Any, Any], Span]:
        rewind(model, m, pos)
        return watch.each_ns(steps)

    plain_ns = quickest(model, watch, m, pos, steps)
    stamped()
    stamps, host = min((stamped() for _ in range(REPEATS)), key=lambda run: run[0][-1] - run[0][0])
    widths = np.diff(stamps)
    # A timestamp costs the same everywhere, and no more than the shortest dispatch took with one.
    cost = float(np.clip((widths.sum() - plain_ns) / len(widths), 0, widths.min()))
    net = np.maximum(widths - cost, widths / 20)
    owners = owners_of(model)
    slices: list[Slice] = []
    for plan, tokens, at in steps:
        for dispatch in plan.dispatches:
            i = len(slices)
            layer = layer_of(dispatch, owners, slices)
            flops, moved = work(model, dispatch, owners, tokens, at)
            slices.append(Slice(dispatch.label, op_of(dispatch), layer, stamps[i], widths[i], net[i], flops, moved))
    count = 1 if m > 1 else len(steps) // 2  # a token is a step through the layers and a choice
    return Phase(name, count, m * count, tuple(slices), plain_ns, float(widths.sum()), host)


# What a dispatch is for, and what it has to do

Owners = dict[int, tuple[int | None, Part | None]]  # by a buffer's identity: its layer; of weights also the rows


def owners_of(model: Transformer) -> Owners:
    owners: Owners = {}
    outside = (model.weights.token_embd, model.weights.output)
    owners |= {id(part.words): (None, part) for matrix in outside for part in matrix.parts}
    for i, layer in enumerate(model.weights.layers):
        matrices = (layer.qkv, layer.attn_output, *layer.gate_up, layer.ffn_down)
        owners |= {id(part.words): (i, part) for matrix in matrices for part in matrix.parts}
        caches = [model.images[i]] if isinstance(model, TiledTransformer) else model.caches[i]
        owners |= {id(buffer): (i, None) for buffer in (*caches, layer.attn_norm, layer.ffn_norm)}
    return owners


def layer_of(dispatch: Dispatch, owners: Owners, before: list[Slice]) -> int | None:
    """What owns no buffer of a layer (conversions, merges) belongs with the dispatch before it."""
    named = [owners[id(b)][0] for b in dispatch.buffers.values() if id(b) in owners]
    if named:
        return named[0]
    inside = dispatch.label in ("to_i8", "attend_merge", "attend_image_values", "silu_mul", "silu_mul_image")
    return before[-1].layer if before and inside else None


def op_of(dispatch: Dispatch) -> str:
    label = dispatch.label
    if label.startswith("attend"):
        return "attention"
    if label.startswith("embed"):
        return "embedding"
    weight = dispatch.buffers.get("w")
    if weight is None or not label.startswith(("linear", "rms_norm")):
        return {"pick": "choice", "argmax": "choice", "sample": "choice"}.get(label, label)
    name = str(weight.label).removesuffix(".weight").rpartition(".")[2]
    return "output" if name == "token_embd" else name


def work(model: Transformer, dispatch: Dispatch, owners: Owners, m: int, pos: int) -> tuple[float, float]:
    """(operations, bytes) that it cannot avoid: weights, inputs and cache read once, results written once."""
    label, c, consts = dispatch.label, model.config, dispatch.consts
    weights = sum(nbytes(dispatch.buffers[name]) for name in ("w", "scales") if name in dispatch.buffers)
    layer, part = owners.get(id(dispatch.buffers.get("w")), (None, None))
    width = c.heads * c.head_dim
    if label.startswith("linear") and part:
        m = 1 if layer is None else m  # logits are made for the last token alone
        per_input = 1.5 if dispatch.buffers["x"].label.endswith("_i8") else 4  # a record of 32 takes 48 bytes
        return 2.0 * m * part.n * part.k, weights + m * (per_input * part.k + 4 * part.n)
    if label.startswith("embed") and part:
        return 0.0, m * (weights / part.n + 4 * part.k)
    if label == "attend_merge":
        return 0.0, 4.0 * width * (consts["SPLITS"] + 1)
    if label == "attend_image_values":
        return 0.0, 0.0  # the other half of attend_image_scores, which counts for both
    if label.startswith("attend"):
        window = c.sliding_window
        seen = sum(min(p, window or p) for p in range(pos + 1, pos + m + 1))
        reach = min(pos + m, window + m if window else pos + m)
        cache = 2 * c.kv_heads * c.head_dim * model.kv_bytes * reach
        return 4.0 * width * seen, cache + 8.0 * m * width
    if "WIDTH" in consts:
        rows = 1 if consts.get("LAST") else m
        per_value = {"to_i8": 5.5, "rms_norm_i8": 5.5, "silu_mul": 12, "silu_mul_image": 12}.get(label, 8)
        return 0.0, rows * consts["WIDTH"] * per_value
    return 0.0, 8.0 * consts.get("CANDIDATES", 0) + 4.0 * consts.get("VOCAB", 0)
