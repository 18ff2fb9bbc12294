"""One kernel at a time on the GPU's clock, with its error against float64.

Matrices and caches are cloned until they fill more than any cache holds, and the clones are taken in turn: a
chain over one small matrix would measure the cache. What is small in a model as well stays where it is.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llamagpu.engine import ops
from llamagpu.engine.llama import Transformer
from llamagpu.engine.synthetic import SHAPES, synthetic_config, synthetic_weights
from llamagpu.engine.tiled import upload_tiles
from llamagpu.engine.weights import Matrix, Part
from llamagpu.files.tiles import tile
from llamagpu.gpu import routes
from llamagpu.gpu.device import Gpu
from llamagpu.gpu.routes import Route
from llamagpu.gpu.timing import Stopwatch
from llamagpu.tools import baselines, oracle
from llamagpu.tools.oracle import Weight, errors, only, random, step_buffer

SPREAD_BYTES = 192 << 20  # clones of one matrix: an H200 caches 50 MB
Timed = tuple[str, float, float]  # kernel, ns, NMSE


def clones(gpu: Gpu, nbytes: int) -> int:
    """How many besides the first."""
    return 0 if gpu.software else min(63, SPREAD_BYTES // nbytes)


def clone(gpu: Gpu, buffer: Any) -> Any:
    copy = gpu.zeros(buffer.size, buffer.label)
    encoder = gpu.device.create_command_encoder()
    encoder.copy_buffer_to_buffer(buffer, 0, copy, 0, buffer.size)
    gpu.device.queue.submit([encoder.finish()])
    return copy


class LinearTimes:
    """One matrix in several copies, and inputs for up to `most` tokens."""

    def __init__(self, gpu: Gpu, watch: Stopwatch, weight: Weight, most: int) -> None:
        self.gpu, self.watch, self.weight = gpu, watch, weight
        part, self.packed = weight.upload(gpu)
        self.bytes = part.words.size + part.scales.size
        self.parts = [part, *(self.cloned(part) for _ in range(clones(gpu, self.bytes)))]
        self.x = random("x").standard_normal((most, weight.k)).astype(np.float32)
        self.inputs = {"f32": gpu.upload(self.x, "x"), "i8": gpu.upload(oracle.to_records(self.x), "x")}
        self.y = gpu.zeros(most * weight.n * 4, "y")

    def cloned(self, part: Part) -> Part:
        return replace(part, words=clone(self.gpu, part.words), scales=clone(self.gpu, part.scales))

    def time(self, m: int, table: Sequence[Route], inputs: str = "f32") -> Timed:
        step, work = step_buffer(self.gpu, m), []
        for part in self.parts:
            matrix = Matrix(self.weight.n, self.weight.k, (part,))
            out = ops.store(self.y, matrix)
            work += ops.linear(self.gpu, self.inputs[inputs], matrix, m, out, step, inputs, tuple(table))
        found = work[0].label, self.watch.repeated_ns([[w] for w in work], m), self.error(m)
        self.gpu.free(step)
        return found

    def time_choice(self, m: int, kind: str) -> Timed:
        """What the routes take: for f32 or int8 activations, or for a model on images."""
        if kind != "images":
            return self.time(m, routes.LINEAR, kind)
        matrix, step = upload_tiles(self.gpu, [tile(self.packed)], "tiles"), step_buffer(self.gpu, m)
        x = self.gpu.upload_image(self.x[:m].reshape(m, -1, 4), "x")
        out = ops.Out("image_store", {"y": self.y}, {"WIDTH": self.weight.n})
        work = ops.linear(self.gpu, x, matrix, m, out, step, table=routes.LINEAR_IMAGE)
        found = work[0].label, self.watch.repeated_ns([work], m), self.error(m)
        self.gpu.free(x, step, *(part.words for part in matrix.parts))
        return found

    def error(self, m: int) -> float:
        """Of some rows and tokens, the first and the last among them; rounding x to int8 counts too."""
        n = self.weight.n
        rows = np.unique(np.r_[0, n - 1, random("rows").integers(0, n, 30)])
        tokens = np.unique(np.r_[0, m - 1, random("tokens").integers(0, m, 6)])
        got = np.array([self.gpu.read(self.y, np.float32, n, int(t) * n * 4)[rows] for t in tokens])
        return errors(got, self.x[tokens].astype(np.float64) @ oracle.rows_of(self.packed, rows).T)[0]

    def close(self) -> None:
        buffers = [b for part in self.parts for b in part.buffers.values()]
        self.gpu.free(*buffers, *self.inputs.values(), self.y)


def norm_time(gpu: Gpu, watch: Stopwatch, width: int, m: int, kernel: str) -> Timed:
    """`rms_norm_plain` stands for the pair with mul."""
    rng = random("norm")
    x, weight = rng.standard_normal((m, width), np.float32), rng.standard_normal(width, np.float32)
    xs, ws = gpu.upload(x, "x"), gpu.upload(weight, "w")
    between, y, step = gpu.zeros(x.nbytes, "between"), gpu.zeros(x.nbytes, "y"), step_buffer(gpu, m)
    if kernel == "rms_norm_plain":
        work = baselines.norm_then_mul(gpu, xs, ws, between, y, width, 1e-5)
    else:
        table = only(next(r for r in routes.NORM if r.kernel == kernel))
        work = [ops.rms_norm(gpu, xs, ws, y, width, 1e-5, m, step, table=table)]
    ns = watch.repeated_ns([work], m)
    got = gpu.read(y, np.float32, x.size).reshape(x.shape)
    gpu.free(xs, ws, between, y, step)
    return " + ".join(w.label for w in work), ns, errors(got, oracle.rms_norm(x, weight, 1e-5))[0]


def whole_ns(gpu: Gpu, watch: Stopwatch, shape: str, m: int) -> float:
    """One step of the whole model with f32 activations, where norms are dispatches of their own."""
    config = synthetic_config(shape)
    model = Transformer(gpu, config, synthetic_weights(gpu, config, "q4_0"), None, max(m, 64), chunk=m)
    gpu.write(model.step, np.array([0, m, model.capacity, 0], np.uint32))
    plan = model.plan(m)
    times = [watch.pass_ns([(plan, m, 0)]) for _ in range(2 if gpu.software else 20)]
    return float(np.median(times[len(times) // 2 :]))


def attend_time(gpu: Gpu, watch: Stopwatch, shape: str, m: int, pos: int, table: tuple[Route, ...]) -> Timed:
    s, rng, kv_f32 = SHAPES[shape], random("attend"), not gpu.caps.half
    config, capacity = oracle.heads_config(s.heads, s.kv_heads, s.head_dim), -(-(pos + m) // 4) * 4
    q = rng.standard_normal((m, s.heads, s.head_dim), np.float32)
    k, v = rng.standard_normal((2, s.kv_heads, capacity, s.head_dim), np.float32)
    k, v = (k, v) if kv_f32 else (k.astype(np.float16), v.astype(np.float16))
    caches = [(gpu.upload(k, "k"), gpu.upload(v, "v"))]
    caches += [(clone(gpu, caches[0][0]), clone(gpu, caches[0][1])) for _ in range(clones(gpu, 2 * k.nbytes))]
    split = routes.pick(table, s.head_dim, m, gpu.caps).kernel == "attend_split"
    reach = routes.reach(pos + 1) if split else 1
    splits = routes.splits(reach, s.kv_heads, m) if split else 1
    qs, y, step = gpu.upload(q, "q"), gpu.zeros(q.nbytes, "y"), step_buffer(gpu, m, pos, capacity)
    partial, stats = gpu.zeros(q.nbytes * splits, "partial"), gpu.zeros(m * s.heads * splits * 8 + 16, "stats")
    out = y if splits == 1 else partial
    merge = [ops.attend_merge(gpu, config, partial, stats, y, splits, False, m)] if splits > 1 else []
    work = [
        [ops.attend(gpu, config, qs, *pair, out, m, step, kv_f32, table, False, splits, stats, reach), *merge]
        for pair in caches
    ]
    ns = watch.repeated_ns(work, m, pos)
    some = slice(max(0, m - 8), m)  # the last tokens see the most
    want = oracle.attention(q[some], k[:, : pos + m], v[:, : pos + m], pos + max(0, m - 8))
    nmse = errors(gpu.read(y, np.float32, q.size).reshape(q.shape)[some], want)[0]
    gpu.free(*(b for pair in caches for b in pair), qs, y, partial, stats, step)
    return " + ".join(w.label for w in work[0]), ns, nmse
