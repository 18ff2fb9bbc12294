"""One method per operation: select the route, set the constants, bind the buffers, return the dispatch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import TypeVar

from llamagpu.engine import routes
from llamagpu.engine.options import KvType
from llamagpu.engine.routes import (
    Attention,
    Epilogue,
    ExpertLinear,
    Inputs,
    Linear,
    Prologue,
    Role,
    Route,
    RowWise,
    Table,
)
from llamagpu.engine.weights import Matrix
from llamagpu.files.architectures import Activation, QkNorm
from llamagpu.files.config import LayerKind, ModelConfig, Rope
from llamagpu.files.storage import Storage
from llamagpu.gpu.buffers import AnyBuffer, Bindable, Buffer, Texture
from llamagpu.gpu.caps import Grid
from llamagpu.gpu.device import Dispatch, Gpu, GridFunction
from llamagpu.gpu.shaders import Const, constants

Consts = dict[str, Const]
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Output:
    """The epilogue of a linear, with its bindings, constants and further kernel parts."""

    epilogue: Epilogue
    bindings: Mapping[str, Bindable]
    consts: Consts = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    blocks: Inputs = Inputs.INT8  # the kind that it writes, if any

    @property
    def written_blocks(self) -> Inputs | None:
        return self.blocks if self.epilogue.to_blocks else None


@dataclass(frozen=True, slots=True)
class PrologueSpec:
    """The prologue of a linear, with its bindings, constants and further kernel parts."""

    prologue: Prologue
    bindings: Mapping[str, Bindable] = field(default_factory=dict)
    consts: Consts = field(default_factory=dict)
    parts: tuple[str, ...] = ()


NO_PROLOGUE = PrologueSpec(Prologue.NONE)


@dataclass(frozen=True, slots=True)
class HeadBuffers:
    """Where the output head leaves its results for the segments of a step."""

    logits: Buffer  # [segments, vocab]
    candidates: Buffer  # [segments, candidates]
    step: Buffer  # inputs of a step with one row for each segment
    segments: int = 1


@dataclass(frozen=True, slots=True)
class AttentionBuffers:
    q: Bindable  # [m, heads, head_dim]
    keys: AnyBuffer
    values: AnyBuffer
    out: Bindable  # [m, heads, head_dim] f32 or int8 blocks, or partial sums of splits
    stats: AnyBuffer | None = None  # [m, heads, splits] (top, total): softmax statistics of splits
    int8_kv: AnyBuffer | None = None  # keys and values that quantise_kv leaves for attend_int8
    kv_rows: AnyBuffer | None = None  # of the step, where the KV cache is q8_0: see QkvBuffers
    sinks: Bindable | None = None  # [heads]
    # `rope` and `norm`, where q and kv_rows are rows q | k | v before `rotate`
    rotation: Mapping[str, Bindable] | None = None


@dataclass(frozen=True, slots=True)
class AttentionMode:
    kv_type: KvType
    out: Inputs = Inputs.F32  # blocks, where the kernel can write them
    own_row: bool = False  # attend_split, q8_0 and f16: store the row's own key and value
    step_rows: bool = False  # fused, f16: of several rows, which need those of each other


@dataclass(frozen=True, slots=True)
class Splits:
    """Results of a linear that is split over k, to be added to the residual stream."""

    sums: Buffer  # [count, rows, n]
    count: int
    rows: int

    @property
    def consts(self) -> Consts:
        return {"GRID_SPLIT": self.count, "SPLIT_ROWS": self.rows}


@dataclass(frozen=True, slots=True)
class Choices:
    """Which experts the tokens of a step use."""

    experts: int
    used: int  # by a token
    chosen: Buffer  # [m, used] (expert, f32 weight)
    groups: Buffer  # tiles of choices of one expert, see group_experts

    @property
    def consts(self) -> Consts:
        return {"EXPERTS": self.experts, "USED": self.used}


# Outputs of linears


def _bias(matrix: Matrix) -> Consts:
    return {"BIAS": matrix.bias is not None}


def store(y: AnyBuffer, matrix: Matrix) -> Output:
    return Output(Epilogue.STORE, {"y": y}, {"WIDTH": matrix.n} | _bias(matrix))


def add(y: AnyBuffer, matrix: Matrix) -> Output:
    """y += result: the residual stream."""
    return Output(Epilogue.ADD, {"y": y}, {"WIDTH": matrix.n} | _bias(matrix))


def sum_to(y: AnyBuffer, residual: AnyBuffer, matrix: Matrix, layer_offset: int = 0) -> Output:
    """The residual stream from one buffer to another, by layer; with an offset of 1 into the row of the next layer."""
    consts: Consts = {"WIDTH": matrix.n, "LAYER_OFFSET": layer_offset}
    return Output(Epilogue.SUM, {"y": y, "residual": residual}, consts | _bias(matrix))


def sum_blocks(
    stream: AnyBuffer,
    residual: AnyBuffer,
    y: AnyBuffer,
    squares: AnyBuffer,
    norm: AnyBuffer,
    matrix: Matrix,
    layer_offset: int = 0,
) -> Output:
    """As sum_to, and as int8 blocks for the linear after the next norm."""
    consts: Consts = {"LAYER_OFFSET": layer_offset, "NORMS": norm.size // (4 * matrix.n)}
    bindings = {"y": y, "residual": residual, "stream": stream, "squares": squares, "next_norm": norm}
    return Output(Epilogue.SUM_BLOCKS, bindings, consts | _bias(matrix))


def activation_parts(activation: Activation) -> tuple[str, ...]:
    return (f"activation_{activation}",)


def glu(y: AnyBuffer, matrix: Matrix, activation: Activation, interleaved: bool = False) -> Output:
    """activation(gate) * up; with `interleaved` in the order that Inputs.INTERLEAVED reads."""
    consts = {"WIDTH": matrix.n, "INTERLEAVED": interleaved} | _bias(matrix)
    return Output(Epilogue.GLU, {"y": y}, consts, activation_parts(activation))


def glu_blocks(
    y: AnyBuffer,
    matrix: Matrix,
    activation: Activation,
    persistent: bool = False,
    blocks: Inputs = Inputs.INT8,
) -> Output:
    """The same as blocks; `persistent`: in a workgroup that goes on with other rows."""
    consts = {"WIDTH": matrix.n, "PERSISTENT": persistent} | _bias(matrix)
    return Output(Epilogue.GLU_BLOCKS, {"y": y}, consts, activation_parts(activation), blocks)


def glu_experts(y: AnyBuffer, matrix: Matrix, activation: Activation, interleaved: bool = False) -> Output:
    """As glu, of the chosen experts of a fused kernel: with their biases, and times their weights."""
    consts: Consts = {"WIDTH": matrix.n, "INTERLEAVED": interleaved}
    return Output(Epilogue.GLU_EXPERTS, {"y": y}, consts, activation_parts(activation))


def sum_experts(y: AnyBuffer, residual: AnyBuffer, matrix: Matrix, layer_offset: int = 0) -> Output:
    """As sum_to, of the chosen experts of a fused kernel: with the weighted sum of their biases."""
    consts: Consts = {"WIDTH": matrix.n, "LAYER_OFFSET": layer_offset}
    return Output(Epilogue.SUM_EXPERTS, {"y": y, "residual": residual}, consts)


def rows(y: AnyBuffer, matrix: Matrix) -> Output:
    """By layer, for a stage that reads whole rows."""
    return Output(Epilogue.ROWS, {"y": y}, {"WIDTH": matrix.n} | _bias(matrix))


@dataclass(frozen=True, slots=True)
class QkvBuffers:
    q: AnyBuffer  # [m, heads, head_dim]
    keys: AnyBuffer  # the KV cache of a layer
    values: AnyBuffer
    rope: AnyBuffer
    kv_rows: AnyBuffer | None = None  # [m, keys and values, kv_heads, head_dim] f32, to be quantised for a q8_0 cache

    def bindings(self, kv_type: KvType) -> dict[str, Bindable]:
        bound: dict[str, Bindable] = {"y": self.q, "rope": self.rope}
        if kv_type is KvType.Q8_0:
            assert self.kv_rows is not None, "no epilogue has the 32 numbers that share a scale"
            return bound | {"kv_rows": self.kv_rows}
        return bound | {"k_cache": self.keys, "v_cache": self.values}


def qkv(
    config: ModelConfig,
    kind: LayerKind | None,
    matrix: Matrix,
    buffers: QkvBuffers,
    kv_type: KvType,
    one_segment: bool = False,
) -> Output:
    """Queries, rotated, to q; keys, rotated, and values into the KV cache, or to kv_rows if it is q8_0."""
    consts = qkv_consts(config, kind) | {"ONE_SEGMENT": one_segment} | _bias(matrix)
    return Output(Epilogue.QKV, buffers.bindings(kv_type), consts, (f"kv_store_{kv_type}",))


def qkv_consts(config: ModelConfig, kind: LayerKind | None) -> Consts:
    """Of a layer of this kind; None: of a fused kernel whose layers differ."""
    by_layer: Consts = {"ROPE_DIMS": config.rope_dims, "BY_LAYER": True}
    return head_consts(config) | (by_layer if kind is None else {"ROPE_DIMS": rope_dims(config, kind)})


def rotate_consts(config: ModelConfig, kind: LayerKind | None) -> Consts:
    consts: Consts = {"QK_NORM": config.qk_norm is not QkNorm.NONE, "EPS": config.norm_eps}
    consts |= {"TEMPERATURE": config.temperature, "TEMPERATURE_RUN": config.rope_orig_context}
    return qkv_consts(config, kind) | consts


def rope_dims(config: ModelConfig, kind: LayerKind) -> int:
    return 0 if kind.rope is Rope.NONE else config.rope_dims


def head_consts(shape: ModelConfig | Attention) -> Consts:
    return {"HEADS": shape.heads, "KV_HEADS": shape.kv_heads, "HEAD_DIM": shape.head_dim}


def lane_run(kv_type: KvType) -> int:
    """Dimensions of a key or value that a lane of attend_split loads at once."""
    return constants("kv_run_q8_0" if kv_type is KvType.Q8_0 else "kv_run_float")["RUN"]


def attention_shape(
    config: ModelConfig,
    m: int,
    segments: int = 1,
    bucket: int = 1,
    int8: bool = False,
    kind: LayerKind | None = None,
    half: bool = False,
) -> Attention:
    """Of a layer of this kind, or of the one with the longest window."""
    c, window = config, config.window if kind is None else kind.window
    own = Attention(m, c.heads, c.kv_heads, c.head_dim, window, c.attn_scale, 1, segments, bucket, int8)
    return replace(own, half=half, soft_cap=c.attn_soft_cap, sinks=c.sinks)


def written(out: Inputs) -> Inputs:
    """The blocks of a kernel whose constant TO_BLOCKS tells whether it writes any."""
    return out if out.blocks else Inputs.INT8


class Ops:
    """Makes dispatches for one device.

    All kernels read the token rows of a step from `step` (engine/step_inputs.py). Those that use the KV cache find
    its pages in `table` (engine/page_table.py).
    """

    def __init__(self, gpu: Gpu, step: Buffer, table: Buffer | None = None, logit_soft_cap: float = 0.0) -> None:
        self.gpu, self.step, self.logit_soft_cap = gpu, step, logit_soft_cap
        self.shared: dict[str, Bindable] = {"step": step}
        if table is not None:
            self.shared["table"] = table
        self.grids: dict[object, GridFunction] = {}  # layers share them
        self.scratch: list[Buffer] = []
        self._partial_sums: Buffer | None = None

    # From routes to kernels

    def parts(
        self,
        route: Route[S],
        storage: Storage = Storage.F16,
        inputs: Inputs = Inputs.F32,
        prologue: Prologue = Prologue.NONE,
        epilogue: Epilogue | None = None,
        kv_type: KvType = KvType.F32,
        sinks: bool = False,
        own_row: bool = False,
        step_rows: bool = False,
        blocks: Inputs = Inputs.INT8,
        experts: bool = False,
        rotates: bool = False,
        block_scale: str = "",
        half_scores: bool = False,
    ) -> tuple[str, ...]:
        """The files of a route's kernel parts, in the order of composition. `blocks`: the kind that it writes."""
        caps = self.gpu.caps
        names = ["f16_native" if caps.native_f16 else "f16_bits"]
        scales = [f"pair_{storage}"] if storage.two_bytes else ["scales"]
        words = "f16" if storage.two_bytes else storage  # the part that reads them
        int8_block = "int8_block_subgroup" if caps.subgroup >= 4 else "int8_block_tree"
        block_parts = [f"blocks_{blocks}"] if blocks is not Inputs.INT8 else [int8_block, "blocks_int8"]
        for role in route.parts:
            if role in (Role.WEIGHT, Role.BLOCK, Role.PLANES):
                names += [*scales, f"{role}_{words}"]
            elif role is Role.HALVES and storage.two_bytes:
                names.append("halves_f16")
            elif role is Role.HALVES:
                names += scales if block_scale == "block_scale_one" else []
                names += [block_scale, "half2", f"halves_{words}"]
            elif role is Role.MATRIX and caps.matrix in ("16x8", "8x8"):
                names.append(f"matrix_{caps.matrix}")
            elif role is Role.SCORES:
                names.append("scores_f16" if half_scores else "scores_f32")
            elif role is Role.TILE:
                names.append(f"tile_{inputs}")
            elif role is Role.STRIP:
                names.append(f"strip_{storage}")
            elif role is Role.SUBGROUP_BARRIER:
                names.append("subgroup_barrier_none" if caps.measured_barrier else "subgroup_barrier_workgroup")
            elif role is Role.DOT:
                names += [*scales, *self._dot_parts(storage, inputs, prologue, int8_block)]
            elif role is Role.REDUCE:
                names.append("reduce_subgroup" if self.subgroups_fit(route) else "reduce_tree")
            elif role is Role.EPILOGUE and epilogue:
                names.append(epilogue)
                if epilogue.to_blocks:
                    names += block_parts + ["hidden"] * (Role.DOT in route.parts)
            elif role is Role.INT8_BLOCK:
                names.append(int8_block)
            elif role is Role.BLOCKS:
                names += block_parts
            elif role is Role.TEXTURE:
                names.append(storage)
            elif role is Role.RESIDUAL:
                names.append("residual")
            elif role is Role.BROADCAST:
                one_subgroup = caps.subgroup == routes.vector_lanes(caps)
                names.append("broadcast_subgroup" if one_subgroup else "broadcast_plain")
            elif role is Role.STAGE:
                names.append("stage_int8" if "STAGED" in route.consts else "stage_none")
            elif role is Role.TURN:
                names.append("turn_row" if caps.measured_barrier and not caps.tint else "turn_uniform")
            elif role is Role.ROWS:
                biased = epilogue is not None and epilogue.adds_expert_biases
                own_rows = "rows_experts_biased" if biased else "rows_experts"
                names += ["choose_experts", own_rows] if experts else ["rows_plain"]
            elif role is Role.SINKS:
                names.append("sinks" if sinks else "sinks_none")
            elif role is Role.EXPERT_BIAS:
                names.append("expert_bias")
            elif role is Role.PAGES:
                names.append("pages")
            elif role is Role.KV_LAYOUT:
                names.append(f"kv_{kv_type}")
            elif role is Role.KV_RUN and kv_type is not KvType.Q8_0:
                own = [f"kv_own_{kv_type}", "store_own_turned" if rotates else "store_own_plain"]
                names += own if own_row else [f"kv8_{kv_type}", "kv_own_none"]
                names.append("kv_run_float")
            elif role in (Role.KV4, Role.KV8, Role.KV_RUN):
                names += ["kv_q8_0"] * (kv_type is KvType.Q8_0) + [f"{role}_{kv_type}"]
            if role is Role.KV_RUN:
                names += ["own_rows"] * (rotates or kv_type is KvType.Q8_0)
                names.append("own_step" if step_rows else "own_last")
                names.append("heads_rotated" if rotates else "heads_plain")
        return tuple(dict.fromkeys(names))

    @staticmethod
    def _dot_parts(storage: Storage, inputs: Inputs, prologue: Prologue, int8_block: str) -> list[str]:
        arithmetic = "int8" if inputs is Inputs.INT8 else "f32"
        if prologue is Prologue.NONE:
            source = [f"inputs_{inputs}"]
        else:
            source = [f"prologue_{prologue}", f"prologue_{arithmetic}"] + [int8_block] * (arithmetic == "int8")
        if storage.two_bytes:
            return [*source, "dot_f16_int8" if arithmetic == "int8" else "dot_f16"]
        return [*source, f"planes_{storage}", f"dot_{arithmetic}"]

    def subgroups_fit(self, route: Route[S]) -> bool:
        """Whether the sums of the kernel divide into whole subgroups."""
        size, own = self.gpu.caps.subgroup, self.constants(route)
        sums = own.get("TOKENS", 1) // own.get("TOKEN_TEAMS", 1) * own.get("ROW_PAIRS", 1)
        lanes = own.get("LANES", own["WORKGROUP"])
        in_part = own.get("TOKENS", 1) > 1 or route.kernel == "linear_gemv_fused"  # lanes may be a part of a subgroup
        if in_part and size >= lanes:
            return size % lanes == 0
        return size >= sums and lanes % size == 0

    def constants(self, route: Route[S]) -> dict[str, int]:
        """The kernel's own tile sizes with the route's tuning on top."""
        lanes = {"WORKGROUP": routes.vector_lanes(self.gpu.caps)} if route.one_vector else {}
        return constants(route.kernel) | dict(route.consts) | lanes

    def tuning(self, route: Route[S]) -> Consts:
        """The constants that a route sets: sizes of the workgroup and how it reduces."""
        tuned: Consts = dict(route.consts)
        own = self.constants(route)
        if Role.REDUCE in route.parts:
            tuned |= {"WORKGROUP": own["WORKGROUP"], "LANES": own.get("LANES", own["WORKGROUP"])}
            if self.subgroups_fit(route):
                tuned["SUBGROUP"] = self.gpu.caps.subgroup
        if route.one_vector:
            tuned["WORKGROUP"] = own["WORKGROUP"]
        return tuned

    def grid(self, route: Route[S], shape: S, m: int, consts: Mapping[str, int] | None = None) -> Grid | GridFunction:
        """The grid: fixed for a plan of one row, else a function of the rows of the step."""
        own = self.constants(route) | dict(consts or {})
        grid = partial(route.grid, shape, own, self.gpu.caps)
        return grid(1, 0) if m == 1 else self.grids.setdefault((route.grid, shape, *own.items()), grid)

    def workgroups(self, route: Route[Linear], shape: Linear) -> int:
        return prod(route.grid(shape, self.constants(route), self.gpu.caps, 1, 0))

    def _dispatch(
        self,
        route: Route[S],
        parts: tuple[str, ...],
        consts: Consts,
        bindings: Mapping[str, Bindable],
        grid: Grid | GridFunction,
        shape: object,
    ) -> Dispatch:
        bound = self.shared | dict(bindings)
        return self.gpu.dispatch(route.kernel, parts, consts, bound, grid, route.needs, shape)

    # Linears

    def linear(
        self,
        x: Bindable,
        matrix: Matrix,
        m: int,
        output: Output,
        inputs: Inputs = Inputs.F32,
        prologue: PrologueSpec = NO_PROLOGUE,
        table: Table[Linear] = routes.LINEAR,
    ) -> list[Dispatch]:
        """y = x @ W^T into `output`, one dispatch for each shard. `m` is the most token rows that the plan takes."""
        dispatches: list[Dispatch] = []
        candidates = 0
        for shard in matrix.shards:
            blocks = output.written_blocks
            shape = replace(shard.shape(m, inputs, prologue.prologue, output.epilogue), blocks=blocks)
            route = routes.select(table, shape, self.gpu.caps)
            halves = "EPILOGUE_ROWS" in route.consts
            assert not halves or blocks is not Inputs.INT8, "an int8 block is stored as a whole"
            consts = shard.consts | self.tuning(route) | output.consts | {"N": shard.n, "ROW0": shard.row0}
            if output.epilogue is Epilogue.LOGITS:
                consts["FIRST_CANDIDATE"] = candidates
                candidates += self.workgroups(route, shape)
            bindings = shard.bindings | dict(output.bindings) | {"x": x}
            # bias and norm are bound even where they are not read
            bindings |= {"bias": matrix.bias or self.step, "norm": x} | dict(prologue.bindings)
            grid, epilogue, total = self.grid(route, shape, m), output.epilogue, list[Dispatch]()
            if splits := self.splits(route, shape):
                total = [self.linear_sum(shape, splits, output, bindings, shard.row0)]
                consts = shard.consts | self.tuning(route) | {"N": shard.n, "SPLIT_ROWS": m}
                bindings, epilogue = bindings | {"y": splits.sums}, Epilogue.PARTIAL
            own = () if splits else output.parts
            parts = (
                *self.parts(
                    route,
                    shard.layout.storage,
                    inputs,
                    prologue.prologue,
                    epilogue,
                    blocks=output.blocks,
                    experts=matrix.experts > 1,
                    block_scale=routes.block_scale(shard.layout),
                ),
                *own,
                *prologue.parts,
            )
            dispatches.append(self._dispatch(route, parts, consts | prologue.consts, bindings, grid, shape))
            dispatches += total
        return dispatches

    def add_linear(
        self, x: Bindable, matrix: Matrix, m: int, y: AnyBuffer, inputs: Inputs
    ) -> tuple[list[Dispatch], Splits | None]:
        """y += x @ W^T. Where the linear is split over k, the next rms_norm adds the splits up."""
        dispatches = self.linear(x, matrix, m, add(y, matrix), inputs)
        shape = matrix.shards[0].shape(m, inputs, epilogue=Epilogue.ADD)
        splits = self.splits(routes.select(routes.LINEAR, shape, self.gpu.caps), shape)
        if splits and len(matrix.shards) == 1 and matrix.bias is None and routes.sums_in_norm(shape):
            return dispatches[:-1], splits
        return dispatches, None

    def splits(self, route: Route[Linear], shape: Linear) -> Splits | None:
        """Where a linear that is split over k leaves its results."""
        count = route.consts.get("GRID_SPLIT", 1)
        return Splits(self.partial_sums(count * shape.m * shape.n * 4), count, shape.m) if count > 1 else None

    def linear_sum(
        self, linear: Linear, splits: Splits, output: Output, bindings: Mapping[str, Bindable], row0: int
    ) -> Dispatch:
        """The sum of the splits of a linear, into `output`."""
        route = routes.LINEAR_SUM
        consts = splits.consts | output.consts | {"N": linear.n, "ROW0": row0}
        parts, grid = (*self.parts(route, epilogue=output.epilogue), *output.parts), self.grid(route, linear, linear.m)
        return self._dispatch(route, parts, consts, dict(bindings) | {"x": splits.sums}, grid, RowWise(linear.n))

    def partial_sums(self, size: int) -> Buffer:
        """The scratch buffer of splits over K, of at least `size` bytes."""
        if self._partial_sums is None or self._partial_sums.size < size:
            self._partial_sums = self.gpu.zeros(size, "partial sums")
            self.scratch.append(self._partial_sums)
        return self._partial_sums

    def output_head(self, x: AnyBuffer, matrix: Matrix, head: HeadBuffers, inputs: Inputs) -> list[Dispatch]:
        """Logits of a row for each segment, and the candidates of sampling.

        For one row the linear writes the candidates itself, where its kernel can.
        """
        if self.head_finds_candidates(matrix, inputs, head.segments):
            output = Output(Epilogue.LOGITS, {"y": head.logits, "candidates": head.candidates})
            return self.linear(x, matrix, 1, output, inputs)
        output = store(head.logits, matrix)
        output = replace(output, bindings=dict(output.bindings) | {"step": head.step})
        linear = [fixed_grid(d, head.segments) for d in self.linear(x, matrix, head.segments, output, inputs)]
        if self.logit_soft_cap:
            linear.append(fixed_grid(self.soft_cap(head.logits, matrix.n, head.step, head.segments), head.segments))
        return [*linear, self.argmax(head.logits, head.candidates, matrix.n, head.segments)]

    def soft_cap(self, logits: AnyBuffer, vocab: int, step: Buffer, m: int) -> Dispatch:
        """Logits v become c tanh(v / c)."""
        bindings = {"y": logits, "step": step}
        return self._row_wise(routes.SOFT_CAP, bindings, vocab, m, {"CAP": self.logit_soft_cap})

    def head_finds_candidates(self, matrix: Matrix, inputs: Inputs, segments: int = 1) -> bool:
        if segments > 1 or self.logit_soft_cap:
            return False
        shapes = [shard.shape(1, inputs, epilogue=Epilogue.LOGITS) for shard in matrix.shards]
        caps = self.gpu.caps
        fit = all(routes.fits_any(routes.LINEAR, shape, caps) for shape in shapes)
        selected = [routes.select(routes.LINEAR, shape, caps) for shape in shapes] if fit else []
        return fit and matrix.bias is None and all(route.has_workgroup_epilogue for route in selected)

    def candidate_count(self, matrix: Matrix, inputs: Inputs, segments: int = 1) -> int:
        """How many candidates `output_head` leaves for each segment."""
        if not self.head_finds_candidates(matrix, inputs, segments):
            return argmax_candidates(matrix.n)
        shapes = [shard.shape(1, inputs, epilogue=Epilogue.LOGITS) for shard in matrix.shards]
        table, caps = routes.LINEAR, self.gpu.caps
        return sum(self.workgroups(routes.select(table, shape, caps), shape) for shape in shapes)

    def candidate_rows(self, matrix: Matrix, inputs: Inputs, segments: int = 1) -> int:
        """Logits per candidate of `output_head`."""
        if not self.head_finds_candidates(matrix, inputs, segments):
            return self.argmax_rows
        shape = matrix.shards[0].shape(1, inputs, epilogue=Epilogue.LOGITS)
        route = routes.select(routes.LINEAR, shape, self.gpu.caps)
        return routes.rows_per_workgroup(self.constants(route))

    @property
    def argmax_rows(self) -> int:
        """Logits per candidate of `argmax`."""
        return constants("argmax")["CANDIDATE_ROWS"]

    # Experts

    def top_experts(self, logits: AnyBuffer, choices: Choices, whole: bool, m: int) -> Dispatch:
        """The experts with the largest logits [m, experts], and their weights."""
        bindings, width = {"x": logits, "y": choices.chosen}, choices.experts
        consts = choices.consts | {"WHOLE": whole}
        return self._experts(routes.TOP_EXPERTS, bindings, width, m, consts, ("choose_experts",))

    def group_experts(self, choices: Choices, m: int) -> Dispatch:
        """The choices of m tokens, grouped by expert."""
        tiles = routes.expert_tiles(m, choices.used, choices.experts)
        consts: Consts = choices.consts | {"TILES": tiles, "TOKENS": routes.EXPERT_TOKENS}
        bindings = {"x": choices.chosen, "y": choices.groups}
        return self._experts(routes.GROUP_EXPERTS, bindings, choices.used, m, consts)

    def sum_experts(self, x: AnyBuffer, y: AnyBuffer, width: int, choices: Choices, m: int) -> Dispatch:
        """y [m, width] += the results x [m, used, width] times their weights."""
        consts: Consts = {"WIDTH": width, "USED": choices.used}
        return self._experts(routes.SUM_EXPERTS, {"x": x, "y": y, "chosen": choices.chosen}, width, m, consts)

    def _experts(
        self,
        route: Route[RowWise],
        bindings: Mapping[str, Bindable],
        width: int,
        m: int,
        consts: Consts,
        parts: tuple[str, ...] = (),
    ) -> Dispatch:
        shape = RowWise(width)
        return self._dispatch(route, parts, consts, bindings, self.grid(route, shape, m), shape)

    def expert_linear(
        self,
        x: AnyBuffer,
        matrix: Matrix,
        m: int,
        output: Output,
        choices: Choices,
        inputs: Inputs = Inputs.F32,
        own_inputs: bool = False,
        table: Table[ExpertLinear] = routes.EXPERT_LINEAR,
    ) -> list[Dispatch]:
        """y [m, used, n] = x @ W^T of the experts that each token has chosen, one dispatch for each shard.

        x has a row for each token, or with `own_inputs` for each choice.
        """
        dispatches = []
        for shard in matrix.shards:
            linear = shard.shape(m, inputs, epilogue=output.epilogue)
            linear = replace(linear, n=matrix.n, blocks=output.written_blocks)
            shape = ExpertLinear(linear, choices.experts, choices.used, routes.groups_experts(m))
            route = routes.select(table, shape, self.gpu.caps)
            consts = shard.consts | self.tuning(route) | output.consts | {"N": matrix.n, "ROW0": 0}
            consts |= {"USED": choices.used, "OWN_INPUTS": own_inputs}
            consts |= {"BIAS": False, "EXPERT_BIAS": matrix.bias is not None}
            consts |= {"FIRST_EXPERT": shard.row0 // matrix.n, "SHARD_EXPERTS": shard.n // matrix.n}
            bindings = shard.bindings | dict(output.bindings) | {"x": x, "chosen": choices.chosen}
            bindings["bias"] = matrix.bias or self.step  # bound even where it is not read
            if route.kernel == "linear_tile_experts":
                consts, bindings = consts | {"TILES": shape.tiles}, bindings | {"groups": choices.groups}
            parts = (*self.parts(route, shard.layout.storage, inputs, epilogue=output.epilogue), *output.parts)
            dispatches.append(self._dispatch(route, parts, consts, bindings, self.grid(route, shape, m), shape))
        return dispatches

    # Row-wise operations

    def rms_norm(
        self,
        x: Bindable,
        weight: Bindable,
        y: Bindable,
        width: int,
        eps: float,
        m: int,
        last_rows: bool = False,
        table: Table[RowWise] = routes.NORM,
        splits: Splits | None = None,
        blocks: Inputs = Inputs.INT8,
    ) -> Dispatch:
        """y = x / rms(x) * weight, row by row; routes.NORM_BLOCKS writes `blocks`.

        With `last_rows` only the last rows of the m segments, into row 0, 1, ... `splits` are added to x first.
        """
        shape = RowWise(width)
        route = routes.select(table, shape, self.gpu.caps)
        consts: Consts = {"WIDTH": width, "EPS": eps, "LAST_ROWS": last_rows} | self.tuning(route)
        grid, parts = self.grid(route, shape, m), self.parts(route, blocks=blocks)
        bindings = {"x": x, "w": weight, "y": y}
        if splits:
            parts = tuple("residual_split" if part == "residual" else part for part in parts)
            consts, bindings = consts | splits.consts, bindings | {"partial_sums": splits.sums}
        dispatch = self._dispatch(route, parts, consts, bindings, grid, shape)
        return fixed_grid(dispatch, m) if last_rows else dispatch

    def quantise(
        self, x: AnyBuffer, y: AnyBuffer, width: int, m: int, rows: int = 1, blocks: Inputs = Inputs.INT8
    ) -> Dispatch:
        """x as blocks, for producers that cannot write them themselves; each token has `rows` rows."""
        route, shape = routes.QUANTISE[0], RowWise(width * rows)
        consts: Consts = {"WIDTH": width, "ROWS": rows} | self.tuning(route)
        parts, grid = self.parts(route, blocks=blocks), self.grid(route, shape, m)
        return self._dispatch(route, parts, consts, {"x": x, "y": y}, grid, shape)

    def short_conv(
        self,
        config: ModelConfig,
        kind: LayerKind,
        x: AnyBuffer,
        taps: Bindable,
        cache: tuple[AnyBuffer, AnyBuffer],
        y: AnyBuffer,
        kv_type: KvType,
        m: int,
        out: Inputs = Inputs.F32,
        route: Route[RowWise] = routes.SHORT_CONV,
    ) -> Dispatch:
        """From rows b | c | x to y, as f32 or as `out`. `cache`: keys and values of the layer, for its inputs."""
        consts: Consts = {"DIM": config.dim, "TAPS": config.conv_taps, "TO_BLOCKS": out.blocks} | self.tuning(route)
        consts |= {"KV_HEADS": config.cache_heads(kind), "HEAD_DIM": config.head_dim}
        parts = (*self.parts(route, blocks=written(out)), f"kv_store_{kv_type}", f"kv_load_{kv_type}")
        bindings: dict[str, Bindable] = {"x": x, "w": taps, "y": y, "k_cache": cache[0], "v_cache": cache[1]}
        shape = RowWise(config.dim)
        return self._dispatch(route, parts, consts, bindings, self.grid(route, shape, m), shape)

    def add_norm(self, x: AnyBuffer, weight: Bindable, y: AnyBuffer, width: int, eps: float, m: int) -> Dispatch:
        """y += x / rms(x) * weight, row by row."""
        return self._row_wise(routes.ADD_NORM, {"x": x, "w": weight, "y": y}, width, m, {"EPS": eps})

    def sum_norm(
        self,
        x: AnyBuffer,
        weight: Bindable,
        residual: AnyBuffer,
        y: AnyBuffer,
        width: int,
        consts: Consts,
        route: Route[RowWise] = routes.SUM_NORM,
    ) -> Dispatch:
        """y = residual + x / rms(x) * weight, by layer."""
        return self._row_wise(route, {"x": x, "norm": weight, "residual": residual, "y": y}, width, 1, consts)

    def scale(self, y: AnyBuffer, width: int, scale: float, m: int) -> Dispatch:
        """y *= scale."""
        return self._row_wise(routes.SCALE, {"y": y}, width, m, {"SCALE": scale})

    def glu_mul(self, y: AnyBuffer, up: AnyBuffer, width: int, activation: Activation, m: int) -> Dispatch:
        """y = activation(y) * up, in place."""
        return self._row_wise(routes.GLU_MUL[0], {"y": y, "up": up}, width, m, parts=activation_parts(activation))

    def texture_scale(self, x: Texture, y: Texture, width: int, scale: float, m: int) -> Dispatch:
        """y = scale * x."""
        return self._row_wise(routes.TEXTURE_SCALE, {"x": x, "y": y}, width, m, {"SCALE": scale})

    def texture_short_conv(
        self, x: Texture, taps: Bindable, cache: Texture, y: Texture, width: int, count: int, m: int
    ) -> list[Dispatch]:
        """From rows b | c | x to y. `taps`: so many; `cache`: of the layer, for its inputs."""
        bindings: dict[str, Bindable] = {"x": x, "cache": cache}
        inputs = self._row_wise(routes.TEXTURE_CONV_INPUTS, bindings, width, m)
        bindings |= {"w": taps, "y": y}
        return [inputs, self._row_wise(routes.TEXTURE_SHORT_CONV, bindings, width, m, {"TAPS": count})]

    def texture_silu_mul(self, gate: Texture, up: Texture, y: Texture, width: int, m: int) -> Dispatch:
        return self._row_wise(routes.TEXTURE_SILU_MUL[0], {"y": y, "gate": gate, "up": up}, width, m)

    def _row_wise(
        self,
        route: Route[RowWise],
        bindings: Mapping[str, Bindable],
        width: int,
        m: int,
        more: Consts | None = None,
        parts: tuple[str, ...] = (),
    ) -> Dispatch:
        shape = RowWise(width)
        parts = (*(self.parts(route) if route.parts else ()), *parts)
        consts: Consts = {"WIDTH": width} | self.tuning(route) | (more or {})
        return self._dispatch(route, parts, consts, bindings, self.grid(route, shape, m), shape)

    # Attention

    def rotate(
        self,
        config: ModelConfig,
        kind: LayerKind | None,
        x: AnyBuffer,
        norm: Bindable | None,
        buffers: QkvBuffers,
        kv_type: KvType,
        m: int,
        route: Route[Attention] = routes.ROTATE,
    ) -> Dispatch:
        """From rows q | k | v to normalised and rotated queries, and keys and values in the KV cache."""
        bindings = buffers.bindings(kv_type) | {"x": x, "norm": x if norm is None else norm}
        return self._rotate(config, kind, bindings, m, route, (f"kv_store_{kv_type}",))

    def rotate_texture(
        self, config: ModelConfig, kind: LayerKind, bindings: Mapping[str, Bindable], m: int
    ) -> Dispatch:
        return self._rotate(config, kind, bindings, m, routes.TEXTURE_ROTATE)

    def _rotate(
        self,
        config: ModelConfig,
        kind: LayerKind | None,
        bindings: Mapping[str, Bindable],
        m: int,
        route: Route[Attention],
        parts: tuple[str, ...] = (),
    ) -> Dispatch:
        row_norm = config.qk_norm is QkNorm.ROW
        consts = rotate_consts(config, kind) | {"ROW_NORM": row_norm} | self.tuning(route)
        shape = attention_shape(config, m, kind=kind)
        grid = self.grid(route, shape, m, {"ROW_NORM": int(row_norm)})
        return self._dispatch(route, (*self.parts(route), *parts), consts, bindings, grid, shape)

    def attend(
        self,
        shape: Attention,
        buffers: AttentionBuffers,
        mode: AttentionMode,
        table: Table[Attention] = routes.ATTEND,
        consts: Consts | None = None,
        parts: tuple[str, ...] = (),
    ) -> list[Dispatch]:
        """Attention of shape.m token rows. It leaves shape.splits partial results for attend_merge.

        `consts` and `parts` are additions of a fused kernel.
        """
        caps = self.gpu.caps
        route = routes.select(table, shape, caps)
        settings = head_consts(shape) | {"WINDOW": shape.window, "SCALE": shape.scale} | self.tuning(route)
        settings |= {"SOFT_CAP": shape.soft_cap} if shape.soft_cap else {}
        bindings: dict[str, Bindable] = {"x": buffers.q, "y": buffers.out}
        caches: dict[str, Bindable] = {"k_cache": buffers.keys, "v_cache": buffers.values}
        grid_consts: Consts = {}  # what the grid depends on
        before: list[Dispatch] = []
        if route.kernel == "attend_tile":
            grid_consts = {"OWNERS": routes.tile_owners(shape.head_dim)}
            settings |= {"TO_BLOCKS": mode.out.blocks, "ONE_SEGMENT": shape.segments == 1}
        if route.kernel in ("attend_split", "attend_int8", "attend_matrix"):
            assert buffers.stats is not None, f"{route.kernel} leaves statistics"
            bindings["stats"] = buffers.stats
        if route.kernel in ("attend_split", "attend_int8"):
            settings["TO_BLOCKS"] = mode.out.blocks
        if route.kernel == "attend_split":
            settings |= {"SUBGROUP": caps.subgroup, "SUBGROUPS_PER_HEAD": routes.subgroups_per_head(shape, caps)}
            grid_consts = {"HEAD_SHARES": routes.head_shares(shape)}
            settings |= routes.position_lanes(shape.head_dim, lane_run(mode.kv_type), caps, shape.m)
            settings |= {"PARTIAL": True} if shape.sinks else {}
            settings |= {"OWN_ROW": mode.own_row} if mode.kv_type is KvType.Q8_0 else {}
            if buffers.rotation is not None:
                bindings |= buffers.rotation
                settings["RAW"] = True
            if mode.kv_type is KvType.Q8_0 or mode.own_row:
                bindings["kv_rows"] = buffers.kv_rows or buffers.q  # bound even where it is not read
        blocks = written(mode.out)
        if route.kernel == "attend_matrix":
            settings |= {"SPLITS": shape.splits, "ONE_SEGMENT": shape.segments == 1}
            blocks = Inputs.F32 if shape.splits > 1 else mode.out
        if route.kernel == "attend_int8":
            assert buffers.int8_kv is not None, "attend_int8 reads what quantise_kv leaves"
            settings |= {"SPLITS": shape.splits, "ONE_SEGMENT": shape.segments == 1}
            before = [self._quantise_kv(shape, caches, buffers.int8_kv, mode)]
            caches = {"kv": buffers.int8_kv}
        files = self.parts(
            route,
            kv_type=mode.kv_type,
            sinks=shape.sinks,
            own_row=mode.own_row,
            step_rows=mode.step_rows,
            blocks=blocks,
            rotates=buffers.rotation is not None,
            half_scores=routes.half_scores(shape, caps),
        )
        if buffers.sinks is not None:
            bindings["sinks"] = buffers.sinks
        settings |= {**grid_consts, **(consts or {})}
        grid = self.grid(route, shape, shape.m, {name: int(settings[name]) for name in grid_consts})
        return [*before, self._dispatch(route, (*files, *parts), settings, bindings | caches, grid, shape)]

    def _quantise_kv(
        self, shape: Attention, caches: dict[str, Bindable], y: AnyBuffer, mode: AttentionMode
    ) -> Dispatch:
        route = routes.QUANTISE_KV
        consts: Consts = {"KV_HEADS": shape.kv_heads, "HEAD_DIM": shape.head_dim, "WINDOW": shape.window}
        files, grid = self.parts(route, kv_type=mode.kv_type), self.grid(route, shape, shape.m)
        return self._dispatch(route, files, consts, caches | {"y": y}, grid, shape)

    def store_kv(self, shape: Attention, rows: AnyBuffer, keys: AnyBuffer, values: AnyBuffer) -> Dispatch:
        """Keys and values of the rows of the step into a q8_0 cache."""
        route = routes.STORE_KV
        consts: Consts = {"KV_HEADS": shape.kv_heads, "HEAD_DIM": shape.head_dim}
        files, grid = self.parts(route, kv_type=KvType.Q8_0), self.grid(route, shape, shape.m)
        bindings = {"x": rows, "k_cache": keys, "v_cache": values}
        return self._dispatch(route, files, consts, bindings, grid, RowWise(2 * shape.kv_heads * shape.head_dim))

    def attend_merge(
        self,
        shape: Attention,
        partial_sums: AnyBuffer,
        stats: AnyBuffer,
        y: AnyBuffer,
        out: Inputs,
        sinks: Bindable | None = None,
    ) -> Dispatch:
        """The partial results of shape.splits splits, merged."""
        route = routes.MERGE
        consts: Consts = {"HEADS": shape.heads, "HEAD_DIM": shape.head_dim, "SPLITS": shape.splits}
        consts["TEAMS"] = routes.merge_teams(shape)
        bindings: dict[str, Bindable] = {"x": partial_sums, "stats": stats, "y": y}
        bindings |= {} if sinks is None else {"sinks": sinks}
        parts, grid = self.parts(route, sinks=sinks is not None, blocks=out), self.grid(route, shape, shape.m)
        return self._dispatch(route, parts, consts, bindings, grid, shape)

    def attend_textures(
        self, shape: Attention, q: Texture, cache: Texture, scores: Texture, y: Texture, consts: Consts | None = None
    ) -> list[Dispatch]:
        """Attention over a cache texture; one token takes two dispatches, with its scores in a texture between them.

        Where shape.m is shape.segments, each sequence has one row.
        """
        own = head_consts(shape) | {"WINDOW": shape.window} | (consts or {})

        def over(table: Table[Attention], x: Texture, out: Texture, more: Consts) -> Dispatch:
            route = routes.select(table, shape, self.gpu.caps)
            grid = partial(route.grid, shape, self.constants(route), self.gpu.caps)
            bindings = {"x": x, "cache": cache, "y": out}
            return self._dispatch(route, self.parts(route), own | more | self.tuning(route), bindings, grid, shape)

        scale: Consts = {"SCALE": shape.scale}
        if shape.m > 1:
            return [over(routes.TEXTURE_ATTEND, q, y, scale)]
        return [over(routes.TEXTURE_ATTEND, q, scores, scale), over(routes.TEXTURE_VALUES, scores, y, {})]

    # Embedding and sampling

    def embed(self, matrix: Matrix, y: Bindable, m: int, table: Table[Linear] = routes.EMBED) -> list[Dispatch]:
        """The rows of the embedding table for the tokens of the step."""
        dispatches = []
        for shard in matrix.shards:
            shape = shard.shape(m)
            route = routes.select(table, shape, self.gpu.caps)
            consts = shard.consts | self.tuning(route) | {"N": shard.n, "ROW0": shard.row0}
            parts = self.parts(route, shard.layout.storage)
            bindings = shard.bindings | {"y": y}
            dispatches.append(self._dispatch(route, parts, consts, bindings, self.grid(route, shape, m), shape))
        return dispatches

    def embeds_next(self, table: Matrix) -> bool:
        """Whether the sampling kernel can look up the next token's embedding."""
        shard = table.shards[0]
        return len(table.shards) == 1 and routes.select(routes.EMBED, shard.shape(1), self.gpu.caps) is routes.EMBED[0]

    def argmax(self, logits: Buffer, candidates: Buffer, vocab: int, segments: int = 1) -> Dispatch:
        """The largest of every CANDIDATE_ROWS logits, for each segment."""
        grid = (-(-argmax_candidates(vocab) // constants("argmax")["WORKGROUP"]), segments, 1)
        return self.gpu.dispatch("argmax", (), {"VOCAB": vocab}, {"logits": logits, "candidates": candidates}, grid)

    def sample(
        self,
        kernel: str,
        consts: Consts,
        bindings: Mapping[str, Bindable],
        table: Matrix | None,
        segments: int = 1,
    ) -> Dispatch:
        """`greedy` or `sample`: one workgroup samples the next token of each segment and writes the next step's row.

        The token's embedding goes to x where `table`, the embedding, is in one shard that the kernel can read.
        """
        grid = (segments, 1, 1)
        bound = self.shared | dict(bindings)
        parts = ("pages", "best_tokens") if kernel == "sample" else ("pages",)
        if table is None or not self.embeds_next(table):
            return self.gpu.dispatch(kernel, (*parts, "embed_next_none"), consts, bound, grid)
        shard = table.shards[0]
        parts = (*parts, *self.parts(routes.EMBED[0], shard.layout.storage), "embed_next")
        return self.gpu.dispatch(kernel, parts, consts | shard.consts, bound | shard.bindings, grid)

    def check_logits(self, consts: Consts, bindings: Mapping[str, Bindable], head: HeadBuffers) -> Dispatch:
        """Whether all logits are numbers, for each segment."""
        return self.gpu.dispatch(
            "check_logits", (), consts, {"step": self.step} | dict(bindings), (head.segments, 1, 1)
        )

    def mask_logits(self, consts: Consts, bindings: Mapping[str, Bindable], head: HeadBuffers) -> Dispatch:
        """The logits and candidates that the masks leave, for each segment."""
        count = int(consts["CANDIDATES"])
        grid = (-(-count // constants("mask_logits")["WORKGROUP"]), head.segments, 1)
        return self.gpu.dispatch("mask_logits", (), consts, {"step": self.step} | dict(bindings), grid)

    def top_logprobs(self, consts: Consts, bindings: Mapping[str, Bindable], head: HeadBuffers) -> Dispatch:
        """The largest log probabilities of each segment."""
        bound = {"step": self.step} | dict(bindings)
        return self.gpu.dispatch("top_logprobs", ("best_tokens",), consts, bound, (head.segments, 1, 1))

    def log_prob(self, logits: Buffer, targets: Buffer, out: Buffer, vocab: int) -> Dispatch:
        """The log probability of each row's target."""
        bindings = {"logits": logits, "targets": targets, "out": out}
        return self.gpu.dispatch("log_prob", (), {"VOCAB": vocab}, bindings, _one_by_row)


def fixed_grid(dispatch: Dispatch, rows: int) -> Dispatch:
    """The dispatch for `rows` rows, however many rows the step has."""
    return replace(dispatch, grid=dispatch.grid_for(rows, 0))


def argmax_candidates(vocab: int) -> int:
    """How many candidates `argmax` leaves."""
    return -(-vocab // constants("argmax")["CANDIDATE_ROWS"])


def _one_by_row(rows: int, position: int) -> Grid:
    return rows, 1, 1


def tagged(dispatches: list[Dispatch], op: str, layer: int | None) -> list[Dispatch]:
    """The dispatches, marked with their purpose and layer."""
    return [replace(dispatch, op=op, layer=layer) for dispatch in dispatches]
