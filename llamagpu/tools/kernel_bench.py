"""Each specialised kernel against its naive baseline on the GPU's clock, over the shapes of real models."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from llamagpu.engine.synthetic import SHAPES, synthetic_config
from llamagpu.gpu import routes
from llamagpu.gpu.device import Gpu
from llamagpu.gpu.routes import Route
from llamagpu.gpu.timing import Stopwatch
from llamagpu.tools import baselines
from llamagpu.tools.bench_tests import BadValue
from llamagpu.tools.kernel_times import LinearTimes, Timed, attend_time, norm_time, whole_ns
from llamagpu.tools.oracle import Weight, only
from llamagpu.tools.report import table as as_table

TOKENS = (32, 128, 512)
DEPTH = 1024  # positions that one token attends to
OPS = {
    "gemm": "register-tiled GEMM against one row pair and token per workgroup",
    "gemv": "the kernel for one token against the tiled GEMM at M = 1",
    "loads": "16-byte against 4-byte loads of weights, both in f32",
    "norm": "rms_norm by vec4 against by scalars",
    "fused": "rms_norm with its weight in one dispatch against a norm and a product",
    "attend": "attention reading V along head_dim against across positions",
}
# What the change was worth where it was first made: ExecuTorch and llama.cpp, on phones and Apple GPUs
CLAIMS = {
    "gemm": "3.4x at M 128",
    "loads": "2x with a layout made for it",
    "norm": "1.33x",
    "fused": "-43 % op time in decode",
    "attend": "1.24x",
}
COLUMNS = ("us", "rate", "baseline", "us", "rate", "ratio", "NMSE", "baseline NMSE")
Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class Result:
    op: str
    shape: str
    m: int
    note: str
    kernel: str
    us: float
    rate: float
    unit: str
    baseline: str
    baseline_us: float
    baseline_rate: float
    ratio: float  # baseline time over kernel time
    nmse: float  # against float64
    baseline_nmse: float
    claim: str

    def line(self) -> str:
        times = f"{self.kernel} {self.us:.1f} us, {self.baseline} {self.baseline_us:.1f} us"
        return f"{self.op} {self.shape}, m {self.m}: {times}, {self.ratio:.2f}x"


def result(op: str, shape: str, m: int, note: str, fast: Timed, slow: Timed, work: float, unit: str = "GB/s") -> Result:
    """`work`: bytes for GB/s, operations for GFLOP/s; both are 1e9 per second, so one per ns."""
    (kernel, ns, nmse), (baseline, slow_ns, slow_nmse) = fast, slow
    return Result(
        op, shape, m, note, kernel, ns / 1e3, work / ns, unit, baseline, slow_ns / 1e3, work / slow_ns,
        slow_ns / ns, nmse, slow_nmse, CLAIMS.get(op, ""),
    )  # fmt: skip


def kernel_bench(gpu: Gpu, wanted: Sequence[str], shapes: Sequence[str], tokens: Tokens) -> Iterator[Result]:
    """Results as they are measured; shapes are names of synthetic models, or NxK for the linears alone."""
    watch = Stopwatch(gpu)
    runs: dict[str, Callable[[Gpu, Stopwatch, str, Tokens], Iterator[Result]]] = {
        "gemm": gemm, "gemv": gemv, "loads": loads, "norm": norm, "fused": fused, "attend": attend,
    }  # fmt: skip
    for op in wanted:
        for shape in shapes:
            if shape in SHAPES or op in ("gemm", "gemv", "loads"):
                yield from runs[op](gpu, watch, shape, tokens)


def check_shape(shape: str) -> str:
    n, _, k = shape.partition("x")
    if shape in SHAPES or (n.isdigit() and k.isdigit() and int(n) > 0 and int(k) > 0 and int(k) % 64 == 0):
        return shape
    raise BadValue(f"no shape is called {shape!r}", f"choose {', '.join(SHAPES)}, or NxK with K % 64 = 0")


def markdown(rows: Sequence[Result]) -> str:
    """A table per operation."""
    parts = []
    for op in dict.fromkeys(r.op for r in rows):
        cells = [
            [r.shape, str(r.m), r.note or "-", r.kernel, f"{r.us:.1f}", f"{r.rate:.4g} {r.unit}", r.baseline,
             f"{r.baseline_us:.1f}", f"{r.baseline_rate:.4g} {r.unit}", f"{r.ratio:.2f}", f"{r.nmse:.0e}",
             f"{r.baseline_nmse:.0e}"]
            for r in rows if r.op == op
        ]  # fmt: skip
        claim = f" (where it was first done: {CLAIMS[op]})" if op in CLAIMS else ""
        parts.append(f"{op}: {OPS[op]}{claim}\n\n{as_table(('shape', 'm', 'note', 'kernel', *COLUMNS), cells, 4)}")
    return "\n".join(parts)


# Linears


def matrices(shape: str) -> list[tuple[str, Weight]]:
    """The matrices of a layer, in Q4_0's layout."""
    if shape not in SHAPES:
        n, k = map(int, shape.split("x"))
        return [(f"{n}x{k}", Weight("q4", n, k))]
    c = synthetic_config(shape)
    sizes = {
        "qkv": ((c.heads + 2 * c.kv_heads) * c.head_dim, c.dim),
        "attn_output": (c.dim, c.heads * c.head_dim),
        "gate_up": (2 * c.ffn_dim, c.dim),
        "ffn_down": (c.dim, c.ffn_dim),
    }
    return [(f"{shape} {role} {n}x{k}", Weight("q4", n, k)) for role, (n, k) in sizes.items()]


def row(kernel: str) -> tuple[Route, ...]:
    """The first row of the table with this kernel, whatever the shape."""
    return only(next(r for r in routes.LINEAR if r.kernel == kernel))


def kinds(gpu: Gpu) -> tuple[str, ...]:
    return ("f32", "i8", "images") if gpu.caps.cpu else ("f32", "i8")


def gemm(gpu: Gpu, watch: Stopwatch, shape: str, tokens: Tokens) -> Iterator[Result]:
    for name, weight in matrices(shape):
        times = LinearTimes(gpu, watch, weight, max(tokens))
        for m in tokens:
            slow, flops = times.time(m, only(baselines.GEMM_ROWS)), 2 * m * weight.n * weight.k
            for kind in kinds(gpu):
                fast = times.time_choice(m, kind)
                yield result("gemm", name, m, f"x in {kind}", fast, slow, flops, "GFLOP/s")
        times.close()


def gemv(gpu: Gpu, watch: Stopwatch, shape: str, tokens: Tokens) -> Iterator[Result]:
    for name, weight in matrices(shape):
        times = LinearTimes(gpu, watch, weight, 1)
        slow = times.time(1, row("linear_gemm"))
        for kind in kinds(gpu):
            yield result("gemv", name, 1, f"x in {kind}", times.time_choice(1, kind), slow, times.bytes)
        times.close()


def loads(gpu: Gpu, watch: Stopwatch, shape: str, tokens: Tokens) -> Iterator[Result]:
    for name, weight in matrices(shape):
        times = LinearTimes(gpu, watch, weight, 1)
        table = [r for r in routes.LINEAR if r.kernel == "linear_gemv"]  # the setting that this shape takes
        fast, slow = times.time(1, table), times.time(1, row("linear_gemv_word"))
        yield result("loads", name, 1, "", fast, slow, times.bytes)
        times.close()


# Norms


def norm(gpu: Gpu, watch: Stopwatch, shape: str, tokens: Tokens) -> Iterator[Result]:
    width = SHAPES[shape].dim
    for m in (1, max(tokens)):
        fast, slow = (norm_time(gpu, watch, width, m, kernel) for kernel in ("rms_norm_vec4", "rms_norm"))
        yield result("norm", f"{shape} width {width}", m, "", fast, slow, 8 * m * width)


def fused(gpu: Gpu, watch: Stopwatch, shape: str, tokens: Tokens) -> Iterator[Result]:
    width = SHAPES[shape].dim
    for m in (1, max(tokens)):
        fast, slow = (norm_time(gpu, watch, width, m, k) for k in ("rms_norm_vec4", "rms_norm_plain"))
        # whole models run on images on a CPU, with another norm
        note = "" if gpu.software else shares(shape, fast[1], slow[1], whole_ns(gpu, watch, shape, m))
        yield result("fused", f"{shape} width {width}", m, note, fast, slow, 8 * m * width)


def shares(shape: str, fast_ns: float, slow_ns: float, whole_ns: float) -> str:
    """What all norms of a step are of it, fused as they are and if they were not."""
    count = 2 * SHAPES[shape].layers + 1
    pair = count * slow_ns / (whole_ns + count * (slow_ns - fast_ns))
    return f"{count * fast_ns / whole_ns:.1%} of a step, the pair {pair:.1%}"


# Attention


def attend(gpu: Gpu, watch: Stopwatch, shape: str, tokens: Tokens) -> Iterator[Result]:
    """The plain kernel, and what the routes take instead of it."""
    s = SHAPES[shape]
    name = f"{shape} {s.heads} heads of {s.head_dim}, {s.kv_heads} kv"
    plain = only(next(r for r in routes.ATTEND if r.kernel == "attend"))
    for m, pos in ((1, DEPTH - 1), (max(tokens), 0)):
        seen = m * pos + m * (m + 1) // 2  # positions, over all tokens
        kv_bytes = 2 * s.kv_heads * (pos + m) * s.head_dim * (2 if gpu.caps.half else 4)
        work, unit = (kv_bytes, "GB/s") if m == 1 else (4 * s.heads * s.head_dim * seen, "GFLOP/s")
        slow = attend_time(gpu, watch, shape, m, pos, only(baselines.ATTEND_STRIDED))
        for table in (plain, routes.ATTEND):
            fast = attend_time(gpu, watch, shape, m, pos, table)
            if table is plain or fast[0] != "attend":
                yield result("attend", name, m, f"over {pos + m} positions", fast, slow, work, unit)
