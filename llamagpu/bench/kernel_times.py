"""Times one kernel at a time on the GPU's clock, and computes its error against float64.

Matrices and KV caches are cloned until the clones exceed every hardware cache. Consecutive dispatches use different
clones, because a single small matrix would stay in the cache. Buffers that are small in a model too are not cloned.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from llamagpu.engine import baselines, ops, routes
from llamagpu.engine.load import load_model
from llamagpu.engine.model import BufferModel
from llamagpu.engine.ops import AttentionBuffers, AttentionMode, Ops, Output
from llamagpu.engine.options import Backend, EngineOptions, KvType, Precision
from llamagpu.engine.routes import Attention, Epilogue, Inputs, Linear, Table
from llamagpu.engine.sequence import Sequence
from llamagpu.engine.step_inputs import Segment
from llamagpu.engine.synthetic import SHAPES
from llamagpu.engine.weights import Matrix, MatrixShard, WeightTarget, upload_matrix
from llamagpu.gpu.buffers import AnyBuffer, Bindable, Buffer, BufferRange, as_buffer, base_buffer, nbytes
from llamagpu.gpu.device import Dispatch, Gpu
from llamagpu.gpu.recorder import Step
from llamagpu.gpu.timing import Stopwatch
from llamagpu.verify import reference
from llamagpu.verify.reference import Weight, errors, matrix_of, only, ops_at, random, step_buffer

CLONE_BYTES = 192 << 20  # of all clones of one matrix: an H200 caches 50 MB
EPS = 1e-5


class Timed(NamedTuple):
    kernel: str
    ns: float
    nmse: float  # normalised mean squared error against float64


def clone_count(gpu: Gpu, size: int) -> int:
    """How many clones a buffer needs besides itself."""
    return 0 if gpu.software else min(63, CLONE_BYTES // size)


def clone(gpu: Gpu, buffer: AnyBuffer) -> Buffer:
    copy = gpu.zeros(buffer.size, buffer.label)
    gpu.copy([(BufferRange(base_buffer(buffer), 0, buffer.size), BufferRange(copy, 0, buffer.size))])
    return copy


class LinearTimes:
    """One q4 matrix in several clones, and inputs of up to `most` rows."""

    def __init__(self, gpu: Gpu, watch: Stopwatch, weight: Weight, most: int) -> None:
        self.gpu, self.watch, self.weight = gpu, watch, weight
        shard, self.packed = weight.upload(gpu)
        self.bytes = sum(nbytes(resource) for resource in shard.bindings.values())
        self.shards = [shard, *(self.clone(shard) for _ in range(clone_count(gpu, self.bytes)))]
        self.x = random("x").standard_normal((most, weight.k)).astype(np.float32)
        blocks = reference.block_planes(reference.quantise_blocks(self.x))
        self.inputs = {Inputs.F32: gpu.upload(self.x, "x"), Inputs.INT8: gpu.upload(blocks, "x")}
        self.y = gpu.zeros(most * weight.n * 4, "y")

    def clone(self, shard: MatrixShard) -> MatrixShard:
        assert shard.scales is not None
        return replace(shard, words=clone(self.gpu, as_buffer(shard.words)), scales=clone(self.gpu, shard.scales))

    def time(self, m: int, table: Table[Linear] = routes.LINEAR, inputs: Inputs = Inputs.F32) -> Timed:
        """The kernel that the table selects."""

        def dispatches(make: Ops) -> list[list[Dispatch]]:
            matrices = [matrix_of(shard) for shard in self.shards]
            x = self.inputs[inputs]
            return [make.linear(x, matrix, m, ops.store(self.y, matrix), inputs, table=table) for matrix in matrices]

        return self.timed(m, dispatches)

    def time_texture(self, m: int) -> Timed:
        """The kernel of the texture backend."""
        target = WeightTarget.of(Backend.TEXTURES, Precision.HIGH, self.gpu.caps)
        matrix = upload_matrix(self.gpu, [self.packed], "textures", target)
        x = self.gpu.upload_texture(self.x[:m].reshape(m, -1, 4), "x")
        output = Output(Epilogue.TEXTURE_TO_BUFFER, {"y": self.y}, {"WIDTH": self.weight.n})
        found = self.timed(m, lambda make: [make.linear(x, matrix, m, output, table=routes.TEXTURE_LINEAR)])
        self.gpu.free(x, *resources(matrix))
        return found

    def timed(self, m: int, dispatches: Callable[[Ops], list[list[Dispatch]]]) -> Timed:
        step = step_buffer(self.gpu, m)
        units = dispatches(Ops(self.gpu, step))
        found = Timed(units[0][0].kernel, self.watch.repeated_ns(units, m), self.nmse(m))
        self.gpu.free(step)
        return found

    def nmse(self, m: int) -> float:
        """The error of some matrix rows and token rows, including the first and last. Rounding x to int8 counts."""
        n = self.weight.n
        rows = np.unique(np.r_[0, n - 1, random("rows").integers(0, n, 30)])
        tokens = np.unique(np.r_[0, m - 1, random("tokens").integers(0, m, 6)])
        got = np.array([self.gpu.read(self.y, np.float32, n, int(t) * n * 4)[rows] for t in tokens])
        return errors(got, self.x[tokens].astype(np.float64) @ reference.rows_of(self.packed, rows).T)[0]

    def close(self) -> None:
        shards = [resource for shard in self.shards for resource in shard.bindings.values()]
        self.gpu.free(*shards, *self.inputs.values(), self.y)


def resources(matrix: Matrix) -> list[Bindable]:
    return [resource for shard in matrix.shards for resource in shard.bindings.values()]


def norm_time(gpu: Gpu, watch: Stopwatch, width: int, m: int, kernel: str) -> Timed:
    """`rms_norm_plain` stands for the two dispatches of baselines.norm_then_mul."""
    rng = random("norm")
    x, weight = rng.standard_normal((m, width), np.float32), rng.standard_normal(width, np.float32)
    xs, ws = gpu.upload(x, "x"), gpu.upload(weight, "w")
    normed, y, step = gpu.zeros(x.nbytes, "normed"), gpu.zeros(x.nbytes, "y"), step_buffer(gpu, m)
    make = Ops(gpu, step)
    if kernel == "rms_norm_plain":
        unit = baselines.norm_then_mul(make, xs, ws, normed, y, width, EPS)
    else:
        table = only(next(route for route in routes.NORM if route.kernel == kernel))
        unit = [make.rms_norm(xs, ws, y, width, EPS, m, table=table)]
    ns = watch.repeated_ns([unit], m)
    got = gpu.read(y, np.float32, x.size).reshape(x.shape)
    gpu.free(xs, ws, normed, y, step)
    return Timed(kernels(unit), ns, errors(got, reference.rms_norm(x, weight, EPS))[0])


def kernels(unit: list[Dispatch]) -> str:
    return " + ".join(dispatch.kernel for dispatch in unit)


def step_ns(gpu: Gpu, watch: Stopwatch, shape: str, m: int) -> float:
    """One step of the whole model with f32 activations, unfused: every norm is a dispatch."""
    options = EngineOptions(context=max(m, 64), chunk=m, precision=Precision.HIGH, backend=Backend.BUFFERS)
    loaded = load_model(f"{shape}:q4_0", options, gpu=gpu)
    engine = loaded.engine
    if isinstance(engine.model, BufferModel):
        engine.model.unfuse()
    engine.reserve(Sequence(), m)
    engine.model.write_step([Segment(0, 0, [0] * m)])
    step = Step(engine.model.plan(m), m)
    times = [watch.pass_ns([step]) for _ in range(2 if gpu.software else 20)]
    engine.free()
    return float(np.median(times[len(times) // 2 :]))


def attend_time(gpu: Gpu, watch: Stopwatch, name: str, m: int, position: int, table: Table[Attention]) -> Timed:
    """Attention of `m` rows from `position` on, in the shape of a synthetic model."""
    s, rng, kv_type = SHAPES[name], random("attend"), KvType.F16 if gpu.caps.native_f16 else KvType.F32
    end = position + m
    capacity = -(-end // 4) * 4
    q = rng.standard_normal((m, s.heads, s.head_dim), np.float32)
    dtype = np.float16 if kv_type is KvType.F16 else np.float32
    k, v = rng.standard_normal((2, s.kv_heads, capacity, s.head_dim), np.float32).astype(dtype)
    caches = [(gpu.upload(k, "k"), gpu.upload(v, "v"))]
    caches += [(clone(gpu, caches[0][0]), clone(gpu, caches[0][1])) for _ in range(clone_count(gpu, 2 * k.nbytes))]
    shape = Attention(m, s.heads, s.kv_heads, s.head_dim, scale=s.head_dim**-0.5)
    if table is routes.ATTEND:
        half = kv_type is KvType.F16  # as prompts in `fast` do on matrix units
        shape = replace(shape, bucket=routes.context_bucket(position + 1), half=half, half_scores=half)
        shape = routes.in_splits(shape, gpu.caps)
    splits = shape.splits
    qs, y, make = gpu.upload(q, "q"), gpu.zeros(q.nbytes, "y"), ops_at(gpu, m, position, capacity)
    partial, stats = gpu.zeros(q.nbytes * splits, "partial"), gpu.zeros(m * s.heads * splits * 8 + 16, "stats")
    mode = AttentionMode(kv_type)
    out = y if splits == 1 else partial
    merge = [make.attend_merge(shape, partial, stats, y, Inputs.F32)] if splits > 1 else []
    units = [
        [*make.attend(shape, AttentionBuffers(qs, keys, values, out, stats), mode, table), *merge]
        for keys, values in caches
    ]
    ns = watch.repeated_ns(units, m, position)
    first = max(0, m - 8)  # the last rows see the most positions
    want = reference.attention(q[first:], k[:, :end], v[:, :end], position + first)
    got = gpu.read(y, np.float32, q.size).reshape(q.shape)[first:]
    gpu.free(*(buffer for cache in caches for buffer in cache), qs, y, partial, stats, *make.shared.values())
    return Timed(kernels(units[0]), ns, errors(got, want)[0])
