"""The transformer on a CPU adapter (llvmpipe), in images: tiles of 8 rows of weights, activations, caches.

There a lane gets 16 bytes from an image in 2 ns and from a buffer in 36 (Mesa 22.3, Neoverse-N1: a buffer is
read in a loop over the lanes, with a branch for each), so that kernels on buffers are ten times slower.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from llamagpu.engine import ops, weights
from llamagpu.engine.llama import RING, Transformer
from llamagpu.engine.ops import Out
from llamagpu.engine.weights import Layer, Matrix, Part, Progress, Tensors, Weights
from llamagpu.files.config import LlamaConfig, rope_table, used_shapes
from llamagpu.files.repack import FORMATS, Packed, slice_rows, small
from llamagpu.files.tiles import ROWS, tile
from llamagpu.gpu import routes
from llamagpu.gpu.device import Dispatch, Gpu
from llamagpu.gpu.recorder import Plan, Step
from llamagpu.gpu.routes import Heads, Linear
from llamagpu.gpu.shaders import Const, constants

FOLD = constants("attend_image")["FOLD"]  # positions below each other in a cache image
Bias = np.ndarray[Any, Any] | None


def suits_tiles(config: LlamaConfig, tensors: Tensors, gpu: Gpu) -> bool:
    c, shapes = config, []
    for tensor in (tensors[name] for name in used_shapes(config, tensors)):
        if len(tensor.shape) == 2:
            (n, k), form = tensor.shape, FORMATS.get(tensor.kind)
            shapes.append(Linear(1, n, k, form.group, form.form) if form else Linear(1, n, k, k, "f16"))
    return routes.tileable(c.dim, c.ffn_dim, c.head_dim, c.rope_dims, shapes, gpu.caps)


# Weights


@dataclass(frozen=True, slots=True)
class Tiles(Part):
    """Rows as one image, their scales among them."""

    @property
    def consts(self) -> dict[str, Const]:
        return {} if self.form == "tile_f32" else {"GROUP": self.group}


def load_tiles(tensors: Tensors, config: LlamaConfig, gpu: Gpu, progress: Progress | None = None) -> Weights:
    """As load_weights; the threads that repack also tile."""
    most = ROWS * gpu.caps.image_side
    jobs: list[Any] = [(label, partial(tiled, job, most)) for label, job in weights.matrix_jobs(tensors, config)]
    done: dict[str, Any] = {}
    for count, (label, (tiles, bias)) in enumerate(weights.ahead(jobs)):
        done[label] = upload_tiles(gpu, tiles, label, bias)
        if progress:
            progress(count + 1, len(jobs))
    for name in weights.norm_names(config):
        done[name] = gpu.upload_image(small(tensors[name]).reshape(1, -1, 4), name)
    return weights.assemble(done, config)


def tiled(job: Callable[[], tuple[list[Packed], Bias]], most: int) -> tuple[list[Packed], Bias]:
    """A job's matrices in tiles, at most `most` rows each."""
    packed, bias = job()
    pieces = [slice_rows(p, start, min(start + most, p.n)) for p in packed for start in range(0, p.n, most)]
    return [tile(piece) for piece in pieces], bias


def upload_tiles(gpu: Gpu, tiles: Iterable[Packed], label: str, bias: Bias = None) -> Matrix:
    parts: list[Part] = []
    row0 = 0
    for t in tiles:
        image = gpu.upload_image(t.words, label)
        parts.append(Tiles(row0, t.n, t.k, t.group, t.form, True, True, image, None))
        row0 += t.n
    return Matrix(row0, parts[0].k, tuple(parts), None if bias is None else gpu.upload(bias, f"{label}.bias"))


class TiledTransformer(Transformer):
    """The residual stream goes to and fro between two images: a kernel cannot read and write the same one."""

    layout = "images"
    images: list[Any]  # per layer: a row per position, its keys and values
    scored: Any  # [heads, capacity] scores of one token

    def activations(self) -> None:
        gpu, c, rows = self.gpu, self.config, self.chunk
        self.dispatches: dict[int, list[Dispatch]] = {}
        self.x = gpu.image(c.dim // 4, rows, "x")  # [m, dim] residual stream, into a layer and out of it
        self.mid = gpu.image(c.dim // 4, rows, "mid")  # [m, dim] between attention and feed forward
        self.h = gpu.image(max(c.dim, c.heads * c.head_dim) // 4, rows, "h")  # [m, dim] normalised; attended
        self.q = gpu.image(c.heads * c.head_dim // 4, rows, "q")  # [m, heads, head_dim] rotated queries
        self.act = gpu.image(c.ffn_dim // 4, rows, "act")  # [m, ffn] silu(gate) * up

    def reserve(self, context: int) -> None:
        if context <= self.capacity:
            return
        self.check_most(context)
        c, gpu, old = self.config, self.gpu, self.capacity
        capacity = -(-context // 4) * 4  # a texel of `scored` holds 4 positions
        size = -(-capacity // FOLD) * self.texels, min(capacity, FOLD)
        images = [gpu.image(*size, f"cache {i}") for i in range(c.layers)]
        scored = gpu.image(min(capacity // 4, FOLD), -(-capacity // 4 // FOLD) * c.heads, "scored")
        rope = gpu.upload(rope_table(c, self.freq_factors, capacity), "rope")  # [capacity, rope_dims/2, 2]
        if old:
            self.copy_images(self.images, images)
        freed = [*self.images, self.rope, self.scored] if old else []
        self.plans.clear()  # and then all at once: a Ctrl-C finds the old cache or the new one, whole
        self.dispatches.clear()
        self.images, self.scored, self.rope, self.capacity = images, scored, rope, capacity
        gpu.free(*freed)

    def copy_images(self, before: list[Any], after: list[Any]) -> None:
        encoder = self.gpu.device.create_command_encoder()
        for source, target in zip(before, after, strict=True):
            size = (source.width, source.height, 1)
            encoder.copy_texture_to_texture({"texture": source}, {"texture": target}, size)
        self.gpu.device.queue.submit([encoder.finish()])

    @property
    def texels(self) -> int:
        """Of one position: its keys and values."""
        return 2 * self.config.kv_heads * self.config.head_dim // 4

    def read_cache(self, count: int) -> Iterator[np.ndarray[Any, Any]]:
        for image, x, rows in self.cache_columns(count):
            yield self.gpu.read_image(image, x, self.texels, rows)

    def write_cache(self, count: int, take: Callable[[int], np.ndarray[Any, Any]]) -> None:
        for image, x, rows in self.cache_columns(count):
            data = take(16 * self.texels * rows).view(np.uint32)
            self.gpu.write_image(image, data.reshape(rows, self.texels, 4), x)

    def cache_columns(self, count: int) -> Iterator[tuple[Any, int, int]]:
        """Where the first `count` positions stand: image, first column, rows."""
        for image in self.images:
            for start in range(0, count, FOLD):
                yield image, start // FOLD * self.texels, min(FOLD, count - start)

    # Plans

    def plan(self, m: int, pos: int = 0, embed: bool = True) -> Plan:
        """One plan takes any number of tokens above one. For one token the grids are fixed; when the context
        has doubled, there is another plan."""
        m = min(m, 2)
        groups = routes.score_groups(pos, routes.vector(self.gpu.caps)) if m == 1 else 0
        if ("plan", m, groups) not in self.plans:
            if m not in self.dispatches:
                self.dispatches[m] = [*self.body(m), *self.head()]
            fix = partial(fixed, pos=pos) if m == 1 else lambda dispatch: dispatch
            self.plans["plan", m, groups] = Plan([fix(dispatch) for dispatch in self.dispatches[m]])
        return self.plans["plan", m, groups]

    @property
    def heads(self) -> Heads:
        return Heads(self.config.heads, self.config.kv_heads, self.config.head_dim)

    def body(self, m: int, reach: int = 0, embed: bool = True) -> list[Dispatch]:
        dispatches = ops.embed(self.gpu, self.tokens, self.weights.token_embd, self.x, m, routes.EMBED_IMAGE)
        for layer, image in zip(self.weights.layers, self.images, strict=True):
            dispatches += self.layer(layer, image, m)
        return dispatches

    def layer(self, layer: Layer, cache: Any, m: int) -> list[Dispatch]:
        c = self.config
        shape: dict[str, Const] = {"HEADS": c.heads, "KV_HEADS": c.kv_heads, "HEAD_DIM": c.head_dim}
        to_qkv = Out("image_qkv", {"y": self.q, "cache": cache, "rope": self.rope}, shape | {"ROPE_DIMS": c.rope_dims})
        return [
            *self.norm_linears(self.x, layer.attn_norm, [(layer.qkv, to_qkv)], m),
            *ops.attend_image(
                self.gpu, self.heads, self.q, cache, self.scored, self.h, m, self.step, c.sliding_window, c.attn_scale
            ),
            *self.linear(self.h, layer.attn_output, m, Out("image_add", {"base": self.x, "y": self.mid})),
            *self.feed_forward(layer, m),
            *self.linear(self.act, layer.ffn_down, m, Out("image_add", {"base": self.mid, "y": self.x})),
        ]

    def head(self) -> list[Dispatch]:
        """From the last row to its logits and the largest of every run of them."""
        gpu, matrix = self.gpu, self.weights.output
        grid = -(-ops.chunks(matrix.n) // constants("argmax")["WORKGROUP"]), 1, 1
        buffers = {"logits": self.logits, "best": self.best}
        return [
            self.normalise(self.x, self.weights.output_norm, 1, last=True),
            *self.linear(self.h, matrix, 1, Out("image_store", {"y": self.logits}, {"WIDTH": matrix.n})),
            gpu.dispatch("argmax", (), {"VOCAB": matrix.n}, buffers, grid),
        ]

    def linear(self, x: Any, matrix: Matrix, m: int, out: Out, norm: Any = None) -> list[Dispatch]:
        out = replace(out, consts=out.consts | {"BIAS": matrix.bias is not None})
        made = ops.Made({"norm": norm}, {"NORM": True, "EPS": self.config.norm_eps}) if norm else None
        return ops.linear(self.gpu, x, matrix, m, out, self.step, table=routes.LINEAR_IMAGE, made=made)

    def norm_linears(self, x: Any, norm: Any, pairs: list[tuple[Matrix, Out]], m: int) -> list[Dispatch]:
        """Linears of normalised x: the kernel for one token normalises itself, which is cheaper than a dispatch."""
        first, h = ([], x) if m == 1 else ([self.normalise(x, norm, m)], self.h)
        return first + [d for w, out in pairs for d in self.linear(h, w, m, out, norm if m == 1 else None)]

    def normalise(self, x: Any, weight: Any, m: int, last: bool = False) -> Dispatch:
        gpu, c, table = self.gpu, self.config, routes.NORM_IMAGE
        return ops.rms_norm(gpu, x, weight, self.h, c.dim, c.norm_eps, m, self.step, last, table)

    def feed_forward(self, layer: Layer, m: int) -> list[Dispatch]:
        if len(layer.gate_up) == 1:
            pairs = [(layer.gate_up[0], Out("image_swiglu", {"y": self.act}))]
            return self.norm_linears(self.mid, layer.ffn_norm, pairs, m)
        gpu, width = self.gpu, self.config.ffn_dim
        if not hasattr(self, "gate"):  # only for files that need them
            self.gate, self.up = (gpu.image(width // 4, self.chunk, name) for name in ("gate", "up"))
        outs = [Out("image_put", {"y": y}) for y in (self.gate, self.up)]
        return [
            *self.norm_linears(self.mid, layer.ffn_norm, list(zip(layer.gate_up, outs, strict=True)), m),
            ops.silu_mul_image(gpu, self.gate, self.up, self.act, width, m),
        ]

    def choose(self, drawn: bool = False) -> Plan:
        if ("choose", drawn) not in self.plans:
            vocab = self.config.vocab
            consts: dict[str, Const] = {"CANDIDATES": ops.chunks(vocab), "RING": RING}
            buffers = {"best": self.best, "tokens": self.tokens, "ring": self.ring, "step": self.step}
            if drawn:
                consts["VOCAB"] = vocab
                buffers |= {"logits": self.logits, "sampling": self.sampling}
            else:
                consts["WORKGROUP"] = 16  # barriers cost more here than turns of a loop: 30 us instead of 150
            kernel = "sample" if drawn else "pick"
            found = self.gpu.dispatch(kernel, ("next_none",), consts, buffers, (1, 1, 1))
            self.plans["choose", drawn] = Plan([found])
        return self.plans["choose", drawn]

    def scoring_plan(self, m: int) -> Plan:
        if ("score", m) not in self.plans:
            c, gpu, head = self.config, self.gpu, self.weights.output
            logits = gpu.zeros(m * c.vocab * 4, "all logits")  # [m, vocab]
            norm = self.normalise(self.x, self.weights.output_norm, m)
            rows = self.linear(self.h, head, m, Out("image_store", {"y": logits}, {"WIDTH": head.n}))
            scores = ops.log_prob(gpu, logits, self.targets, self.scores, c.vocab)
            self.plans["score", m] = Plan([*self.body(m), norm, *rows, scores])
        return self.plans["score", m]

    def steps(self, pos: int, count: int, choose: Plan) -> list[Step]:
        return [step for p in range(pos, pos + count) for step in ((self.plan(1, p), 1, p), (choose, 1, p))]


def fixed(dispatch: Dispatch, pos: int) -> Dispatch:
    """For one token at `pos`."""
    return replace(dispatch, grid=dispatch.grid(1, pos)) if callable(dispatch.grid) else dispatch
