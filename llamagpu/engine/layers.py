"""Decode in few dispatches: runs of like layers, each run one kernel (gpu/join.py).

The weights of a run lie one behind the other (engine/shelves.py), and so do the cache and everything that stages hand
to each other, with gaps: no line of memory is read before all of it has been written, since a workgroup may keep what
it has read in a cache of its own.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import wgpu

from llamagpu.engine import ops
from llamagpu.engine.weights import Layer, Matrix, Part, Weights
from llamagpu.files.config import LlamaConfig
from llamagpu.gpu import routes
from llamagpu.gpu.device import Dispatch, Gpu, Slice, nbytes, with_gaps
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
    found = [layer.attn_norm, layer.ffn_norm]
    for matrix in matrices(layer):
        found += [b for part in matrix.parts for b in part.buffers.values()]
        found += [] if matrix.bias is None else [matrix.bias]
    return found


def with_buffers(layer: Layer, take: Callable[[Any], Any]) -> Layer:
    """The layer with take(buffer) for each of its buffers, in the order of `buffers_of`."""

    def part(p: Part) -> Part:
        return replace(p, words=take(p.words), scales=None if p.scales is None else take(p.scales))

    def matrix(m: Matrix) -> Matrix:
        return replace(m, parts=tuple(map(part, m.parts)), bias=None if m.bias is None else take(m.bias))

    attn_norm, ffn_norm = take(layer.attn_norm), take(layer.ffn_norm)
    qkv, attn_output, *gate_up, ffn_down = map(matrix, matrices(layer))
    return Layer(attn_norm, qkv, attn_output, ffn_norm, tuple(gate_up), ffn_down)


def stage_fits(layer: Layer) -> bool:
    parts = [part for matrix in matrices(layer) for part in matrix.parts]
    return len(layer.gate_up) == 1 and all(routes.one(part.shape(1)) for part in parts)


def follows(after: Any, before: Any) -> bool:
    """Whether one buffer lies right behind the other."""
    both = isinstance(after, Slice) and isinstance(before, Slice)
    return both and after.buffer is before.buffer and after.offset == before.offset + before.size


def span(first: Any, count: int) -> Any:
    """The place of `count` layers on a shelf, the first of them given."""
    return Slice(first.buffer, first.offset, count * first.size) if isinstance(first, Slice) else first


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
        self.counts: dict[int, Any] = {}  # buffers that say how many layers
        # queries, the residual stream after attention, silu(gate) * up, and attention's splits
        rows = [c.layers * layer_stride(width) for width in handed_on(c)]
        self.q, self.mid, self.act, self.partial, self.stats = with_gaps(gpu, rows, "by layer")

    def free(self) -> None:
        self.gpu.free(self.q.buffer, *self.counts.values())

    def dispatches(self, caches: list[tuple[Any, Any]], rope: Any) -> list[Dispatch]:
        """One for each run of layers whose weights and caches lie one behind the other."""
        layers = self.weights.layers
        kinds = [with_buffers(layer, nbytes) for layer in layers]
        places = [[*buffers_of(layer), *pair] for layer, pair in zip(layers, caches, strict=True)]
        starts = [0] + [
            i for i in range(1, len(layers))
            if kinds[i] != kinds[i - 1] or not all(map(follows, places[i], places[i - 1]))
        ]  # fmt: skip
        found = []
        for start, stop in zip(starts, [*starts[1:], len(layers)], strict=True):
            stages = self.stages(start, stop - start, *caches[start], rope)
            found.append(self.gpu.joined(stages, self.crew.count, self.meeting, self.count_of(stop - start)))
        return found

    def stages(self, start: int, count: int, k_cache: Any, v_cache: Any, rope: Any) -> list[Stage]:
        c, gpu = self.config, self.gpu
        layer = with_buffers(self.weights.layers[start], lambda buffer: span(buffer, count))
        k_cache, v_cache = span(k_cache, count), span(v_cache, count)
        x = Slice(self.x, start * layer_stride(c.dim), (count + 1) * layer_stride(c.dim))
        gate_up = layer.gate_up[0]
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
        to_qkv = ops.qkv(c, layer.qkv, self.q, k_cache, v_cache, rope, self.kv_f32)
        to_mid, to_x = ops.sum_to(self.mid, x, layer.attn_output), ops.sum_to(x, self.mid, layer.ffn_down, up=1)
        return [
            *self.linear(x, layer.qkv, to_qkv, "norm", self.norm(layer.attn_norm)),
            Stage(attention.source, attention.buffers, (c.kv_heads, "split_count()", 1)),
            *self.linear(self.partial, layer.attn_output, to_mid, "merge", merged),
            *self.linear(self.mid, gate_up, ops.swiglu(self.act, gate_up), "norm", self.norm(layer.ffn_norm)),
            *self.linear(self.act, layer.ffn_down, to_x, "norm", ops.Made({}, {"NORM": False})),
        ]

    def norm(self, weight: Any) -> ops.Made:
        return ops.Made({"norm": weight}, {"EPS": self.config.norm_eps})

    def linear(self, x: Any, matrix: Matrix, out: ops.Out, inputs: str, made: ops.Made) -> list[Stage]:
        found = []
        for part in matrix.parts:
            route = routes.joined_linear(part.shape(1, inputs + self.exact), self.crew, self.gpu.caps)
            one = replace(matrix, parts=(part,))
            (d,) = ops.linear(self.gpu, x, one, 1, out, self.step, inputs + self.exact, (route,), made)
            found.append(Stage(d.source, d.buffers, d.grid, last=part is matrix.parts[-1]))
        return found

    def count_of(self, layers: int) -> Any:
        if layers not in self.counts:
            self.counts[layers] = self.gpu.upload(np.array([layers], np.uint32), "layers", wgpu.BufferUsage.UNIFORM)
        return self.counts[layers]

    def find_crew(self, caches: list[tuple[Any, Any]], rope: Any, recorder: Recorder) -> bool:
        """Try how many workgroups run at the same time and see each other's stores; position 0 of the cache and the
        residual stream are then anything."""
        for crew in routes.crews(self.config.dim, self.gpu.caps):
            self.crew = crew
            self.gpu.write(self.meeting, np.array([0, 0, TRIAL, 0], np.uint32))
            try:
                recorder.submit([(Plan(self.dispatches(caches, rope)), 1, 0)])
            except wgpu.GPUError:  # the driver does not take so large a kernel, or so many bindings
                continue
            relays = [relayed(self.gpu, crew, self.meeting, self.count_of(RELAY), seed) for seed in (1, 2, 3)]
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
