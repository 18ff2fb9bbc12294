"""Decode in few dispatches: all layers are one kernel (gpu/join.py), or as many as its bindings reach.

Weights of one type lie one behind the other (engine/shelves.py), and so do the cache and everything that stages hand
to each other, with gaps: no line of memory is read before all of it has been written, since a workgroup may keep what
it has read in a cache of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby, product
from typing import Any

import numpy as np
import wgpu

from llamagpu.engine import ops
from llamagpu.engine.weights import Layer, Matrix, Weights
from llamagpu.files.config import LlamaConfig
from llamagpu.gpu import routes
from llamagpu.gpu.device import Dispatch, Gpu, Slice, whole, with_gaps
from llamagpu.gpu.join import Stage
from llamagpu.gpu.recorder import Plan, Recorder
from llamagpu.gpu.shaders import Const, constants

PATIENCE = 1 << 20  # looks of a workgroup at who else has arrived, about half a second
TRIAL = 1 << 14
RELAY = 32  # meetings that a trial checks for what is handed on


def matrices(layer: Layer) -> tuple[Matrix, ...]:
    return layer.qkv, layer.attn_output, *layer.gate_up, layer.ffn_down


def buffers_of(layer: Layer) -> list[Any]:
    """Every buffer of a layer, in order."""
    return [layer.attn_norm, layer.ffn_norm, *(b for matrix in matrices(layer) for b in buffers_in(matrix))]


def stage_fits(layer: Layer) -> bool:
    parts = [part for matrix in matrices(layer) for part in matrix.parts]
    return len(layer.gate_up) == 1 and all(routes.one(part.shape(1)) for part in parts)


def buffers_in(matrix: Matrix) -> list[Any]:
    found = [buffer for part in matrix.parts for buffer in part.buffers.values()]
    return found if matrix.bias is None else [*found, matrix.bias]


def shelved(matrix: Matrix) -> bool:
    """All of it, or what is on shelves counts as this layer's own."""
    return all(isinstance(buffer, Slice) for buffer in buffers_in(matrix))


def on_shelves(matrix: Matrix) -> Matrix:
    """The matrices of all layers that lie on the same shelves."""
    if not shelved(matrix):
        return matrix
    parts = tuple(replace(p, words=whole(p.words), scales=whole(p.scales)) for p in matrix.parts)
    return replace(matrix, parts=parts, bias=whole(matrix.bias))


def span(first: Any, count: int) -> Any:
    """The place of `count` layers on a shelf, the first of them given."""
    return Slice(first.buffer, first.offset, count * first.size) if isinstance(first, Slice) else first


def shelf_of(matrix: Matrix) -> tuple[Any, ...]:
    """The same for layers whose matrix is of the same type and lies on the same shelves."""
    types = ((p.form, p.n, p.group, p.pair, p.scale_bits) for p in matrix.parts)
    return *types, *(id(whole(buffer)) for buffer in buffers_in(matrix))


def slot_of(matrix: Matrix) -> int:
    if not shelved(matrix):
        return 0
    (slot,) = {buffer.offset // buffer.size for buffer in buffers_in(matrix)}
    return int(slot)


def layer_stride(width: int) -> int:
    """Bytes from what a layer hands on, so many words, to what the next one does."""
    return 4 * (width + constants("meet")["GAP"])


def handed_on(c: LlamaConfig) -> tuple[int, ...]:
    """Words of a layer: q, mid, act, partial, stats."""
    splits = c.heads * routes.joined_splits(c.kv_heads)
    return c.heads * c.head_dim, c.dim, c.ffn_dim, splits * c.head_dim, 2 * splits


class JoinedLayers:
    """All layers for one token: from row 0 of x to row `layers`."""

    def __init__(
        self, gpu: Gpu, config: LlamaConfig, weights: Weights, x: Any, step: Any, meeting: Any, kv_f32: bool, fast: bool
    ) -> None:
        self.gpu, self.config, self.weights, self.x, self.step, self.meeting = gpu, config, weights, x, step, meeting
        self.kv_f32, self.exact = kv_f32, "" if fast else "_f32"
        c = config
        self.crew = routes.crews(c.dim, gpu.caps)[0]
        self.alike = False  # a kernel for each section of layers of the same types
        self.tables: dict[bytes, Any] = {}  # what kernels know of their layers
        # queries, the residual stream after attention, silu(gate) * up, and attention's splits
        rows = [c.layers * layer_stride(width) for width in handed_on(c)]
        self.q, self.mid, self.act, self.partial, self.stats = with_gaps(gpu, rows, "by layer")

    def free(self) -> None:
        self.gpu.free(self.q.buffer, *self.tables.values())

    def dispatches(self, caches: list[tuple[Any, Any]], rope: Any) -> list[Dispatch]:
        """One, or as few as bindings allow: layers of different types are in one where a kernel may bind enough."""
        found = self.sections(caches, rope, self.alike)
        if not self.alike and any(d.source.count("var<storage") > self.gpu.caps.storage_buffers for d in found):
            return self.sections(caches, rope, alike=True)
        return found

    def sections(self, caches: list[tuple[Any, Any]], rope: Any, alike: bool) -> list[Dispatch]:
        """One for each section of layers whose caches and norms are in the same bindings, and with `alike` all else."""
        layers, found = self.weights.layers, []

        def bound(i: int) -> tuple[int, ...]:
            own = [b for b in buffers_of(layers[i]) if alike or not isinstance(b, Slice)]
            return tuple(id(whole(b)) for b in (layers[i].attn_norm, layers[i].ffn_norm, *caches[i], *own))

        for _, group in groupby(range(len(layers)), bound):
            members = list(group)
            stages = self.stages(members, *caches[members[0]], rope)
            found.append(self.gpu.joined(stages, self.crew.count, self.meeting, self.table(members)))
        return found

    def stages(self, members: list[int], k_cache: Any, v_cache: Any, rope: Any) -> list[Stage]:
        c, gpu, count = self.config, self.gpu, len(members)
        first = self.weights.layers[members[0]]
        k_cache, v_cache = span(k_cache, count), span(v_cache, count)
        attn_norm, ffn_norm = span(first.attn_norm, count), span(first.ffn_norm, count)
        x = Slice(self.x, members[0] * layer_stride(c.dim), (count + 1) * layer_stride(c.dim))
        splits: dict[str, Const] = {"WINDOW": c.sliding_window, "MOST_SPLITS": routes.joined_splits(c.kv_heads)}
        own: dict[str, Const] = {
            "STRANDS": routes.joined_strands(c.heads // c.kv_heads, self.crew, gpu.caps),
            "WORKGROUP": self.crew.invocations,
            "PARTIAL": True,
        }
        attention = ops.attend(
            gpu, c, self.q, k_cache, v_cache, self.partial, 1, self.step, self.kv_f32, stats=self.stats,
            more=splits | own, parts=("splits_now",),
        )  # fmt: skip
        merged = ops.Made({"stats": self.stats}, splits | {"HEAD_DIM": c.head_dim}, ("splits_now",))

        def linear(column: int, x: Any, out: Callable[[Matrix], ops.Out], inputs: str, made: ops.Made) -> list[Stage]:
            return [
                replace(stage, column=column, variant=number)
                for number, matrix in enumerate(self.variants(members, column).values())
                for stage in self.linear(x, on_shelves(matrix), out, inputs, made)
            ]

        def to_qkv(matrix: Matrix) -> ops.Out:
            return ops.qkv(c, matrix, self.q, k_cache, v_cache, rope, self.kv_f32)

        heads = routes.Heads(c.heads, c.kv_heads, c.head_dim)
        quads = bool(self.exact) and not routes.held(c.ffn_dim, heads, False, self.crew, gpu.caps)
        wide = ("quads", ops.Made({}, {})) if quads else ("norm", ops.Made({}, {"NORM": False}))
        return [
            *linear(0, x, to_qkv, "norm", self.norm(attn_norm)),
            Stage(attention.source, attention.buffers, (c.kv_heads, "split_count()", 1)),
            *linear(1, self.partial, lambda m: ops.sum_to(self.mid, x, m), "merge", merged),
            *linear(2, self.mid, lambda m: ops.swiglu(self.act, m, quads), "norm", self.norm(ffn_norm)),
            *linear(3, self.act, lambda m: ops.sum_to(x, self.mid, m, up=1), *wide),
        ]

    def variants(self, members: Sequence[int], column: int) -> dict[tuple[Any, ...], Matrix]:
        """The different matrices that layers have there, by the shelves that they lie on."""
        found: dict[tuple[Any, ...], Matrix] = {}
        for i in members:
            matrix = matrices(self.weights.layers[i])[column]
            found.setdefault(shelf_of(matrix), matrix)
        return found

    def norm(self, weight: Any) -> ops.Made:
        return ops.Made({"norm": weight}, {"EPS": self.config.norm_eps})

    def linear(
        self, x: Any, matrix: Matrix, out: Callable[[Matrix], ops.Out], inputs: str, made: ops.Made
    ) -> list[Stage]:
        """A stage for each part; all take the inputs that the first has made, if all of their workgroups have."""
        found: list[Stage] = []
        busy: list[int] = []
        for part in matrix.parts:
            route = routes.joined_linear(part.shape(1, inputs + self.exact), self.crew, self.gpu.caps)
            one = replace(matrix, parts=(part,))
            busy.append(min(self.crew.count, ops.workgroups(self.gpu, route, part.shape(1))))
            ready = {"READY": bool(found) and busy[-1] <= busy[0]} if inputs in routes.MADE else {}
            own = replace(made, consts=made.consts | ready)
            (d,) = ops.linear(self.gpu, x, one, 1, out(matrix), self.step, inputs + self.exact, (route,), own)
            found.append(Stage(d.source, d.buffers, d.grid))
        return found

    def table(self, members: Sequence[int]) -> Any:
        """What `join` wants to know of the layers."""
        rows, shelves = [[len(members), 0, 0, 0]], [list(self.variants(members, column)) for column in range(4)]
        for i in members:
            each = zip(matrices(self.weights.layers[i]), shelves, strict=True)
            rows.append([known.index(shelf_of(matrix)) << 16 | slot_of(matrix) for matrix, known in each])
        return self.counted(np.array(rows, np.uint32))

    def counted(self, rows: np.ndarray[Any, Any]) -> Any:
        key = rows.tobytes()
        if key not in self.tables:
            self.tables[key] = self.gpu.upload(rows, "layers", wgpu.BufferUsage.UNIFORM)
        return self.tables[key]

    def find_crew(self, caches: list[tuple[Any, Any]], rope: Any, recorder: Recorder) -> bool:
        """Try how many workgroups run at the same time and see each other's stores; position 0 of the cache and the
        residual stream are then anything."""
        relay_table = self.counted(np.array([[RELAY, 0, 0, 0]], np.uint32))
        tried: list[list[str]] = []
        for crew, alike in product(routes.crews(self.config.dim, self.gpu.caps), (False, True)):
            self.crew, self.alike = crew, alike
            work = self.dispatches(caches, rope)
            if (sources := [d.source for d in work]) in tried:
                continue
            tried.append(sources)
            self.gpu.write(self.meeting, np.array([0, 0, TRIAL, 0], np.uint32))
            try:
                recorder.submit([(Plan(work), 1, 0)])
            except wgpu.GPUError:  # the driver does not take so large a kernel, or so many bindings
                continue
            relays = [relayed(self.gpu, crew, self.meeting, relay_table, seed) for seed in (1, 2, 3)]
            met = not self.gpu.read(self.meeting, np.uint32, 2)[1]
            if met and all(np.array_equal(got, want) for got, want in relays):
                self.gpu.write(self.meeting, np.array([PATIENCE], np.uint32), offset=8)
                return True
        return False


def relayed(gpu: Gpu, crew: routes.Crew, meeting: Any, count: Any, seed: int = 1) -> tuple[Any, Any]:
    """Values that each of RELAY layers takes from workgroups of the layer before, and what they should be. With every
    seed rows begin elsewhere in a line of memory."""
    n, shift, at = constants("relay")["N"], constants("relay")["SHIFT"], 12 * seed
    words = np.arange(seed, seed + at + (RELAY + 1) * layer_stride(n) // 4, dtype=np.uint32) * np.uint32(2654435761)
    y = gpu.upload(words, "relay")  # what is read too early is no zero and nothing that another relay left
    consts: dict[str, Const] = {"WORKGROUP": crew.invocations, "AT": at}
    alone = gpu.dispatch("relay", (), consts, {"y": y}, (n // crew.invocations, 1, 1))
    work = gpu.joined([Stage(alone.source, alone.buffers, alone.grid)], crew.count, meeting, count)
    Recorder(gpu).submit([(Plan([work]), 1, 0)])
    got = gpu.read(y, np.uint32, n, offset=4 * at + RELAY * layer_stride(n))
    gpu.free(y)
    return got, np.roll(words[at : at + n], -RELAY * shift) + np.uint32(RELAY)
