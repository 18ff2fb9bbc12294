"""The reference of the kernel checks: random weights and inputs, and each operation in numpy float64."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamagpu.engine import page_table
from llamagpu.engine.ops import NO_PROLOGUE, Consts, Ops, PrologueSpec
from llamagpu.engine.options import Backend, KvType
from llamagpu.engine.page_table import PageTable
from llamagpu.engine.pages import PAGE
from llamagpu.engine.routes import Epilogue, Inputs, Linear, Prologue, Route, S, Table
from llamagpu.engine.step_inputs import HEADER_WORDS, MAX_SEGMENTS, Segment, StepInputs
from llamagpu.engine.weights import Matrix, MatrixShard, WeightTarget
from llamagpu.files.storage import SUPER_BLOCK, Layout, PackedMatrix, Storage, dequantize, take_rows
from llamagpu.gpu.buffers import Bindable, Buffer
from llamagpu.gpu.caps import Caps
from llamagpu.gpu.device import Dispatch, Gpu
from llamagpu.gpu.recorder import Plan, Recorder, Step

Array = NDArray[Any]  # numbers of any type
Floats = NDArray[np.float64]
Bound = tuple[float, float]  # normalised mean squared error; largest error over largest value
Answer = tuple[Array, Array]  # result of the device, reference

# f32 sums of some thousand products: 1e-13 and 1e-6 measured. The margin allows for other orders of addition,
# and for an exp and inverseSqrt that are a few ulp off.
F32 = (1e-10, 1e-5)
# int8 sums of an adapter whose fma rounds twice (Gpu.exact_int8_sums): 1e-7 and 2.3e-4 measured
ROUNDED_SUMS = (5e-7, 1e-3)
COPIED = (1e-13, 3e-7)  # one product and one sum in f32, perhaps fused
# f32 sums rounded to int8: a value near a tie may round differently, by 1/127 of the largest value
REQUANTISED = (1e-5, 5e-3)
ROUNDED_WEIGHTS = (1e-4, 2e-2)  # f16 weights that a kernel rounds to int8
ROUNDED_F16 = (1e-7, 2**-11)  # at most 2^-11 of a value, 2^-22 / 3 of its square on average
HALVES = (1e-6, 2e-3)  # weights and inputs that a kernel rounds to f16
REQUANTISED_HALVES = (3e-5, 1e-2)
# Numbers of two f16 each. Matrix units cut what they add to a sum: 8e-11 and 1e-5 at k = 2304 on an H200, and
# about four times as much at 4096.
TWO_HALVES = (1e-9, 5e-5)


@dataclass(frozen=True, slots=True)
class Case:
    kernel: str
    shape: str
    compare: Callable[[], Answer]
    bound: Bound = F32


def errors(got: Array, want: Array) -> Bound:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    error = np.abs(got - want)
    mean = (error**2).sum() / max((want**2).sum(), 1e-300)
    return float(mean), float(error.max() / max(np.abs(want).max(), 1e-300))


def random(name: str) -> np.random.Generator:
    """A random generator seeded by the name."""
    return np.random.default_rng(zlib.crc32(name.encode()))


# Weights


@dataclass(frozen=True, slots=True)
class Weight:
    """A random matrix [n, k] in one storage."""

    storage: Storage
    n: int
    k: int
    group: int = 32  # unused for floats
    has_offset: bool = False
    scale_bits: int = 16  # or 32; or 8: super-blocks, as K-quants have them

    @property
    def name(self) -> str:
        if self.storage.two_bytes:
            return f"{self.storage} {self.n}x{self.k}"
        scales = {8: " super-blocks", 16: "", 32: " f32 scales"}[self.scale_bits]
        return f"{self.storage}/{self.group}{'+' * self.has_offset}{scales} {self.n}x{self.k}"

    def shape(
        self,
        m: int,
        inputs: Inputs = Inputs.F32,
        prologue: Prologue = Prologue.NONE,
        epilogue: Epilogue = Epilogue.STORE,
    ) -> Linear:
        group = self.k if self.storage.two_bytes else self.group
        shape = Linear(m, self.n, self.k, group, self.storage, inputs, prologue, epilogue)
        if self.has_offset or self.storage.two_bytes:
            return shape
        return replace(shape, f16_scales=self.scale_bits == 16, sub_scales=self.scale_bits == 8)

    def packed(self) -> PackedMatrix:
        """The layout of `repack`, which stores 6-bit weights as int8."""
        rng, n, k = random(self.name), self.n, self.k
        if self.storage.two_bytes:
            values = np.zeros((n, k + k % 2), np.float32)
            values[:, :k] = 0.05 * rng.standard_normal((n, k), np.float32)
            if self.storage is Storage.F16:
                return PackedMatrix(Layout(self.storage, k, k), values.astype(np.float16))
            beyond_f16 = (2.0**21 * values).view(np.uint16)[:, 1::2]
            return PackedMatrix(Layout(self.storage, k, k), np.ascontiguousarray(beyond_f16))
        storage = Storage.Q4 if self.storage is Storage.Q4 else Storage.Q8
        layout = Layout(storage, k, self.group, self.has_offset, self.scale_bits)
        words: Array
        if storage is Storage.Q4:
            words = rng.integers(0, 256, (n, k // 2), np.uint8)
        else:
            most = 32 if self.storage is Storage.Q6 else 128
            words = rng.integers(-most, most, (n, k), np.int8)
        if self.scale_bits == 8:
            return PackedMatrix(layout, words, super_blocks(rng, n, layout))
        scales = 0.01 * rng.standard_normal((n, k // self.group, layout.scale_width))
        scales[..., 1:] *= 10
        return PackedMatrix(layout, words, scales.astype(np.float32 if self.scale_bits == 32 else np.float16))

    def upload(self, gpu: Gpu, row0: int = 0, keep_scales: bool = False) -> tuple[MatrixShard, PackedMatrix]:
        """The matrix on the device, converted as the loader does.

        With `keep_scales` the scales stay as they are also on an adapter without native f16.
        """
        packed = self.packed()
        native_f16 = keep_scales or gpu.caps.native_f16
        target = WeightTarget(Backend.BUFFERS, self.storage is Storage.Q6, native_f16, int8=False)
        words, scales = target.convert(packed)
        on_device = None if scales is None else gpu.upload(scales, "scales")
        layout = target.layout(packed.layout)
        return MatrixShard(row0, self.n, layout, gpu.upload(words, self.name), on_device), packed


def super_blocks(rng: np.random.Generator, n: int, layout: Layout) -> Array:
    """Scales of K-quants (see storage.PackedMatrix): any sub-scales under random super-block scales."""
    blocks = rng.integers(0, 256, (n, layout.k // SUPER_BLOCK, layout.super_block_bytes), np.uint8)
    scales = rng.standard_normal((*blocks.shape[:2], 2)) * (1e-4, 1e-3 * layout.has_offset)
    blocks[..., :4] = scales.astype(np.float16).view(np.uint8)
    return blocks


def matrix_of(shard: MatrixShard) -> Matrix:
    return Matrix(shard.n, shard.k, (shard,))


def rows_of(packed: PackedMatrix, rows: NDArray[np.integer]) -> Floats:
    return dequantize(take_rows(packed, rows))


# int8 blocks: the activations of precision "fast"

F16_UNIT = 16.0  # f16 blocks hold values divided by it
INT8_BLOCK = np.dtype([("even", "i1", 16), ("odd", "i1", 16), ("scale", "f4", 4)])  # 32 activations


def quantise_blocks(x: Array) -> Array:
    """[m, k] to [m, k/32] blocks: scale = (d, d * sum of the first 16, of the last 16, of all)."""
    values = x.astype(np.float64).reshape(len(x), -1, 32)
    d = np.abs(values).max(axis=2, keepdims=True) / 127
    integers = np.rint(values / np.where(d == 0, 1, d)).astype(np.int8)
    d = (d.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFFFFC)).view(np.float32).astype(np.float64)  # 22 bits
    blocks = np.zeros(integers.shape[:2], INT8_BLOCK)
    blocks["even"], blocks["odd"] = integers[..., ::2], integers[..., 1::2]
    low, high = integers[..., :16].sum(axis=2), integers[..., 16:].sum(axis=2)
    blocks["scale"] = d * np.stack([np.ones_like(low), low, high, low + high], axis=2)
    return blocks


def block_planes(blocks: Array) -> Array:
    """[m, k/32] blocks as they lie on the device: planes [m, 3, k/32] of 16 bytes (kernels/parts/int8_block_*.wgsl)."""
    planes = np.ascontiguousarray(blocks).view(np.uint32).reshape(*blocks.shape, 3, 4)
    return np.ascontiguousarray(planes.swapaxes(1, 2))


def blocks_of_planes(words: Array, m: int) -> Array:
    """The inverse of `block_planes`, of any 4-byte words."""
    planes = np.ascontiguousarray(words).view(np.uint32).reshape(m, 3, -1, 4)
    return planes.swapaxes(1, 2).reshape(m, -1).view(INT8_BLOCK)


def read_blocks(gpu: Gpu, y: Buffer, m: int, count: int) -> Array:
    """[m, count] blocks that a kernel stored."""
    return blocks_of_planes(gpu.read(y, np.uint32, m * count * 12), m)


def f16_blocks(x: Array) -> Array:
    """[m, k] as f16 blocks on the device (kernels/parts/blocks_f16.wgsl)."""
    largest = float(np.finfo(np.float16).max)
    halves = np.clip(x / F16_UNIT, -largest, largest).astype(np.float16)
    eights = halves.reshape(len(x), -1, 4, 2, 4)  # [m, block, eight, half, of half]
    return np.ascontiguousarray(eights.transpose(0, 1, 2, 4, 3))


def values_of_f16(words: Array, m: int) -> Floats:
    """The inverse of `f16_blocks`, of any 4-byte words."""
    pairs = np.ascontiguousarray(words).view(np.float16).reshape(m, -1, 4, 4, 2)
    return np.asarray(F16_UNIT * pairs.transpose(0, 1, 2, 4, 3).reshape(m, -1).astype(np.float64))


def read_values(gpu: Gpu, y: Buffer, m: int, width: int, blocks: Inputs) -> Floats:
    """[m, width] of the blocks that a kernel stored."""
    if blocks is Inputs.F16:
        return values_of_f16(gpu.read(y, np.uint32, m * width // 2), m)
    return dequantise_blocks(read_blocks(gpu, y, m, width // 32))


def block_integers(blocks: Array) -> Floats:
    """[m, k/32, 32] in the order of the activations."""
    pairs = np.stack([blocks["even"], blocks["odd"]], axis=-1)
    return pairs.reshape(*blocks.shape, 32).astype(np.float64)


def dequantise_blocks(blocks: Array) -> Floats:
    """[m, k/32] blocks to [m, k]."""
    values = block_integers(blocks) * blocks["scale"][..., :1].astype(np.float64)
    return values.reshape(len(blocks), -1)


def round_int8(x: Array) -> Floats:
    """Activations rounded as int8 blocks round them."""
    return dequantise_blocks(quantise_blocks(x))


# Keys and values as a KV cache holds them


def quantise_kv(x: Array) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """[..., d] to the numbers [..., d/32, 32] and scales [..., d/32] of a q8_0 cache."""
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], -1, 32)
    d = np.abs(blocks).max(axis=-1) / 127
    return np.rint(blocks / np.where(d == 0, 1, d)[..., None]).astype(np.int8), d.astype(np.float16)


def round_kv(x: Array, kv_type: KvType) -> Floats:
    """Keys or values [..., d], rounded as the cache rounds them."""
    if kv_type is KvType.Q8_0:
        numbers, scales = quantise_kv(x)
        return (numbers * scales.astype(np.float64)[..., None]).reshape(x.shape)
    return x.astype(np.float16 if kv_type is KvType.F16 else np.float32).astype(np.float64)


def cache_bytes(x: Array, kv_type: KvType) -> NDArray[np.uint8]:
    """Keys or values [kv_heads, cells, d], whole pages, as they lie on the device (kernels/parts/kv_q8_0.wgsl)."""
    if kv_type is not KvType.Q8_0:
        return x.astype(np.float16 if kv_type is KvType.F16 else np.float32).reshape(-1).view(np.uint8)
    numbers, scales = quantise_kv(x.reshape(-1, PAGE, x.shape[-1]))
    padded = np.pad(scales, ((0, 0), (0, 0), (0, scales.shape[2] % 2)))
    planes = [np.ascontiguousarray(plane).view(np.uint8).reshape(len(numbers), -1) for plane in (numbers, padded)]
    return np.concatenate(planes, axis=1).reshape(-1)


# Inputs of linears


@dataclass(frozen=True, slots=True)
class LinearInputs:
    """The inputs of a linear on the device, and the values that its dot products use."""

    x: Buffer
    values: Floats  # [m, k]
    inputs: Inputs = Inputs.F32
    prologue: PrologueSpec = NO_PROLOGUE


EPS = 0.25  # of the prologue's norm: large enough to matter


def linear_inputs(
    gpu: Gpu, m: int, k: int, inputs: Inputs = Inputs.F32, prologue: Prologue = Prologue.NONE
) -> LinearInputs:
    x = random("x").standard_normal((m, k)).astype(np.float32)
    if prologue in (Prologue.MERGE, Prologue.MERGE_SINKS):
        return _partial_sums(gpu, m, k, inputs, prologue)
    if prologue is Prologue.NORM:
        weight = random("norm").uniform(0.5, 2.0, k).astype(np.float32)
        spec = PrologueSpec(prologue, {"norm": gpu.upload(weight, "norm")}, {"EPS": EPS})
        return LinearInputs(gpu.upload(x, "x"), _as_seen(rms_norm(x, weight, EPS), inputs), inputs, spec)
    if prologue is Prologue.SUM_NORM:
        after, weight = random("norms").uniform(0.5, 2.0, (2, k)).astype(np.float32)
        residual = random("residual").standard_normal(k).astype(np.float32)
        bound = {"residual": residual, "after": after, "norm": weight, "stream": np.zeros_like(residual)}
        named = {name: gpu.upload(values, name) for name, values in bound.items()}
        spec = PrologueSpec(prologue, named, {"EPS": EPS, "AFTER_EPS": 2 * EPS})
        values = rms_norm(residual + rms_norm(x, after, 2 * EPS), weight, EPS)
        return LinearInputs(gpu.upload(x, "x"), _as_seen(values, inputs), inputs, spec)
    if inputs is Inputs.INT8:
        blocks = quantise_blocks(x)
        on_device = gpu.upload(block_planes(blocks), "x")
        parts = ("input_rms_none",) if prologue is Prologue.BLOCKS else ()
        return LinearInputs(on_device, dequantise_blocks(blocks), inputs, PrologueSpec(prologue, parts=parts))
    if inputs is Inputs.F16:
        words = f16_blocks(x)
        return LinearInputs(gpu.upload(words, "x"), values_of_f16(words, m), inputs)
    stored = x
    if inputs is Inputs.INTERLEAVED:
        stored = np.ascontiguousarray(x.reshape(k // 32, 8, 4).swapaxes(0, 1))
    return LinearInputs(gpu.upload(stored, "x"), x.astype(np.float64), inputs)


def _partial_sums(gpu: Gpu, m: int, k: int, inputs: Inputs, prologue: Prologue) -> LinearInputs:
    """Attention in three splits, one of them without positions; with sinks a head has one that exceeds all scores."""
    rng, splits, dim = random("splits"), 3, 64
    sums = rng.standard_normal((m * k // dim, splits, dim)).astype(np.float32)
    stats = rng.uniform(1, 4, (m * k // dim, splits, 2)).astype(np.float32)  # (top, total)
    sums[:, 1], stats[:, 1] = 0, (-1e30, 0)
    tops, totals = np.moveaxis(stats.astype(np.float64), 2, 0)
    shares = np.exp(tops - tops.max(axis=1, keepdims=True))
    total = (totals * shares).sum(axis=1, keepdims=True)
    consts: Consts = {"HEAD_DIM": dim, "SPLITS": splits}
    bound: dict[str, Bindable] = {"stats": gpu.upload(stats, "stats")}
    if prologue is Prologue.MERGE_SINKS:
        sinks = rng.uniform(1, 4, len(sums)).astype(np.float32)
        sinks[-1] = 100
        total = total + np.exp(sinks[:, None] - tops.max(axis=1, keepdims=True))
        bound["sinks"] = gpu.upload(sinks, "sinks")
    merged = (sums * shares[..., None]).sum(axis=1) / total
    spec = PrologueSpec(prologue, bound, consts, ("split_count_fixed",))
    return LinearInputs(gpu.upload(sums, "x"), _as_seen(merged.reshape(m, k), inputs), inputs, spec)


def _as_seen(values: Floats, inputs: Inputs) -> Floats:
    return round_int8(values) if inputs is Inputs.INT8 else values


# Operations in float64


def rms_norm(x: Array, weight: Array, eps: float) -> Floats:
    wide = x.astype(np.float64)
    return np.asarray(wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + eps) * weight)


def silu(x: Array) -> Floats:
    wide = x.astype(np.float64)
    return np.asarray(wide / (1 + np.exp(-np.clip(wide, -700, None))))


def swiglu(x: Array) -> Floats:
    """[m, 2n] of interleaved gate and up to [m, n]."""
    return silu(x[:, ::2]) * x[:, 1::2]


def attention(q: Array, k: Array, v: Array, position: int, sinks: Array | None = None, soft_cap: float = 0) -> Floats:
    """q [m, heads, d] from `position` on, k and v [kv_heads, n, d] to [m, heads, d]; causal. sinks [heads]."""
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    heads_per_kv = q.shape[1] // len(k)
    hidden = np.arange(k.shape[1]) > position + np.arange(len(q))[:, None]
    out = np.empty_like(q)
    for head in range(q.shape[1]):
        kv_head = head // heads_per_kv
        scores = q[:, head] @ k[kv_head].T / np.sqrt(q.shape[2])
        scores = np.where(hidden, -np.inf, soft_cap * np.tanh(scores / soft_cap) if soft_cap else scores)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        total = weights.sum(axis=1, keepdims=True)
        if sinks is not None:
            total += np.exp(sinks[head] - scores.max(axis=1, keepdims=True))
        out[:, head] = weights @ v[kv_head] / total
    return out


# Running single kernels


def step_buffer(gpu: Gpu, rows: int, position: int = 0, table: PageTable | None = None) -> Buffer:
    """The inputs of a step with one segment."""
    step = StepInputs(gpu)
    step.write([Segment(0, position, [0] * rows)], table)
    return step.buffer


def ops_at(gpu: Gpu, rows: int, position: int, capacity: int) -> Ops:
    """For a step with one segment, over a KV cache of `capacity` positions in order."""
    table = page_table.in_order(gpu, capacity)
    return Ops(gpu, step_buffer(gpu, rows, position, table), table.buffer)


def step_rows(gpu: Gpu, step: Buffer, rows: int) -> NDArray[np.uint32]:
    """[rows, 4]: slot, position, token and cell of each row, as the device left them."""
    first = 4 * (HEADER_WORDS + 4 * MAX_SEGMENTS)
    return gpu.read(step, np.uint32, 4 * rows, first).reshape(rows, 4)


def run(gpu: Gpu, dispatches: Sequence[Dispatch], rows: int = 1, position: int = 0) -> None:
    Recorder(gpu).submit([Step(Plan(dispatches), rows, position)])


def fits(route: Route[S], shape: S, caps: Caps) -> bool:
    """Whether the route fits on a CPU or a GPU adapter: routes for either give correct results on both."""
    return any(route.fits(shape, replace(caps, cpu=cpu)) for cpu in (False, True))


def only(route: Route[S]) -> Table[S]:
    """A table in which this route always wins."""
    return (replace(route, fits=lambda shape, caps: True),)
