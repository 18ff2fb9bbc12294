"""Linears, norms and attention: every row of the route tables on small shapes, with its answer in float64."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from llamagpu.engine import ops
from llamagpu.engine.weights import Matrix
from llamagpu.gpu import routes
from llamagpu.gpu.device import Gpu
from llamagpu.gpu.routes import Linear, Route
from llamagpu.tools import baselines, oracle
from llamagpu.tools.oracle import F32, RECORD, REQUANTISED, Array, Case, Weight, fits, only, random, run

Answer = tuple[Any, Any]  # what the device gives, what it should


def kernel_cases(gpu: Gpu, quick: bool) -> Iterator[Case]:
    yield from linear_cases(gpu, quick)
    yield from stage_cases(gpu)
    yield from collected_cases(gpu)
    yield from norm_cases(gpu)
    yield from attention_cases(gpu, quick)


# Linears

PLAIN = Weight("q4", 71, 576)
FORMS = (
    Weight("q8", 71, 576), Weight("f16", 71, 576), Weight("q6", 71, 2304, 16, scale="i1"),
    Weight("q4", 66, 256, 32, pair=True, scale="i1"), Weight("q4", 9, 36, 12, pair=True),
    Weight("f16", 5, 129),
)  # fmt: skip
LONG = (Weight("q4", 31, 8448, 32, pair=True, scale="i1"), Weight("q6", 30, 8448, 16, scale="i1"))
STAGES = (
    *((PLAIN, inputs) for inputs in ("norm", "merge", "norm_f32", "merge_f32", "quads_f32")),
    *((weight, inputs) for weight in LONG for inputs in ("norm", "quads_f32")),
)
LEAST_K = {"f32": 1, "i8": 32, "norm": 576, "merge": 576}
WIDE = (Weight("q4", 8193, 64), Weight("q4", 3073, 64))  # with tiles of their own


def linear_cases(gpu: Gpu, quick: bool) -> Iterator[Case]:
    """Each row of the table on one shape, each kernel on every storage form."""
    table = (*routes.LINEAR, baselines.GEMM_ROWS)
    for weight in (PLAIN,) if quick else (PLAIN, *FORMS):
        for inputs in (i for i, least in LEAST_K.items() if weight.k % least == 0):
            for m in (1, 3, 8, 16, 70)[: 1 if inputs in routes.MADE else 5]:
                fitting = [r for r in table if fits(r, gpu.caps, weight.shape(m, inputs))]
                if m in (3, 8, 16):  # for kernels that take no more
                    fitting = [r for r in fitting if not fits(r, gpu.caps, weight.shape(70, inputs))]
                if weight is not PLAIN or quick:
                    fitting = list({r.kernel: r for r in reversed(fitting)}.values())
                for route in distinct(fitting):
                    yield linear_case(gpu, route, weight, inputs, m)
    for weight in () if quick else WIDE:
        shape = weight.shape(70, "i8")
        yield linear_case(gpu, routes.pick(routes.LINEAR, shape, gpu.caps), weight, "i8", 70)


def linear_case(gpu: Gpu, route: Route, weight: Weight, inputs: str, m: int) -> Case:
    bound = REQUANTISED if inputs in routes.MADE else F32
    shape = f"{weight.name}, {inputs} x, m {m}{tuning(route)}"
    return Case(route.kernel, shape, partial(linear, gpu, route, weight, inputs, m), bound)


def tuning(route: Route) -> str:
    return "".join(f", {name.lower()} {value}" for name, value in route.consts.items())


def distinct(table: Iterable[Route]) -> Iterable[Route]:
    """Rows that make different kernels: some only tell apart when one is taken."""
    return {(r.kernel, str(r.consts)): r for r in table}.values()


def stage_cases(gpu: Gpu) -> Iterator[Case]:
    """linear_turns by itself, where it has too few workgroups for its rows; in two shapes with more rounds than are on
    their way, and some lanes idle in the last."""
    for weight, inputs in STAGES if gpu.caps.subgroup else ():
        route = routes.joined_linear(weight.shape(1, inputs), routes.Crew(1, 128), gpu.caps)
        compare = partial(linear, gpu, replace(route, grid=lambda *_: (3, 1, 1)), weight, inputs, 1)
        bound = F32 if inputs.endswith("f32") else REQUANTISED
        yield Case(route.kernel, f"{weight.name}, {inputs} x", compare, bound)


def linear(gpu: Gpu, route: Route, weight: Weight, inputs: str, m: int) -> Answer:
    part, packed = weight.upload(gpu)
    matrix, step = Matrix(weight.n, weight.k, (part,)), oracle.step_buffer(gpu, m)
    buffer, x, more = linear_inputs(gpu, m, weight.k, inputs)
    y = gpu.zeros(m * weight.n * 4, "y")
    run(gpu, ops.linear(gpu, buffer, matrix, m, ops.store(y, matrix), step, table=only(route), **more), m)
    want = x @ oracle.rows_of(packed, np.arange(weight.n)).T
    return gpu.read(y, np.float32, want.size).reshape(want.shape), want


def linear_inputs(gpu: Gpu, m: int, k: int, inputs: str) -> tuple[Any, Array, dict[str, Any]]:
    """x on the device, x as the linear sees it, and what else `linear` wants."""
    x = random("x").standard_normal((m, k)).astype(np.float32)
    if inputs == "f32":
        return gpu.upload(x, "x"), x.astype(np.float64), {}
    if inputs == "i8":
        records = oracle.to_records(x)
        return gpu.upload(records, "x"), oracle.from_records(records), {"inputs": "i8"}
    if inputs == "quads_f32":
        quads = np.ascontiguousarray(x.reshape(k // 32, 8, 4).swapaxes(0, 1))
        return gpu.upload(quads, "x"), x.astype(np.float64), {"inputs": inputs}
    seen: Callable[[Array], Array] = (lambda v: v) if inputs.endswith("f32") else oracle.rounded
    if inputs.startswith("merge"):  # two splits that count alike
        stats = np.tile(np.array([0.5, 1.0], np.float32), (k // 64, 2, 1))
        made = ops.Made({"stats": gpu.upload(stats, "stats")}, {"HEAD_DIM": 64, "SPLITS": 2}, ("splits_fixed",))
        halves = random("halves").standard_normal((k // 64, 2, 64)).astype(np.float32)
        joined = halves.astype(np.float64).mean(axis=1).reshape(1, k)
        return gpu.upload(halves, "x"), seen(joined), {"inputs": inputs, "made": made}
    weight = random("norm").uniform(0.5, 2.0, k).astype(np.float32)
    made = ops.Made({"norm": gpu.upload(weight, "norm")}, {"EPS": 0.25})
    return gpu.upload(x, "x"), seen(oracle.rms_norm(x, weight, 0.25)), {"inputs": inputs, "made": made}


# Outputs for which a workgroup brings its rows together: logits with candidates, silu(gate) * up as records

JOINT = Weight("q4", 192, 576)


def collected_cases(gpu: Gpu) -> Iterator[Case]:
    for inputs in ("f32", "i8"):
        for route in collecting(gpu, JOINT.shape(1, inputs, "out_logits")):
            said = f"out_logits {JOINT.name}, {inputs} x{tuning(route)}"
            yield Case(route.kernel, said, partial(logits, gpu, route, inputs))
        for m in (1, 4, 8, 30, 70):
            for route in collecting(gpu, JOINT.shape(m, inputs, "out_swiglu_i8"))[:1]:
                said = f"out_swiglu_i8 {JOINT.name}, {inputs} x, m {m}"
                yield Case(route.kernel, said, partial(hidden, gpu, route, inputs, m), REQUANTISED)


def collecting(gpu: Gpu, shape: Linear) -> list[Route]:
    return list(distinct(r for r in routes.LINEAR if fits(r, gpu.caps, shape) and r.collects))


def joint(gpu: Gpu, route: Route, inputs: str, out: ops.Out, m: int = 1) -> Array:
    """Runs it; the [m, 192] results as float64."""
    part, packed = JOINT.upload(gpu)
    matrix, step = Matrix(JOINT.n, JOINT.k, (part,)), oracle.step_buffer(gpu, m)
    buffer, x, more = linear_inputs(gpu, m, JOINT.k, inputs)
    run(gpu, ops.linear(gpu, buffer, matrix, m, out, step, table=only(route), **more), m)
    return np.asarray(x @ oracle.rows_of(packed, np.arange(JOINT.n)).T)


def logits(gpu: Gpu, route: Route, inputs: str) -> Answer:
    y, best = gpu.zeros(JOINT.n * 4, "y"), gpu.zeros(JOINT.n * 8, "best")
    want = joint(gpu, route, inputs, ops.Out("out_logits", {"y": y, "best": best}))[0]
    groups = ops.workgroups(gpu, route, JOINT.shape(1, inputs, "out_logits"))
    top = gpu.read(best, np.float32, 2 * groups)[::2].max()
    return [*gpu.read(y, np.float32, JOINT.n), top], [*want, want.max()]


def hidden(gpu: Gpu, route: Route, inputs: str, m: int) -> Answer:
    count = m * JOINT.n // 64
    y = gpu.zeros(count * RECORD.itemsize, "y")
    out = ops.Out("out_swiglu_i8", {"y": y}, {"WIDTH": JOINT.n})
    gate, up = np.moveaxis(joint(gpu, route, inputs, out, m).reshape(m, -1, 2), 2, 0)
    got = oracle.from_records(gpu.read(y, RECORD, count).reshape(m, -1))
    return got, oracle.rounded(oracle.silu(gate) * up)


# Norms


def norm_cases(gpu: Gpu) -> Iterator[Case]:
    for route in (*routes.NORM, *routes.NORM_I8):
        for width, m in ((576, 5), (2048, 1), (577, 3)):
            if fits(route, gpu.caps, width):
                bound = REQUANTISED if route in routes.NORM_I8 else F32
                yield Case(route.kernel, f"width {width}, m {m}", partial(norm, gpu, route, width, m), bound)
    yield Case("rms_norm_plain", "width 576, m 5, with mul", partial(two_step_norm, gpu, 576, 5))


def norm_data(width: int, m: int) -> tuple[Array, Array]:
    rng = random("norm")
    x = rng.standard_normal((m, width)).astype(np.float32) * np.float32(3)
    return x, rng.standard_normal(width).astype(np.float32)


def norm(gpu: Gpu, route: Route, width: int, m: int) -> Answer:
    x, weight = norm_data(width, m)
    y, step = gpu.zeros(m * width * 4, "y"), oracle.step_buffer(gpu, m)
    xs, ws = gpu.upload(x, "x"), gpu.upload(weight, "w")
    run(gpu, [ops.rms_norm(gpu, xs, ws, y, width, 1e-5, m, step, table=only(route))], m)
    want = oracle.rms_norm(x, weight, 1e-5)
    if route in routes.NORM_I8:
        records = gpu.read(y, RECORD, m * width // 32).reshape(m, -1)
        return oracle.from_records(records), oracle.rounded(want)
    return gpu.read(y, np.float32, x.size).reshape(x.shape), want


def two_step_norm(gpu: Gpu, width: int, m: int) -> Answer:
    x, weight = norm_data(width, m)
    between, y = gpu.zeros(x.nbytes, "between"), gpu.zeros(x.nbytes, "y")
    xs, ws = gpu.upload(x, "x"), gpu.upload(weight, "w")
    run(gpu, baselines.norm_then_mul(gpu, xs, ws, between, y, width, 1e-5), m)
    return gpu.read(y, np.float32, x.size).reshape(x.shape), oracle.rms_norm(x, weight, 1e-5)


# Attention

CAPACITY = 240
ROUGH = (2e-4, 3e-2)  # queries and keys of int8, values of f16; the same for records of it
Heads = tuple[int, int, int]  # count, kv heads, head_dim


def attention_cases(gpu: Gpu, quick: bool) -> Iterator[Case]:
    shapes: tuple[Heads, ...] = ((4, 2, 64), (2, 1, 128), (2, 1, 48), (2, 2, 6))
    for heads in shapes[: 1 if quick else 4]:
        count, kv_heads, head_dim = heads
        for m, pos in ((1, 200), (8, 60), (33, 65)):
            for route in (*routes.ATTEND, baselines.ATTEND_STRIDED):
                for kv_f32 in (False, True)[: 2 if head_dim == 64 else 1]:
                    if fits(route, gpu.caps, head_dim, m) and (m != 8 or route.kernel == "attend_split"):
                        kind = "f32" if kv_f32 else "f16"
                        shape = f"{count} heads of {head_dim}, {kv_heads} kv, {kind}, m {m} at {pos}"
                        yield Case(route.kernel, shape, partial(attend, gpu, route, heads, m, pos, kv_f32))
    for route in routes.ATTEND:
        for i8 in (False, True):
            kind = "i8" if i8 else "f32"
            if route.kernel == "attend_split" and fits(route, gpu.caps, 64, 1):
                compare = partial(attend, gpu, route, shapes[0], 1, 200, False, splits=4, i8=i8)
                shape, bound = f"4 heads of 64 at 200, 4 splits, {kind}", REQUANTISED if i8 else F32
                yield Case("attend_merge", shape, compare, bound)
            rough = [h for h in shapes if route.kernel == "attend_tile" and routes.rough_tile(h[2], gpu.caps)]
            for heads in [h for h in rough if fits(route, gpu.caps, h[2], 33)]:
                compare = partial(attend, gpu, route, heads, 33, 65, False, i8=i8, rough=True)
                yield Case("attend_tile", f"heads of {heads[2]} in int8, m 33 at 65, {kind}", compare, ROUGH)


def attend(
    gpu: Gpu, route: Route, heads: Heads, m: int, pos: int, kv_f32: bool, splits: int = 1, i8: bool = False,
    rough: bool = False,
) -> Answer:  # fmt: skip
    count, kv_heads, head_dim = heads
    config, rng = oracle.heads_config(*heads), random(f"attention {heads}")
    q = rng.standard_normal((m, count, head_dim)).astype(np.float32)
    k, v = rng.standard_normal((2, kv_heads, CAPACITY, head_dim)).astype(np.float32 if kv_f32 else np.float16)
    y, step = gpu.zeros(q.nbytes, "y"), oracle.step_buffer(gpu, m, pos, CAPACITY)
    partial_sums, stats = gpu.zeros(q.nbytes * splits, "partial"), gpu.zeros(count * splits * 8 + 16, "stats")
    qs, ks, vs = gpu.upload(q, "q"), gpu.upload(k, "k"), gpu.upload(v, "v")
    out, table = y if splits == 1 else partial_sums, only(route)
    work = [ops.attend(gpu, config, qs, ks, vs, out, m, step, kv_f32, table, i8, splits, stats, rough=rough)]
    if splits > 1:
        work.append(ops.attend_merge(gpu, config, partial_sums, stats, y, splits, i8))
    run(gpu, work, m, pos)
    want = oracle.attention(q, k[:, : pos + m], v[:, : pos + m], pos)
    if i8:
        records = gpu.read(y, RECORD, q.size // 32).reshape(m, -1)
        return oracle.from_records(records), oracle.rounded(want.reshape(m, -1))
    return gpu.read(y, np.float32, q.size).reshape(q.shape), want
