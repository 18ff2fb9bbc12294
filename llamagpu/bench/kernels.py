"""Measures each specialised kernel against its naive baseline on the GPU's clock, in the shapes of real models."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from llamagpu.bench.cases import BadValue
from llamagpu.bench.kernel_times import LinearTimes, Timed, attend_time, norm_time, step_ns
from llamagpu.engine import baselines, routes
from llamagpu.engine.routes import Inputs, Linear, Table
from llamagpu.engine.synthetic import SHAPES, synthetic_config
from llamagpu.files.config import CONV_IN, CONV_OUT
from llamagpu.files.storage import Storage
from llamagpu.gpu.device import Gpu
from llamagpu.gpu.timing import Stopwatch
from llamagpu.markdown import table as as_table
from llamagpu.verify.reference import Weight, only

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
# Where each idea comes from and its gain there, on phones and Apple GPUs
CLAIMS = {
    "gemm": "ExecuTorch's WebGPU backend gained 3.4x at M 128",
    "loads": "ExecuTorch's Vulkan backend gained 2x, with a layout made for it",
    "norm": "ExecuTorch's WebGPU backend gained 1.33x",
    "fused": "ggml-webgpu took 43 % off the op time in decode",
    "attend": "ExecuTorch's WebGPU backend gained 1.24x",
}
NOT_USED = "not used here"
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


def result(
    op: str, shape: str, m: int, note: str, kernel: Timed, baseline: Timed, work: float, unit: str = "GB/s"
) -> Result:
    """`work`: bytes for GB/s, operations for GFLOP/s. Both are 1e9 per second, which is one per ns."""
    return Result(
        op=op,
        shape=shape,
        m=m,
        note=note,
        kernel=kernel.kernel,
        us=kernel.ns / 1e3,
        rate=work / kernel.ns,
        unit=unit,
        baseline=baseline.kernel,
        baseline_us=baseline.ns / 1e3,
        baseline_rate=work / baseline.ns,
        ratio=baseline.ns / kernel.ns,
        nmse=kernel.nmse,
        baseline_nmse=baseline.nmse,
        claim=CLAIMS.get(op, ""),
    )


def kernel_bench(gpu: Gpu, wanted: Sequence[str], shapes: Sequence[str], tokens: Tokens) -> Iterator[Result]:
    """Yield each result when it is measured. Shapes are names of synthetic models, or NxK for linears."""
    watch = Stopwatch(gpu)
    runs: dict[str, Callable[[Gpu, Stopwatch, str, Tokens], Iterator[Result]]] = {
        "gemm": gemm,
        "gemv": gemv,
        "loads": loads,
        "norm": norm,
        "fused": fused,
        "attend": attend,
    }
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
    """A table for each operation."""
    tables = []
    for op in dict.fromkeys(r.op for r in rows):
        claim = f" ({CLAIMS[op]})" if op in CLAIMS else ""
        table = as_table(("shape", "m", "note", "kernel", *COLUMNS), [cells(r) for r in rows if r.op == op], 4)
        tables.append(f"{op}: {OPS[op]}{claim}\n\n{table}")
    return "\n".join(tables)


def cells(r: Result) -> list[str]:
    times = [f"{r.us:.1f}", f"{r.rate:.4g} {r.unit}", r.baseline, f"{r.baseline_us:.1f}"]
    ratio = [f"{r.baseline_rate:.4g} {r.unit}", f"{r.ratio:.2f}", f"{r.nmse:.0e}", f"{r.baseline_nmse:.0e}"]
    return [r.shape, str(r.m), r.note or "-", r.kernel, *times, *ratio]


def note(gpu: Gpu, text: str = "") -> str:
    """The note of a kernel on buffers. On a CPU models run on textures, with other kernels."""
    return "; ".join(filter(None, (text, NOT_USED if gpu.caps.cpu else "")))


# Linears


def matrices(shape: str) -> list[tuple[str, Weight]]:
    """The matrices of a layer, in the layout of Q4_0."""
    if shape not in SHAPES:
        n, k = map(int, shape.split("x"))
        return [(f"{n}x{k}", Weight(Storage.Q4, n, k))]
    c = synthetic_config(shape)
    sizes = {
        "qkv": (c.q_width + 2 * c.kv_width, c.dim),
        "attn_output": (c.dim, c.q_width),
        "gate_up": (2 * c.ffn_dim, c.dim),
        "ffn_down": (c.dim, c.ffn_dim),
    }
    if c.conv_taps:
        sizes |= {CONV_IN: (3 * c.dim, c.dim), CONV_OUT: (c.dim, c.dim)}
    return [(f"{shape} {role} {n}x{k}", Weight(Storage.Q4, n, k)) for role, (n, k) in sizes.items()]


def first_route(kernel: str) -> Table[Linear]:
    """A table with only the first route of this kernel."""
    return only(next(route for route in routes.LINEAR if route.kernel == kernel))


def selected(times: LinearTimes, m: int) -> Iterator[tuple[str, Timed]]:
    """The kernels that the routes select for f32 and int8 activations, and for the texture backend."""
    for inputs in (Inputs.F32, Inputs.INT8):
        yield note(times.gpu, f"x in {inputs}"), times.time(m, inputs=inputs)
    if times.gpu.caps.cpu:
        yield "x in textures", times.time_texture(m)


def gemm(gpu: Gpu, watch: Stopwatch, shape: str, tokens: Tokens) -> Iterator[Result]:
    for name, weight in matrices(shape):
        times = LinearTimes(gpu, watch, weight, max(tokens))
        for m in tokens:
            baseline, flops = times.time(m, only(baselines.GEMM_ROWS)), 2 * m * weight.n * weight.k
            for how, kernel in selected(times, m):
                yield result("gemm", name, m, how, kernel, baseline, flops, "GFLOP/s")
        times.close()


def gemv(gpu: Gpu, watch: Stopwatch, shape: str, tokens: Tokens) -> Iterator[Result]:
    for name, weight in matrices(shape):
        times = LinearTimes(gpu, watch, weight, 1)
        baseline = times.time(1, first_route("linear_gemm"))
        for how, kernel in selected(times, 1):
            yield result("gemv", name, 1, how, kernel, baseline, times.bytes)
        times.close()


def loads(gpu: Gpu, watch: Stopwatch, shape: str, tokens: Tokens) -> Iterator[Result]:
    for name, weight in matrices(shape):
        times = LinearTimes(gpu, watch, weight, 1)
        table = tuple(route for route in routes.LINEAR if route.kernel == "linear_gemv")  # with this shape's tuning
        kernel, baseline = times.time(1, table), times.time(1, first_route("linear_gemv_word"))
        yield result("loads", name, 1, note(gpu), kernel, baseline, times.bytes)
        times.close()


# Norms


def norm(gpu: Gpu, watch: Stopwatch, shape: str, tokens: Tokens) -> Iterator[Result]:
    width = SHAPES[shape].dim
    for m in (1, max(tokens)):
        kernel, baseline = (norm_time(gpu, watch, width, m, name) for name in ("rms_norm_vec4", "rms_norm"))
        yield result("norm", f"{shape} width {width}", m, note(gpu), kernel, baseline, 8 * m * width)


def fused(gpu: Gpu, watch: Stopwatch, shape: str, tokens: Tokens) -> Iterator[Result]:
    width = SHAPES[shape].dim
    for m in (1, max(tokens)):
        kernel, baseline = (norm_time(gpu, watch, width, m, name) for name in ("rms_norm_vec4", "rms_norm_plain"))
        share = "" if gpu.software else shares(shape, kernel.ns, baseline.ns, step_ns(gpu, watch, shape, m))
        yield result("fused", f"{shape} width {width}", m, note(gpu, share), kernel, baseline, 8 * m * width)


def shares(shape: str, kernel_ns: float, baseline_ns: float, step_ns: float) -> str:
    """The share of all norms in the time of a step: with one dispatch per norm, as in a model, and with two."""
    count = 2 * SHAPES[shape].layers + 1
    two = count * baseline_ns / (step_ns + count * (baseline_ns - kernel_ns))
    return f"{count * kernel_ns / step_ns:.1%} of a step, as two dispatches {two:.1%}"


# Attention


def attend(gpu: Gpu, watch: Stopwatch, shape: str, tokens: Tokens) -> Iterator[Result]:
    """`attend`, and the kernel that the routes select if that is another one."""
    s = SHAPES[shape]
    name = f"{shape} {s.heads} heads of {s.head_dim}, {s.kv_heads} kv"
    attend_only = only(next(route for route in routes.ATTEND if route.kernel == "attend"))
    for m, position in ((1, DEPTH - 1), (max(tokens), 0)):
        seen = m * position + m * (m + 1) // 2  # positions, over all tokens
        kv_bytes = 2 * s.kv_heads * (position + m) * s.head_dim * (2 if gpu.caps.native_f16 else 4)
        work, unit = (kv_bytes, "GB/s") if m == 1 else (4 * s.heads * s.head_dim * seen, "GFLOP/s")
        baseline = attend_time(gpu, watch, shape, m, position, only(baselines.ATTEND_STRIDED))
        route = attend_time(gpu, watch, shape, m, position, routes.ATTEND)
        over = f"over {position + m} positions"
        if route.kernel != "attend":
            kernel = attend_time(gpu, watch, shape, m, position, attend_only)
            yield result("attend", name, m, f"{over}; {NOT_USED}", kernel, baseline, work, unit)
        yield result("attend", name, m, note(gpu, over), route, baseline, work, unit)
