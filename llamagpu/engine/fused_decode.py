"""Fused decode: all layers of a few token rows in one persistent kernel (gpu/fuse.py), or in as few as bindings allow.

Weights of the same storage share slabs (engine/slabs.py). The layers of the KV cache and of the inter-stage buffers are
adjacent, with cache-line padding: no cache line may be read before all of it has been written, because a workgroup may
keep the line in its own cache.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby, product

import numpy as np
from numpy.typing import NDArray

from llamagpu.engine import ops, routes
from llamagpu.engine.kv_cache import BufferKvCache
from llamagpu.engine.ops import (
    AttentionBuffers,
    AttentionMode,
    Consts,
    Ops,
    Output,
    PrologueSpec,
    QkvBuffers,
    attention_shape,
)
from llamagpu.engine.options import KvType
from llamagpu.engine.routes import GridSize, Inputs, Prologue
from llamagpu.engine.weights import Layer, Matrix, Weights
from llamagpu.files.architectures import QkNorm
from llamagpu.files.config import LayerKind, ModelConfig
from llamagpu.files.storage import Layout, Storage
from llamagpu.gpu.buffers import (
    AnyBuffer,
    Bindable,
    Buffer,
    BufferRange,
    as_buffer,
    base_buffer,
    cut,
    nbytes,
    padded_ranges,
    padded_size,
)
from llamagpu.gpu.caps import Caps
from llamagpu.gpu.device import Dispatch, Gpu
from llamagpu.gpu.fuse import Stage, storage_bindings
from llamagpu.gpu.recorder import Plan, Recorder, Step
from llamagpu.gpu.shaders import constants
from llamagpu.gpu.webgpu import BufferUsage, GPUError

WAIT_S = 0.25  # longest wait of a workgroup: watchdogs end a kernel after about 2 s
PROBE_SPIN_LIMIT = 1 << 14  # loads of the arrivals by a waiting workgroup
FILL_WORKGROUPS = 1024  # an estimate: they fill 6 MB for 1B
QKV, ATTN_OUTPUT, GATE_UP, DOWN, ROUTER = range(5)  # columns of the layer table, in the order of Layer.matrices
LITMUS_LAYERS = 32  # grid barriers across which the litmus test passes values


def can_fuse(config: ModelConfig, caps: Caps, int8: bool, kv_type: KvType) -> bool:
    """Whether the adapter and the shapes allow fused decode; the probe and the weights decide the rest.

    A router has an even number of rows and no norm after attention before it, and with Tint attention cannot store the
    row's own key and value in an f32 KV cache.
    """
    c = config
    if c.experts % 2 or (c.experts and c.norms_after) or (caps.tint and kv_type is KvType.F32):
        return False
    return routes.can_fuse(c.dim, c.hidden_width, attention_shape(c, 1), int8, caps, expert_bytes(c, int8))


def expert_bytes(c: ModelConfig, int8: bool) -> int:
    """Workgroup memory of the choice of experts, and of the router's f32 inputs beside the int8 blocks of others."""
    return 4 * (2 * c.experts + 2 * c.experts_used + c.dim * int8) if c.experts else 0


def weights_fit(weights: Weights, caps: Caps) -> bool:
    """Whether every linear of a layer can be a stage: routers and experts all have biases, or none has.

    Experts of 8 bits with biases are faster unfused with wgpu: gpt-oss 20B in MXFP4 generates 471 tokens a second on
    an H200, fused 316. With Dawn it is 461 and 594, and in Q4_0 fused decode is faster with both (2026-11-18).
    """

    def fits(matrix: Matrix) -> bool:
        whole = matrix.experts == 1 or len(matrix.shards) == 1
        return whole and all(routes.is_gemv(shard.shape(1)) for shard in matrix.shards)

    layers = weights.layers
    of_experts = [m for layer in layers if layer.router for m in (*layer.gate_up, layer.ffn_down, layer.router)]
    wide = any(m.bias and m.experts > 1 and m.shards[0].layout.storage is Storage.Q8 for m in of_experts)
    if wide and not caps.tint and not caps.fuses_all:
        return False
    fitting = all(len(layer.gate_up) == 1 and all(map(fits, layer.matrices)) for layer in layers)
    return fitting and len({matrix.bias is None for matrix in of_experts}) <= 1


def matrix_buffers(matrix: Matrix) -> list[AnyBuffer]:
    found: list[AnyBuffer] = []
    for shard in matrix.shards:
        found += [as_buffer(binding) for binding in shard.bindings.values()]
    return found if matrix.bias is None else [*found, matrix.bias]


def in_slabs(matrix: Matrix) -> bool:
    """Whether all buffers of the matrix are ranges of slabs. If not, only its layer can use them."""
    return all(isinstance(buffer, BufferRange) for buffer in matrix_buffers(matrix))


def slab_matrix(matrix: Matrix) -> Matrix:
    """The matrix with whole slabs as its buffers: it stands for all layers that share them."""
    if not in_slabs(matrix):
        return matrix
    index, words = slab_index(matrix), as_buffer(matrix.shards[0].words)
    layers = base_buffer(words).size // words.size

    def slab(buffer: AnyBuffer) -> BufferRange:
        assert isinstance(buffer, BufferRange)
        return BufferRange(buffer.buffer, buffer.offset - index * buffer.size, layers * buffer.size)

    shards = tuple(
        replace(shard, words=slab(as_buffer(shard.words)), scales=None if shard.scales is None else slab(shard.scales))
        for shard in matrix.shards
    )
    return replace(matrix, shards=shards, bias=None if matrix.bias is None else slab(matrix.bias))


def as_stage(matrix: Matrix, column: int) -> Matrix:
    """Gate and up have the rows of all experts that a token uses, which share the rows of down; they add the router's
    bias to its results."""
    if matrix.experts == 1:
        return replace(matrix, bias=None) if column == ROUTER else matrix
    n = matrix.n * (matrix.used if column == GATE_UP else 1)
    return replace(matrix, n=n, shards=tuple(replace(shard, n=n) for shard in matrix.shards))


def slab_key(matrix: Matrix) -> tuple[object, ...]:
    """Equal for matrices of the same layout in the same slabs."""
    layouts = ((shard.layout, shard.n) for shard in matrix.shards)
    return *layouts, *(id(base_buffer(buffer)) for buffer in matrix_buffers(matrix))


def slab_index(matrix: Matrix) -> int:
    """Of the matrix in its slabs. Words have a buffer to themselves; other slabs may share one (engine/slabs.py)."""
    words = matrix.shards[0].words
    return words.offset // words.size if in_slabs(matrix) and isinstance(words, BufferRange) else 0


def place_of_layer(binding: Bindable, layer: int) -> tuple[int, int]:
    """Equal for two layers if a binding that begins at one of them has the other at its place."""
    buffer = as_buffer(binding)
    return id(base_buffer(buffer)), buffer.offset - layer * buffer.size if isinstance(buffer, BufferRange) else 0


def router_biases(layer: Layer) -> tuple[AnyBuffer, ...]:
    """The bias of the router, if there is one."""
    return () if layer.router is None or layer.router.bias is None else (layer.router.bias,)


def layer_range(first: Bindable, count: int) -> AnyBuffer:
    """The range of `count` adjacent layers, from that of the first layer."""
    if isinstance(first, BufferRange):
        return BufferRange(first.buffer, first.offset, count * first.size)
    return as_buffer(first)


def layer_stride(width: int) -> int:
    """Bytes from one layer's `width` words of an inter-stage buffer to the next layer's."""
    return 4 * (width + constants("grid_barrier")["LINE_PADDING"])


def inter_stage_widths(c: ModelConfig, rows: int, caps: Caps) -> tuple[int, ...]:
    """Words of a layer in the inter-stage buffers, in the order of InterStage."""
    staged = routes.has_norm_stages(rows, c.dim, caps)
    splits = 0 if staged else rows * c.heads * routes.fused_max_splits(c.kv_heads, rows)
    blocks = (rows * c.dim * 3 // 8, rows * c.q_width * 3 // 8) if staged else (0, 0)
    squares = rows * c.dim // 32 if staged else 0
    act = c.hidden_width if rows == 1 else rows * c.ffn_dim * 3 // 8  # f32; int8 blocks
    raw = rows * c.raw_width
    branch = rows * c.dim if c.norms_after else 0
    attention = splits * c.head_dim, 2 * splits, 2 * rows * c.kv_width if rows == 1 or caps.tint else 0
    staging = *blocks, blocks[0], squares, squares
    mixed = max(c.mixer_width(kind) for kind in c.kinds)
    return rows * mixed, rows * c.dim, act, *attention, raw, branch, branch, c.experts, *staging


def fused_widths(config: ModelConfig, weights: Weights, int8: bool, kv_type: KvType, caps: Caps) -> tuple[int, ...]:
    """The numbers of token rows that a fused kernel can take.

    With a q8_0 cache attention stores keys and values: a row could not read those of another row. Parts of norms after
    and of experts take one row, and a stage of short convolutions leaves no blocks. Float weights of several rows are
    faster unfused (F16, 1B on an H200: 2 rows 1282 us, fused 1832; 4 rows 1382 and 1948).
    """
    one_row = kv_type is KvType.Q8_0 or config.norms_after or config.experts or config.conv_taps
    if one_row or has_float_weights(weights):
        return (1,)
    return (1, *routes.fused_widths(config.dim, attention_shape(config, 1), int8, has_half_sums(weights), caps))


def attention_stores(kv_type: KvType, caps: Caps) -> bool:
    """Whether attention stores the row's own key and value: to quantise them, or since it cannot wait for them."""
    return kv_type is KvType.Q8_0 or caps.tint


def attention_rotates(c: ModelConfig, kv_type: KvType, caps: Caps) -> bool:
    """Whether attention normalises and rotates its queries and the row's own key, which saves a grid barrier.

    It sees one head, and there is no part that stores the row's own in an f32 cache.
    """
    fits = routes.attention_can_rotate(c.head_dim, c.rope_dims, ops.lane_run(kv_type), caps)
    return c.rotates_apart and c.qk_norm is not QkNorm.ROW and fits and kv_type is not KvType.F32


def layouts(weights: Weights) -> Iterator[Layout]:
    """Of all matrices of all layers."""
    return (shard.layout for layer in weights.layers for matrix in layer.matrices for shard in matrix.shards)


def has_half_sums(weights: Weights) -> bool:
    """Whether groups of 16 need the sums of half an int8 block."""
    return any(layout.group == 16 for layout in layouts(weights))


def has_float_weights(weights: Weights) -> bool:
    return any(layout.storage.two_bytes for layout in layouts(weights))


@dataclass(frozen=True, slots=True)
class InterStage:
    """Inter-stage buffers, with a row for each layer of a kernel."""

    q: BufferRange  # queries, or the results of a short convolution
    mid: BufferRange  # the residual stream after attention
    act: BufferRange  # silu(gate) * up
    partial: BufferRange  # attention's splits
    stats: BufferRange
    kv_rows: BufferRange  # keys and values on their way into the cache, where attention stores them
    raw: BufferRange  # queries, keys and values as the linear leaves them, or the inputs of a short convolution
    attended: BufferRange  # results of attention and feed forward before the norms after them, where there are such
    fed_forward: BufferRange
    logits: BufferRange  # of experts
    attn_blocks: BufferRange  # inputs of the linears of many rows: of qkv
    head_blocks: BufferRange  # of the output projection
    ffn_blocks: BufferRange  # of gate and up
    attn_squares: BufferRange  # sums of squares of blocks of the residual stream, after a layer and after attention
    ffn_squares: BufferRange


LEFT_FOR_NEXT = ("attn_blocks", "attn_squares")  # what a layer leaves for the next one, and the last one for nobody


@dataclass(frozen=True, slots=True)
class Mixer:
    """Attention of a run of layers, or short convolutions, between their two linears."""

    to_inputs: Callable[[Matrix], Output]  # of the first linear
    stages: list[Stage]
    result: AnyBuffer
    prologue: PrologueSpec  # of the second linear, which reads the result


class FusedDecode:
    """All layers for up to `rows` token rows: from those of layer 0 of x to those of layer `layers`.

    `widths` are the numbers of rows. The kernel of one row is probed; the others are compiled when they are needed.
    """

    def __init__(
        self,
        ops: Ops,
        config: ModelConfig,
        weights: Weights,
        cache: BufferKvCache,
        x_bytes: int,
        barrier: BufferRange,
        int8: bool,
        widths: tuple[int, ...],
    ) -> None:
        """Allocates x too, behind the inter-stage buffers: where bindings are few, they share one."""
        self.ops, self.config, self.weights, self.cache = ops, config, weights, cache
        self.gpu, self.barrier, self.int8 = ops.gpu, barrier, int8
        self.inputs = Inputs.INT8 if int8 else Inputs.F32
        self.compiled = dict.fromkeys(widths, False)  # widths whose kernels the driver has taken
        self.compiled[1] = True
        self.half_sums = has_half_sums(weights)
        self.grid = self.grid_sizes()[0]
        self.same_storage = False  # one kernel for each run of layers of the same storage
        self.composed: dict[tuple[int, GridSize, bool], list[Dispatch]] = {}  # by rows, grid and same_storage
        self.spin_limit = PROBE_SPIN_LIMIT
        self.layer_tables: dict[bytes, Buffer] = {}
        most = max(map(padded_size, map(self.inter_stage_bytes, widths)))
        self.inter_stage, self.x = padded_ranges(self.gpu, [most, x_bytes], "x and inter-stage")
        stream = self.stream(0, config.layers + 1, max(widths))
        self.copies = self.gpu.zeros(stream.offset + stream.size, "copies") if self.gpu.caps.tint else None

    def inter_stage_bytes(self, rows: int) -> list[int]:
        """Sizes of the inter-stage buffers, in the order of InterStage."""
        most = max(map(len, self.runs(same_storage=False)))  # layers of a kernel
        layers = (most + (field.name in LEFT_FOR_NEXT) for field in fields(InterStage))
        widths = inter_stage_widths(self.config, rows, self.gpu.caps)
        return [count * layer_stride(width) for count, width in zip(layers, widths, strict=True)]

    def between(self, rows: int) -> InterStage:
        """The inter-stage buffers of so many rows, which begin where those of other numbers do."""
        return InterStage(*cut(self.inter_stage, self.inter_stage_bytes(rows)))

    def buffers(self) -> list[Bindable]:
        """Those that only fused decode uses: not the one of x and the inter-stage buffers."""
        copies = [] if self.copies is None else [self.copies]
        return [*copies, *self.layer_tables.values()]

    def stream(self, first: int, count: int, rows: int) -> BufferRange:
        """The residual stream before `count` layers, from layer `first` on."""
        stride = layer_stride(rows * self.config.dim)
        return BufferRange(self.x.buffer, self.x.offset + first * stride, count * stride)

    def takes(self, rows: int) -> bool:
        """Whether steps of up to `rows` rows are fused. A kernel that the driver refuses is not asked for again."""
        if rows in self.compiled and not self.compiled[rows]:
            try:
                self.compiled[rows] = all(dispatch.pipeline for dispatch in self.dispatches(rows))
            except GPUError:
                del self.compiled[rows]
        return rows in self.compiled

    def after_layers(self, rows: int) -> BufferRange:
        """The residual stream after the last layer."""
        return replace(self.stream(self.config.layers, 1, rows), size=4 * rows * self.config.dim)

    def dispatches(self, rows: int = 1) -> list[Dispatch]:
        """One kernel, or as few as bindings allow. They are composed once: plans of several keys have the same."""
        key = rows, self.grid, self.same_storage
        if key not in self.composed:
            self.composed[key] = self._compose(rows)
        return self.composed[key]

    def _compose(self, rows: int) -> list[Dispatch]:
        """Layers of different storage share a kernel if it can bind them all."""
        found = self.kernels(self.same_storage, rows)
        if not self.same_storage and not self.can_bind(found):
            found = self.kernels(same_storage=True, rows=rows)
        return [dispatch for i, kernel in enumerate(found) for dispatch in (*self.fill(rows, i == 0), kernel)]

    def fill(self, rows: int, with_x: bool) -> list[Dispatch]:
        """With Tint, what a kernel will store begins as NOT_STORED; x of layer 0 is there already.

        Kernels use the same rows of inter-stage buffers, and different ones of x.
        """
        if self.copies is None:
            return []
        first, *_, last = cut(self.inter_stage, self.inter_stage_bytes(rows))
        y, x = replace(first, size=last.offset + last.size - first.offset), self.stream(0, self.config.layers + 1, rows)
        bindings = {
            "x": x,
            "y": y,
            "x_copies": replace(x, buffer=self.copies),
            "y_copies": replace(y, buffer=self.copies),
        }
        sizes: Consts = {"X_VEC4S": x.size // 16 if with_x else 0, "FIRST": self.stream(0, 1, rows).size // 16}
        fill = self.gpu.dispatch("fill", (), sizes | {"Y_VEC4S": y.size // 16}, bindings, (FILL_WORKGROUPS, 1, 1))
        return [replace(fill, op="layers")]

    def can_bind(self, dispatches: Sequence[Dispatch]) -> bool:
        """Whether the bindings are few enough, and that of all RoPE tables is not too large."""
        caps = self.gpu.caps
        few = all(storage_bindings(d.source) <= caps.storage_buffers for d in dispatches)
        return few and self.cache.rope_tables.size <= caps.binding_bytes

    def kernels(self, same_storage: bool, rows: int = 1) -> list[Dispatch]:
        """One kernel for each run of layers."""
        found = []
        for members in self.runs(same_storage):
            stages = self.stages(members, rows)
            table = self.layer_table(members)
            workgroups = self.grid_of(rows).workgroups
            found.append(self.gpu.fused(stages, workgroups, self.barrier, table, rows, self.copies))
        return found

    def runs(self, same_storage: bool) -> list[list[int]]:
        """Neighbouring layers whose KV cache and norms share bindings.

        With `same_storage` their matrices must share bindings too.
        """
        layers, caches = self.weights.layers, self.cache.layers

        def bound(i: int) -> tuple[object, ...]:
            layer = layers[i]
            own = (
                id(base_buffer(buffer))
                for matrix in layer.matrices
                for buffer in matrix_buffers(matrix)
                if same_storage or not isinstance(buffer, BufferRange)
            )
            shared = (*layer.vectors, *router_biases(layer), caches[i].keys, caches[i].values)
            is_conv = self.config.kinds[i].is_conv
            return is_conv, *(place_of_layer(buffer, i) for buffer in shared), *own

        return [list(run) for _, run in groupby(range(len(layers)), bound)]

    def stages(self, members: list[int], rows: int = 1) -> list[Stage]:
        c, gpu, count, between, grid = self.config, self.gpu, len(members), self.between(rows), self.grid_of(rows)
        first, x = self.weights.layers[members[0]], self.stream(members[0], count + 1, rows)
        # inputs of linears are blocks that stages before them have left
        staged = routes.has_norm_stages(rows, c.dim, gpu.caps)
        mixer = self.short_convs(members) if c.kinds[members[0]].is_conv else self.attention(members, rows)

        def linear(
            column: int,
            x: AnyBuffer,
            output: Callable[[Matrix], Output],
            inputs: Inputs,
            prologue: PrologueSpec,
        ) -> list[Stage]:
            return [
                replace(stage, column=column, variant=number)
                for number, i in enumerate(self.variants(members, column).values())
                for stage in self.linear(
                    x,
                    as_stage(slab_matrix(self.weights.layers[i].matrices[column]), column),
                    output,
                    inputs,
                    prologue,
                    rows,
                )
            ]

        leaves_blocks, biased = self.sums_leave_blocks(members, rows), bool(router_biases(first))
        attn_norm, ffn_norm = (None if w is None else layer_range(w, count) for w in (first.attn_norm, first.ffn_norm))

        def to_mid(matrix: Matrix) -> Output:
            if leaves_blocks and ffn_norm:
                return ops.sum_blocks(between.mid, x, between.ffn_blocks, between.ffn_squares, ffn_norm, matrix)
            return ops.rows(between.attended, matrix) if c.norms_after else ops.sum_to(between.mid, x, matrix)

        def to_x(matrix: Matrix) -> Output:
            if leaves_blocks and attn_norm:
                return ops.sum_blocks(x, between.mid, between.attn_blocks, between.attn_squares, attn_norm, matrix, 1)
            if biased:
                return ops.sum_experts(x, between.mid, matrix, 1)
            return ops.rows(between.fed_forward, matrix) if c.norms_after else ops.sum_to(x, between.mid, matrix, 1)

        def to_blocks(matrix: Matrix) -> Output:
            return ops.glu_blocks(between.act, matrix, c.activation, persistent=True)

        if staged:
            assert attn_norm is not None and ffn_norm is not None
            before_qkv = self.norm_stage(attn_norm, x, between.attn_blocks, rows)
            before_gate_up = [self.norm_stage(ffn_norm, between.mid, between.ffn_blocks, rows)]
            normalised = qkv_inputs = gate_up_inputs = PrologueSpec(Prologue.BLOCKS, parts=("input_rms_none",))
            if leaves_blocks:  # for all but the first layer
                before_qkv, before_gate_up = replace(before_qkv, first=True), []
                qkv_inputs = self.unnormalised(between.attn_squares, but_first=True)
                gate_up_inputs = self.unnormalised(between.ffn_squares)
            return [
                before_qkv,
                *linear(QKV, between.attn_blocks, mixer.to_inputs, self.inputs, qkv_inputs),
                *mixer.stages,
                *linear(ATTN_OUTPUT, between.head_blocks, to_mid, self.inputs, normalised),
                *before_gate_up,
                *linear(GATE_UP, between.ffn_blocks, to_blocks, self.inputs, gate_up_inputs),
                *linear(DOWN, between.act, to_x, self.inputs, normalised),
            ]

        def to_act(matrix: Matrix) -> Output:
            if biased:
                return ops.glu_experts(between.act, matrix, c.activation, not fits)
            return to_blocks(matrix) if rows > 1 else ops.glu(between.act, matrix, c.activation, not fits)

        def to_logits(matrix: Matrix) -> Output:
            return ops.rows(between.logits, matrix)

        # inputs of the down projection that do not fit into workgroup memory are read from global memory
        more = expert_bytes(c, self.int8)
        attention = attention_shape(c, 1)
        fits = self.int8 or routes.fits_shared_memory(c.hidden_width, attention, False, grid, gpu.caps, more)
        down_inputs = self.inputs if fits else Inputs.INTERLEAVED
        unused = first.ffn_norm or first.post_ffw_norm
        assert unused is not None
        copy = PrologueSpec(Prologue.NORM, {"norm": layer_range(unused, count)}, {"NORM": False})
        down = copy if fits and rows == 1 else ops.NO_PROLOGUE
        if gpu.caps.tint and rows > 1:  # which tests blocks for late stores once, not with each load
            down = PrologueSpec(Prologue.BLOCKS, parts=("input_rms_none",))

        def norm(weight: Bindable | None) -> PrologueSpec:
            if weight is None:
                return copy
            return PrologueSpec(Prologue.NORM, {"norm": layer_range(weight, count)}, {"EPS": c.stream_eps})

        def sum_norm(
            after: Bindable | None, residual: AnyBuffer, stream: AnyBuffer, weight: Bindable | None, before: bool
        ) -> PrologueSpec:
            """`norm` of the residual stream; with a norm after the branch also the sum of both."""
            own = norm(weight)
            if after is None:
                return own
            bindings = dict(own.bindings) | {"residual": residual, "after": layer_range(after, count), "stream": stream}
            consts = own.consts | {"AFTER_EPS": c.norm_eps, "BEFORE": before}
            return PrologueSpec(Prologue.SUM_NORM, bindings, consts)

        attention_inputs = sum_norm(first.post_ffw_norm, between.mid, x, first.attn_norm, before=True)
        ffn_inputs = sum_norm(first.post_attention_norm, x, between.mid, first.ffn_norm, before=False)
        ffn_x, router = between.attended if c.norms_after else between.mid, list[Stage]()
        gate_up = linear(GATE_UP, ffn_x, to_act, self.inputs, self.chosen(ffn_inputs, members, chooses=True))
        if c.experts:  # each workgroup keeps the choice for the down projection, so all run the stage that chooses
            router = linear(ROUTER, ffn_x, to_logits, Inputs.F32, ffn_inputs)
            gate_up = [replace(stage, grid=(grid.workgroups, 1, 1)) for stage in gate_up]
        return [
            *linear(QKV, between.fed_forward if c.norms_after else x, mixer.to_inputs, self.inputs, attention_inputs),
            *mixer.stages,
            *linear(ATTN_OUTPUT, mixer.result, to_mid, self.inputs, mixer.prologue),
            *router,
            *gate_up,
            *linear(DOWN, between.act, to_x, down_inputs, self.chosen(down, members, chooses=False)),
            *self.norm_after(first.post_ffw_norm, count, between.fed_forward, between.mid, x),
        ]

    def attention(self, members: Sequence[int], rows: int) -> Mixer:
        c, gpu, count, between, grid = self.config, self.gpu, len(members), self.between(rows), self.grid_of(rows)
        first, cache = self.weights.layers[members[0]], self.cache.layers[members[0]]
        kinds, kv_type = {c.kinds[i] for i in members}, self.cache.kv_type
        kind = kinds.pop() if len(kinds) == 1 else None  # else the layer table has what differs
        keys, values = layer_range(cache.keys, count), layer_range(cache.values, count)
        shape, parts = attention_shape(c, 1, kind=kind), ("split_count_dynamic",)
        staged = routes.has_norm_stages(rows, c.dim, gpu.caps)
        own: Consts = {"WORKGROUP": grid.invocations, "PARTIAL": not staged}
        own |= routes.fused_head_consts(shape, grid, gpu.caps, rows, staged)
        max_splits = routes.fused_max_splits(c.kv_heads, rows, int(own["HEAD_SHARES"]))
        splits: Consts = {"MAX_SPLITS": max_splits, "TOKENS": rows}
        splits |= {"BY_LAYER": True} if kind is None else {"WINDOW": kind.window}
        rope = self.cache.rope_tables if kind is None else self.cache.rope(kind)
        qk_norm = between.raw if first.qk_norm is None else layer_range(first.qk_norm, count)
        buffers = AttentionBuffers(between.q, keys, values, between.partial, between.stats, kv_rows=between.kv_rows)
        rotates = rows == 1 and attention_rotates(c, kv_type, gpu.caps)
        if rotates:
            buffers = replace(buffers, q=between.raw, kv_rows=between.raw, rotation={"rope": rope, "norm": qk_norm})
            own |= ops.rotate_consts(c, kind)
        own_row = rotates or attention_stores(kv_type, gpu.caps)
        stored = KvType.Q8_0 if own_row else kv_type  # for q8_0 they are left for attention to store
        mode = AttentionMode(kv_type, own_row=own_row, step_rows=own_row and rows > 1)
        if staged:
            buffers, mode = replace(buffers, out=between.head_blocks), replace(mode, out=Inputs.INT8)
        [attention] = self.ops.attend(shape, buffers, mode, consts=splits | own, parts=parts)
        to_q = QkvBuffers(between.q, keys, values, rope, between.kv_rows)

        def to_inputs(matrix: Matrix) -> Output:
            return ops.rows(between.raw, matrix) if c.rotates_apart else ops.qkv(c, kind, matrix, to_q, stored)

        split_count = f"splits_of({'layer_kind().x' if kind is None else f'{kind.window}u'})"
        units, live_rows = attention.grid_for(1, 0)[0], "step.rows" if rows > 1 else 1
        stages = [
            *self.rotate(kind, qk_norm, to_q, stored, rows),
            Stage(attention.source, attention.bindings, (units, 1 if staged else split_count, live_rows)),
        ]
        merge = PrologueSpec(Prologue.MERGE, {"stats": between.stats}, splits | {"HEAD_DIM": c.head_dim}, parts)
        if first.attn_sinks is not None:
            sinks: Consts = {"SINK_STRIDE": nbytes(first.attn_sinks) // 4}
            bound = dict(merge.bindings) | {"sinks": layer_range(first.attn_sinks, count)}
            merge = PrologueSpec(Prologue.MERGE_SINKS, bound, merge.consts | sinks, parts)
        return Mixer(to_inputs, stages, between.head_blocks if staged else between.partial, merge)

    def short_convs(self, members: Sequence[int]) -> Mixer:
        """Of one row: no other one's inputs are in the same step."""
        c, count, between, i = self.config, len(members), self.between(1), members[0]
        first, cache = self.weights.layers[i], self.cache.layers[i]
        assert first.conv is not None and first.attn_norm is not None
        pages, taps = (layer_range(cache.keys, count), layer_range(cache.values, count)), layer_range(first.conv, count)
        route = replace(routes.SHORT_CONV, consts={"WORKGROUP": self.grid.invocations})
        conv = self.ops.short_conv(c, c.kinds[i], between.raw, taps, pages, between.q, cache.kv_type, 1, route=route)
        stage = Stage(conv.source, conv.bindings, conv.grid_for(1, 0))
        unused = layer_range(first.attn_norm, count)
        copy = PrologueSpec(Prologue.NORM, {"norm": unused}, {"NORM": False})
        return Mixer(lambda matrix: ops.rows(between.raw, matrix), [stage], between.q, copy)

    def sums_leave_blocks(self, members: Sequence[int], rows: int) -> bool:
        """Whether the linears into the residual stream quantise it for the next ones. No shard may cut a block."""
        layers = (self.weights.layers[i] for i in members)
        whole = all(len(matrix.shards) == 1 for layer in layers for matrix in (layer.attn_output, layer.ffn_down))
        piece = routes.piece_blocks(self.half_sums, self.gpu.caps)
        return whole and routes.sums_leave_blocks(self.config.dim, rows, self.grid_of(rows), piece, self.gpu.caps)

    def unnormalised(self, squares: AnyBuffer, but_first: bool = False) -> PrologueSpec:
        """Inputs that a linear has left, or for the first layer a norm."""
        consts: Consts = {"EPS": self.config.stream_eps, "FIRST_NORMALISED": but_first}
        consts |= {"SUBGROUP": self.gpu.caps.subgroup}
        return PrologueSpec(Prologue.BLOCKS, {"squares": squares}, consts, ("input_rms",))

    def norm_stage(self, weight: AnyBuffer, x: AnyBuffer, y: AnyBuffer, rows: int) -> Stage:
        """From the residual stream to the blocks that a linear reads."""
        consts = {"WORKGROUP": self.grid_of(rows).invocations, "TOKENS": rows, "PREFETCHED": True}
        table = tuple(replace(route, consts=consts) for route in routes.NORM_BLOCKS)
        one = self.ops.rms_norm(x, weight, y, self.config.dim, self.config.stream_eps, rows, table=table)
        return Stage(one.source, one.bindings, ("step.rows", 1, 1))

    def chosen(self, prologue: PrologueSpec, members: Sequence[int], chooses: bool) -> PrologueSpec:
        """The prologue of a stage of the chosen experts, where there are experts: gate and up choose, down does not."""
        c = self.config
        if not c.experts:
            return prologue
        consts: Consts = {"EXPERTS": c.experts, "USED": c.experts_used, "WHOLE": c.whole_weights, "CHOOSES": chooses}
        consts |= {"EXPERT_ROWS": 2 * c.ffn_dim} if chooses else {"EXPERT_ROWS": c.dim, "INPUT_WIDTH": c.hidden_width}
        bindings = dict(prologue.bindings) | {"logits": self.between(1).logits}
        for bias in router_biases(self.weights.layers[members[0]]):
            bindings["router_bias"] = layer_range(bias, len(members))
            consts["ROUTER_STRIDE"] = bias.size // 4
        return replace(prologue, bindings=bindings, consts=prologue.consts | consts)

    def rotate(
        self, kind: LayerKind | None, norm: AnyBuffer, buffers: QkvBuffers, stored: KvType, rows: int
    ) -> list[Stage]:
        """From q, k and v to rotated queries and the KV cache, where neither the linear nor attention does it."""
        c = self.config
        if not c.rotates_apart or (rows == 1 and attention_rotates(c, self.cache.kv_type, self.gpu.caps)):
            return []
        route = replace(routes.ROTATE, consts={"WORKGROUP": self.grid_of(rows).invocations, "TOKENS": rows})
        one = self.ops.rotate(c, kind, self.between(rows).raw, norm, buffers, stored, 1, route)
        units, _, _ = one.grid_for(1, 0)
        return [Stage(one.source, one.bindings, (units, "step.rows" if rows > 1 else 1, 1))]

    def norm_after(
        self, norm: Bindable | None, count: int, branch: AnyBuffer, stream: AnyBuffer, y: AnyBuffer
    ) -> list[Stage]:
        """y = stream + the normalised branch after the last layer, where the prologue of the next one would do it."""
        if norm is None:
            return []
        route = replace(routes.SUM_NORM, consts={"WORKGROUP": self.grid.invocations})
        consts: Consts = {"EPS": self.config.norm_eps, "LAYER_OFFSET": 1}
        one = self.ops.sum_norm(branch, layer_range(norm, count), stream, y, self.config.dim, consts, route)
        return [Stage(one.source, one.bindings, (1, 1, 1), last=True)]

    def variants(self, members: Sequence[int], column: int) -> dict[tuple[object, ...], int]:
        """A layer for each of the distinct matrices of a column, by slab_key."""
        found: dict[tuple[object, ...], int] = {}
        for i in members:
            found.setdefault(slab_key(self.weights.layers[i].matrices[column]), i)
        return found

    def linear(
        self,
        x: AnyBuffer,
        matrix: Matrix,
        output: Callable[[Matrix], Output],
        inputs: Inputs,
        prologue: PrologueSpec,
        rows: int,
    ) -> list[Stage]:
        """A stage for each shard.

        A later shard reuses the inputs that the first shard's prologue computed, if all its workgroups ran it.
        """
        found: list[Stage] = []
        busy: list[int] = []
        grid = self.grid_of(rows)
        for shard in matrix.shards:
            shape = shard.shape(rows, inputs, prologue.prologue, output(matrix).epilogue)
            shape = replace(shape, k=int(prologue.consts.get("INPUT_WIDTH", shape.k)))
            route = routes.fused_linear(shape, grid, self.gpu.caps, self.half_sums)
            busy.append(min(grid.workgroups, self.ops.workgroups(route, shape)))
            ready: Consts = {}
            if prologue.prologue is not Prologue.NONE:
                ready = {"INPUTS_READY": bool(found) and busy[-1] <= busy[0]}
                ready |= {"HALF_SUMS": self.half_sums} if inputs is Inputs.INT8 else {}
            if prologue.prologue is Prologue.BLOCKS:
                piece = routes.piece_width(shape, route, self.half_sums, self.gpu.caps)
                ready |= {"INPUT_WIDTH": piece, "INPUTS_READY": bool(ready["INPUTS_READY"]) and piece == shape.k}
            own = replace(prologue, consts=prologue.consts | ready)
            # a bias that is not read is a norm: a range of a buffer that is bound anyway
            single = replace(matrix, shards=(shard,), bias=matrix.bias or as_buffer(self.weights.layers[0].vectors[0]))
            (dispatch,) = self.ops.linear(x, single, rows, output(matrix), inputs, own, (route,))
            found.append(Stage(dispatch.source, dispatch.bindings, dispatch.grid_for(rows, 0)))
        return found

    def layer_table(self, members: Sequence[int]) -> Buffer:
        """The layer table of gpu.fuse: layer_kind() (kernels/parts/unfused.wgsl), then variants and slab indices."""
        columns = range(len(self.weights.layers[0].matrices))
        known = [list(self.variants(members, column)) for column in columns]
        words = [len(members), 0, 0, 0]
        for i in members:
            kind, matrices = self.config.kinds[i], self.weights.layers[i].matrices
            words += [kind.window, ops.rope_dims(self.config, kind), self.cache.rope(kind).offset // 8, 0]
            variants = [keys.index(slab_key(matrix)) for keys, matrix in zip(known, matrices, strict=True)]
            words += [variant << 16 | slab_index(m) for variant, m in zip(variants, matrices, strict=True)]
            words += [0] * (-len(words) % 4)
        return self._table(np.array(words, np.uint32))

    def _table(self, rows: NDArray[np.uint32]) -> Buffer:
        key = rows.tobytes()
        if key not in self.layer_tables:
            self.layer_tables[key] = self.gpu.upload(rows, "layers", BufferUsage.UNIFORM)
        return self.layer_tables[key]

    def grid_of(self, rows: int) -> GridSize:
        return self.grid if rows == 1 else routes.rows_grid(self.grid)

    def grid_sizes(self) -> tuple[GridSize, ...]:
        c = self.config
        return routes.grid_sizes(c.dim, c.heads_per_kv, self.gpu.caps, c.experts > 0)

    def probe(self, recorder: Recorder) -> bool:
        """Find a grid size whose workgroups run at the same time and see each other's stores.

        Afterwards position 0 of the KV cache and the residual stream are undefined.
        """
        litmus_table = self._table(np.array([[LITMUS_LAYERS, 0, 0, 0]], np.uint32))
        probed: list[list[str]] = []
        self.composed.clear()
        for grid, same_storage in product(self.grid_sizes(), (False, True)):
            self.grid, self.same_storage = grid, same_storage
            dispatches = self.dispatches()
            if (sources := [dispatch.source for dispatch in dispatches]) in probed or not self.can_bind(dispatches):
                continue
            probed.append(sources)
            self.gpu.write(self.barrier, np.array([0, 0, PROBE_SPIN_LIMIT, 0], np.uint32))
            try:
                recorder.submit([Step(Plan(dispatches))])
            except GPUError:  # the driver refuses so large a kernel
                continue
            passed = all(
                np.array_equal(*barrier_litmus_test(self.gpu, grid, self.barrier, litmus_table, seed))
                for seed in (1, 2, 3)
            )
            if passed and not timed_out(self.gpu, self.barrier):
                self.spin_limit = max(PROBE_SPIN_LIMIT, int(WAIT_S / self.spin_seconds()))
                self.restore_barrier()
                return True
        return False

    def restore_barrier(self) -> None:
        """As after the probe: nobody has arrived or timed out."""
        self.gpu.write(self.barrier, np.array([0, 0, self.spin_limit, 0], np.uint32))

    def spin_seconds(self) -> float:
        """The time of one spin: a workgroup waits for another one that is not dispatched."""
        table, grid = self._table(np.array([[2, 0, 0, 0]], np.uint32)), GridSize(2, self.grid.invocations)
        words = 3 * layer_stride(constants("barrier_litmus")["N"]) // 4
        fused, buffers = barrier_litmus(self.gpu, grid, self.barrier, table, 0, words)
        plan = Plan([replace(fused, grid=(1, 1, 1))])

        def seconds(spins: int) -> float:
            self.gpu.write(self.barrier, np.array([0, 0, spins, 0], np.uint32))
            started = time.perf_counter()
            Recorder(self.gpu).submit([Step(plan)])
            assert timed_out(self.gpu, self.barrier)
            return time.perf_counter() - started

        few, many = (min(seconds(spins) for _ in range(2)) for spins in (1, PROBE_SPIN_LIMIT))
        self.gpu.free(*buffers)
        return max(many - few, 1e-6) / PROBE_SPIN_LIMIT


def timed_out(gpu: Gpu, barrier: BufferRange) -> bool:
    return bool(gpu.read(barrier, np.uint32, 2)[1])


def barrier_litmus(
    gpu: Gpu, grid: GridSize, barrier: AnyBuffer, layers: Buffer, first: int, size: int
) -> tuple[Dispatch, list[Buffer]]:
    """A fused kernel of a single light stage, and its buffer of `size` words, with the rows from `first` on.

    With Tint a buffer of copies follows.
    """
    y, n = gpu.zeros(4 * size, "litmus"), constants("barrier_litmus")["N"]
    copies = gpu.zeros(4 * size, "copies") if gpu.caps.tint else None
    consts: Consts = {"WORKGROUP": grid.invocations, "FIRST_WORD": first}
    single = gpu.dispatch("barrier_litmus", (), consts, {"y": y}, (n // grid.invocations, 1, 1))
    assert not callable(single.grid)
    stage = Stage(single.source, single.bindings, single.grid)
    return gpu.fused([stage], grid.workgroups, barrier, layers, copies=copies), [y] if copies is None else [y, copies]


def barrier_litmus_test(
    gpu: Gpu, grid: GridSize, barrier: AnyBuffer, layers: Buffer, seed: int = 1
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Each layer reads values that other workgroups stored in the layer before. Returns the values and the right ones.

    Each seed starts the rows at another offset in a cache line.
    """
    n, shift = constants("barrier_litmus")["N"], constants("barrier_litmus")["SHIFT"]
    first, stride = 12 * seed, layer_stride(n)
    words = np.arange(seed, seed + first + (LITMUS_LAYERS + 1) * stride // 4, dtype=np.uint32) * np.uint32(2654435761)
    fused, buffers = barrier_litmus(gpu, grid, barrier, layers, first, len(words))
    if gpu.caps.tint:
        words[first + n :] = constants("late_stores")["NOT_STORED"]
    for buffer in buffers:
        gpu.write(buffer, words)  # a value that is read too early is neither zero nor left by another test
    Recorder(gpu).submit([Step(Plan([fused]))])
    got = gpu.read(buffers[0], np.uint32, n, offset=4 * first + LITMUS_LAYERS * stride)
    gpu.free(*buffers)
    return got, np.roll(words[first : first + n], -LITMUS_LAYERS * shift) + np.uint32(LITMUS_LAYERS)
