"""Times every dispatch of one prefill and some decode steps by GPU timestamps between them, inside one pass.

The cost of the timestamps themselves is measured and subtracted.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from llamagpu.engine.decode import decode_steps
from llamagpu.engine.engine import Engine
from llamagpu.engine.model import BufferModel
from llamagpu.engine.options import KvType, Precision
from llamagpu.engine.routes import Attention, ExpertLinear, Inputs, Linear, Prologue, RowWise
from llamagpu.engine.sequence import Sequence
from llamagpu.engine.step_inputs import Segment
from llamagpu.errors import LlamaGpuError
from llamagpu.gpu.buffers import nbytes
from llamagpu.gpu.device import Dispatch
from llamagpu.gpu.recorder import Step
from llamagpu.gpu.settle import FRESH_S, Settling
from llamagpu.gpu.timing import Span, Stopwatch, copy_bandwidth, peak_flops

REPEATS = 5
INT8_VALUE_BYTES = 1.5  # an int8 block of 32 activations takes 48 bytes
# Bytes read and written for each value of a row-wise operation; the default is 8
ROW_WISE_BYTES = {
    "to_blocks": 4 + INT8_VALUE_BYTES,
    "rms_norm_blocks": 4 + INT8_VALUE_BYTES,
    "glu_mul": 12,
    "silu_mul_texture": 12,
    "store_kv": 5,
    "add_rms_norm": 12,
    "conv_inputs_texture": 12,
    "short_conv_texture": 20,  # with three taps
    "short_conv": 28,  # b, c, x and the result; inputs of two positions before and its own, as f32
}


@dataclass(frozen=True, slots=True)
class DispatchTiming:
    kernel: str
    op: str  # its purpose in the model: "ffn_down", "attention", ...
    layer: int | None  # None: before the first layer or after the last
    start_ns: float  # since the pass began, as measured
    ns: float  # as measured
    net_ns: float  # without its share of the cost of the timestamps
    flops: float
    bytes: float  # that it must read and write at least


@dataclass(frozen=True, slots=True)
class Phase:
    name: str  # "prefill of 512 at 0", "8 tokens at 128"
    steps: int  # decoded tokens, or one prefill: reports divide by it
    tokens: int
    timings: tuple[DispatchTiming, ...]
    plain_ns: float  # the same pass without timestamps inside
    stamped_ns: float
    host: Span
    fused_ns: float | None = None  # of fused decode, whose stages cannot be timed: the phase is timed unfused

    @property
    def net_ns(self) -> float:
        return sum(timing.net_ns for timing in self.timings)

    @property
    def overhead(self) -> str:
        plain, stamped = self.plain_ns / 1e3, self.stamped_ns / 1e3
        subtracted = (self.stamped_ns - self.net_ns) / 1e3 / max(1, len(self.timings))
        fused = f"{self.fused_ns / 1e3:.1f} us fused, as `generate` runs it; unfused " if self.fused_ns else ""
        return (
            f"{fused}{len(self.timings)} dispatches: {plain:.1f} us without timestamps between them, {stamped:.1f} us "
            f"with ({stamped / plain - 1:+.1%}); {subtracted:.2f} us are taken off each below"
        )


@dataclass(frozen=True, slots=True)
class Profile:
    model: str
    adapter: str
    driver: str
    backend: str  # the implementation of WebGPU
    precision: str
    copy: float  # bytes/s
    f32_peak: float  # operations/s
    int8_peak: float
    phases: tuple[Phase, ...]


@dataclass(slots=True)
class Total:
    """The sum of several timings."""

    name: str
    count: int = 0
    ns: float = 0.0
    net_ns: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0

    def add(self, timing: DispatchTiming) -> None:
        self.count += 1
        self.ns += timing.ns
        self.net_ns += timing.net_ns
        self.flops += timing.flops
        self.bytes += timing.bytes


def totals(timings: Iterable[DispatchTiming], by: str) -> list[Total]:
    """Sums by "kernel", "op" or "layer": layers in their order, the others by their time."""
    found: dict[str, Total] = {}
    for timing in timings:
        layer = "-" if timing.layer is None else str(timing.layer)
        name = {"op": f"{timing.op} ({timing.kernel})", "kernel": timing.kernel, "layer": layer}[by]
        found.setdefault(name, Total(name)).add(timing)
    rows = list(found.values())
    if by == "layer":
        return sorted(rows, key=lambda t: (t.name == "-", int(t.name) if t.name != "-" else 0))
    return sorted(rows, key=lambda t: -t.net_ns)


def computing(profile: Profile) -> list[tuple[int, Total]]:
    """(number of the phase, operation) of everything that computes: the points of a roofline."""
    return [(i, t) for i, p in enumerate(profile.phases) for t in totals(p.timings, "op") if t.flops and t.net_ns]


def ceilings(profile: Profile) -> list[tuple[str, float]]:
    """Name and operations/s of the roofline's ceilings: int8 only where the model computes in it.

    A kernel that is faster than the measured peak of its arithmetic raises the ceiling.
    """
    reached = max((t.flops / t.net_ns * 1e9 for _, t in computing(profile)), default=0.0)
    if profile.precision != Precision.FAST:
        return [("f32", max(profile.f32_peak, reached))]
    return [("f32", profile.f32_peak), ("int8", max(profile.int8_peak, reached))]


def profile(engine: Engine, name: str, n_prompt: int, n_gen: int, depth: int, copy: float | None = None) -> Profile:
    """Time a prefill of `n_prompt` tokens and `n_gen` decode steps, both at `depth`. The engine is unfused afterwards.

    `copy` is the copy bandwidth in bytes/s, where it is known.
    """
    gpu, model, watch = engine.gpu, engine.model, Stopwatch(engine.gpu)
    if watch.timestamps is None:
        raise LlamaGpuError(
            f"{gpu.name} has no timestamps inside passes", "`bench` works without them, on the host's clock"
        )
    start, rows = max(1, depth), min(n_prompt, model.chunk)
    sequence = Sequence()
    engine.reserve(sequence, max(depth + rows, start + n_gen))
    phases, fused_ns = [], None
    if model.fused:
        if n_gen:
            fused_ns = quickest(engine, watch, decoding(engine, start, n_gen))
        assert isinstance(model, BufferModel)
        model.unfuse()
    if n_prompt:
        prefill = [Step(model.plan(rows, depth), rows, depth)]
        phases.append(phase(engine, watch, f"prefill of {rows} at {depth}", prefill))
    if n_gen:
        timed = phase(engine, watch, f"{n_gen} tokens at {start}", decoding(engine, start, n_gen))
        phases.append(replace(timed, fused_ns=fused_ns))
    engine.discard(sequence)
    return Profile(
        model=name,
        adapter=gpu.name,
        driver=gpu.info["description"],
        backend=str(gpu.info["library"]),
        precision=str(model.precision),
        copy=copy or copy_bandwidth(gpu),
        f32_peak=peak_flops(gpu, int8=False),
        int8_peak=peak_flops(gpu, int8=True),
        phases=tuple(phases),
    )


def decoding(engine: Engine, start: int, count: int) -> list[Step]:
    return decode_steps(engine, start, count, engine.model.sample_plan(greedy=True))


def rewind(engine: Engine, first: Step) -> None:
    """Write the inputs of the first step again: each decode step replaces them by those of the next."""
    segment = Segment(0, first.position, [0] * first.rows)
    engine.model.write_step([segment])


def quickest(engine: Engine, watch: Stopwatch, steps: list[Step]) -> float:
    """Nanoseconds of the pass without timestamps inside, settled: a driver may replace fresh kernels by faster ones."""

    def run() -> float:
        rewind(engine, steps[0])
        return watch.pass_ns(steps)

    def seconds() -> float:  # by wall clock: of a small model the GPU has little to do
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    if engine.gpu.software:
        run()
    else:
        Settling(FRESH_S).wait(seconds)
    return min(run() for _ in range(REPEATS))


def phase(engine: Engine, watch: Stopwatch, name: str, steps: list[Step]) -> Phase:
    """Run `steps` several times from the same position; keep the fastest pass with timestamps and without."""

    def run() -> tuple[NDArray[np.float64], Span]:
        rewind(engine, steps[0])
        return watch.dispatches_ns(steps)

    plain_ns = quickest(engine, watch, steps)
    run()
    stamps, host = min((run() for _ in range(REPEATS)), key=lambda found: found[0][-1] - found[0][0])
    widths = np.diff(stamps)
    # Every timestamp costs the same, and no more than the shortest dispatch took with one.
    cost = float(np.clip((widths.sum() - plain_ns) / len(widths), 0, widths.min()))
    net = np.maximum(widths - cost, widths / 20)
    timings: list[DispatchTiming] = []
    for step in steps:
        for d in step.plan.dispatches:
            i = len(timings)
            flops, moved = work(d, step.rows, step.position, engine.cache.kv_type)
            timings.append(DispatchTiming(d.kernel, d.op, d.layer, stamps[i], widths[i], net[i], flops, moved))
    rows = steps[0].rows
    count = 1 if rows > 1 else max(1, len(steps) // 2)  # a token is a step of the model and a step of sampling
    return Phase(name, count, rows * count, tuple(timings), plain_ns, float(widths.sum()), host)


# The work of a dispatch


def work(dispatch: Dispatch, rows: int, position: int, kv_type: KvType) -> tuple[float, float]:
    """(operations, bytes) at least: weights, inputs and KV cache are read once, results are written once."""
    shape, consts = dispatch.shape, dispatch.consts
    if isinstance(shape, Linear):
        return linear_work(dispatch, shape, 1 if shape.m == 1 else rows)
    if isinstance(shape, ExpertLinear):
        choices = shape.used * (1 if shape.linear.m == 1 else rows)
        return linear_work(dispatch, shape.linear, choices, min(1.0, choices / shape.experts))
    if isinstance(shape, Attention):
        return attention_work(dispatch.kernel, shape, rows, position, kv_type)
    if isinstance(shape, RowWise):
        rows = 1 if consts.get("LAST_ROWS") else rows
        return 0.0, rows * shape.width * ROW_WISE_BYTES.get(dispatch.kernel, 8)
    return 0.0, 8.0 * consts.get("CANDIDATES", 0) + 4.0 * consts.get("VOCAB", 0)  # sampling


def linear_work(dispatch: Dispatch, shape: Linear, rows: int, share: float = 1.0) -> tuple[float, float]:
    """`share`: of the weights that are read."""
    weights = share * sum(nbytes(dispatch.bindings[name]) for name in ("w", "scales") if name in dispatch.bindings)
    if dispatch.op == "embedding":  # looks up a row of the matrix for each token
        return 0.0, rows * (weights / shape.n + 4 * shape.k)
    int8 = shape.inputs is Inputs.INT8 and shape.prologue is Prologue.NONE  # a prologue reads f32
    inputs = (2 if shape.inputs is Inputs.F16 else INT8_VALUE_BYTES if int8 else 4) * shape.k
    return 2.0 * rows * shape.n * shape.k, weights + rows * (inputs + 4 * shape.n)


def attention_work(kernel: str, shape: Attention, rows: int, position: int, kv_type: KvType) -> tuple[float, float]:
    width, window = shape.heads * shape.head_dim, shape.window
    if kernel == "attend_merge":
        return 0.0, 4.0 * rows * width * (shape.splits + 1)
    if kernel in ("rotate", "rotate_texture"):
        return 0.0, 8.0 * rows * (width + 2 * shape.kv_heads * shape.head_dim)
    if kernel == "attend_texture_values":
        return 0.0, 0.0  # attend_texture_scores counts for both
    end = position + rows
    seen = sum(min(p, window or p) for p in range(position + 1, end + 1))
    positions = min(end, (window or end) + rows)
    cache = 2 * shape.kv_heads * kv_type.head_bytes(shape.head_dim) * positions
    return 4.0 * width * seen, cache + 8.0 * rows * width
