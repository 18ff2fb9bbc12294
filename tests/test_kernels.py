"""Every kernel, and every row of every route table, against float64: real shapes and ragged ones.
A row runs on every shape it fits, not only where it would be chosen; new rows are picked up by themselves."""

import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from reference import assert_close, attention

from llamagpu.files.config import LlamaConfig
from llamagpu.files.repack import Packed, dequantize
from llamagpu.gpu import routes, shaders
from llamagpu.gpu.routes import Caps, Linear, Route

wgpu = pytest.importorskip("wgpu")
from llamagpu.engine import ops, synthetic  # noqa: E402
from llamagpu.engine.sampler import Sampling, candidates, make_sampler, penalise  # noqa: E402
from llamagpu.engine.weights import Matrix, Part, to_q6, upload_part  # noqa: E402
from llamagpu.gpu.recorder import Plan, Recorder  # noqa: E402
from llamagpu.tools import baselines  # noqa: E402
from llamagpu.tools.oracle import step_records  # noqa: E402

# (NMSE, largest error / largest value). f32 sums of up to 8192 products: measured 1e-13 and 1e-6 at most, the
# rest is room for adapters that add in another order or whose exp and inverseSqrt are a few ulp off.
F32 = (1e-10, 1e-5)
COPIED = (1e-13, 3e-7)  # one product and one sum in f32, perhaps fused
ROUNDED = (1e-7, 2**-11)  # f16: at most 2^-11 of a value, 2^-22 / 3 of its square on average
# int8 made from f32 sums: a value between two steps may fall to the other one, 1/127 of the largest away
REQUANTISED = (1e-5, 5e-3)
TOLERANCES: dict[str, tuple[float, float]] = {}  # kernels that round more than f32 does, and why
GUARD = 77.0  # what stands where nothing may be written

# Everything a row may ask for; a row that the adapter here cannot run is skipped when its test comes.
EVERYTHING = Caps(
    cpu=False, half=True, subgroup=32, workgroups=65535, binding_bytes=1 << 30, workgroup_bytes=1 << 15,
    invocations=1024, storage_buffers=16,
)  # fmt: skip
FLOOR = replace(
    EVERYTHING, half=False, subgroup=0, workgroup_bytes=1 << 14, invocations=256, storage_buffers=8
)
SLOW = {"linear_gemv_few", *baselines.KERNELS}
COVERED: set[str] = set()


def covers(*kernels: str) -> Callable[[Any], Any]:
    COVERED.update(kernels)
    return lambda test: test


def fits(route: Route, caps: Caps, *facts: Any) -> bool:
    """Rows made for a CPU are right on a GPU, and the other way round: both run everywhere."""
    return any(route.fits(*facts, replace(caps, cpu=cpu)) for cpu in (False, True))


def runs(table: Sequence[Route], cases: Sequence[Any], floor: Callable[[Any], bool]) -> list[Any]:
    """Every (gpu, route, case) where the route fits the case. A pipeline takes half a second to compile on a
    software adapter, so some run on fewer cases: rows that only tune a kernel otherwise on the first, kernels
    that take seconds and baselines on the `main` ones, and at the floor limits only what `floor` chooses."""
    found = []
    for case in cases:
        fitting = [r for r in table if case.fits(r, EVERYTHING) and (case.main or r.kernel not in SLOW)]
        found += [("full", r, case) for r in (fitting if case.first else one_per_kernel(fitting))]
        low = [r for r in fitting if floor(case) and case.fits(r, FLOOR)]
        found += [("floor", r, case) for r in one_per_kernel(low)]
    return [pytest.param(gpu, r, c, id=f"{gpu}-{r.kernel}-{c.name}") for gpu, r, c in found]


def one_per_kernel(table: Sequence[Route]) -> list[Route]:
    return list({r.kernel: r for r in reversed(table)}.values())[::-1]


def on_gpus(params: list[Any]) -> Callable[[Any], Any]:
    COVERED.update(param.values[1].kernel for param in params)
    return pytest.mark.parametrize("any_gpu, route, case", params, indirect=["any_gpu"])


def only(gpu: Any, route: Route, case: Any) -> tuple[Route, ...]:
    """A table in which the row always wins."""
    if not case.fits(route, gpu.caps):
        pytest.skip(f"the adapter lacks what {route.kernel} needs ({route.needs})")
    return (replace(route, fits=lambda *_: True),)


def tolerance(route: Route, inputs: str = "f32") -> tuple[float, float]:
    return REQUANTISED if inputs in routes.MADE else TOLERANCES.get(route.kernel, F32)


def step(gpu: Any, m: int, pos: int = 0, capacity: int = 0) -> Any:
    return gpu.upload(np.array([pos, m, capacity, 0], np.uint32), "step", wgpu.BufferUsage.UNIFORM)


def run(gpu: Any, dispatches: list[Any], m: int, pos: int = 0) -> None:
    recorder = Recorder(gpu)
    recorder.safe = not gpu.trusted  # with bounds checks in the shaders go checked calls: both ways are used
    recorder.submit([(Plan(dispatches), m, pos)])


def random(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


def test_every_kernel_is_covered():
    kernels = {name for name, path in shaders.kernel_files().items() if path.parent.name != "parts"}
    assert {name for name in kernels if "_image" not in name} == COVERED  # those are test_tiled's


def test_every_row_has_cases():
    ran = {id(param.values[1]) for params in (LINEAR, COLLECTED, SWIGLU, NORM, ATTEND, EMBED) for param in params}
    for table in (routes.LINEAR, routes.NORM, routes.ATTEND, routes.EMBED):
        assert not [r for r in table if id(r) not in ran]


# int8 records: what a linear of precision "fast" reads, and what the kernels before it write

RECORD = np.dtype([("even", "i1", 16), ("odd", "i1", 16), ("scale", "f4", 4)])  # of 32 values


def to_records(x: np.ndarray) -> np.ndarray:
    """[m, k] -> [m, k/32] records: scale = (d, d * sum of the first 16, of the last 16, of all)."""
    blocks = x.astype(np.float64).reshape(len(x), -1, 32)
    d = np.abs(blocks).max(axis=2, keepdims=True) / 127
    ints = np.rint(blocks / np.where(d == 0, 1, d)).astype(np.int8)
    made = np.zeros(ints.shape[:2], RECORD)
    made["even"], made["odd"] = ints[..., ::2], ints[..., 1::2]
    low, high = ints[..., :16].sum(axis=2), ints[..., 16:].sum(axis=2)
    made["scale"] = d * np.stack([np.ones_like(low), low, high, low + high], axis=2)
    return made


def ints_of(made: np.ndarray) -> np.ndarray:
    return np.stack([made["even"], made["odd"]], axis=-1).reshape(*made.shape, 32).astype(np.float64)


def from_records(made: np.ndarray) -> np.ndarray:
    return (ints_of(made) * made["scale"][..., :1].astype(np.float64)).reshape(len(made), -1)


def check_records(got: np.ndarray, want: np.ndarray) -> None:
    """Each value rounded to a step of 1/127 of its block's largest; sums of what is stored, not of `want`."""
    blocks, d = want.reshape(len(want), -1, 32), got["scale"][..., 0].astype(np.float64)
    assert_close(d, np.abs(blocks).max(axis=2) / 127, *F32, "scale")
    ints = ints_of(got)
    assert (np.abs(ints * d[..., None] - blocks) <= d[..., None] * 0.501 + 1e-30).all()
    low, high = ints[..., :16].sum(axis=2), ints[..., 16:].sum(axis=2)
    sums = d[..., None] * np.stack([low, high, low + high], axis=2)
    assert (np.abs(got["scale"][..., 1:] - sums) <= 1e-6 * np.abs(sums)).all()


# Linear


@dataclass(frozen=True)
class Weight:
    form: str
    n: int
    k: int
    group: int = 0
    offset: bool = False
    scale: str = "f2"
    why: str = ""
    inputs: str = "f32"
    out: str = "out_store"

    @property
    def name(self) -> str:
        scales = "" if self.form == "f16" else f"/{self.group}{'+' if self.offset else ''}{self.scale}"
        return f"{self.form}{scales}-{self.n}x{self.k}" + f"-{self.inputs}" * (self.inputs != "f32")

    def tokens(self, route: Route, caps: Caps) -> list[int]:
        """The numbers of tokens that the row takes."""
        shape = Linear(1, self.n, self.k, self.group or self.k, self.form, self.inputs, self.out)
        return [m for m in TOKENS if fits(route, caps, replace(shape, m=m))]

    def fits(self, route: Route, caps: Caps) -> bool:
        """Outputs that collect a workgroup's rows: only what is made for them, the rest has cases enough."""
        plain = self.out != "out_store" and replace(self, out="out_store").fits(route, caps)
        return bool(self.tokens(route, caps)) and not plain

    @property
    def first(self) -> bool:
        return self.name.startswith(WEIGHTS[0].name) or self.out != "out_store" or self.n > 2000

    @property
    def main(self) -> bool:
        return self.out != "out_store" or (self.k == 576 and (self.inputs == "f32" or self.first))

    def packed(self) -> Packed:
        """As `repack` gives it: q6 comes as q8."""
        rng, n, k = random(self.name), self.n, self.k
        if self.form == "f16":
            words = (0.05 * rng.standard_normal((n, k + k % 2))).astype(np.float16)
            words[:, k:] = 0
            return Packed("f16", n, k, k, words, None)
        if self.form == "q4":
            words = rng.integers(0, 256, (n, k // 2), dtype=np.uint8)
        else:
            most = 32 if self.form == "q6" else 128
            words = rng.integers(-most, most, (n, k), dtype=np.int8)
        scales = 0.01 * rng.standard_normal((n, k // self.group, 1 + self.offset))
        scales[..., 1:] *= 10
        form = "q8" if self.form == "q6" else self.form
        made = step_records(rng, n, k, self.group, self.offset) if self.scale == "i1" else scales.astype(self.scale)
        return Packed(form, n, k, self.group, words, made)


WEIGHTS = (
    Weight("q4", 71, 576, 32, why="Q4_0, the width of SmolLM2; odd n"),
    Weight("q8", 71, 576, 32, why="Q8_0; odd n"),
    Weight("f16", 71, 576, why="odd n"),
    Weight("q4", 10, 8192, 32, offset=True, scale="i1", why="Q4_K, the down projection of Llama 1B"),
    Weight("q4", 10, 2048, 32, offset=True, scale="f4", why="an AWQ file's offsets"),
    Weight("q4", 130, 64, 32, offset=True, why="Q4_1; a third tile of 2 rows"),
    Weight("q4", 66, 256, 16, scale="i1", why="Q3_K"),
    Weight("q4", 67, 768, 16, offset=True, scale="i1", why="Q2_K; an odd number of records, and of rows"),
    Weight("q4", 64, 96, 16, offset=True, scale="f4", why="an odd number of blocks"),
    Weight("q4", 3, 128, 16, offset=True, why="groups of 16 with offsets in f16"),
    Weight("q4", 34, 256, 128, why="a group of four loads"),
    Weight("q4", 9, 40, 8, why="a group of one u32"),
    Weight("q4", 9, 36, 12, offset=True, why="k and group not % 8; words shared by rows"),
    Weight("q4", 7, 30, 5, why="an odd group: the nibbles of a byte have two scales"),
    Weight("q4", 1, 32, 32, why="one row"),
    Weight("q8", 10, 2048, 32, offset=True, scale="i1", why="Q5_K"),
    Weight("q8", 11, 512, 32, scale="i1", why="IQ4_XS"),
    Weight("q8", 66, 64, 32, offset=True, why="Q5_1"),
    Weight("q6", 71, 576, 16, scale="f4", why="Q6_K where f16 cannot be converted; odd n"),
    Weight("q6", 130, 256, 16, scale="i1", why="Q6_K"),
    Weight("q6", 7, 2048, 16, scale="i1", why="Q6_K, many records"),
    Weight("q6", 1, 64, 16, scale="f4", why="the smallest"),
    Weight("q8", 130, 96, 16, scale="f4", why="two scales per block"),
    Weight("q8", 9, 32, 8, why="a group of 8"),
    Weight("q8", 5, 96, 3, offset=True, why="an odd group"),
    Weight("q8", 1, 32, 16, scale="f4", why="one row, one block"),
    Weight("f16", 65, 40, why="k % 8 but not % 32"),
    Weight("f16", 12, 129, why="odd k: padded rows"),
    Weight("f16", 3, 6, why="less than one load"),
    Weight("f16", 1, 1, why="one weight"),
    Weight("q4", 8193, 192, 32, why="tiles enough for a large GPU; blocks left over when teams share them"),
    Weight("q8", 3073, 192, 16, why="fewer"),
)
TOKENS = (1, 2, 3, 7, 8, 9, 32, 33, 65, 70)
INPUTS = ("f32", "i8", "norm", "merge")
WIDTHS = {"f32": range(1, 8193), "i8": (128, 192, 256, 576, 2048), "norm": (576,), "merge": (576,)}
LINEAR = runs(
    (*routes.LINEAR, baselines.GEMM_ROWS),
    [replace(w, inputs=i) for w in WEIGHTS for i in INPUTS if w.k in WIDTHS[i]],
    lambda weight: weight.k == 576,
)


def upload(gpu: Any, weight: Weight, row0: int = 0) -> tuple[Part, np.ndarray]:
    """The weights on the device, and as [n, k] float64. f16 scales and steps stay as they are, also where the loader
    would widen them because the adapter cannot convert: that decoding is part of what is tested."""
    packed = weight.packed()
    part = upload_part(gpu, to_q6(packed) if weight.form == "q6" else packed, row0, weight.name)
    if packed.scales is not None and packed.scales.itemsize < 4:
        bits = 8 * packed.scales.itemsize
        part = replace(part, scales=gpu.upload(packed.scales, "scales"), scale_bits=bits)
    return part, dequantize(packed)


def upload_inputs(gpu: Any, m: int, k: int, inputs: str) -> tuple[Any, np.ndarray, dict[str, Any]]:
    """x on the device, x as [m, k] float64, and what `linear` wants to know besides."""
    x = random("x").standard_normal((m, k)).astype(np.float32)
    if inputs == "f32":
        return gpu.upload(x, "x"), x.astype(np.float64), {}
    if inputs == "i8":
        made = to_records(x)
        return gpu.upload(made, "x"), from_records(made), {"inputs": "i8"}
    if inputs == "merge":
        return upload_splits(gpu, k)
    weight = random("norm").uniform(0.5, 2.0, k).astype(np.float32)
    more = {"inputs": "norm", "made": ops.Made({"norm": gpu.upload(weight, "norm")}, {"EPS": 0.25})}
    return gpu.upload(x, "x"), from_records(to_records(normalised(x, weight, 0.25))), more


def upload_splits(gpu: Any, k: int, rounds: bool = True) -> tuple[Any, np.ndarray, dict[str, Any]]:
    """The same of attention cut into three, one of them with nothing to look at."""
    rng, splits, dim = random("splits"), 3, 64
    sums = rng.standard_normal((k // dim, splits, dim)).astype(np.float32)
    stats = rng.uniform(1, 4, (k // dim, splits, 2)).astype(np.float32)  # (top, total)
    sums[:, 1], stats[:, 1] = 0, (-1e30, 0)
    shares = np.exp(stats[..., 0].astype(np.float64) - stats[..., 0].max(axis=1, keepdims=True))
    joined = (sums * shares[..., None]).sum(axis=1) / (stats[..., 1] * shares).sum(axis=1, keepdims=True)
    made = ops.Made({"stats": gpu.upload(stats, "stats")}, {"HEAD_DIM": dim, "SPLITS": splits}, ("splits_fixed",))
    x = from_records(to_records(joined.reshape(1, k))) if rounds else joined.reshape(1, k)
    return gpu.upload(sums, "x"), x, {"inputs": "merge", "made": made}


def normalised(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + eps) * weight


@on_gpus(LINEAR)
def test_linear(any_gpu, route, case):
    gpu, table, tokens = any_gpu, only(any_gpu, route, case), case.tokens(route, any_gpu.caps)
    part, w = upload(gpu, case)
    matrix, most, n = Matrix(case.n, case.k, (part,)), max(tokens), case.n
    xs, x, more = upload_inputs(gpu, most, case.k, case.inputs)
    want = x @ w.T
    y, at = gpu.zeros((most + 1) * n * 4, "y"), step(gpu, 1)
    for m in [m for m in tokens if m < 64 or n * case.k < 20_000]:
        gpu.write(at, np.array([0, m], np.uint32))
        gpu.write(y, np.full((most + 1, n), GUARD, np.float32))
        to = ops.store(y, matrix)
        plan = ops.linear(gpu, xs, matrix, 1 if m == 1 else most, to, at, table=table, **more)
        assert [d.label for d in plan] == [route.kernel]
        run(gpu, plan, m)
        got = gpu.read(y, np.float32, (most + 1) * n).reshape(-1, n)
        assert_close(got[:m], want[:m], *tolerance(route, case.inputs), f"{m} tokens")
        assert (got[m:] == GUARD).all(), f"{m} tokens: wrote behind the last"


STAGES = [Weight("q4", 71, 576, 32), Weight("q4", 70, 2048, 32, offset=True), Weight("q6", 71, 768, 16, scale="i1"),
          Weight("q4", 30, 5376, 32, offset=True, scale="i1"), Weight("q8", 71, 192, 32),
          Weight("f16", 70, 576)]  # fmt: skip


@covers("linear_turns")
@pytest.mark.parametrize("inputs", ["norm", "merge", "norm_f32", "merge_f32"])
@pytest.mark.parametrize("case", STAGES, ids=lambda case: case.name)
def test_linear_turns(gpu, case, inputs):
    """A stage by itself, with as many workgroups as rows ask for, and with 1 and 3 that take turns."""
    if not gpu.caps.subgroup:
        pytest.skip("the adapter lacks subgroups")
    part, w = upload(gpu, case)
    matrix, y = Matrix(case.n, case.k, (part,)), gpu.zeros(case.n * 4, "y")
    exact = inputs.endswith("_f32")
    if "merge" in inputs:
        xs, x, more = upload_splits(gpu, case.k, rounds=not exact)
    else:
        xs, x, more = upload_inputs(gpu, 1, case.k, "norm")
        plain, norm = gpu.read(xs, np.float32, case.k)[None], gpu.read(more["made"].buffers["norm"], np.float32, case.k)
        x = normalised(plain, norm, 0.25) if exact else x
    for count in (1, 3, 64):
        route = routes.joined_linear(part.shape(1, inputs), routes.Crew(count, 128), gpu.caps)
        (found,) = ops.linear(
            gpu, xs, matrix, 1, ops.store(y, matrix), step(gpu, 1), inputs, (route,), more["made"]
        )
        gpu.write(y, np.full(case.n, GUARD, np.float32))
        run(gpu, [replace(found, grid=(min(count, *found.grid[:1]), 1, 1))], 1)
        bound = F32 if exact else REQUANTISED
        assert_close(gpu.read(y, np.float32, case.n), (x @ w.T)[0], *bound, f"{count} workgroups")


@covers("relay")
def test_relay(gpu):
    n, shift = (shaders.constants("relay")[name] for name in ("N", "SHIFT"))
    start = random("relay").integers(1 << 31, size=n, dtype=np.uint32)
    y = gpu.zeros(8 * n, "y")
    gpu.write(y, start)
    run(gpu, [gpu.dispatch("relay", (), {}, {"y": y}, (n // 256, 1, 1))], 1)
    assert np.array_equal(gpu.read(y, np.uint32, n, offset=4 * n), np.roll(start, -shift) + 1)


MIXED = (Weight("q4", 14, 64, 32), Weight("q8", 58, 64, 32, offset=True, scale="f4"))


def split(gpu: Any, weights: Sequence[Weight] = MIXED) -> tuple[Matrix, np.ndarray, np.ndarray]:
    """A matrix in parts of different forms, cut inside a head, with a bias."""
    starts = np.cumsum([0, *(weight.n for weight in weights)])
    uploads = [upload(gpu, weight, int(row0)) for weight, row0 in zip(weights, starts, strict=False)]
    bias = random("bias").standard_normal(starts[-1]).astype(np.float32)
    parts = tuple(part for part, _ in uploads)
    matrix = Matrix(int(starts[-1]), weights[0].k, parts, gpu.upload(bias, "bias"))
    return matrix, np.concatenate([w for _, w in uploads]), bias


PLAIN = one_per_kernel([r for r in routes.LINEAR if MIXED[0].fits(r, EVERYTHING)])


@pytest.mark.parametrize("out", ["out_add", "out_swiglu"])
@pytest.mark.parametrize("route", [r for r in PLAIN if r.kernel not in SLOW], ids=lambda r: r.kernel)
def test_linear_out(gpu, route, out):
    """What happens to the results, in a matrix of several parts with a bias."""
    matrix, w, bias = split(gpu)
    table, tokens = only(gpu, route, MIXED[0]), MIXED[0].tokens(route, gpu.caps)
    most = max(tokens)
    xs, x, _ = upload_inputs(gpu, most, 64, "f32")
    sums = x @ w.T + bias
    before = random("y").standard_normal((most + 1, 36 if out == "out_swiglu" else 72)).astype(np.float32)
    gate, up = sums[:, ::2], sums[:, 1::2]
    to, want = ops.swiglu, gate / (1 + np.exp(-gate)) * up
    if out == "out_add":
        to, want = ops.add, before[:-1] + sums
    y, at = gpu.zeros(before.nbytes, "y"), step(gpu, 1)
    for m in {min(tokens), most, min(9, most)}:
        gpu.write(at, np.array([0, m], np.uint32))
        gpu.write(y, before)
        run(gpu, ops.linear(gpu, xs, matrix, 1 if m == 1 else most, to(y, matrix), at, table=table), m)
        got = gpu.read(y, np.float32, before.size).reshape(before.shape)
        assert_close(got[:m], want[:m], *tolerance(route), f"{m} tokens")
        assert (got[m:] == before[m:]).all(), f"{m} tokens: wrote behind the last"


@pytest.mark.parametrize("kv_f32", [True, False], ids=["kv_f32", "kv_f16"])
@pytest.mark.parametrize("route", PLAIN, ids=lambda r: r.kernel)
def test_linear_qkv(gpu, route, kv_f32):
    """q is rotated and stored; k, rotated, and v go to their places in the cache, and nowhere else."""
    c, capacity = config(heads=8, kv_heads=2, head_dim=6, rope_dims=4), 80
    matrix, w, bias = split(gpu)
    table, tokens = only(gpu, route, MIXED[0]), MIXED[0].tokens(route, gpu.caps)
    most = max(tokens)
    xs, x, _ = upload_inputs(gpu, most, 64, "f32")
    angle = random("qkv").uniform(0, 6, (capacity, 2))
    rope = np.stack([np.cos(angle), np.sin(angle)], axis=2).astype(np.float32)
    kind, at = np.float32 if kv_f32 else np.float16, step(gpu, 1)
    fresh = np.full((2, capacity, 6), GUARD, kind)
    q, k, v = gpu.zeros((most + 1) * 48 * 4, "q"), gpu.zeros(fresh.nbytes, "k"), gpu.zeros(fresh.nbytes, "v")
    out = ops.qkv(c, matrix, q, k, v, gpu.upload(rope, "rope"), kv_f32)
    for m, pos in {(min(tokens), 0), (min(9, most), 3), (most, capacity - most)}:
        gpu.write(at, np.array([pos, m, capacity, 0], np.uint32))
        gpu.write(q, np.full((most + 1, 48), GUARD, np.float32))
        gpu.write(k, fresh)
        gpu.write(v, fresh)
        run(gpu, ops.linear(gpu, xs, matrix, 1 if m == 1 else most, out, at, table=table), m, pos)
        rows = (x[:m] @ w.T + bias).reshape(m, 12, 6)
        turn = rope[pos : pos + m, None].astype(np.float64)  # [m, 1, 2 pairs, (cos, sin)]
        a, b = rows[:, :10, 0:4:2].copy(), rows[:, :10, 1:4:2].copy()
        rows[:, :10, 0:4:2] = a * turn[..., 0] - b * turn[..., 1]
        rows[:, :10, 1:4:2] = a * turn[..., 1] + b * turn[..., 0]
        got = gpu.read(q, np.float32, (most + 1) * 48).reshape(-1, 8, 6)
        assert_close(got[:m], rows[:, :8], *tolerance(route), f"q, {m} tokens")
        assert (got[m:] == GUARD).all(), f"q, {m} tokens: wrote behind the last"
        for name, buffer, part in (("k", k, rows[:, 8:10]), ("v", v, rows[:, 10:])):
            cache = gpu.read(buffer, kind, fresh.size).reshape(fresh.shape)
            here = cache[:, pos : pos + m].swapaxes(0, 1)
            assert_close(here, part, *(tolerance(route) if kv_f32 else ROUNDED), f"{name}, {m} tokens")
            untouched = np.delete(cache, np.s_[pos : pos + m], axis=1)
            assert (untouched == GUARD).all(), f"{name}, {m} tokens: wrote outside its positions"


FOLDED = [r for r in PLAIN if r.grid is not routes.tiles]


@pytest.mark.parametrize("route", FOLDED, ids=lambda r: r.kernel)
def test_linear_folded_grid(gpu, monkeypatch, route):
    """Rows beyond what one dimension of a grid holds: here three workgroups instead of 65,535."""
    weight = Weight("q4", 1030, 32, 32)
    table, most = only(gpu, route, weight), min(2, max(weight.tokens(route, gpu.caps)))
    part, w = upload(gpu, weight)
    matrix = Matrix(weight.n, weight.k, (part,))
    xs, x, _ = upload_inputs(gpu, most, 32, "f32")
    y, at = gpu.zeros(most * 1030 * 4, "y"), step(gpu, most)
    monkeypatch.setattr(gpu, "caps", replace(gpu.caps, workgroups=3))
    run(gpu, ops.linear(gpu, xs, matrix, most, ops.store(y, matrix), at, table=table), most)
    got = gpu.read(y, np.float32, most * 1030).reshape(most, 1030)
    assert_close(got, x @ w.T, *tolerance(route))


# Outputs that collect a whole workgroup's rows. Two parts: the second one starts where the first one ends.

COLLECTED = runs(
    routes.LINEAR,
    [Weight("q4", 192, 64, 32, inputs=i, out="out_logits") for i in ("f32", "i8")],
    lambda weight: weight.inputs == "f32",
)


@on_gpus(COLLECTED)
def test_logits_and_candidates(any_gpu, route, case):
    gpu, table = any_gpu, only(any_gpu, route, case)
    matrix, w, _ = split(gpu, (case, Weight("f16", 71, 64)))
    xs, x, more = upload_inputs(gpu, 1, 64, case.inputs)
    matrix = replace(matrix, bias=None)
    y, best = gpu.upload(np.full(264, GUARD, np.float32), "y"), gpu.zeros(264 * 8, "best")
    out = ops.Out("out_logits", {"y": y, "best": best})
    run(gpu, ops.linear(gpu, xs, matrix, 1, out, step(gpu, 1), table=table, **more), 1)
    got = gpu.read(y, np.float32, 264)
    assert_close(got[:263], (x @ w.T)[0], *tolerance(route, case.inputs))
    assert got[263] == GUARD
    rows = rows_of(route)
    starts = [*range(0, 192, rows), *range(192, 263, rows)]
    ends = [min(s + rows, 192 if s < 192 else 263) for s in starts]
    places = [s + int(got[s:e].argmax()) for s, e in zip(starts, ends, strict=True)]
    candidates = gpu.read(best, np.uint32, 2 * 264).reshape(-1, 2)
    assert candidates[: len(starts), 1].tolist() == places
    assert (candidates[: len(starts), 0].copy().view(np.float32) == got[places]).all()
    assert (candidates[len(starts) :] == 0).all()


def rows_of(route: Route) -> int:
    own = shaders.constants(route.kernel) | route.consts
    return 2 * own["PAIRS"] * own["WORKGROUP"] // own["LANES"]  # that a workgroup makes


HIDDEN = Weight("q4", 128, 576, 32, out="out_swiglu_i8")
SWIGLU = runs(routes.LINEAR, [replace(HIDDEN, inputs=i) for i in ("f32", "i8")], lambda weight: weight.inputs == "i8")


@on_gpus(SWIGLU)
def test_swiglu_to_records(any_gpu, route, case):
    gpu, table, tokens = any_gpu, only(any_gpu, route, case), case.tokens(route, any_gpu.caps)
    matrix, w, bias = split(gpu, (HIDDEN, Weight("q8", 64, 576, 16, scale="f4")))
    most, at = max(tokens), step(gpu, 1)
    xs, x, more = upload_inputs(gpu, most, HIDDEN.k, case.inputs)
    gate, up = np.moveaxis((x @ w.T + bias).reshape(most, 96, 2), 2, 0)
    y = gpu.zeros((most + 1) * 3 * 48, "y")
    for m in {min(tokens), most, min(9, most)}:
        gpu.write(at, np.array([0, m], np.uint32))
        gpu.write(y, np.full((most + 1) * 3 * 12, 99, np.uint32))
        run(gpu, ops.linear(gpu, xs, matrix, most, ops.swiglu_i8(y, matrix), at, table=table, **more), m)
        got = gpu.read(y, RECORD, (most + 1) * 3).reshape(-1, 3)
        check_records(got[:m], (gate / (1 + np.exp(-gate)) * up)[:m])
        assert (got[m:].view(np.uint32) == 99).all()


TILES = list({str(r.consts): r for r in routes.LINEAR if r.kernel == "linear_gemm_i8"}.values())


@pytest.mark.parametrize("route", TILES, ids=lambda r: " ".join(map(str, r.consts.values())))
def test_tiles_stay_in_workgroup_memory(gpu, monkeypatch, route):
    """With the bounds checks that trusted shaders go without: what is read from outside would be another number."""
    monkeypatch.setattr(gpu, "trusted", False)
    monkeypatch.setattr(gpu, "pipelines", {})
    weight = replace(HIDDEN, inputs="i8", out="out_swiglu_i8" if "TOKENS" in route.consts else "out_store")
    if gpu.caps.workgroup_bytes < 32768:
        pytest.skip("the adapter has too little workgroup memory")
    table, m = (replace(route, fits=lambda *_: True),), min(33, route.consts["TILE_M"])
    part, w = upload(gpu, weight)
    matrix = Matrix(weight.n, weight.k, (part,))
    xs, x, more = upload_inputs(gpu, m, weight.k, "i8")
    y, want = gpu.zeros(m * weight.n * 4, "y"), x @ w.T
    to = ops.swiglu_i8(y, matrix) if "TOKENS" in route.consts else ops.store(y, matrix)
    run(gpu, ops.linear(gpu, xs, matrix, m, to, step(gpu, m), table=table, **more), m)
    if "TOKENS" in route.consts:
        gate, up = np.moveaxis(want.reshape(m, -1, 2), 2, 0)
        return check_records(gpu.read(y, RECORD, m * 2).reshape(m, 2), gate / (1 + np.exp(-gate)) * up)
    assert_close(gpu.read(y, np.float32, want.size).reshape(want.shape), want, *F32)


@covers("to_i8")
@pytest.mark.parametrize("width", [32, 576])
def test_to_records(any_gpu, monkeypatch, width):
    gpu, rng = any_gpu, random("records")
    x = (rng.standard_normal((40, width)) * rng.choice([1e-6, 1.0, 1e4], (40, 1))).astype(np.float32)
    x[2, :32] = 0  # no largest value to divide by
    y, at = gpu.zeros(41 * width // 32 * 48, "y"), step(gpu, 1)
    for m, workgroups in ((1, 65535), (3, 65535), (40, 3)):  # the last one folds its grid
        monkeypatch.setattr(gpu, "caps", replace(gpu.caps, workgroups=workgroups))
        gpu.write(at, np.array([0, m], np.uint32))
        gpu.write(y, np.full(41 * width // 32 * 12, 99, np.uint32))
        run(gpu, [ops.to_i8(gpu, gpu.upload(x, "x"), y, width, 1 if m == 1 else 40, at)], m)
        got = gpu.read(y, RECORD, 41 * width // 32).reshape(41, -1)
        for row, wanted in zip(got[:m], x[:m].astype(np.float64), strict=True):
            check_records(row[None], wanted[None])
        assert (got[m:].view(np.uint32) == 99).all()


# Norms


@dataclass(frozen=True)
class Width:
    width: int

    @property
    def name(self) -> str:
        return str(self.width)

    first = main = True

    def fits(self, route: Route, caps: Caps) -> bool:
        return fits(route, caps, self.width)


NORM = runs(
    routes.NORM + routes.NORM_I8,
    [Width(w) for w in (1, 3, 64, 576, 577, 4096)],
    lambda case: case.width in (577, 4096),
)


@on_gpus(NORM)
def test_rms_norm(any_gpu, route, case):
    gpu, width, table, eps = any_gpu, case.width, only(any_gpu, route, case), 1e-5
    rng = random("norm")
    # large, ordinary, small beside eps, and zero rows
    x = (rng.standard_normal((5, width)) * [[300.0], [1.0], [3e-3], [0.0], [1.0]]).astype(np.float32)
    weight = rng.standard_normal(width).astype(np.float32)
    want = normalised(x, weight, eps)
    records = route in routes.NORM_I8
    kind, size = (RECORD, width // 32) if records else (np.dtype(np.float32), width)
    xs, ws, y = gpu.upload(x, "x"), gpu.upload(weight, "w"), gpu.zeros(6 * size * kind.itemsize, "y")
    for m, last in ((1, False), (5, False), (5, True), (3, True), (1, True)):
        gpu.write(y, np.full(6 * size * kind.itemsize // 4, GUARD, np.float32))
        dispatch = ops.rms_norm(gpu, xs, ws, y, width, eps, 1 if m == 1 else 5, step(gpu, m), last, table)
        assert dispatch.label == route.kernel
        run(gpu, [dispatch], m)
        got = gpu.read(y, kind, 6 * size).reshape(6, size)
        rows = want[m - 1 : m] if last else want[:m]
        for i, row in enumerate(rows):  # one by one: beside 300 an error in 3e-3 would not show
            if records:
                check_records(got[i : i + 1], row[None])
            else:
                assert_close(got[i], row, *tolerance(route), f"row {i} of {m}, last={last}")
        assert (got[len(rows) :].view(np.float32) == GUARD).all()


@covers("rms_norm_plain", "mul")
def test_norm_in_two_steps(gpu):
    x, weight = random("norm").standard_normal((3, 580)).astype(np.float32), random("w").standard_normal(580)
    weight, between = weight.astype(np.float32), gpu.zeros(x.nbytes, "between")
    xs, ws, y = gpu.upload(x, "x"), gpu.upload(weight, "w"), gpu.zeros(4 * 580 * 4, "y")
    gpu.write(y, np.full((4, 580), GUARD, np.float32))
    run(gpu, baselines.norm_then_mul(gpu, xs, ws, between, y, 580, 1e-5), 3)
    got = gpu.read(y, np.float32, 4 * 580).reshape(4, 580)
    assert_close(got[:3], normalised(x, weight, 1e-5), *F32)
    assert (got[3] == GUARD).all()


# Attention


def config(heads: int, kv_heads: int, head_dim: int, rope_dims: int = 2, window: int = 0) -> LlamaConfig:
    return LlamaConfig(
        arch="llama", name="", layers=1, dim=heads * head_dim, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, ffn_dim=1, vocab=1, context=1, rope_theta=1e4, rope_dims=rope_dims,
        rope_scaling="none", rope_factor=1.0, rope_orig_context=1, yarn_ext_factor=1.0, yarn_attn_factor=1.0,
        yarn_beta_fast=32.0, yarn_beta_slow=1.0, neox=False, norm_eps=1e-5, sliding_window=window, tied=True,
    )  # fmt: skip


@dataclass(frozen=True)
class Heads:
    head_dim: int
    heads: int
    kv_heads: int
    kv_f32: bool
    window: int = 0
    m: int = 1

    @property
    def name(self) -> str:
        window, kv = f"-window{self.window}" if self.window else "", "f32" if self.kv_f32 else "f16"
        return f"{self.heads}of{self.head_dim}-share{self.heads // self.kv_heads}-{kv}{window}-m{self.m}"

    @property
    def first(self) -> bool:
        return True

    @property
    def main(self) -> bool:
        return self.head_dim == 64

    def fits(self, route: Route, caps: Caps) -> bool:
        return fits(route, caps, self.head_dim, self.m)


HEADS = (
    Heads(64, 4, 2, kv_f32=False), Heads(64, 8, 1, kv_f32=False, window=16), Heads(128, 2, 2, kv_f32=True),
    Heads(256, 1, 1, kv_f32=False), Heads(48, 4, 1, kv_f32=False), Heads(48, 2, 1, kv_f32=True, window=100),
    Heads(80, 8, 1, kv_f32=True), Heads(260, 1, 1, kv_f32=True), Heads(6, 8, 2, kv_f32=False),
    Heads(6, 2, 2, kv_f32=True), Heads(6, 2, 1, kv_f32=False, window=3),
)  # fmt: skip
ATTEND = runs(
    (*routes.ATTEND, baselines.ATTEND_STRIDED),
    [replace(case, m=m) for case in HEADS for m in (1, 33)] + [replace(case, m=8) for case in HEADS[:3]],
    lambda case: case.head_dim == 48,
)
SPLIT = (Heads(64, 2, 1, kv_f32=True), Heads(128, 4, 2, kv_f32=False, window=150))
CAPACITY = 240


@on_gpus(ATTEND)
def test_attend(any_gpu, route, case):
    assert check_attend(any_gpu, case, only(any_gpu, route, case), tolerance(route)) == route.kernel


@pytest.mark.parametrize("case", [Heads(64, 66, 1, True), Heads(64, 66, 1, True, m=33), Heads(256, 33, 1, True, m=33)])
def test_attend_of_many_heads_to_one(gpu, case):
    """More heads share a key than some workgroups have rows or subgroups: others are taken."""
    check_attend(gpu, case)


def check_attend(
    gpu: Any, case: Heads, table: tuple[Route, ...] | None = None, bounds: tuple[float, float] = F32
) -> str:
    """Runs the case, which must be right and stay in its place; the kernel's name."""
    c = config(case.heads, case.kv_heads, case.head_dim, window=case.window)
    rng, d, kind = random(case.name), case.head_dim, np.float32 if case.kv_f32 else np.float16
    q = rng.standard_normal((33, case.heads, d)).astype(np.float32)
    # keys of unequal size, so that some positions dominate; numbers that the cache holds exactly
    k = (rng.standard_normal((case.kv_heads, CAPACITY, d)) * rng.uniform(0, 3, (1, CAPACITY, 1))).astype(kind)
    v = rng.standard_normal((case.kv_heads, CAPACITY, d)).astype(kind)
    qs, ks, vs = gpu.upload(q, "q"), gpu.zeros(k.nbytes, "k"), gpu.zeros(v.nbytes, "v")
    y, at = gpu.zeros(q.nbytes + 4 * case.heads * d, "y"), step(gpu, 1)
    dispatch = ops.attend(gpu, c, qs, ks, vs, y, case.m, at, case.kv_f32, table)
    for m, pos in ATTEND_STEPS[case.m]:
        end = pos + m
        stale = np.arange(CAPACITY)[:, None] >= end  # positions that are not there yet: far from harmless
        gpu.write(ks, np.where(stale, kind(1e4), k))
        gpu.write(vs, np.where(stale, kind(1e4), v))
        gpu.write(at, np.array([pos, m, CAPACITY, 0], np.uint32))
        gpu.write(y, np.full((34, case.heads, d), GUARD, np.float32))
        run(gpu, [dispatch], m, pos)
        got = gpu.read(y, np.float32, 34 * case.heads * d).reshape(34, case.heads, d)
        exact = [a.astype(np.float64) for a in (q[:m].swapaxes(0, 1), k[:, :end], v[:, :end])]
        want = attention(*exact, pos + np.arange(m), case.window).swapaxes(0, 1)
        assert_close(got[:m], want, *bounds, f"{m} tokens at {pos}")
        assert (got[m:] == GUARD).all(), f"{m} tokens at {pos}: wrote behind the last"
    return dispatch.label


ATTEND_STEPS = {  # plan's tokens -> (tokens, position): around the ends of a block of 64 positions
    1: [(1, 0), (1, 1), (1, 63), (1, 64), (1, 65), (1, 200)],
    8: [(2, 0), (8, 60), (5, 200)],
    33: [(5, 0), (33, 0), (5, 1), (5, 63), (33, 65), (5, 200)],
}


@covers("attend_merge")
@pytest.mark.parametrize("i8", [False, True], ids=["f32", "i8"])
@pytest.mark.parametrize("splits", [1, 2, 16])
@pytest.mark.parametrize("case", SPLIT, ids=lambda case: case.name)
def test_attend_in_splits(gpu, case, splits, i8):
    """A token or three over a context cut into parts that are joined again; the result as f32 or as records."""
    route = next(r for r in routes.ATTEND if r.kernel == "attend_split")
    table, heads, d = only(gpu, route, case), case.heads, case.head_dim
    c = config(heads, case.kv_heads, d, window=case.window)
    q, k, v = attend_data(case, 3)
    qs, ks, vs = gpu.upload(q, "q"), gpu.upload(k, "k"), gpu.upload(v, "v")
    partial, stats = gpu.zeros(3 * heads * splits * d * 4, "partial"), gpu.zeros(3 * heads * splits * 8, "stats")
    for m, pos in [(1, 0), (1, 1), (1, 14), (1, 63), (1, 200), (1, 239), (3, 0), (3, 63), (2, 200)]:
        size = m * (heads * d // 32 * 12 if i8 else heads * d)
        at, y = step(gpu, m, pos, CAPACITY), gpu.upload(np.full(size + 4, GUARD, np.float32), "y")
        out, most = y if splits == 1 else partial, 1 if m == 1 else 4
        plan = [ops.attend(gpu, c, qs, ks, vs, out, most, at, case.kv_f32, table, i8, splits, stats)]
        if splits > 1:  # with 16 some have nothing to do
            plan.append(ops.attend_merge(gpu, c, partial, stats, y, splits, i8, most))
        run(gpu, plan, m, pos)
        check_attended(gpu.read(y, np.float32, size + 4), attended(q, k, v, m, pos, case.window), i8, F32)


def test_attend_in_splits_with_16_lanes_for_a_position(gpu):
    """Mesa's lanes are fixed when it starts: in a process of its own, with twice as many as usual."""
    other, only = 77, ["-q", "-p", "no:cacheprovider", __file__, "-k", "test_attend_in_splits and 4of128"]
    run = "import sys, pytest; from llamagpu.gpu.device import Gpu; lanes = Gpu.open().caps.subgroup; "
    run += f"sys.exit(pytest.main({only!r}) if lanes == 16 else {other})"
    env = os.environ | {"LP_NATIVE_VECTOR_WIDTH": "512"}
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, env=env)
    if done.returncode == other:
        pytest.skip("the adapter has not 16 lanes")
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]


def attend_data(case: Heads, m: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = random(case.name)
    k, v = rng.standard_normal((2, case.kv_heads, CAPACITY, case.head_dim))
    kind = np.float32 if case.kv_f32 else np.float16
    q = rng.standard_normal((m, case.heads, case.head_dim)).astype(np.float32)
    return q, k.astype(kind), v.astype(kind)


def attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, m: int, pos: int, window: int) -> np.ndarray:
    exact = [a.astype(np.float64) for a in (q[:m].swapaxes(0, 1), k[:, : pos + m], v[:, : pos + m])]
    return attention(*exact, pos + np.arange(m), window).swapaxes(0, 1).reshape(m, -1)


def check_attended(got: np.ndarray, want: np.ndarray, i8: bool, bounds: tuple[float, float]) -> None:
    made = got[:-4].view(RECORD).reshape(len(want), -1) if i8 else got[:-4].reshape(want.shape)
    if i8 and bounds == F32:
        check_records(made, want)
    else:
        assert_close(from_records(made) if i8 else made, want, *bounds)
    assert (got[-4:] == GUARD).all()


TILED = (Heads(64, 6, 2, kv_f32=False), Heads(64, 2, 1, kv_f32=True, window=40), Heads(32, 4, 1, kv_f32=False))
ROUGH = (2e-4, 2e-2)  # queries and keys of int8, values of f16; the same for records of it


@pytest.mark.parametrize("i8", [False, True], ids=["f32", "i8"])
@pytest.mark.parametrize("rough", [False, True], ids=["exact", "rough"])
@pytest.mark.parametrize("case", TILED, ids=lambda case: case.name)
def test_attend_tile(gpu, case, rough, i8):
    """Results as records, and products in int8 and f16."""
    route = next(r for r in routes.ATTEND if r.kernel == "attend_tile")
    table = only(gpu, route, replace(case, m=33))
    c = config(case.heads, case.kv_heads, case.head_dim, window=case.window)
    if rough and not routes.rough_tile(case.head_dim, gpu.caps):
        pytest.skip("the adapter has no f16 arithmetic")
    q, k, v = attend_data(case, 33)
    qs, ks, vs = gpu.upload(q, "q"), gpu.upload(k, "k"), gpu.upload(v, "v")
    for m, pos in [(33, 0), (5, 200), (33, 107)]:
        size = m * case.heads * case.head_dim * (12 if i8 else 32) // 32
        at, y = step(gpu, m, pos, CAPACITY), gpu.upload(np.full(size + 4, GUARD, np.float32), "y")
        plan = [ops.attend(gpu, c, qs, ks, vs, y, 33, at, case.kv_f32, table, i8, rough=rough)]
        run(gpu, plan, m, pos)
        want = attended(q, k, v, m, pos, case.window)
        check_attended(gpu.read(y, np.float32, size + 4), want, i8, ROUGH if rough else F32)


LONGEST = [
    *((r, d) for r in (*routes.ATTEND, baselines.ATTEND_STRIDED) for d in (64, 256) if r.kernel != "attend_any"),
    *((routes.ATTEND[-1], d) for d in (6, 130, 260)),
]


@pytest.mark.parametrize("route, d", LONGEST, ids=lambda x: x if isinstance(x, int) else x.kernel)
def test_attend_over_the_longest_context(any_gpu, route, d):
    """As far as a CPU adapter may look back: llvmpipe ends loops after 65535 turns, without a word. Equal scores:
    the result is the mean of the values."""
    gpu, m = any_gpu, 33 if route.kernel == "attend_tile" else 1
    table = only(gpu, route, Heads(d, 1, 1, kv_f32=True, m=m))
    positions = routes.most_positions(d, replace(gpu.caps, cpu=True), images=False)
    values = np.arange(-(-positions // 4) * 4, dtype=np.float32) / positions
    q, pos, y = np.zeros((m, 1, d), np.float32), positions - m, gpu.zeros(m * d * 4, "y")
    caches = gpu.zeros(values.nbytes * d, "k"), gpu.upload(np.repeat(values, d), "v")
    at, stats = step(gpu, m, pos, len(values)), gpu.zeros(16, "stats")
    qs = gpu.upload(q, "q")
    run(gpu, [ops.attend(gpu, config(1, 1, d), qs, *caches, y, m, at, True, table, stats=stats)], m, pos)
    want = np.array([[values[: pos + t + 1].mean(dtype=np.float64)] * d for t in range(m)])
    assert_close(gpu.read(y, np.float32, m * d).reshape(m, d), want, 1e-8, 1e-4, f"{positions} positions")


FOLDED_ATTEND = [r for r in routes.ATTEND if r.grid is routes.values]


@pytest.mark.parametrize("route", FOLDED_ATTEND, ids=lambda r: r.kernel)
def test_attend_folded_grid(gpu, monkeypatch, route):
    case = Heads(8, 8, 2, kv_f32=True, m=33)  # 264 results: five workgroups of 64 in the plain kernel
    table, rng = only(gpu, route, case), random("folded")
    q = rng.standard_normal((33, 8, 8)).astype(np.float32)
    k, v = rng.standard_normal((2, 2, 36, 8)).astype(np.float32)
    y = gpu.zeros(q.nbytes, "y")
    monkeypatch.setattr(gpu, "caps", replace(gpu.caps, workgroups=3))
    uploads = gpu.upload(q, "q"), gpu.upload(k, "k"), gpu.upload(v, "v")
    run(gpu, [ops.attend(gpu, config(8, 2, 8), *uploads, y, 33, step(gpu, 33, 0, 36), True, table)], 33)
    got = gpu.read(y, np.float32, q.size).reshape(33, 8, 8)
    exact = [a.astype(np.float64) for a in (q.swapaxes(0, 1), k[:, :33], v[:, :33])]
    assert_close(got, attention(*exact, np.arange(33), 0).swapaxes(0, 1), *tolerance(route))


# Embedding


@dataclass(frozen=True)
class Table:
    parts: tuple[Weight, ...]

    @property
    def name(self) -> str:
        return "+".join(part.name for part in self.parts)

    first = main = True

    def fits(self, route: Route, caps: Caps) -> bool:
        return all(part.fits(route, caps) for part in self.parts)


TABLES = (
    Table(MIXED),
    Table((Weight("q6", 40, 256, 16, scale="i1"),)),
    Table((Weight("q4", 40, 576, 32, offset=True),)),  # more than one workgroup of values
    Table((Weight("q8", 7, 32, 8), Weight("f16", 1, 32))),
    Table((Weight("f16", 6, 33), Weight("f16", 5, 33))),
    Table((Weight("q4", 9, 96, 3), Weight("q8", 9, 96, 3, offset=True))),
)
EMBED = runs(routes.EMBED, TABLES, lambda case: case.parts == MIXED)


@on_gpus(EMBED)
def test_embed(any_gpu, route, case):
    gpu, table = any_gpu, only(any_gpu, route, case)
    starts = np.cumsum([0, *(part.n for part in case.parts)])
    uploads = [upload(gpu, part, int(row0)) for part, row0 in zip(case.parts, starts, strict=False)]
    w, k = np.concatenate([w for _, w in uploads]), case.parts[0].k
    matrix = Matrix(len(w), k, tuple(part for part, _ in uploads))
    ids = [*(starts[1:] - 1), *starts[:-1], len(w) - 1, len(w) // 2]  # the edges of every part, one id twice
    tokens, y = gpu.upload(np.array(ids, np.uint32), "tokens"), gpu.zeros((len(ids) + 1) * k * 4, "y")
    for m in (1, 2, len(ids)):
        gpu.write(y, np.full((len(ids) + 1, k), GUARD, np.float32))
        plan = ops.embed(gpu, tokens, matrix, y, 1 if m == 1 else len(ids), table)
        assert {d.label for d in plan} == {route.kernel}
        run(gpu, plan, m)
        got = gpu.read(y, np.float32, (len(ids) + 1) * k).reshape(-1, k)
        assert_close(got[:m], w[ids[:m]], *COPIED, f"{m} tokens")
        assert (got[m:] == GUARD).all()


# Feed-forward


@covers(*(r.kernel for r in routes.SILU_MUL))
def test_silu_mul(any_gpu, monkeypatch):
    gpu, width = any_gpu, 129
    gate, up = random("silu").standard_normal((2, 5, width)).astype(np.float32) * 3
    gate[0, :6] = [-1000.0, 1000.0, -100.0, 100.0, 0.0, -0.0]  # exp overflows; silu does not
    want = gate / (1 + np.exp(-np.clip(gate.astype(np.float64), -700, None))) * up
    y, ups, at = gpu.zeros(gate.nbytes, "y"), gpu.upload(up, "up"), step(gpu, 1)
    for m, workgroups in ((1, 65535), (3, 65535), (4, 3)):  # the last one folds its grid
        monkeypatch.setattr(gpu, "caps", replace(gpu.caps, workgroups=workgroups))
        gpu.write(at, np.array([0, m], np.uint32))
        gpu.write(y, gate)
        run(gpu, [ops.silu_mul(gpu, y, ups, width, 1 if m == 1 else 5, at)], m)
        got = gpu.read(y, np.float32, gate.size).reshape(5, width)
        assert_close(got[:m], want[:m], *F32, f"{m} tokens")
        assert (got[m:] == gate[m:]).all()


# Choosing


def pick_on(gpu: Any, logits: np.ndarray, times: int = 1, m: int = 1) -> tuple[np.ndarray, ...]:
    """argmax and pick, `times` in one submission -> (tokens, ring, step) afterwards; pos starts at 7."""
    vocab, at, count = logits.size, step(gpu, m, pos=7, capacity=99), ops.chunks(logits.size)
    groups = -(-count // shaders.constants("argmax")["WORKGROUP"])
    best, values = gpu.zeros(count * 8, "best"), gpu.upload(logits.astype(np.float32), "logits")
    tokens, ring = (gpu.upload(np.full(n, 9, np.uint32), "words") for n in (4, 8))
    part, _ = upload(gpu, Weight("f16", 2, 8))
    table = Matrix(4, 8, (part, part))  # of two parts: `pick` leaves the embedding to the next step
    plan = [
        gpu.dispatch("argmax", (), {"VOCAB": vocab}, {"logits": values, "best": best}, (groups, 1, 1)),
        ops.pick(gpu, best, count, tokens, ring, 4, at, table, tokens),
    ]
    run(gpu, plan * times, 1)
    return tuple(gpu.read(buffer, np.uint32, count) for buffer, count in ((tokens, 4), (ring, 8), (at, 4)))


@covers("argmax", "pick")
@pytest.mark.parametrize("vocab", [1, 63, 1024, 1025, 128256])
def test_pick_takes_the_largest(any_gpu, vocab):
    rng = random(f"logits {vocab}")
    for place in {0, vocab // 2, vocab - 1, vocab // 3}:
        logits = rng.standard_normal(vocab)
        logits[place] = 9.0
        assert pick_on(any_gpu, logits)[0][0] == place
        assert pick_on(any_gpu, logits - 1000)[0][0] == place


# neighbours, two chunks of 64, two workgroups, and 256 chunks apart, where one invocation of pick compares
EQUALS = [(5, 6), (63, 64), (65, 1), (0, 1024), (1023, 1024), (70_000, 3000, 3001), (19_884, 3500)]


@pytest.mark.parametrize("places", EQUALS)
def test_pick_takes_the_first_of_equals(any_gpu, places):
    logits = np.full(70_001, -1.0)
    logits[list(places)] = 2.5
    assert pick_on(any_gpu, logits)[0][0] == min(places)


def test_pick_of_equal_logits_is_zero(any_gpu):
    assert pick_on(any_gpu, np.zeros(3000))[0][0] == 0


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_pick_passes_over_what_is_no_number(any_gpu, bad):
    logits = np.full(3000, bad)
    assert pick_on(any_gpu, logits)[0][0] == 0  # nothing to choose from: an id that exists
    logits[2100] = -50.0
    assert pick_on(any_gpu, logits)[0][0] == 2100


def test_pick_moves_the_step_on(any_gpu):
    tokens, ring, at = pick_on(any_gpu, -np.arange(20.0)[::-1] ** 2, times=6, m=5)
    assert list(tokens) == [19, 9, 9, 9]  # only the next input
    assert list(ring) == [19, 19, 19, 19, 9, 9, 9, 9]  # six picks into a ring of four
    assert list(at) == [7 + 5 + 5, 1, 99, 6]  # past the prompt's five, then one by one; capacity stays


NEXT = (Weight("q4", 71, 64, 32), Weight("q8", 71, 2112, 32), Weight("f16", 71, 64))


@pytest.mark.parametrize("weight", NEXT, ids=lambda weight: weight.name)
def test_pick_looks_up_the_embedding(any_gpu, weight):
    gpu = any_gpu
    part, w = upload(gpu, weight)
    best = np.array([(0, 5), (0, 70), (0, 3), (0, 33)], np.uint32)
    best[:, 0] = np.array([-3.0, 2.0, 2.0, 1.0], np.float32).view(np.uint32)
    x = gpu.upload(np.full(2 * weight.k, GUARD, np.float32), "x")
    tokens, ring, at = gpu.zeros(16, "tokens"), gpu.zeros(16, "ring"), step(gpu, 1)
    table = Matrix(71, weight.k, (part,))
    run(gpu, [ops.pick(gpu, gpu.upload(best, "best"), 4, tokens, ring, 4, at, table, x)], 1)
    assert gpu.read(tokens, np.uint32, 1)[0] == 3  # of the two largest
    got = gpu.read(x, np.float32, 2 * weight.k)
    assert_close(got[: weight.k], w[3], *COPIED)
    assert (got[weight.k :] == GUARD).all()


def drawn_number(seed: int, pos: int) -> float:
    """The number in 0..1 that a seed gives for a position: two rounds of PCG."""

    def pcg(h: int) -> int:
        h = (h * 747796405 + 2891336453) & 0xFFFFFFFF
        h = (((h >> ((h >> 28) + 4)) ^ h) * 277803737) & 0xFFFFFFFF
        return (h >> 22) ^ h

    return (pcg(pcg(seed ^ ((pos * 2654435761) & 0xFFFFFFFF))) >> 8) / (1 << 24)


def tops(logits: np.ndarray) -> np.ndarray:
    """What argmax leaves: of every 64 logits the largest, as (its bits, its index)."""
    chunks = enumerate(np.split(logits, range(64, logits.size, 64)))
    return np.array([(c.max().view(np.uint32), 64 * i + c.argmax()) for i, c in chunks], np.uint32)


def draw_on(
    gpu: Any, logits: np.ndarray, s: Sampling, draws: int = 1, pos: int = 1, recent: Sequence[int] = (), oldest: int = 0
) -> tuple[np.ndarray, ...]:
    """`draws` draws in one submission, each from these logits -> (ring, recent, step, tokens, logits) afterwards."""
    vocab, quads, window = logits.size, -(-logits.size // 4), len(recent)
    part, _ = upload(gpu, Weight("f16", 2, 8))
    reals = np.array([s.temperature, s.top_p, s.min_p, s.repeat_penalty], np.float32)
    settings = np.concatenate([reals.view(np.uint32), np.array([s.top_k, s.seed, window, oldest], np.uint32)])
    kept, values, best = (gpu.upload(data, "in") for data in (logits, logits, tops(logits)))
    ring = gpu.upload(np.array([0] * draws + list(recent), np.uint32), "ring")
    tokens, at, table = gpu.zeros(16, "tokens"), step(gpu, 1, pos - 1, 99), Matrix(vocab, 8, (part, part))
    uniform = gpu.upload(settings, "sampling", wgpu.BufferUsage.UNIFORM)
    renew = [  # a penalty changes the logits: in a model, the next step makes new ones
        gpu.dispatch("copy", (), {"QUADS": quads}, {"x": kept, "y": values}, (1, 1, 1)),
        gpu.dispatch("argmax", (), {"VOCAB": vocab}, {"logits": values, "best": best}, (len(tops(logits)), 1, 1)),
    ]
    choice = ops.pick(gpu, best, len(tops(logits)), tokens, ring, draws, at, table, tokens, values, uniform)
    run(gpu, [*renew * bool(recent), choice] * draws, 1)
    rings = gpu.read(ring, np.uint32, draws + window)
    others = gpu.read(at, np.uint32, 4), gpu.read(tokens, np.uint32, 1), gpu.read(values, np.float32, vocab)
    return rings[:draws], rings[draws:], *others


SAMPLINGS = [
    Sampling(1.0, 64, 1.0, 0.0), Sampling(0.8, 40, 0.95, 0.05), Sampling(1.5, 64, 0.5, 0.0),
    Sampling(1.0, 7, 1.0, 0.2), Sampling(0.3, 1, 1.0, 0.0),
]  # fmt: skip


@covers("sample")
@pytest.mark.parametrize("s", SAMPLINGS, ids=lambda s: f"t{s.temperature} k{s.top_k} p{s.top_p} m{s.min_p}")
@pytest.mark.parametrize("vocab", [5, 700, 9001])
def test_sample_draws_as_the_host_does(any_gpu, vocab, s):
    """64 draws of one submission: each by its own number, from the candidates that the host would keep."""
    seed, start = 1234, 11
    logits = (3 * random(f"draw {vocab}").standard_normal(vocab)).astype(np.float32)
    drawn, _, at, tokens, _ = draw_on(any_gpu, logits, replace(s, seed=seed), 64, start)
    order, shares = candidates(logits.astype(np.float64), s)
    sums = np.cumsum(shares)
    for i, got in enumerate(drawn):
        number = drawn_number(seed, start + i)
        if np.abs(sums[:-1] - number).min(initial=1.0) > 1e-5:  # f32 may decide a tie otherwise
            assert got == order[np.searchsorted(sums, number, side="right")], f"draw {i}"
    assert tokens[0] == got
    assert list(at) == [start - 1 + 64, 1, 99, 64]


@pytest.mark.parametrize("penalty", [1.5, 0.5])
def test_sample_penalises_what_came_lately(any_gpu, penalty):
    """Top-k 1 of penalised logits: each token of the window once, whatever its sign; others not at all."""
    vocab, none = 700, 0xFFFFFFFF
    logits = (3 * random("penalty").standard_normal(vocab)).astype(np.float32)
    recent = np.array([*logits.argsort()[::-1][[0, 1, 1, 5, 0, 300, 699]], none], np.uint32)
    want = logits.astype(np.float64)
    for t in set(recent.tolist()) - {none}:
        want[t] = want[t] / penalty if want[t] > 0 else want[t] * penalty
    s = Sampling(1.0, 1, 1.0, 0.0, penalty, seed=7)
    _, window, _, tokens, penalised = draw_on(any_gpu, logits, s, recent=recent.tolist(), oldest=3)
    assert_close(penalised, want, *COPIED)
    assert tokens[0] == want.argmax()
    recent[3] = want.argmax()  # takes the place of the oldest
    assert (window == recent).all()


# One filter each, then all of them
FILTERS = {
    "none": Sampling(1.0, 64, 1.0, 0.0),
    "temperature": Sampling(0.6, 64, 1.0, 0.0),
    "top-k": Sampling(1.0, 4, 1.0, 0.0),
    "top-p": Sampling(1.0, 64, 0.5, 0.0),
    "min-p": Sampling(1.0, 64, 1.0, 0.1),
    "penalty": Sampling(1.0, 64, 1.0, 0.0, 1.5, 16),
    "all": Sampling(0.8, 40, 0.8, 0.1, 1.2, 64),
}


@pytest.mark.parametrize("sampler", ["device", "host"])
@pytest.mark.parametrize("name", FILTERS)
def test_both_samplers_have_one_distribution(gpu, name, sampler):
    """3000 draws: how often each token came against its share, or with a penalty the sum of its shares given what
    had come before each draw."""
    s, draws = replace(FILTERS[name], seed=5), 3000
    logits = (2 * random("shares").standard_normal(300)).astype(np.float32)
    recent = logits.argsort()[::-1][: s.repeat_last_n].tolist() if s.repeat_penalty != 1.0 else []

    def draw(s: Sampling, draws: int) -> list[int]:
        if sampler == "device":
            return draw_on(gpu, logits, s, draws, recent=recent)[0].tolist()
        choose = make_sampler(s, recent)
        return [choose(logits) for _ in range(draws)]

    drawn = draw(s, draws)
    assert drawn[:50] == draw(s, 50) != draw(replace(s, seed=6), 50)
    shares, said = np.zeros((draws if recent else 1, 300)), recent + drawn
    for i, row in enumerate(shares):
        order, kept = candidates(penalise(logits.astype(np.float64), said[i : i + len(recent)], s), s)
        row[order] = kept
    shares = np.broadcast_to(shares, (draws, 300))
    count, mean, spread = np.bincount(drawn, minlength=300), shares.sum(0), (shares * (1 - shares)).sum(0)
    assert not count[mean == 0].any()
    rare = mean < 20  # counted together
    off = np.append((count - mean)[~rare], (count - mean)[rare].sum())
    spread = np.append(spread[~rare], max(spread[rare].sum(), 1.0))
    # standard deviations: chance takes one of these 350 comparisons beyond 4.5 with one seed in 400
    assert np.abs(off / np.sqrt(spread)).max() < 4.5


@covers("log_prob")
@pytest.mark.parametrize("vocab", [1, 100, 1025, 49152])
def test_log_prob(any_gpu, vocab):
    gpu, rng = any_gpu, random("log_prob")
    logits = rng.standard_normal((3, vocab)) * [[1.0], [10.0], [0.1]] + [[0.0], [-300.0], [1000.0]]
    logits = logits.astype(np.float32)
    targets = rng.integers(0, vocab, 3).astype(np.uint32)
    targets[0], targets[1] = logits[0].argmax(), vocab - 1
    out = gpu.upload(np.full(4, GUARD, np.float32), "out")
    run(gpu, [ops.log_prob(gpu, gpu.upload(logits, "l"), gpu.upload(targets, "t"), out, vocab)], 3)
    wide = logits.astype(np.float64)
    top = wide.max(1)
    want = wide[range(3), targets] - top - np.log(np.exp(wide - top[:, None]).sum(1))
    got = gpu.read(out, np.float32, 4)
    # a difference of logits: f32 keeps 6e-5 of 1000, and log(sum) is good to 1e-6
    assert np.abs(got[:3] - want).max() < 1e-4
    assert got[3] == GUARD


@covers("fill_random")
def test_fill_random(gpu):
    """Weights for benchmarks: words that differ, spread evenly over all values; or one word everywhere."""
    recorder = Recorder(gpu)
    words = gpu.read(synthetic.filled(gpu, recorder, 300_000, 0, "words"), np.uint32, 75_000)
    assert len(np.unique(words)) > 74_990
    assert np.abs(np.bincount(words.view(np.uint8), minlength=256) - 300_000 / 256).max() < 200  # 6 sigma
    assert (gpu.read(synthetic.filled(gpu, recorder, 4000, 1234, "same"), np.uint32, 1000) == 1234).all()


@covers("copy")
def test_copy(gpu):
    x = random("copy").integers(0, 1 << 32, 4 * 1001, np.uint32)
    y = gpu.upload(np.full(4 * 1002, 99, np.uint32), "y")
    run(gpu, [gpu.dispatch("copy", (), {"QUADS": 1001}, {"x": gpu.upload(x, "x"), "y": y}, (3, 1, 1))], 1)
    assert (gpu.read(y, np.uint32, 4 * 1002) == [*x, 99, 99, 99, 99]).all()


@covers("peak")
@pytest.mark.parametrize("i8", [False, True], ids=["f32", "i8"])
def test_peak(gpu, i8):
    """Its loop runs every round: the sums are those of the same loop in numpy."""
    word, rounds = 0x01FF0203, 7
    x = np.array([0.5, 1.0, 0.0, 0.0], np.float32)
    x.view(np.uint32)[2] = word
    if i8:
        weights, sums = np.array([word], np.uint32).view(np.int8).astype(int), list(range(1, 9))
        for _ in range(rounds):
            sums = [s + int(np.array([s], np.int32).view(np.int8).astype(int) @ weights) for s in sums]
        want = float(np.bitwise_xor.reduce(np.array(sums, np.int32)) & 0xFFFF)
    else:
        numbers = np.array([1.0, 1.5, 0.5, -1.0, -0.5, 3.0, 4.0, 2.5])
        for _ in range(rounds):
            numbers = numbers * 0.5 + 1.0
        want = 4 * numbers.sum()
    y = gpu.zeros(512 * 4, "y")
    buffers = {"x": gpu.upload(x, "x"), "y": y}
    run(gpu, [gpu.dispatch("peak", (), {"ROUNDS": rounds, "I8": i8}, buffers, (2, 1, 1))], 1)
    assert np.allclose(gpu.read(y, np.float32, 512), want, rtol=1e-6)


# f16 conversions

CONVERSIONS = """
@group(0) @binding(0) var<storage, read> words: array<u32>;
@group(0) @binding(1) var<storage, read> numbers: array<vec2<f32>>;
@group(0) @binding(2) var<storage, read_write> decoded: array<vec2<f32>>;
@group(0) @binding(3) var<storage, read_write> encoded: array<u32>;
@compute @workgroup_size(64) fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x < arrayLength(&words)) { decoded[id.x] = halves(words[id.x]); }
  if (id.x < arrayLength(&numbers)) { encoded[id.x] = pack_halves(numbers[id.x]); }
}
"""


def convert(gpu: Any, part: str, halves: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """halves (f16) as f32 and numbers (f32) as f16, by a kernel part; both of even length."""
    module = shaders.create_module(gpu.device, shaders.read(part) + CONVERSIONS, part, gpu.trusted)
    stage = {"module": module, "entry_point": "main"}
    pipeline = gpu.device.create_compute_pipeline(layout="auto", compute=stage)
    decoded, encoded = gpu.zeros(halves.size * 4, "decoded"), gpu.zeros(numbers.size * 2, "encoded")
    buffers = gpu.upload(halves, "words"), gpu.upload(numbers, "numbers"), decoded, encoded
    entries = [{"binding": i, "resource": {"buffer": b}} for i, b in enumerate(buffers)]
    group = gpu.device.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries)
    encoder = gpu.device.create_command_encoder()
    work = encoder.begin_compute_pass()
    work.set_pipeline(pipeline)
    work.set_bind_group(0, group)
    work.dispatch_workgroups(-(-max(halves.size, numbers.size) // 128))
    work.end()
    gpu.device.queue.submit([encoder.finish()])
    return gpu.read(decoded, np.float32, halves.size), gpu.read(encoded, np.float16, numbers.size)


@pytest.mark.parametrize("part", ["half_bits", "half_native"])
def test_half_conversions(any_gpu, part):
    """Every finite f16 both ways, and what lies between two of them: to the nearer, a tie to the even."""
    if part == "half_native" and not any_gpu.caps.half:
        pytest.skip("the adapter does not convert f16 itself")
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)]
    exact = halves.astype(np.float32)
    up = np.sort(np.abs(exact))[::2]  # +0 and -0, 2^-24, ... 65504
    middle = (up[1:] + up[:-1]) / 2  # exact in f32
    below, above = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))
    near = np.concatenate([below, middle, above])
    beyond = np.array([65505, 65519, 65520, 1e6, 3e38, 1e-8, 2e-8, 2.9e-8], np.float32)
    numbers = np.concatenate([exact, near, -near, beyond, -beyond]).astype(np.float32)
    numbers = np.resize(numbers, -(-numbers.size // 4) * 4)
    decoded, encoded = convert(any_gpu, part, halves, numbers)
    assert (decoded.view(np.uint32) == exact.view(np.uint32)).all()
    want = np.clip(numbers, -65504, 65504).astype(np.float16)
    wrong = encoded.view(np.uint16) != want.view(np.uint16)
    assert not wrong.any(), list(zip(numbers[wrong][:5], encoded[wrong][:5], strict=True))
