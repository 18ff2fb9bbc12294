"""The model on the device: weights, the buffers between kernels, and plans (lists of dispatches).

Plans are keyed by the rows and segments of a step and by context bucket, never by the caller. The inputs of a step
(engine/step_inputs.py) say which rows of which sequences it has.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import product

import numpy as np
from numpy.typing import NDArray

from llamagpu.engine import ops, routes
from llamagpu.engine.device_sampler import Candidates, DeviceSampler, SampleKind
from llamagpu.engine.fused_decode import FusedDecode, fused_widths, layer_stride
from llamagpu.engine.kv_cache import BufferKvCache, KvCache, LayerCache
from llamagpu.engine.ops import (
    AttentionBuffers,
    AttentionMode,
    Choices,
    Consts,
    HeadBuffers,
    Ops,
    Output,
    PrologueSpec,
    QkvBuffers,
    Splits,
    attention_shape,
    tagged,
)
from llamagpu.engine.options import KvType, Precision, Settings
from llamagpu.engine.routes import Attention, Epilogue, Inputs, Linear, Prologue
from llamagpu.engine.step_inputs import Segment, StepInputs
from llamagpu.engine.weights import Layer, Matrix, Weights
from llamagpu.files.config import CONV, CONV_IN, CONV_OUT, LayerKind, ModelConfig
from llamagpu.gpu.buffers import AnyBuffer, Bindable, Buffer, BufferRange
from llamagpu.gpu.caps import Caps
from llamagpu.gpu.device import Dispatch, Gpu
from llamagpu.gpu.recorder import Plan

INT8_BLOCK_BYTES = 48  # of 32 activations: 32 int8, then four f32
F16_BLOCK_BYTES = 64
PREFILL_WIDTH = 512  # token rows of the shapes that decide whether prefill uses int8 activations


class PlanKind(Enum):
    STEP = auto()  # from tokens to the logits of the last row of each segment
    SCORE = auto()  # from tokens to the log probability of each row's target
    HIDDEN = auto()  # from the residual stream to the hidden states of all rows after the last norm
    SAMPLE = auto()  # from logits and candidates to the next token


@dataclass(frozen=True, slots=True)
class PlanKey:
    kind: PlanKind
    width: int = 1  # token rows
    bucket: int = 0  # context bucket; 0: the plan does not depend on it, as a fused one
    embed: bool = True
    segments: int = 1  # sequences that the rows belong to
    sampling: SampleKind | None = None


class Model(ABC):
    """The base of both backends. `BufferModel` and `TextureModel` build the dispatches."""

    def __init__(self, gpu: Gpu, config: ModelConfig, weights: Weights, cache: KvCache, settings: Settings) -> None:
        self.gpu, self.config, self.weights, self.cache, self.settings = gpu, config, weights, cache, settings
        # int8 activations, for one row and for many; shapes or types without an int8 kernel use f32
        fast = settings.precision is Precision.FAST
        self.int8_decode = fast and suits_int8(weights, gpu.caps, 1)
        self.int8_prefill = fast and suits_int8(weights, gpu.caps, PREFILL_WIDTH)
        self.lanes = gpu.caps.subgroup  # of a subgroup, as the kernels assume
        self.step = StepInputs(gpu)
        self.head_step = StepInputs(gpu) if settings.slots > 1 else self.step  # of the output head: a row per segment
        self.ops = Ops(gpu, self.step.buffer, cache.table.buffer, config.logit_soft_cap)
        self.plans: dict[PlanKey, Plan] = {}
        self.score_buffers: list[Buffer] = []  # of score plans; no other plan needs the logits of all rows
        c, rows = config, settings.chunk
        self.logits = gpu.zeros(settings.slots * c.vocab * 4, "logits")  # [segments, vocab] of the last rows
        # [segments, candidates] (logit, id), at most one candidate per pair of logits
        self.candidates = gpu.zeros(settings.slots * -(-c.vocab // 2) * 8, "candidates")
        self.targets = gpu.zeros(rows * 4, "targets")  # [m] u32, for perplexity: the next id of each row
        self.scores = gpu.zeros(rows * 4, "scores")  # [m] f32, log probability of the target
        self.sampler = DeviceSampler(gpu, settings.slots, c.vocab)

    @property
    def precision(self) -> Precision:
        return Precision.FAST if self.int8_decode else Precision.HIGH

    @property
    def chunk(self) -> int:
        return self.settings.chunk

    @property
    def fused(self) -> bool:
        return False

    @property
    def barrier(self) -> BufferRange | None:
        """The grid barrier of fused decode."""
        return None

    def free(self) -> None:
        """Free what this model allocated; the caller owns weights and KV cache."""
        self.clear_plans()
        self.gpu.free(*self.scratch())

    def clear_plans(self) -> None:
        self.plans.clear()
        self.gpu.free(*self.score_buffers)
        self.score_buffers.clear()

    def scratch(self) -> list[Bindable]:
        """Every buffer and texture that all plans share, once."""
        steps = dict.fromkeys((self.step.buffer, self.head_step.buffer))
        own = [*steps, self.logits, self.candidates, self.targets, self.scores]
        return [*own, *self.sampler.buffers]

    def write_step(self, segments: Items[Segment]) -> None:
        """Write the inputs of the next step."""
        self.step.write(segments, self.cache.table)
        if len(segments) > 1:
            last = [Segment(s.slot, s.position + len(s.tokens) - 1, s.tokens[-1:]) for s in segments]
            self.head_step.write(last, self.cache.table)

    def head_buffers(self, segments: int) -> HeadBuffers:
        return HeadBuffers(self.logits, self.candidates, self.head_step.buffer, segments)

    # Plans

    def plan(self, rows: int, position: int = 0, embed: bool = True, segments: int = 1) -> Plan:
        """From up to `rows` token rows to the logits of the last row of each segment and the candidates of sampling.

        `position` is the first one of the step, or the largest of several segments. Without `embed` the embeddings are
        in x already: the sampling kernel looked them up.
        """
        key = self.step_key(rows, position, embed, segments)
        return self._cached(key, lambda: self.step_dispatches(key, position))

    def step_key(self, rows: int, position: int, embed: bool, segments: int) -> PlanKey:
        width, segments = self.plan_width(rows, segments), self.plan_segments(segments)
        return PlanKey(PlanKind.STEP, width, self.context_bucket(width, position, segments), embed, segments)

    def score_plan(self, rows: int) -> Plan:
        """From `rows` token rows to the log probability of each row's target."""
        return self._cached(self.score_key(rows), lambda: self.score_dispatches(rows))

    def score_key(self, rows: int) -> PlanKey:
        return PlanKey(PlanKind.SCORE, rows, self.context_bucket(rows, 0))

    def hidden_plan(self, rows: int, position: int = 0) -> Plan:
        """After a step of `rows` token rows: their hidden states after the last norm, for `read_hidden`."""
        width = self.plan_width(rows)  # of several rows: the grid follows the step
        key = PlanKey(PlanKind.HIDDEN, width, self.context_bucket(width, position))
        return self._cached(key, lambda: tagged([self.hidden_dispatch(key)], "output_norm", None))

    def sample_plan(
        self,
        greedy: bool,
        segments: int = 1,
        masked: bool = False,
        logprobs: bool = False,
        sampled: int | None = None,
        checked: bool = False,
    ) -> Plan:
        """The next token of each segment of the step before, or of the first `sampled` ones, sampled on the device.

        The next step has a row for each of them. Without `greedy` the rows may have any parameters; with `checked` the
        sampler tells whether all logits are numbers.
        """
        kind = SampleKind(greedy, masked, logprobs, checked)
        key = PlanKey(PlanKind.SAMPLE, sampled or segments, segments=segments, sampling=kind)
        return self._cached(key, lambda: tagged(self.sample_dispatches(kind, key.width, segments), "sampling", None))

    def step_kernels(self) -> Iterator[Dispatch]:
        """Dispatches that have, together, all kernels but those of score plans. None on textures: a software adapter
        compiles a kernel when it runs."""
        return iter(())

    def _cached(self, key: PlanKey, build: Callable[[], list[Dispatch]]) -> Plan:
        if key not in self.plans:
            self.plans[key] = Plan(build())
        return self.plans[key]

    def score_buffer(self, values: int, label: str) -> Buffer:
        """f32 values that only a score plan needs."""
        self.score_buffers.append(self.gpu.zeros(values * 4, label))
        return self.score_buffers[-1]

    def plan_width(self, rows: int, segments: int = 1) -> int:
        return rows

    def plan_segments(self, segments: int) -> int:
        return segments

    @property
    def widths(self) -> list[int]:
        """The widths of plans; none where every number of rows has a plan of its own."""
        return []

    @property
    def segment_counts(self) -> list[int]:
        """The numbers of segments that plans have."""
        return sorted({self.plan_segments(n) for n in range(1, self.settings.slots + 1)})

    @property
    def depths(self) -> list[int]:
        """The first position of each context bucket."""
        return [first - 1 for first, _, _ in routes.CONTEXT_BUCKETS if first <= self.settings.context]

    @abstractmethod
    def context_bucket(self, width: int, position: int, segments: int = 1) -> int: ...

    @abstractmethod
    def step_dispatches(self, key: PlanKey, position: int) -> list[Dispatch]: ...

    @abstractmethod
    def score_dispatches(self, rows: int) -> list[Dispatch]: ...

    @abstractmethod
    def hidden_dispatch(self, key: PlanKey) -> Dispatch: ...

    @abstractmethod
    def read_hidden(self, rows: int) -> NDArray[np.float32]:
        """The hidden states [rows, dim] that `hidden_plan` left."""

    @abstractmethod
    def sample_dispatches(self, kind: SampleKind, sampled: int, segments: int) -> list[Dispatch]: ...

    @abstractmethod
    def layer_dispatches(self, rows: int) -> list[Dispatch]:
        """From token rows to the residual stream after the last layer, every op a dispatch."""

    @property
    def samples_on_device(self) -> bool:
        """Whether the sampling kernel can sample from this model's logits: no candidate's run spans two shards."""
        return all(shard.row0 % self.ops.argmax_rows == 0 for shard in self.weights.output.shards)

    @property
    def embeds_next(self) -> bool:
        """Whether sampling leaves the next token's embedding in x."""
        return False


class BufferModel(Model):
    """The model on storage buffers: every adapter."""

    cache: BufferKvCache

    def __init__(
        self, gpu: Gpu, config: ModelConfig, weights: Weights, cache: BufferKvCache, settings: Settings
    ) -> None:
        super().__init__(gpu, config, weights, cache, settings)
        self.norm_in_linear = routes.norm_in_linear(config.dim, gpu.caps)
        # Attention of many rows in int8 and f16. Biases can make keys so large that int8 does not tell them apart, and
        # scores so large that f16 does not.
        self.int8_attention = self.int8_prefill and all(layer.qkv.bias is None for layer in weights.layers)
        self.half_attention = self.int8_prefill and cache.kv_type is KvType.F16
        self.half_scores = self.half_attention and self.int8_attention
        int8 = self.int8_decode and self.int8_prefill
        widths = fused_widths(config, weights, int8, cache.kv_type, gpu.caps) if cache.fused else ()
        # [m, dim] residual stream; fused decode: [layers + 1, m, dim] with cache-line padding
        x_bytes = max(
            4 * self.chunk * config.dim, (config.layers + 1) * layer_stride(max(widths, default=0) * config.dim)
        )
        self.fused_decode: FusedDecode | None = None
        if cache.fused:
            barrier, int8 = self.sampler.barrier, self.int8_decode
            self.fused_decode = FusedDecode(self.ops, config, weights, cache, x_bytes, barrier, int8, widths)
        self.x: AnyBuffer = self.fused_decode.x if self.fused_decode else gpu.zeros(x_bytes, "x")
        self._allocate()

    def _allocate(self) -> None:
        """The other buffers between the kernels of a step."""
        gpu, c, rows = self.gpu, self.config, self.chunk
        # with int8 blocks the f32 values are needed only where the attention kernel cannot write blocks
        f32_rows = rows if not (self.int8_decode and self.int8_prefill) else 1
        int8_rows = rows if self.int8_prefill else 1
        self.int8_kv = self._allocate_int8_kv()
        attended = f32_rows if routes.attention_quantises(self.attention(1), gpu.caps) else rows
        if c.experts:  # the router reads f32, and many rows write f32 between the matrices of an expert
            attended = f32_rows = rows
        widest = max(c.dim, c.q_width)
        self.h = gpu.zeros(attended * widest * 4, "h")  # [m, dim] normalised; [m, heads, head_dim] attended
        self.q = gpu.zeros(rows * c.q_width * 4, "q")  # [m, heads, head_dim] rotated queries
        # [m, keys and values, kv_heads, head_dim] on their way into a q8_0 cache
        self.kv_rows = gpu.zeros(rows * 2 * c.kv_width * 4, "kv_rows") if self.cache.kv_type is KvType.Q8_0 else None
        self.act = gpu.zeros(f32_rows * c.hidden_width * 4, "act")  # [m, experts used, ffn] silu(gate) * up
        blocks = int8_rows * (F16_BLOCK_BYTES if self.int8_prefill and gpu.caps.matrices else INT8_BLOCK_BYTES)
        self.h_blocks = gpu.zeros(blocks * widest // 32, "h_blocks")  # [m, dim/32]: normalised, then attended
        self.act_blocks = gpu.zeros(blocks * c.hidden_width // 32, "act_blocks")  # [m, experts used, ffn/32]
        split_rows = routes.MAX_SPLIT_ROWS if self.int8_kv else routes.MAX_SPLITS
        if routes.matrix_attention(self.attention(self.chunk), gpu.caps, 128):
            split_rows = max(split_rows, routes.matrix_split_rows(c.q_width, gpu.caps))
        splits = c.heads * split_rows
        self.partial = gpu.zeros(splits * c.head_dim * 4, "partial")  # [m, heads, splits, head_dim]
        self.stats = gpu.zeros(splits * 8, "stats")  # [m, heads, splits] (top, total)
        separate = any(len(layer.gate_up) > 1 for layer in self.weights.layers)
        if largest := max(self._split_bytes(), default=0):
            self.ops.partial_sums(largest)
        # [m, experts used, ffn], for gate_and_up
        self.up = gpu.zeros(rows * c.hidden_width * 4, "up") if separate else None
        self._allocate_experts()
        # [m, q | k | v] before `rotate`, [m, b | c | x] before `short_conv`
        self.raw = gpu.zeros(rows * c.raw_width * 4, "raw") if c.raw_width else None
        # [m, dim] the result of attention or feed forward, before the norm after it
        self.branch = gpu.zeros(rows * c.dim * 4, "branch") if c.norms_after else None
        self.hidden: Buffer | None = None  # [m, dim] after the last norm, for embeddings: allocated at the first one

    def _allocate_experts(self) -> None:
        gpu, c, rows = self.gpu, self.config, self.chunk
        self.choices: Choices | None = None
        self.expert_buffers: list[Buffer] = []
        if not c.experts:
            return
        chosen = gpu.zeros(rows * c.experts_used * 8, "chosen")
        tiles = routes.expert_tiles(rows, c.experts_used, c.experts)
        groups = gpu.zeros(16 * tiles + 4 * rows * c.experts_used, "groups")
        self.choices = Choices(c.experts, c.experts_used, chosen, groups)
        self.expert_logits = gpu.zeros(rows * c.experts * 4, "expert_logits")  # [m, experts]
        self.branches = gpu.zeros(rows * c.experts_used * c.dim * 4, "branches")  # [m, experts used, dim] results
        self.expert_buffers = [chosen, groups, self.expert_logits, self.branches]

    def _split_bytes(self) -> Iterator[int]:
        """Bytes of the partial sums of every linear that is split over k."""
        widths = set(self.widths) - {1}
        widths |= set(range(128, self.chunk + 1, 128))  # of score plans: more rows have more sums, or fewer splits
        distinct = {layer.layouts: layer for layer in self.weights.layers}
        shapes: set[Linear] = set()
        for layer, width in product(distinct.values(), widths):
            fused = len(layer.gate_up) == 1 and self.inputs(width).blocks  # gate and up, whose results are blocks
            read = (layer.qkv, layer.attn_output, layer.ffn_down, *(() if fused else layer.gate_up))
            known = [(matrix, self.inputs(width, matrix)) for matrix in read if matrix.experts == 1]
            known += [(layer.router, Inputs.F32)] if layer.router else []
            shapes |= {s.shape(width, inputs, epilogue=Epilogue.ADD) for matrix, inputs in known for s in matrix.shards}
        for shape in shapes:
            if routes.fits_any(routes.LINEAR, shape, self.gpu.caps):
                splits = routes.select(routes.LINEAR, shape, self.gpu.caps).consts.get("GRID_SPLIT", 1)
                yield 0 if splits == 1 else splits * shape.m * shape.n * 4

    def _allocate_int8_kv(self) -> Buffer | None:
        """Keys and values of a layer for attend_int8, where it can run."""
        shape = attention_shape(self.config, 2, int8=self.int8_attention)
        size = routes.int8_kv_bytes(shape, self.cache.capacity)
        fits = routes.int8_attention(shape, self.gpu.caps) and size <= self.gpu.caps.binding_bytes
        return self.gpu.zeros(size, "int8_kv") if fits else None

    def scratch(self) -> list[Bindable]:
        own: list[Bindable | None] = [self.x, self.h, self.q, self.act, self.h_blocks, self.act_blocks]
        own += [self.partial, self.stats, self.up, self.raw, self.branch, self.hidden, self.int8_kv, self.kv_rows]
        fused = self.fused_decode.buffers() if self.fused_decode else []
        own += self.expert_buffers
        return [*super().scratch(), *(buffer for buffer in own if buffer is not None), *fused, *self.ops.scratch]

    @property
    def fused(self) -> bool:
        return self.fused_decode is not None

    def fuses(self, width: int) -> bool:
        """Whether the layers of a plan of `width` rows are fused, where the context allows it."""
        return self.fused_decode is not None and self.fused_decode.takes(width)

    def is_fused(self, key: PlanKey) -> bool:
        return key.bucket == 0 and self.fuses(key.width)

    @property
    def barrier(self) -> BufferRange | None:
        return self.sampler.barrier if self.fused_decode else None

    def unfuse_rows(self) -> bool:
        """Disable fused steps of several rows, whose kernels were never probed. False if none has run."""
        ran = [key for key, plan in self.plans.items() if plan.ran and key.kind in (PlanKind.STEP, PlanKind.SCORE)]
        if not self.fused_decode or not any(key.width > 1 and self.is_fused(key) for key in ran):
            return False
        self.fused_decode.compiled = {1: True}
        self.clear_plans()
        self.fused_decode.restore_barrier()
        return True

    def unfuse(self) -> None:
        """Disable fused decode: every op of one row becomes a separate dispatch, which can be timed.

        The inter-stage buffers stay: they share a buffer with x.
        """
        if self.fused_decode:
            self.gpu.free(*self.fused_decode.buffers())
            self.fused_decode = None
            self.clear_plans()
            self.sampler.clear_barrier()  # it may have timed out

    @contextmanager
    def unfused(self) -> Iterator[None]:
        """Without fused decode for a while; the plans are built anew."""
        fused, self.fused_decode = self.fused_decode, None
        self.clear_plans()
        try:
            yield
        finally:
            self.fused_decode = fused
            self.clear_plans()

    # Plans

    def plan_width(self, rows: int, segments: int = 1) -> int:
        return min(self.chunk, routes.plan_width(rows, self.chunk))

    @property
    def widths(self) -> list[int]:
        return sorted({self.plan_width(rows) for rows in range(1, self.chunk + 1)})

    def plan_segments(self, segments: int) -> int:
        """A power of two: few plans do for all numbers of sequences, and a segment without rows costs nothing."""
        return min(1 << (segments - 1).bit_length(), self.settings.slots, self.chunk)

    def context_bucket(self, width: int, position: int, segments: int = 1) -> int:
        """The context bucket: all its positions have the same plan. 0 if attention is the same for all, or fused."""
        window = self.config.window or position + 1
        bucket = routes.context_bucket(min(position + 1, window))
        if self.fused_decode and width in self.fused_decode.compiled:
            c = self.config
            if not routes.fuses_context(attention_shape(c, 1), c.dim, width, segments, bucket, self.gpu.caps):
                return bucket
            if self.fuses(width):
                return 0
        return bucket if routes.depends_on_context(self.attention(width), self.gpu.caps) else 0

    def attention(self, m: int, bucket: int = 1, segments: int = 1, kind: LayerKind | None = None) -> Attention:
        int8, bucket = self.int8_attention and self.int8_kv is not None, max(1, bucket)
        if kind and kind.window:
            bucket = min(bucket, routes.context_bucket(kind.window))
        shape = attention_shape(self.config, m, segments, bucket, int8, kind, self.half_attention)
        return routes.in_splits(replace(shape, half_scores=self.half_scores), self.gpu.caps)

    def step_dispatches(self, key: PlanKey, position: int) -> list[Dispatch]:
        return [*self.body(key), *self.head(key)]

    def head(self, key: PlanKey) -> list[Dispatch]:
        """From the residual stream to the logits of the last row of each segment."""
        m, head = key.segments, self.weights.output
        inputs = self.inputs(m, head)
        norm = self.norm(self.weights.output_norm, m, inputs, last_rows=True, x=self.after_layers(key))
        logits = self.ops.output_head(self.normed(m), head, self.head_buffers(m), inputs)
        return [*tagged([norm], "output_norm", None), *tagged(logits, "output", None)]

    def step_kernels(self) -> Iterator[Dispatch]:
        layers, known = self.layers_with_all_kernels(), set[PlanKey]()
        for rows, segments, depth in product(self.widths, self.segment_counts, self.depths):
            key = self.step_key(rows, depth, True, segments)
            if segments <= rows and key not in known:
                known.add(key)
                yield from (*self.body(key, layers), *self.head(key))
        for rows in self.widths:
            yield self.hidden_norm(self.x, self.x, rows)
        kinds = [SampleKind(*flags) for flags in product((False, True), repeat=4)]
        for kind, segments in product(kinds, self.segment_counts):
            yield from self.sample_dispatches(kind, segments, segments)
        yield from self.cache.copy_dispatches()

    def layers_with_all_kernels(self) -> list[int]:
        """Layers that have, in this order, all the kernels of all layers: those after the first add up its splits, and
        the last leaves none."""
        found: dict[object, int] = {}
        for i, layer in enumerate(self.weights.layers):
            found.setdefault((self.config.kinds[i], layer.layouts), i)
        return [0, *found.values(), self.config.layers - 1]

    def layer_dispatches(self, rows: int) -> list[Dispatch]:
        return self.body(self.score_key(rows))

    def body(self, key: PlanKey, layers: Items[int] | None = None) -> list[Dispatch]:
        """From token rows to the residual stream after the last layer; keys and values go into the KV cache.

        With `layers` only these, if they are not fused.
        """
        m, dispatches = key.width, list[Dispatch]()
        if key.embed:
            dispatches += tagged(self.ops.embed(self.weights.token_embd, self.x, m), "embedding", None)
        if (scale := self.config.stored_embedding_scale) != 1:
            dispatches += tagged([self.ops.scale(self.x, self.config.dim, scale, m)], "embedding", None)
        if self.fused_decode and self.is_fused(key):
            return dispatches + self.fused_decode.dispatches(m)
        splits: Splits | None = None
        for i in range(self.config.layers) if layers is None else layers:
            found, splits = self.layer(i, self.weights.layers[i], self.cache.layers[i], key, splits)
            dispatches += found
        return dispatches

    def after_layers(self, key: PlanKey) -> AnyBuffer:
        """The buffer in which `body` leaves the residual stream."""
        return self.fused_decode.after_layers(key.width) if self.fused_decode and self.is_fused(key) else self.x

    def layer(
        self, i: int, layer: Layer, cache: LayerCache, key: PlanKey, splits: Splits | None
    ) -> tuple[list[Dispatch], Splits | None]:
        """`splits` are what the layer before has left to be added to the residual stream; returned is what this one
        leaves."""
        mix = self.short_conv if self.config.kinds[i].is_conv else self.attend
        mixed, splits = mix(i, layer, cache, key, splits)
        if layer.router is not None:
            return [*mixed, *self.experts(i, layer, layer.router, key.width)], None
        fed_forward, splits = self.feed_forward(i, layer, key.width, splits)
        return [*mixed, *fed_forward], splits

    def attend(
        self, i: int, layer: Layer, cache: LayerCache, key: PlanKey, splits: Splits | None
    ) -> tuple[list[Dispatch], Splits | None]:
        """Attention, between its two linears."""
        qkv = self.qkv(i, layer, cache, key, splits)
        if self.kv_rows and not self.stores_own_row(key.width):
            shape = attention_shape(self.config, key.width)
            qkv += tagged([self.ops.store_kv(shape, self.kv_rows, cache.keys, cache.values)], "store_kv", i)
        attended, splits = self.attend_linear(i, layer, cache, key)
        return [*qkv, *attended], splits

    def short_conv(
        self, i: int, layer: Layer, cache: LayerCache, key: PlanKey, splits: Splits | None
    ) -> tuple[list[Dispatch], Splits | None]:
        """A short convolution in the place of attention."""
        c, m, matrix, kv_type = self.config, key.width, layer.attn_output, cache.kv_type
        assert self.raw is not None and layer.conv is not None
        to_raw = ops.rows(self.raw, layer.qkv)
        linear = self.norm_linear(i, "attn_norm", layer.attn_norm, CONV_IN, layer.qkv, m, to_raw, splits)
        inputs, pages = self.inputs(m, matrix), (cache.keys, cache.values)
        h = self.h_blocks if inputs.blocks else self.h
        conv = self.ops.short_conv(c, c.kinds[i], self.raw, layer.conv, pages, h, kv_type, m, inputs)
        out, left = self.add(h, matrix, m, inputs, layer.post_attention_norm, last=layer.router is not None)
        return [*linear, *tagged([conv], CONV, i), *tagged(out, CONV_OUT, i)], left

    def stores_own_row(self, m: int) -> bool:
        """Whether attention stores the keys and values of a step of m rows in a q8_0 cache."""
        return self.kv_rows is not None and routes.stores_own_row(self.attention(m), self.gpu.caps)

    def qkv(self, i: int, layer: Layer, cache: LayerCache, key: PlanKey, splits: Splits | None) -> list[Dispatch]:
        """Queries to q, keys and values into the KV cache, or to kv_rows if it is q8_0."""
        c, kind, m, kv_type = self.config, self.config.kinds[i], key.width, self.cache.kv_type
        buffers = QkvBuffers(self.q, cache.keys, cache.values, self.cache.rope(kind), self.kv_rows)
        if self.raw is None:
            to_qkv = ops.qkv(c, kind, layer.qkv, buffers, kv_type, one_segment=1 == key.segments < m)
            return self.norm_linear(i, "attn_norm", layer.attn_norm, "qkv", layer.qkv, m, to_qkv, splits)
        to_raw = ops.rows(self.raw, layer.qkv)
        linear = self.norm_linear(i, "attn_norm", layer.attn_norm, "qkv", layer.qkv, m, to_raw, splits)
        rotate = self.ops.rotate(c, kind, self.raw, layer.qk_norm, buffers, kv_type, m)
        return [*linear, *tagged([rotate], "rotate", i)]

    def norm_linear(
        self,
        i: int,
        norm_op: str,
        norm: Bindable | None,
        op: str,
        matrix: Matrix,
        m: int,
        output: Output,
        splits: Splits | None,
    ) -> list[Dispatch]:
        """The linear of the normalised residual stream: one dispatch where its kernel can normalise, else two."""
        inputs = self.inputs(m, matrix)
        if norm is None:
            dim = self.config.dim
            quantise = [self.ops.quantise(self.x, self.h_blocks, dim, m, blocks=inputs)] if inputs.blocks else []
            linear = self.ops.linear(self.h_blocks if inputs.blocks else self.x, matrix, m, output, inputs)
            return [*tagged(quantise, norm_op, i), *tagged(linear, op, i)]
        if inputs is Inputs.INT8 and m == 1 and self.norm_in_linear:
            prologue = PrologueSpec(Prologue.NORM, {"norm": norm}, {"EPS": self.config.stream_eps})
            return tagged(self.ops.linear(self.x, matrix, m, output, inputs, prologue), op, i)
        linear = self.ops.linear(self.normed(m), matrix, m, output, inputs)
        return [*tagged([self.norm(norm, m, inputs, splits=splits)], norm_op, i), *tagged(linear, op, i)]

    def norm(
        self,
        weight: Bindable,
        m: int,
        inputs: Inputs,
        last_rows: bool = False,
        x: AnyBuffer | None = None,
        splits: Splits | None = None,
    ) -> Dispatch:
        """`inputs`: of the linear that reads it."""
        table = routes.NORM_BLOCKS if inputs.blocks else routes.NORM
        c, h = self.config, self.normed(m)
        return self.ops.rms_norm(x or self.x, weight, h, c.dim, c.stream_eps, m, last_rows, table, splits, inputs)

    def attend_linear(
        self, i: int, layer: Layer, cache: LayerCache, key: PlanKey
    ) -> tuple[list[Dispatch], Splits | None]:
        """Attention and its output projection, which adds to the residual stream.

        The linear's kernel merges the splits of a long context where that is cheap, else a separate dispatch does.
        """
        c, m, matrix = self.config, key.width, layer.attn_output
        inputs, h = self.inputs(m, matrix), self.normed(m)
        shape = self.attention(m, key.bucket, key.segments, c.kinds[i])
        splits, sinks = shape.splits, layer.attn_sinks
        merges = routes.merges(shape, self.gpu.caps)
        kernel = routes.select(routes.ATTEND, shape, self.gpu.caps).kernel
        quantises = inputs.blocks and kernel in routes.QUANTISING_ATTENTION
        out = self.partial if merges else h if quantises else self.h
        buffers = AttentionBuffers(self.q, cache.keys, cache.values, out, self.stats, self.int8_kv, self.kv_rows)
        buffers = replace(buffers, sinks=sinks)
        mode = AttentionMode(self.cache.kv_type, inputs, self.stores_own_row(m))
        attention = tagged(self.ops.attend(shape, buffers, mode), "attention", i)
        if splits > 1 and inputs.blocks and m == 1 and sinks is None and routes.merge_in_linear(c.q_width, splits):
            consts: Consts = {"HEAD_DIM": c.head_dim, "SPLITS": splits}
            prologue = PrologueSpec(Prologue.MERGE, {"stats": self.stats}, consts, ("split_count_fixed",))
            linear, left = self.add(self.partial, matrix, m, inputs, layer.post_attention_norm, prologue)
            return [*attention, *tagged(linear, "attn_output", i)], left
        between = []
        if merges:
            between = [self.ops.attend_merge(shape, self.partial, self.stats, h, inputs, sinks)]
        elif inputs.blocks and not quantises:
            between = [self.ops.quantise(self.h, h, c.q_width, m, blocks=inputs)]
        complete = layer.router is not None  # whose norm adds no splits
        linear, left = self.add(h, matrix, m, inputs, layer.post_attention_norm, last=complete)
        return [*attention, *tagged(between, "attention", i), *tagged(linear, "attn_output", i)], left

    def add(
        self,
        x: Bindable,
        matrix: Matrix,
        m: int,
        inputs: Inputs,
        norm: Bindable | None,
        prologue: PrologueSpec = ops.NO_PROLOGUE,
        last: bool = False,
    ) -> tuple[list[Dispatch], Splits | None]:
        """A linear whose results are added to the residual stream, normalised first if there is a norm after it.

        The `last` one leaves no splits: whatever reads the residual stream next finds it complete.
        """
        if norm is not None:
            assert self.branch is not None
            linear = self.ops.linear(x, matrix, m, ops.store(self.branch, matrix), inputs, prologue)
            c = self.config
            return [*linear, self.ops.add_norm(self.branch, norm, self.x, c.dim, c.norm_eps, m)], None
        if last or prologue is not ops.NO_PROLOGUE:
            return self.ops.linear(x, matrix, m, ops.add(self.x, matrix), inputs, prologue), None
        return self.ops.add_linear(x, matrix, m, self.x, inputs)

    def feed_forward(self, i: int, layer: Layer, m: int, splits: Splits | None) -> tuple[list[Dispatch], Splits | None]:
        down = layer.ffn_down
        inputs = self.inputs(m, down)
        act = self.act_blocks if inputs.blocks else self.act
        if len(layer.gate_up) == 1:
            gate_up, activation = layer.gate_up[0], self.config.activation
            output = ops.glu(act, gate_up, activation)
            if inputs.blocks:
                output = ops.glu_blocks(act, gate_up, activation, blocks=inputs)
            hidden = self.norm_linear(i, "ffn_norm", layer.ffn_norm, "gate_up", gate_up, m, output, splits)
        else:
            hidden = self.gate_and_up(i, layer, m)
        last = i == self.config.layers - 1
        linear, left = self.add(act, down, m, inputs, layer.post_ffw_norm, last=last)
        return [*hidden, *tagged(linear, "ffn_down", i)], left

    def experts(self, i: int, layer: Layer, router: Matrix, m: int) -> list[Dispatch]:
        """The feed forward of the experts that each token chooses.

        The router reads f32 in both precisions: int8 would choose others where two are nearly as likely.
        """
        c, inputs, choices = self.config, self.inputs(m), self.choices
        assert choices is not None and layer.ffn_norm is not None
        int8 = inputs is Inputs.INT8
        x, act = (self.h_blocks, self.act_blocks) if int8 else (self.h, self.act)
        norm = self.ops.rms_norm(self.x, layer.ffn_norm, self.h, c.dim, c.stream_eps, m)
        route = self.ops.linear(self.h, router, m, ops.store(self.expert_logits, router))
        route.append(self.ops.top_experts(self.expert_logits, choices, c.whole_weights, m))
        if routes.groups_experts(m):
            route.append(self.ops.group_experts(choices, m))
        quantise = [self.ops.quantise(self.h, self.h_blocks, c.dim, m)] if int8 else []
        down = layer.ffn_down
        to_branches = ops.store(self.branches, down)
        return [
            *tagged([norm, *quantise], "ffn_norm", i),
            *tagged(route, "router", i),
            *self.expert_hidden(i, layer, x, m),
            *tagged(self.ops.expert_linear(act, down, m, to_branches, choices, inputs, own_inputs=True), "ffn_down", i),
            *tagged([self.ops.sum_experts(self.branches, self.x, c.dim, choices, m)], "ffn_down", i),
        ]

    def expert_hidden(self, i: int, layer: Layer, x: Buffer, m: int) -> list[Dispatch]:
        """activation(gate) * up of each choice, to act or act_blocks."""
        c, inputs, choices = self.config, self.inputs(m), self.choices
        assert choices is not None
        if len(layer.gate_up) > 1:
            gate, up = layer.gate_up
            assert self.up is not None
            return [
                *tagged(self.ops.expert_linear(x, gate, m, ops.store(self.act, gate), choices), "ffn_gate", i),
                *tagged(self.ops.expert_linear(x, up, m, ops.store(self.up, up), choices), "ffn_up", i),
                *tagged([self.ops.glu_mul(self.act, self.up, c.hidden_width, c.activation, m)], "glu_mul", i),
            ]
        gate_up, int8, grouped = layer.gate_up[0], inputs is Inputs.INT8, routes.groups_experts(m)
        output = ops.glu(self.act, gate_up, c.activation)
        if int8 and not grouped:
            output = ops.glu_blocks(self.act_blocks, gate_up, c.activation)
        linear = self.ops.expert_linear(x, gate_up, m, output, choices, inputs)
        if int8 and grouped:
            linear.append(self.ops.quantise(self.act, self.act_blocks, c.ffn_dim, m, c.experts_used))
        return tagged(linear, "gate_up", i)

    def gate_and_up(self, i: int, layer: Layer, m: int) -> list[Dispatch]:
        """For files whose gate and up have different types: two linears, then their product."""
        c, (gate, up) = self.config, layer.gate_up
        h = self.h if layer.ffn_norm else self.x
        assert self.up is not None
        return [
            *(tagged([self.norm(layer.ffn_norm, m, Inputs.F32)], "ffn_norm", i) if layer.ffn_norm else ()),
            *tagged(self.ops.linear(h, gate, m, ops.store(self.act, gate)), "ffn_gate", i),
            *tagged(self.ops.linear(h, up, m, ops.store(self.up, up)), "ffn_up", i),
            *tagged([self.ops.glu_mul(self.act, self.up, c.ffn_dim, c.activation, m)], "glu_mul", i),
        ]

    # Activations of a plan: f32, or blocks (precision fast)

    def inputs(self, m: int, matrix: Matrix | None = None) -> Inputs:
        """What a linear of m rows reads, that of this matrix if it is given."""
        if not (self.int8_decode if m == 1 else self.int8_prefill):
            return Inputs.F32
        if matrix is None or matrix.experts > 1:
            return Inputs.INT8
        shapes = [shard.shape(m) for shard in matrix.shards]
        if matrix is not self.weights.output:  # see has_strips
            shapes = [replace(shape, sub_scales=False) for shape in shapes]
        return routes.block_inputs(shapes, self.gpu.caps)

    def normed(self, m: int) -> Buffer:
        return self.h_blocks if self.inputs(m).blocks else self.h

    # Sampling and scoring

    @property
    def embeds_next(self) -> bool:
        return self.ops.embeds_next(self.weights.token_embd)

    def sample_dispatches(self, kind: SampleKind, sampled: int, segments: int) -> list[Dispatch]:
        head = self.weights.output
        inputs = self.inputs(segments, head)
        count = self.ops.candidate_count(head, inputs, segments)
        found = Candidates(head.n, count, self.ops.candidate_rows(head, inputs, segments))
        return self.sampler.dispatches(
            self.ops, kind, self.head_buffers(sampled), found, self.weights.token_embd, self.x
        )

    def hidden_dispatch(self, key: PlanKey) -> Dispatch:
        self.hidden = self.hidden or self.gpu.zeros(self.chunk * self.config.dim * 4, "hidden")
        return self.hidden_norm(self.after_layers(key), self.hidden, key.width)

    def hidden_norm(self, x: AnyBuffer, y: AnyBuffer, m: int) -> Dispatch:
        return self.ops.rms_norm(x, self.weights.output_norm, y, self.config.dim, self.config.stream_eps, m)

    def read_hidden(self, rows: int) -> NDArray[np.float32]:
        assert self.hidden is not None
        return self.gpu.read(self.hidden, np.float32, rows * self.config.dim).reshape(rows, -1)

    def score_dispatches(self, rows: int) -> list[Dispatch]:
        c, head, h = self.config, self.weights.output, self.normed(rows)
        inputs = self.inputs(rows, head)
        logits = self.score_buffer(rows * c.vocab, "all logits")  # [m, vocab]
        x = self.after_layers(self.score_key(rows))
        norm = self.norm(self.weights.output_norm, rows, inputs, x=x)
        shapes = [shard.shape(rows, inputs) for shard in head.shards]
        if not all(routes.fits_any(routes.LINEAR, shape, self.gpu.caps) for shape in shapes):
            # f16, which has no kernel for int8 blocks of many rows
            inputs, h = Inputs.F32, self.score_buffer(rows * c.dim, "normed")
            norm = self.ops.rms_norm(x, self.weights.output_norm, h, c.dim, c.stream_eps, rows)
        return [
            *self.layer_dispatches(rows),
            norm,
            *self.ops.linear(h, head, rows, ops.store(logits, head), inputs),
            *([self.ops.soft_cap(logits, c.vocab, self.step.buffer, rows)] if c.logit_soft_cap else ()),
            self.ops.log_prob(logits, self.targets, self.scores, c.vocab),
        ]


def suits_int8(weights: Weights, caps: Caps, m: int) -> bool:
    """Whether every linear has a kernel for int8 blocks, and gate and up are one matrix."""

    def runs(matrix: Matrix, epilogue: Epilogue = Epilogue.ADD) -> bool:
        if matrix.experts > 1:  # their kernels take any number of rows
            return all(routes.block_aligned(shard.shape(m)) for shard in matrix.shards)
        shapes = [shard.shape(m, Inputs.INT8, epilogue=epilogue) for shard in matrix.shards]
        return all(routes.fits_any(routes.LINEAR, shape, caps) for shape in shapes)

    interleaved = all(len(layer.gate_up) == 1 for layer in weights.layers)
    matrices = [matrix for layer in weights.layers for matrix in (layer.qkv, layer.attn_output, layer.ffn_down)]
    hidden = all(runs(layer.gate_up[0], Epilogue.GLU_BLOCKS) for layer in weights.layers)
    return interleaved and all(map(runs, matrices)) and hidden
