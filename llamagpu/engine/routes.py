"""Which kernel runs which shape: the only file that compares m, n, k, group or head_dim with a number.

A table is read from the top. The first row that fits wins, and the last row fits every shape.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache, partial
from math import gcd
from typing import Any, Generic, TypeVar

from llamagpu.files.storage import Layout, Storage
from llamagpu.gpu.caps import Caps, Grid
from llamagpu.gpu.shaders import constants, read

Consts = Mapping[str, int]


class Inputs(StrEnum):
    """How a linear reads its activations."""

    F32 = "f32"
    INT8 = "int8"  # int8 blocks, as ggml's q8_1
    F16 = "f16"  # f16 blocks, for matrix units (parts/blocks_f16.wgsl)
    INTERLEAVED = "interleaved"  # f32, interleaved by 4 (parts/inputs_interleaved.wgsl)

    @property
    def blocks(self) -> bool:
        return self in (Inputs.INT8, Inputs.F16)


class Prologue(StrEnum):
    """What a linear's kernel computes on its inputs before the dot products."""

    NONE = "none"
    NORM = "norm"  # rms_norm
    SUM_NORM = "sum_norm"  # the residual stream after a norm, then rms_norm
    MERGE = "merge"  # merges the splits of attention
    MERGE_SINKS = "merge_sinks"  # the same with attention sinks, in a fused kernel
    BLOCKS = "blocks"  # copies int8 blocks into workgroup memory


class Epilogue(StrEnum):
    """What a linear's kernel does with its results; the value is the name of the kernel part."""

    STORE = "epilogue_store"
    ADD = "epilogue_add"
    SUM = "epilogue_sum"
    SUM_BLOCKS = "epilogue_sum_blocks"  # in a fused kernel
    SUM_EXPERTS = "epilogue_sum_experts"  # likewise, of experts with biases
    GLU = "epilogue_glu"
    GLU_BLOCKS = "epilogue_glu_blocks"
    GLU_EXPERTS = "epilogue_glu_experts"  # in a fused kernel, of experts with biases
    QKV = "epilogue_qkv"
    ROWS = "epilogue_rows"
    LOGITS = "epilogue_logits"
    PARTIAL = "epilogue_partial"  # of a split over K
    TEXTURE_ADD = "epilogue_texture_add"
    TEXTURE_STORE = "epilogue_texture_store"
    TEXTURE_TO_BUFFER = "epilogue_texture_to_buffer"
    TEXTURE_SWIGLU = "epilogue_texture_swiglu"
    TEXTURE_QKV = "epilogue_texture_qkv"

    @property
    def needs_workgroup(self) -> bool:
        """Whether it is a workgroup epilogue, which reads the results of a whole workgroup."""
        return self.to_blocks or self is Epilogue.LOGITS

    @property
    def to_blocks(self) -> bool:
        """Whether the results are blocks."""
        return self in (Epilogue.GLU_BLOCKS, Epilogue.SUM_BLOCKS)

    @property
    def adds_expert_biases(self) -> bool:
        return self in (Epilogue.GLU_EXPERTS, Epilogue.SUM_EXPERTS)


class Role(StrEnum):
    """What a kernel part is for. engine/ops.py chooses the file for each role."""

    WEIGHT = "weight"  # dequantises single weights
    BLOCK = "block"  # dot products of whole blocks, for CPU adapters
    PLANES = "planes"  # unpacks 32 weights into even and odd bytes
    HALVES = "halves"  # makes 32 weights f16
    MATRIX = "matrix"  # 16 x 16 matrices of smaller ones
    TILE = "tile"  # what linear_matrix multiplies
    STRIP = "strip"  # 16 rows of weights as f16, for a subgroup
    SUBGROUP_BARRIER = "subgroup_barrier"  # between stores and loads of a subgroup in workgroup memory
    DOT = "dot"  # inputs, prologue and the dot product of 32 weights
    REDUCE = "reduce"  # sums over lanes
    EPILOGUE = "epilogue"
    INT8_BLOCK = "int8_block"  # quantises 32 activations
    BLOCKS = "blocks"  # stores 32 activations as an int8 or f16 block
    RESIDUAL = "residual"  # the residual stream, with what is still to be added to it
    TEXTURE = "texture"  # weights in a texture
    BROADCAST = "broadcast"  # texels that all lanes need
    STAGE = "stage"  # inputs through workgroup memory, or not
    TURN = "turn"  # the rows that a workgroup takes in turn
    ROWS = "rows"  # which rows of the weights a stage multiplies
    KV4 = "kv4"  # the KV cache, 4 dimensions at a time
    KV8 = "kv8"  # the KV cache, 8 dimensions at a time
    KV_RUN = "kv_run"  # the KV cache, 16 bytes at a time
    KV_LAYOUT = "kv_layout"  # of a quantised KV cache
    SINKS = "sinks"  # with which score a softmax begins
    EXPERT_BIAS = "expert_bias"  # the bias of each expert
    SCORES = "scores"  # how scores of attention leave subgroup matrices
    PAGES = "pages"  # where positions are in the KV cache


@dataclass(frozen=True, slots=True)
class Linear:
    """y[m, n] = x[m, k] @ W[n, k]^T with W in groups of `group`."""

    m: int
    n: int
    k: int
    group: int
    storage: Storage
    inputs: Inputs = Inputs.F32
    prologue: Prologue = Prologue.NONE
    epilogue: Epilogue = Epilogue.STORE
    blocks: Inputs | None = None  # the kind that its epilogue writes
    f16_scales: bool = False  # each group has an f16 scale and no offset
    sub_scales: bool = False  # each group has an int8 sub-scale and no offset


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    """A linear for each expert that a token has chosen."""

    linear: Linear  # of one expert; m: tokens
    experts: int
    used: int  # by a token
    grouped: bool = False  # the choices are grouped by expert

    @property
    def tiles(self) -> int:
        """The most tiles that group_experts makes of the choices."""
        return expert_tiles(self.linear.m, self.used, self.experts)


@dataclass(frozen=True, slots=True)
class Attention:
    """y[m, heads, head_dim] = softmax(q K^T) V over a KV cache."""

    m: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0  # a token sees the last `window` positions, its own included; 0: all
    scale: float = 1.0
    splits: int = 1  # pieces of the context that are computed separately
    segments: int = 1  # sequences that the rows belong to
    bucket: int = 1  # context bucket, see CONTEXT_BUCKETS
    int8: bool = False  # many rows may multiply in int8
    half: bool = False  # many rows may multiply in f16, as which keys and values are stored
    half_scores: bool = False  # and round scores to f16
    soft_cap: float = 0.0  # scores s become c tanh(s / c)
    sinks: bool = False  # each head has one score more, without a value

    @property
    def heads_per_kv(self) -> int:
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class RowWise:
    """An operation on each row of `width` values."""

    width: int


S = TypeVar("S")


@dataclass(frozen=True, slots=True, eq=False)
class Route(Generic[S]):
    kernel: str  # kernels/*/<kernel>.wgsl
    fits: Callable[[S, Caps], bool]
    needs: str  # the same in words, for `devices --kernels`
    grid: Callable[[S, Consts, Caps, int, int], Grid]  # of shape, the kernel's constants, caps, rows, position
    parts: tuple[Role, ...] = ()
    consts: Consts = field(default_factory=dict)  # tuning; the file's own values otherwise
    one_vector: bool = False  # a workgroup has as many invocations as a CPU adapter's vector has lanes

    @property
    def has_workgroup_epilogue(self) -> bool:
        """The kernel calls workgroup_epilogue, which sees the rows of a whole workgroup."""
        return "workgroup_epilogue(" in read(self.kernel)


Table = tuple[Route[S], ...]


def fits_any(table: Table[S], shape: S, caps: Caps) -> bool:
    return any(route.fits(shape, caps) for route in table)


@cache  # all layers of a plan ask for the same: without it a plan takes 48 ms to build, not 36 (32 layers, two cores)
def _select(table: Table[Any], shape: object, caps: Caps) -> Route[Any]:
    rows = reversed(table) if caps.scalar else table
    return next(route for route in rows if route.fits(shape, caps))


def select(table: Table[S], shape: S, caps: Caps) -> Route[S]:
    return _select(table, shape, caps)


# Grids


def fold(count: int, caps: Caps) -> Grid:
    """Fold a 1-D count of workgroups into x and y, where it exceeds the limit of x. Kernels undo the folding."""
    x = min(count, caps.workgroups)
    return x, -(-count // x), 1


def vector_lanes(caps: Caps) -> int:
    """Lanes of a CPU adapter's vector.

    A workgroup of one vector leaves no lane idle and is the smallest unit of work, so that few workgroups are spread
    evenly over the threads.
    """
    return caps.subgroup if caps.subgroup in (4, 8, 16) else 8


def rows_per_workgroup(c: Consts) -> int:
    """Matrix rows of a workgroup in which LANES invocations share ROW_PAIRS pairs of rows."""
    return 2 * c.get("ROW_PAIRS", 1) * c["WORKGROUP"] // c["LANES"] // c.get("TOKEN_TEAMS", 1)


def row_pair_grid(s: Linear, c: Consts, caps: Caps, rows: int, position: int) -> Grid:
    return fold(-(-s.n // rows_per_workgroup(c)), caps)


def query_tile_grid(s: Attention, c: Consts, caps: Caps, rows: int, position: int) -> Grid:
    tokens = 2 * c["WORKGROUP"] // c["OWNERS"] // s.heads_per_kv
    return s.kv_heads, -(-rows // tokens), s.segments


def int8_tile_grid(s: Attention, c: Consts, caps: Caps, rows: int, position: int) -> Grid:
    return s.kv_heads, -(-rows // int8_tokens(s, c)) * s.splits, s.segments


def int8_tokens(s: Attention, c: Consts) -> int:
    """Tokens of a workgroup of attend_int8: it has a row for each in every query head of a KV head."""
    return c["WORKGROUP"] // 2 // s.heads_per_kv


def matrix_attention_grid(s: Attention, c: Consts, caps: Caps, rows: int, position: int) -> Grid:
    """The rows of a KV head are those of all its query heads."""
    return s.kv_heads, -(-rows * s.heads_per_kv // (c["WORKGROUP"] // 2)) * s.splits, s.segments


def row_blocks_grid(s: Linear, c: Consts, caps: Caps, rows: int, position: int) -> Grid:
    return fold(-(-s.n // (c["ROWS"] * c["WORKGROUP"])), caps)


def tile_grid(s: Linear, c: Consts, caps: Caps, rows: int, position: int) -> Grid:
    return -(-s.n // c["TILE_N"]), -(-rows // c["TILE_M"]), c.get("GRID_SPLIT", 1)


def matrix_tile_grid(s: Linear, c: Consts, caps: Caps, rows: int, position: int) -> Grid:
    x, y, z = tile_grid(s, c, caps, rows, position)
    return y, x, z


def skinny_grid(s: Linear, c: Consts, caps: Caps, rows: int, position: int) -> Grid:
    """As many workgroups as run at the same time. They take strips in turn: each begins with reading all of x."""
    splits = c.get("GRID_SPLIT", 1)
    units, running = s.n // c["EPILOGUE_ROWS"], CORES * (SKINNY_TEAMS // c["TEAMS"])
    return 1, min(units, max(1, running // splits)), splits


def pairs_by_token_grid(s: Linear, c: Consts, caps: Caps, rows: int, position: int) -> Grid:
    return -(-s.n // (2 * c["WORKGROUP"])), rows, 1


def texture_grid(s: Linear, c: Consts, caps: Caps, rows: int, position: int) -> Grid:
    return -(-s.n // (8 * c["WORKGROUP"])), -(-rows // 4), 1


def head_dims_grid(s: Attention, c: Consts, caps: Caps, rows: int, position: int) -> Grid:
    return -(-s.kv_heads * s.head_dim // (8 * c["WORKGROUP"])), 1, 1


def pairs_by_row_grid(s: Linear, c: Consts, caps: Caps, rows: int, position: int) -> Grid:
    x, y, _ = fold(-(-s.n // (2 * c["WORKGROUP"])), caps)
    return x, y, rows


def workgroup_per_pair_grid(s: Linear, c: Consts, caps: Caps, rows: int, position: int) -> Grid:
    x, y, _ = fold(-(-s.n // 2), caps)
    return x, y, rows


EXPERT_TOKENS = constants("linear_tile_experts")["TOKENS"]  # choices of a tile


def expert_tiles(m: int, used: int, experts: int) -> int:
    """The most tiles of the choices of m tokens: each expert may leave one that is not full."""
    return m * used // EXPERT_TOKENS + min(experts, m * used)


def choices_grid(s: ExpertLinear, c: Consts, caps: Caps, rows: int, position: int) -> Grid:
    x, y, _ = row_pair_grid(s.linear, c, caps, rows, position)
    return x, y, rows * s.used


def expert_tiles_grid(s: ExpertLinear, c: Consts, caps: Caps, rows: int, position: int) -> Grid:
    x, y, _ = row_pair_grid(s.linear, c, caps, rows, position)
    return x, y, expert_tiles(rows, s.used, s.experts)


def row_pairs_by_choice_grid(s: ExpertLinear, c: Consts, caps: Caps, rows: int, position: int) -> Grid:
    return pairs_by_row_grid(s.linear, c, caps, rows * s.used, position)


def row_grid(s: RowWise, c: Consts, caps: Caps, rows: int, position: int) -> Grid:
    return rows, 1, 1


def one_workgroup(s: RowWise, c: Consts, caps: Caps, rows: int, position: int) -> Grid:
    return 1, 1, 1


def value_grid(s: RowWise, c: Consts, caps: Caps, rows: int, position: int) -> Grid:
    return fold(-(-rows * s.width // c["WORKGROUP"]), caps)


def eighths_grid(s: RowWise, c: Consts, caps: Caps, rows: int, position: int) -> Grid:
    return fold(-(-rows * -(-s.width // 8) // c["WORKGROUP"]), caps)


def texels_grid(s: RowWise, c: Consts, caps: Caps, rows: int, position: int) -> Grid:
    return -(-s.width // (4 * c["WORKGROUP"])), rows, 1


def embed_grid(s: Linear, c: Consts, caps: Caps, rows: int, position: int) -> Grid:
    return -(-s.k // (8 * c["WORKGROUP"])), rows, 1


def embed_value_grid(s: Linear, c: Consts, caps: Caps, rows: int, position: int) -> Grid:
    return -(-s.k // c["WORKGROUP"]), rows, 1


# Linears: conditions


def word_aligned(s: Linear, weights: int) -> bool:
    """Whether a load of `weights` weights stays inside a row and a group; x is f32 without a prologue."""
    aligned = s.k % weights == 0 and (s.storage.two_bytes or s.group % weights == 0)
    return s.inputs is Inputs.F32 and no_prologue(s) and aligned


def block_aligned(s: Linear) -> bool:
    """Whether rows divide into blocks of 32 weights with one or two scales each."""
    groups = s.storage.two_bytes or s.group % 32 == 0 or s.group == 16
    return s.k % (64 if s.storage is Storage.Q6 else 32) == 0 and groups


def quantised_dot(s: Linear) -> bool:
    """Whether both sides of the dot products are bytes."""
    return s.inputs is Inputs.INT8 and not s.storage.two_bytes


def no_prologue(s: Linear) -> bool:
    return s.prologue is Prologue.NONE


def no_extras(s: Linear) -> bool:
    """No prologue, and no workgroup epilogue."""
    return no_prologue(s) and not s.epilogue.needs_workgroup


def is_gemv(s: Linear) -> bool:
    return s.m == 1 and block_aligned(s)


def with_prologue(s: Linear) -> bool:
    return is_gemv(s) and not no_prologue(s)


def fits_linear_rows(s: Linear) -> bool:
    """Whether an invocation can compute whole rows with 16-byte loads: groups (rows of floats) are long enough."""
    smallest = {Storage.Q4: 32, Storage.Q8: 16, Storage.F16: 8, Storage.BF16: 8}.get(s.storage)
    return smallest is not None and s.m == 1 and not s.epilogue.needs_workgroup and word_aligned(s, smallest)


# Lanes that share rows, pairs of rows that they share, invocations of a workgroup: the best of 5 to 36 settings per
# shape of Llama 1B and 8B and SmolLM2 on an H200 (2026-11-15). The choice moves a kernel by up to 2x.
GEMV_SHAPES: tuple[tuple[str, Callable[[Linear, Caps], bool], dict[str, int]], ...] = (
    (
        "logits",
        lambda s, c: is_gemv(s) and s.epilogue is Epilogue.LOGITS,
        {"WORKGROUP": 256, "LANES": 32, "ROW_PAIRS": 2},
    ),
    (
        "int8 results, k <= 1024",
        lambda s, c: is_gemv(s) and s.epilogue.needs_workgroup and s.k <= 1024 and c.invocations >= 1024,
        {"WORKGROUP": 1024, "LANES": 32, "ROW_PAIRS": 1},
    ),
    (
        "int8 results, k < 4096",
        lambda s, c: is_gemv(s) and s.epilogue.needs_workgroup and s.k < 4096 and c.invocations >= 512,
        {"WORKGROUP": 512, "LANES": 32, "ROW_PAIRS": 2},
    ),
    (
        "int8 results",
        lambda s, c: is_gemv(s) and s.epilogue.needs_workgroup,
        {"WORKGROUP": 256, "LANES": 32, "ROW_PAIRS": 4},
    ),
    (
        "prologue, k < 3072",
        lambda s, c: with_prologue(s) and s.k < 3072 and c.invocations >= 512,
        {"WORKGROUP": 512, "LANES": 32},
    ),
    ("prologue", lambda s, c: with_prologue(s) and c.invocations >= 512, {"WORKGROUP": 512, "LANES": 64}),
    ("prologue, small workgroups", lambda s, c: with_prologue(s), {"WORKGROUP": 256, "LANES": 32}),
    ("k <= 2048", lambda s, c: is_gemv(s) and s.k <= 2048, {"WORKGROUP": 256, "LANES": 64}),
    ("k > 2048", lambda s, c: is_gemv(s), {"WORKGROUP": 256, "LANES": 128}),
)

GEMV_WIDTHS = (2, 4, 8, 16)  # most token rows of the GEMV kernels
FUSED_PREFETCH = {2: 4, 4: 2, 8: 2, 16: 1}  # prefetch depth by the token rows of a fused kernel
# A step fused with blocks between stages and unfused on an H200 (2026-11-17), us: 1B 4 rows 542 and 692, 8 rows 650 and
# 773, 16 rows 860 and 987; 3B 1083 and 1490, 1373 and 1813, 2286 and 2500; 8B 1917 and 2347, 2456 and 2959, 4347 and
# 4659; Qwen 3 0.6B 677 and 955, 798 and 1091, 1017 and 1361. With norms in prologues 1B 2 rows 478, 4 rows 566, 8 rows
# 948; 8B 2 rows 1800, 4 rows 2959. Q4_K_M 1B 587 and 759, 901 and 872, 1276 and 1143; 8B 2312 and 2573, 3568 and 3386.
NORM_STAGE_ROWS = 4  # from so many rows on inputs of linears are blocks in global memory, and attention is not split
TINT_PROLOGUE_DIM = 2048  # and with Dawn from two rows on, if they are wider
SUM_BLOCK_ROWS = 8  # most token rows of which sums leave blocks, see sums_leave_blocks
GLU_UNIT, SUM_UNIT = 64, 32  # rows of a linear that epilogue_glu_blocks and epilogue_sum_blocks make a block of
MAX_FUSED_DIM = 4096  # of a fused step of several rows
FUSED_BYTES = 8192  # of workgroup memory that pieces of inputs leave to other things
SPARE_BYTES = 1024  # with all but 400 bytes taken a kernel did not return (H200)
FUSED_ROWS, TINT_ROWS = 16, 8  # most rows of a fused step; with Dawn matrix units are faster from 9 rows on
HALF_SUM_ROWS = 4  # most rows of a fused step with groups of 16, as of Q6_K
GEMM_WIDTHS = (32, 64, 128, 256, 512)  # most token rows of plans with tiles of their own

# Likewise, and from how many token rows to how many. Two pairs of rows share what is read of x; one pair leaves more
# lanes to a small matrix, and registers to 16 tokens. Unpacked f16 weights and f32 inputs leave none for two pairs.
SMALL_MATRIX = 8 << 20  # weights
VOCABULARY = 32768  # rows of a matrix that gives every core enough of them
LONG_ROWS = 4096  # k of a large matrix, from which on a split always costs less than small tiles; or n: not a small one
CORES = 132  # of an H200
STAGED = {"STAGED": 1, "PREFETCH": 1}


def can_stage(s: Linear, c: Caps) -> bool:
    return quantised_dot(s) and c.shared_bytes >= 32768


def large_matrix(s: Linear) -> bool:
    return no_extras(s) and quantised_dot(s) and s.n * s.k > SMALL_MATRIX


def more_rows_than_k(s: Linear) -> bool:
    """As qkv of 8B: on an H200 (2026-11-17) 8.8 us instead of 10.0 for 4 tokens, 11.7 instead of 13.2 for 8."""
    return s.n > s.k >= LONG_ROWS


GEMV_BATCH_SHAPES: tuple[tuple[str, tuple[int, ...], Callable[[Linear, Caps], bool], dict[str, int]], ...] = (
    (
        "int8 results, x staged",
        (16,),
        lambda s, c: s.epilogue.to_blocks and can_stage(s, c),
        {"WORKGROUP": 256, "LANES": 8, "ROW_PAIRS": 1} | STAGED,
    ),
    (  # more than two workgroups of 64 rows a core: gate_up of 8B 26.8 us instead of 28.6 (4 tokens), 36.2 and 37.1 (8)
        f"int8 results, n > {128 * CORES}, x staged",
        (4, 8),
        lambda s, c: s.epilogue.to_blocks and can_stage(s, c) and s.n > 128 * CORES,
        {"WORKGROUP": 128, "LANES": 8, "ROW_PAIRS": 2} | STAGED,
    ),
    (
        "int8 results, x staged",
        (4, 8),
        lambda s, c: s.epilogue.to_blocks and can_stage(s, c),
        {"WORKGROUP": 256, "LANES": 16, "ROW_PAIRS": 2} | STAGED,
    ),
    (
        "int8 results",
        (2, 4, 8),
        lambda s, c: s.epilogue.to_blocks and c.invocations >= 512,
        {"WORKGROUP": 512, "LANES": 32, "ROW_PAIRS": 2},
    ),
    (
        "vocabulary, x staged",
        (16,),
        lambda s, c: no_extras(s) and s.n >= VOCABULARY and can_stage(s, c),
        {"WORKGROUP": 256, "LANES": 8, "ROW_PAIRS": 1} | STAGED,
    ),
    (
        "vocabulary, x staged",
        (8,),
        lambda s, c: no_extras(s) and s.n >= VOCABULARY and can_stage(s, c),
        {"WORKGROUP": 128, "LANES": 8, "ROW_PAIRS": 2} | STAGED,
    ),
    (
        "few rows or more than k, large matrix",
        (8,),
        lambda s, c: large_matrix(s) and (s.n < 4096 or more_rows_than_k(s)),
        {"WORKGROUP": 256, "LANES": 128, "ROW_PAIRS": 2, "PREFETCH": 1},
    ),
    (
        "more rows than k, large matrix, x staged",
        (4,),
        lambda s, c: large_matrix(s) and more_rows_than_k(s) and s.n < VOCABULARY and can_stage(s, c),
        {"WORKGROUP": 128, "LANES": 32, "ROW_PAIRS": 2} | STAGED,
    ),
    (
        "many rows, large matrix",
        (8,),
        lambda s, c: large_matrix(s),
        {"WORKGROUP": 256, "LANES": 64, "ROW_PAIRS": 2, "PREFETCH": 1},
    ),
    (
        "few rows, large matrix",
        (16,),
        lambda s, c: large_matrix(s) and s.n < 4096,
        {"WORKGROUP": 256, "LANES": 64, "ROW_PAIRS": 2, "PREFETCH": 1, "TOKEN_TEAMS": 2},
    ),
    (
        "long rows, large matrix",
        (16,),
        lambda s, c: large_matrix(s) and s.n <= s.k,
        {"WORKGROUP": 256, "LANES": 32, "ROW_PAIRS": 2, "PREFETCH": 1, "TOKEN_TEAMS": 2},
    ),
    (
        "many rows, large matrix",
        (16,),
        lambda s, c: large_matrix(s) and s.n * s.k <= 4 * SMALL_MATRIX,
        {"WORKGROUP": 256, "LANES": 128, "ROW_PAIRS": 2, "PREFETCH": 1},
    ),
    (
        "each result by itself",
        (2, 4, 8, 16),
        lambda s, c: no_extras(s) and (s.m <= 8 or s.n * s.k <= 4 * SMALL_MATRIX or not quantised_dot(s)),
        {"WORKGROUP": 256, "LANES": 64, "ROW_PAIRS": 1},
    ),
)


def tile_count(s: Linear, tile_m: int, tile_n: int) -> int:
    return -(-s.m // tile_m) * -(-s.n // tile_n)


# Tiles of linear_gemm_int8: token rows x 64 matrix rows, and the workgroups that share one by splitting k. Where tiles
# are few, the splits give the 132 cores of a large GPU three or more workgroups each. Measured on an H200 with the
# matrices of Llama 1B and 8B and m = 16 to 512 (2026-11-16): the wrong choice costs up to 3x.
GEMM_TILE_ROWS = (16, 32, 64)
GEMM_TILE_N = constants("linear_gemm_int8")["TILE_N"]
GRID_SPLITS = (1, 2, 4, 8)
SPLIT_K = 256  # fewest k of a split, but for what is left over


def tile_rows(s: Linear) -> int:
    """Token rows of a tile. Workgroups that split k read small pieces of many matrix rows at a time: of rows of 4096
    bytes q4 that takes three times as long with tiles of 64 token rows, which take the smallest pieces, as with 32."""
    if 32 < s.m <= 64 and s.k % 8192 == 0:
        return 32
    if 128 < s.m <= 256 and tile_count(s, 64, 64) < 256:  # twice as many tiles are better than splits
        return 32
    return next((rows for rows in GEMM_TILE_ROWS if s.m <= rows), GEMM_TILE_ROWS[-1])


def grid_splits(s: Linear) -> int:
    """Workgroups that share a tile, each at least 256 k of it. More than 128 tokens have tiles enough."""
    if s.m > 128:
        return 1
    tiles = tile_count(s, tile_rows(s), GEMM_TILE_N)
    wanted = next((splits for splits in GRID_SPLITS if tiles * splits >= 384), GRID_SPLITS[-1])
    return max(splits for splits in GRID_SPLITS if splits <= wanted and (splits == 1 or SPLIT_K * splits <= s.k))


def int8_tile_fits(s: Linear, rows: int, splits: int) -> bool:
    if tile_rows(s) != rows:
        return False
    return splits == (1 if s.n % 2 or not no_extras(s) else grid_splits(s))


# Tiles of linear_matrix, on subgroup matrices: token rows, matrix rows, strips of 16 tokens of a subgroup, teams.
# Measured on an H200 (2026-11-16) with the matrices of Llama 1B and 8B: the wrong choice costs up to 2x. Up to 64 token
# rows the int8 tiles of a small matrix are faster (a step of 32 rows of 1B: 1933 us on matrices alone, 1504 with both).
# Such a step of 1B, 3B and 8B took 1331, 3585 and 5548 us with these (2026-11-18); with one team of 32 x 128, also for
# n = 16384, whose 128 tiles are fewer than cores, 1410, 3784 and 5630. With 16 rows 16 x 32 is faster than 16 x 64
# (gate_up of 8B: 54 us, 58), but makes half a block at a time, and int8 blocks must be whole.
MATRIX_ROWS = 9  # fewest token rows of linear_matrix and linear_skinny
MatrixTile = tuple[int, int, int, int]
MATRIX_TILES: tuple[MatrixTile, ...] = (
    *((16, 32, 1, 2), (16, 64, 1, 2), (32, 128, 2, 2), (32, 64, 2, 2)),
    *((64, 64, 4, 2), (128, 128, 4, 1), (128, 64, 4, 2)),
)
SIDE_BY_SIDE = 7  # workgroups of the smallest tile, of 6912 bytes each, on a core of an H200, which has 48 KiB for them
SMALL_TILE_SPLITS = (*GRID_SPLITS[:-1], 7, GRID_SPLITS[-1])


def matrix_consts(tile: MatrixTile, inputs: Inputs) -> dict[str, int]:
    rows, columns, down, teams = tile
    epilogue_rows = min(columns, 64)
    workgroup = 32 * teams * (rows // (16 * down)) * (columns // epilogue_rows)
    consts = {"TILE_M": rows, "TILE_N": columns, "DOWN": down, "TEAMS": teams, "WORKGROUP": workgroup}
    consts |= {"EPILOGUE_ROWS": epilogue_rows} if epilogue_rows < 64 else {}
    return consts | ({"TILE_K": 32, "TERMS": 3} if inputs is Inputs.F32 else {})


def matrix_tile_bytes(c: Consts) -> int:
    """Workgroup memory of a tile of linear_matrix: inputs, and weights or the strips of its subgroups."""
    own = constants("linear_matrix") | dict(c)
    pitch, planes = own["TILE_K"] // 8 + 1, 2 if own["TERMS"] == 3 else 1
    strips = c["WORKGROUP"] // 32 * 16 * (own["EPILOGUE_ROWS"] // 4 + 1)
    return 16 * (planes * pitch * c["TILE_M"] + max(planes * pitch * c["TILE_N"], strips))


MATRIX_BYTES = {  # 64 rows fit in 32 KiB
    inputs: max(matrix_tile_bytes(matrix_consts(tile, inputs)) for tile in MATRIX_TILES)
    for inputs in (Inputs.F16, Inputs.F32)
}


def matrix_tile(s: Linear, c: Caps) -> MatrixTile:
    """Small tiles where large ones are fewer than cores, unless long rows can be split; or where 32 KiB must do."""
    if s.m <= MATRIX_TILES[0][0]:
        return MATRIX_TILES[1] if s.epilogue.to_blocks and s.blocks is not Inputs.F16 else MATRIX_TILES[0]
    if s.m <= 32:
        return MATRIX_TILES[2] if s.n > 16384 else MATRIX_TILES[3]
    if s.m <= 64 or c.shared_bytes < MATRIX_BYTES[s.inputs]:
        return MATRIX_TILES[4]
    enough = tile_count(s, 128, 128) >= 96 or s.k >= LONG_ROWS
    return MATRIX_TILES[5] if enough else MATRIX_TILES[6]


def matrix_splits(s: Linear, c: Caps) -> int:
    """Workgroups that share a tile: 128 large ones, 256 small ones; of the smallest as many as run side by side
    (ffn_down of 8B with 16 token rows: 39 us with 512 of them, 29 with 896, 42 with 1024).

    A matrix with smaller k is split where its tiles leave half of the cores idle: with 128 rows (2026-11-19, Dawn) qkv
    and attn_output of 1B take 410 and 224 us instead of 554 and 532 in 16 layers. With 96 tiles splits lose (qkv with
    512 rows: 992 us instead of 812), with f32 inputs they were not tried. A split takes whole rounds of k, so that some
    may be empty.
    """
    rows, columns, *_ = tile = matrix_tile(s, c)
    tiles = tile_count(s, rows, columns)
    few = s.inputs is Inputs.F16 and s.m > 64 and tiles < CORES // 2
    if s.n % 2 or not no_extras(s) or not (few or s.k >= LONG_ROWS):
        return 1
    if tile == MATRIX_TILES[0]:
        return max((splits for splits in SMALL_TILE_SPLITS if tiles * splits <= SIDE_BY_SIDE * CORES), default=1)
    possible = [n for n in GRID_SPLITS if n == 1 or SPLIT_K * n <= s.k]
    splits = next((n for n in possible if tiles * n >= (128 if rows == 128 else 256)), possible[-1])
    if rows == 128 and CORES < tiles < 3 * CORES // 2:  # a second round with few
        splits = 2
    if s.inputs is Inputs.F32 and s.n <= s.k:  # what matrix units cut off a sum grows with k
        splits = max(splits, next((n for n in GRID_SPLITS if n * LONG_ROWS >= s.k), GRID_SPLITS[-1]))
    return splits


def matrix_workgroups(s: Linear, c: Caps) -> int:
    rows, columns, *_ = matrix_tile(s, c)
    return tile_count(s, rows, columns) * matrix_splits(s, c)


# A workgroup of linear_skinny has a subgroup for each SLICE k, or shares k with others. A core of an H200 has registers
# for 16 subgroups. us with 16 rows by linear_skinny / GEMV / linear_matrix, with the sums of splits (2026-11-18):
#     qkv                 attn_output         gate_up             ffn_down
# 8B  14.5 / 16.1 / 17.2  11.9 / 12.4 / 14.5  44.5 / 66.2 / 52.7  25.3 / 35.0 / 31.6
# 3B  11.7 / 13.7 / 26.8   9.6 / 12.0 / 27.2  22.4 / 27.7 / 29.4  15.7 / 18.9 / 17.3
# 1B   8.7 /  6.6 / 18.6   5.7 /  5.5 / 11.9  15.7 / 19.8 / 20.5  13.3 / 12.4 / 14.7
# ffn_down of 1B is taken for gate_up, whose f16 blocks it reads. Where gate_up has to write int8 blocks, it is a little
# slower than before.
SKINNY_TEAMS = 16
SKINNY = constants("linear_skinny")
SKINNY_SLICE = SKINNY["SLICE"]
SKINNY_SHAPES = (*((teams, 1) for teams in (4, 6, 8, 10, 12, 14, 16)), *((8, splits) for splits in range(3, 9)))


def skinny_shape(s: Linear) -> tuple[int, int]:
    """Teams and splits of linear_skinny for this k; (0, 0) if there are none.

    A vocabulary is not split: it fills a GPU, and the memory plan counts no splits of logits.
    """
    slices, rest = divmod(s.k, SKINNY_SLICE)
    shapes = [(slices, 1)] + [(8, slices // 8)] * (s.n < VOCABULARY)
    fits = (shape for shape in shapes if rest == 0 and shape[0] * shape[1] == slices and shape in SKINNY_SHAPES)
    return next(fits, (0, 0))


def has_room_for_skinny(teams: int, c: Caps) -> bool:
    """Whether the adapter can run so many subgroups of linear_skinny."""
    room = 8 * teams * 16 * SKINNY["PITCH"] + 4 * 32 * SKINNY["TOKENS"]  # bytes of `tile` and `hidden`
    return c.matrices and c.matrix == "16x16" and c.shared_bytes >= room and c.invocations >= 32 * teams


def skinny_is_faster(c: Caps) -> bool:
    """With barriers of the workgroup it is not: 16 rows of 8B take 4351 us on an H200, by other kernels 4090."""
    return c.measured_barrier


def has_strips(s: Linear) -> bool:
    """Whether linear_skinny takes such weights: Q4_0, and Q6_K as large as a vocabulary, as the output head of a Q4_0
    model is.

    Layers in Q6_K would be split over k, and gate_up would have to write what ffn_down then reads: not measured. So
    BufferModel.inputs asks with sub-scales only for the output head.
    """
    if s.storage is Storage.Q6:
        return s.sub_scales and s.group == 16 and s.n >= VOCABULARY
    return s.storage is Storage.Q4 and s.f16_scales and s.group == 32


def can_be_skinny(s: Linear, c: Caps) -> bool:
    """Whether linear_skinny can run, but for the epilogue, and is faster than others for a layer of such matrices."""
    teams, _ = skinny_shape(s)
    large = s.n * s.k >= 2 * SMALL_MATRIX or (s.n * s.k > SMALL_MATRIX and s.k > 2048)
    return (
        has_strips(s)
        and s.n % 16 == 0
        and teams > 0
        and large
        and MATRIX_ROWS <= s.m <= SKINNY["TOKENS"]
        and has_room_for_skinny(teams, c)
        and skinny_is_faster(c)
    )


def is_skinny(s: Linear, c: Caps) -> bool:
    """Whether linear_skinny runs. A gated unit makes halves of f16 blocks."""
    if s.inputs is not Inputs.F16 or not tiles_of_blocks(s, c) or not can_be_skinny(s, c):
        return False
    whole = s.epilogue.to_blocks and s.blocks is Inputs.F16 and s.n % 64 == 0 and skinny_shape(s)[1] == 1
    return no_extras(s) or whole


def on_matrices(s: Linear, c: Caps) -> bool:
    if s.storage is Storage.BF16 or not c.matrices or not tiles_of_blocks(s, c):  # BF16 may be beyond f16
        return False
    if s.inputs is Inputs.F32:
        return s.m > 64 and no_extras(s) and matrix_workgroups(s, c) >= CORES // 2
    if s.m <= GEMV_WIDTHS[-1]:
        # us with 16 rows here and by GEMV: gate_up of 8B 54 and 67, of 1B 22.4 and 21.2; ffn_down of 8B 29 and 34, of
        # 3B 14.8 and 19.1, of 1B 13 and 12.4; with tiles of 16 x 64 the Q6 output of 8B 327 and 299
        large = s.n * s.k > (2 if s.n < s.k else 4) * SMALL_MATRIX and s.storage is not Storage.Q6
        large = large or can_be_skinny(s, c)
    else:
        large = max(s.n, s.k) >= LONG_ROWS
    return s.inputs is Inputs.F16 and (s.m > 64 or (s.m >= MATRIX_ROWS and large))


def block_scale(layout: Layout) -> str:
    """The part by which linear_matrix loads scales of quantised weights: those of eight blocks of 32 at once, that of a
    super-block of five words once, or all of them with each block."""
    if layout.f16_scales and layout.group == 32 and layout.k % 256 == 0:
        return "block_scale_eight"
    return "block_scale_super" if layout.scale_bits == 8 and layout.super_block_bytes == 5 * 4 else "block_scale_one"


def block_inputs(shards: Iterable[Linear], c: Caps) -> Inputs:
    """The blocks that a linear reads: f16 on matrix units, which is closer to f32, else int8."""
    halves = (replace(shard, inputs=Inputs.F16) for shard in shards)
    return Inputs.F16 if all(on_matrices(shard, c) for shard in halves) else Inputs.INT8


# Tiles of linear_gemm: token rows, matrix rows, k of a split-K team. As above, a smaller one is more work: on an H200
# (2026-11-16) 38, 33, 18 and 13 TFLOP/s where they run, the next larger one 31, 12 and 7 there.
F32_TILE_BYTES = 24576  # of workgroup memory, but for the tiles of 64 x 64
F32_TILES: tuple[tuple[str, Callable[[Linear, Caps], bool], dict[str, int]], ...] = (
    (
        "256 tiles of 128 x 64",
        lambda s, c: tile_count(s, 128, 64) >= 256 and s.m > 64 and c.shared_bytes >= F32_TILE_BYTES,
        {"TILE_M": 128, "TILE_N": 64, "TILE_K": 32, "WORKGROUP": 128, "SIDE": 8},
    ),
    (
        "192 tiles of 64 x 64, or less than 24 KiB of workgroup memory",
        lambda s, c: (tile_count(s, 64, 64) >= 192 and s.m > 32) or c.shared_bytes < F32_TILE_BYTES,
        {"TILE_M": 64, "TILE_N": 64, "TILE_K": 16, "WORKGROUP": 128, "SIDE": 8},
    ),
    (
        "128 tiles of 32 x 32",
        lambda s, c: tile_count(s, 32, 32) >= 128 and c.shared_bytes >= F32_TILE_BYTES,
        {"TILE_M": 32, "TILE_N": 32, "TILE_K": 16, "WORKGROUP": 256, "SIDE": 4},
    ),
    (
        "fewer",
        lambda s, c: c.shared_bytes >= F32_TILE_BYTES,
        {"TILE_M": 32, "TILE_N": 16, "TILE_K": 16, "WORKGROUP": 256, "SIDE": 4},
    ),
)


def tiles_of_blocks(s: Linear, c: Caps) -> bool:
    shape = block_aligned(s) and s.k % 64 == 0 and s.epilogue is not Epilogue.LOGITS and no_prologue(s)
    return shape and c.shared_bytes >= 32768


WEIGHT_PARTS = (Role.WEIGHT, Role.EPILOGUE)
DOT_PARTS = (Role.DOT, Role.EPILOGUE, Role.REDUCE)


def _gemv_batch_route(width: int, case: str, fits: Callable[[Linear, Caps], bool], consts: Consts) -> Route[Linear]:
    needs = f"m <= {width}, k % 32 = 0, group % 32 = 0 or 16, {case}"

    def batch_fits(s: Linear, c: Caps) -> bool:
        return 1 < s.m <= width and no_prologue(s) and block_aligned(s) and fits(s, c)

    consts = {"TOKENS": width} | dict(consts)
    return Route("linear_gemv_batch", batch_fits, needs, row_pair_grid, (*DOT_PARTS, Role.STAGE), consts)


def _gemm_int8_route(rows: int, splits: int, to_blocks: bool) -> Route[Linear]:
    needs = f"int8 x, k % 64 = 0, group % 32 = 0 or 16, tiles of {rows} x {GEMM_TILE_N}"
    needs += ", int8 results" if to_blocks else f", k split {splits} times" if splits > 1 else ""
    consts = {"TILE_M": rows, "TILE_N": GEMM_TILE_N, "WORKGROUP": 128}
    consts |= {"TOKENS": rows} if to_blocks else {"GRID_SPLIT": splits} if splits > 1 else {}

    def fits(s: Linear, c: Caps) -> bool:
        int8 = s.inputs is Inputs.INT8 and tiles_of_blocks(s, c)
        return int8 and to_blocks != no_extras(s) and int8_tile_fits(s, rows, splits)

    return Route("linear_gemm_int8", fits, needs, tile_grid, (Role.PLANES, Role.EPILOGUE), consts)


def _matrix_route(inputs: Inputs, tile: MatrixTile, splits: int) -> Route[Linear]:
    rows, columns, *_ = tile
    least = "m > 64" if inputs is Inputs.F32 else f"m >= {MATRIX_ROWS} (a small matrix: more)"
    needs = f"{inputs} x, k % 64 = 0, group % 32 = 0 or 16, {least}, matrix units, tiles of {rows} x {columns}"
    needs += f", k split {splits} times" if splits > 1 else ", int8 results" if tile == MATRIX_TILES[1] else ""
    consts = matrix_consts(tile, inputs) | {"EPILOGUE_LANES": 32, "TOKENS": 16}
    consts |= {"GRID_SPLIT": splits} if splits > 1 else {}
    weights = Role.WEIGHT if inputs is Inputs.F32 else Role.HALVES

    def fits(s: Linear, c: Caps) -> bool:
        chosen = s.inputs is inputs and on_matrices(s, c)
        return chosen and matrix_tile(s, c) == tile and matrix_splits(s, c) == splits

    parts = (Role.MATRIX, weights, Role.TILE, Role.EPILOGUE)
    return Route("linear_matrix", fits, needs, matrix_tile_grid, parts, consts)


def _skinny_route(teams: int, splits: int, to_blocks: bool) -> Route[Linear]:
    k = SKINNY_SLICE * teams * splits
    weights = "Q4_0" if to_blocks or splits > 1 else f"Q4_0 or (n >= {VOCABULARY}) Q6_K"
    needs = f"f16 x, {MATRIX_ROWS} <= m <= {SKINNY['TOKENS']}, {weights}, k = {k}, matrix units"
    needs += ", f16 results" if to_blocks else f", k split {splits} times" if splits > 1 else ""
    consts = {"TEAMS": teams, "WORKGROUP": 32 * teams, "TOKENS": SKINNY["TOKENS"]}
    consts |= {"EPILOGUE_ROWS": 32} if to_blocks else {"GRID_SPLIT": splits} if splits > 1 else {}

    def fits(s: Linear, c: Caps) -> bool:
        return is_skinny(s, c) and skinny_shape(s) == (teams, splits) and s.epilogue.to_blocks == to_blocks

    parts = (Role.STRIP, Role.SUBGROUP_BARRIER, Role.EPILOGUE)
    return Route("linear_skinny", fits, needs, skinny_grid, parts, consts)


def _gemm_route(case: str, fits: Callable[[Linear, Caps], bool], consts: Consts) -> Route[Linear]:
    def tile_fits(s: Linear, c: Caps) -> bool:
        return word_aligned(s, 8) and no_extras(s) and fits(s, c)

    return Route("linear_gemm", tile_fits, f"k and group % 8 = 0, {case}", tile_grid, WEIGHT_PARTS, consts)


LINEAR: Table[Linear] = (
    Route(
        "linear_rows",
        lambda s, c: c.cpu and fits_linear_rows(s),
        "CPU adapter, m = 1, k and group % 32 = 0 (q8: 16, f16: k % 8)",
        row_blocks_grid,
        (Role.BLOCK, Role.EPILOGUE),
    ),
    # f32 inputs: lanes that take 8 weights read x side by side, lanes that take 32 do not (14 % of a token on an H200)
    Route(
        "linear_gemv_word",
        lambda s, c: is_gemv(s) and s.storage is Storage.Q4 and not s.epilogue.needs_workgroup and word_aligned(s, 8),
        "m = 1, q4, f32 x, k % 32 = 0, group % 32 = 0 or 16",
        row_pair_grid,
        (*WEIGHT_PARTS, Role.REDUCE),
    ),
    *(
        Route(
            "linear_gemv",
            fits,
            f"m = 1, k % 32 = 0, group % 32 = 0 or 16, {case}",
            row_pair_grid,
            DOT_PARTS,
            consts,
        )
        for case, fits, consts in GEMV_SHAPES
    ),
    Route(
        "linear_gemv_word",
        lambda s, c: s.m == 1 and word_aligned(s, 8) and no_extras(s),
        "m = 1, k and group % 8 = 0",
        row_pair_grid,
        (*WEIGHT_PARTS, Role.REDUCE),
    ),
    *(_skinny_route(teams, splits, to_blocks=False) for teams, splits in SKINNY_SHAPES),
    *(_skinny_route(teams, splits, to_blocks=True) for teams, splits in SKINNY_SHAPES if splits == 1),
    *(
        _matrix_route(inputs, tile, splits)
        for inputs in (Inputs.F16, Inputs.F32)
        for tile in MATRIX_TILES
        for splits in (SMALL_TILE_SPLITS if tile == MATRIX_TILES[0] else GRID_SPLITS)
        if (inputs is Inputs.F16 or tile[0] >= 64) and (splits == 1 or tile != MATRIX_TILES[1])
    ),
    *(
        _gemv_batch_route(width, case, fits, consts)
        for width in GEMV_WIDTHS
        for case, widths, fits, consts in GEMV_BATCH_SHAPES
        if width in widths
    ),
    *(_gemm_int8_route(rows, 1, to_blocks=True) for rows in GEMM_TILE_ROWS),
    *(_gemm_int8_route(rows, splits, to_blocks=False) for rows in GEMM_TILE_ROWS for splits in GRID_SPLITS),
    *(_gemm_route(*tile) for tile in F32_TILES),
    Route("linear_any", lambda s, c: s.inputs is Inputs.F32 and no_extras(s), "-", pairs_by_row_grid, WEIGHT_PARTS),
)

# Experts: each choice of a token is a linear of its own. From so many tokens on they are grouped by expert.
GROUPED_EXPERTS = 9
EXPERT_GEMV_SHAPES: tuple[tuple[str, Callable[[Linear, Caps], bool], dict[str, int]], ...] = (
    (
        "int8 results",
        lambda s, c: s.epilogue.needs_workgroup and c.invocations >= 512,
        {"WORKGROUP": 512, "LANES": 32, "ROW_PAIRS": 2},
    ),
    (
        "int8 results, small workgroups",
        lambda s, c: s.epilogue.needs_workgroup,
        {"WORKGROUP": 256, "LANES": 32, "ROW_PAIRS": 4},
    ),
    ("k <= 1024", lambda s, c: no_extras(s) and s.k <= 1024, {"WORKGROUP": 256, "LANES": 32}),
    ("k > 1024", lambda s, c: no_extras(s), {"WORKGROUP": 256, "LANES": 64}),
)


EXPERT_PARTS = (*DOT_PARTS, Role.EXPERT_BIAS)


def _expert_gemv_route(case: str, fits: Callable[[Linear, Caps], bool], consts: Consts) -> Route[ExpertLinear]:
    needs = f"k % 32 = 0, group % 32 = 0 or 16, {case}"

    def gemv_fits(s: ExpertLinear, c: Caps) -> bool:
        return block_aligned(s.linear) and fits(s.linear, c)

    return Route("linear_gemv_experts", gemv_fits, needs, choices_grid, EXPERT_PARTS, consts)


EXPERT_LINEAR: Table[ExpertLinear] = (
    Route(
        "linear_tile_experts",
        lambda s, c: s.grouped and block_aligned(s.linear) and no_extras(s.linear),
        f"m >= {GROUPED_EXPERTS}, k % 32 = 0, group % 32 = 0 or 16",
        expert_tiles_grid,
        EXPERT_PARTS,
        {"WORKGROUP": 256, "LANES": 32, "TOKENS": EXPERT_TOKENS},
    ),
    *(_expert_gemv_route(*shape) for shape in EXPERT_GEMV_SHAPES),
    Route(
        "linear_any_experts",
        lambda s, c: s.linear.inputs is Inputs.F32 and no_extras(s.linear),
        "-",
        row_pairs_by_choice_grid,
        (*WEIGHT_PARTS, Role.EXPERT_BIAS),
    ),
)

TOP_EXPERTS: Route[RowWise] = Route("top_experts", lambda s, c: True, "experts <= 1024", row_grid)

GROUP_EXPERTS: Route[RowWise] = Route(
    "group_experts", lambda s, c: True, f"m >= {GROUPED_EXPERTS}, experts <= 1024", one_workgroup
)

SUM_EXPERTS: Route[RowWise] = Route("sum_experts", lambda s, c: True, "-", value_grid)


def groups_experts(m: int) -> bool:
    """Whether the choices of m tokens are grouped by expert: below that few tokens share one."""
    return m >= GROUPED_EXPERTS


LINEAR_SUM: Route[Linear] = Route(
    "linear_sum", lambda s, c: True, "after splits over k", pairs_by_token_grid, (Role.EPILOGUE,)
)


def sums_in_norm(s: Linear) -> bool:
    """Whether the norm after a linear that is split over k adds the splits up: the one that writes blocks can."""
    return s.inputs.blocks and s.n % 32 == 0


# The persistent kernel of fused decode (engine/fused_decode.py): all workgroups must run at the same time, so they are
# few and large.


@dataclass(frozen=True, slots=True)
class GridSize:
    """The workgroups of a persistent kernel."""

    workgroups: int  # a power of two
    invocations: int  # of each workgroup


def grid_sizes(dim: int, heads_per_kv: int, caps: Caps, experts: bool = False) -> tuple[GridSize, ...]:
    """The grid sizes to probe, in this order; fewer than 128 workgroups are for smaller GPUs.

    On an H200 many small workgroups are better for a model with little to do in a layer (SmolLM2 -8 %, 2026-11-15;
    Qwen 3 0.6B -13 %, Gemma 3 1B -4 %, 2026-11-17). With Dawn, whose barrier takes half the time, they are better up to
    3072 wide (tok/s: 1B 2359 to 2465, 3B 1129 to 1191, Qwen 3 4B 837 to 854, 30B-A3B 695 to 710; but 8B 648 to 589).
    With wgpu one token gains 2 % there, but several rows are slower (a step of 4 rows of 8B 2063 to 2346 us). Models
    with experts have no fused steps of several rows: 30B-A3B gains 5 % (1398 to 1332 us). gpt-oss 20B needs more
    registers than 256 workgroups of 256 leave on an H200: they do not pass the probe.
    """
    if caps.cpu:
        return (GridSize(1, 256),)  # for tests: llvmpipe runs as many as it has threads, and ends long loops
    small = GridSize(256, 256)
    narrow = dim <= 3072 if caps.tint or experts else dim < 1536
    first = (small,) if narrow and heads_per_kv * caps.subgroup <= small.invocations else ()
    return (*first, *(GridSize(workgroups, 512) for workgroups in (128, 64, 32, 16)))


def rows_grid(grid: GridSize) -> GridSize:
    """For a fused kernel of several rows, where one of a row has this grid size.

    Small workgroups may take so many registers each that they do not all run at the same time (Qwen 3 0.6B on an H200).
    Nobody probes this one: if its workgroups do not either, the first step of several rows times out, and such steps
    are unfused from then on.
    """
    return GridSize(128, 512) if grid.workgroups > 128 else grid


def attention_can_rotate(head_dim: int, rope_dims: int, run: int, caps: Caps) -> bool:
    """Whether attend_split of a fused kernel may have heads_rotated: 4 dimensions rotate together.

    More than 8 dimensions a lane of a large head take too many registers: on an H200 a token of Gemma 3 4B takes 1264
    us, 1364 with 16 dimensions a lane, and 1280 with a stage that rotates (2026-11-17).
    """
    lanes = position_lanes(head_dim, run, caps)["LANES_PER_POSITION"]
    return (head_dim <= 128 or head_dim // lanes <= 8) and rope_dims % 4 == 0


def fused_linear(s: Linear, grid: GridSize, caps: Caps, half_sums: bool = True) -> Route[Linear]:
    """As many lanes share two rows as give every subgroup something to do and have something to do themselves.

    Twice as many, with two blocks or more each, if that leaves fewer workgroups idle in the end: a token of 8B takes
    1494 us on an H200 (2026-11-17), else 1514. Half a subgroup, if that leaves far fewer lanes idle, is faster with
    Dawn only: Gemma 3 1B 590 us, else 619; with wgpu 716, else 629.

    The prefetch is shorter where f32 inputs, f16 or q6 weights take the registers (F16 -10 %, f32 inputs -2 to -5 % on
    an H200, 2026-11-15; Q4_K_M, which has stages of both q4 and q6, tokens a second of 1B / 3B / 8B 2103 / 1041 / 580,
    with 4 blocks of q6 1194 / 514 / 573, 2026-11-17).
    """
    if s.m > 1:
        return _fused_batch(s, grid, caps, half_sums)
    lanes, blocks = caps.subgroup, s.k // 32
    while 2 * lanes <= grid.invocations and 3 * lanes <= 2 * blocks and s.n * lanes <= invocations(grid):
        lanes *= 2
    fits = 2 * lanes <= grid.invocations and 4 * lanes <= blocks
    if fits and busiest_rows(s.n, 2 * lanes, grid) < busiest_rows(s.n, lanes, grid):
        lanes *= 2

    def work(lanes: int) -> int:
        return busiest_rows(s.n, lanes, grid) * -(-blocks // lanes) * lanes

    if caps.tint and lanes == caps.subgroup and 4 * work(lanes // 2) <= 3 * work(lanes):
        lanes //= 2
    prefetch = 2 if s.inputs is not Inputs.INT8 or s.storage.two_bytes or s.storage is Storage.Q6 else 4
    consts = {"WORKGROUP": grid.invocations, "LANES": lanes, "PREFETCH": prefetch}
    parts = (*DOT_PARTS, Role.TURN, Role.ROWS)
    return Route("linear_gemv_fused", lambda s, c: is_gemv(s), "a fused stage", row_pair_grid, parts, consts)


def _fused_batch(s: Linear, grid: GridSize, caps: Caps, half_sums: bool) -> Route[Linear]:
    """Half a subgroup shares two rows, or as many lanes as give every subgroup something to do. A turn of their loop
    takes no more inputs than a piece has."""
    prefetch = min(FUSED_PREFETCH[s.m], 2) if s.storage is Storage.Q6 else FUSED_PREFETCH[s.m]
    lanes = max(caps.subgroup // 2, s.m)
    copied = s.prologue is Prologue.BLOCKS
    most = piece_blocks(half_sums, caps) // (s.m * prefetch) if copied else grid.invocations
    while 2 * lanes <= min(most, grid.invocations) and lanes < s.k // 32 and s.n * lanes <= invocations(grid):
        lanes *= 2
    passes, shared = 1, 0
    if s.epilogue is Epilogue.SUM_BLOCKS:
        lanes = lanes_of_unit(SUM_UNIT, grid)
    elif s.epilogue.needs_workgroup:
        lanes = int8_result_lanes(s.m, grid, caps)
        passes = GLU_UNIT // rows_per_workgroup({"WORKGROUP": grid.invocations, "LANES": lanes})
        shared = shared_units(s.n // GLU_UNIT, s.m, grid)
    consts = {"WORKGROUP": grid.invocations, "LANES": lanes, "TOKENS": s.m, "PREFETCH": prefetch, "PASSES": passes}
    consts |= {"SHARED_UNITS": shared} if shared else {}
    return Route(
        "linear_gemv_fused_batch", lambda s, c: block_aligned(s), "a fused stage", row_pair_grid, DOT_PARTS, consts
    )


def invocations(grid: GridSize) -> int:
    return grid.workgroups * grid.invocations


def int8_result_lanes(rows: int, grid: GridSize, caps: Caps) -> int:
    """Lanes that share two rows, so that a workgroup covers no more rows than epilogue_glu_blocks takes."""
    return max(caps.subgroup // 2, lanes_of_unit(GLU_UNIT, grid), rows)


def lanes_of_unit(rows: int, grid: GridSize) -> int:
    """Lanes that share two rows, if a workgroup covers so many."""
    return 2 * grid.invocations // rows


def busiest_rows(n: int, lanes: int, grid: GridSize) -> int:
    """Rows of a linear that the busiest workgroup computes, if so many lanes share two."""
    rows = rows_per_workgroup({"WORKGROUP": grid.invocations, "LANES": lanes})
    return -(-n // (rows * grid.workgroups)) * rows


def shared_units(units: int, rows: int, grid: GridSize) -> int:
    """The units after the last full turn, if two workgroups can share each: each takes half the tokens.

    8 rows of 8B, whose gate and up are 3.5 turns, take 2450 us instead of 2503 on an H200 (2026-11-17).
    """
    left = units % grid.workgroups
    return left if rows > 2 and units > left and 2 * left <= grid.workgroups else 0


def sums_leave_blocks(dim: int, rows: int, grid: GridSize, piece: int, caps: Caps) -> bool:
    """Whether a linear into the residual stream of a fused kernel quantises its results for the next one, which saves
    the norm stage: each workgroup covers a block, most have one, and a piece of inputs is enough for a turn.

    On an H200 (2026-11-17) 4 and 8 rows of 8B take 1982 us instead of 2063, 2566 instead of 2662; 16 rows, whose inputs
    lanes of half a subgroup share, 5487 instead of 4331.
    """
    if not has_norm_stages(rows, dim, caps) or rows > SUM_BLOCK_ROWS:
        return False
    in_turn = rows * lanes_of_unit(SUM_UNIT, grid) * FUSED_PREFETCH[rows]
    return grid.workgroups // 2 < dim // SUM_UNIT <= grid.workgroups and in_turn <= piece


def has_norm_stages(rows: int, dim: int, caps: Caps) -> bool:
    """Whether the inputs of a fused kernel are quantised once, not by each workgroup.

    2 rows of 8B on an H200 (2026-11-19) take 1636 us with norm stages and 1798 with norms in prologues, but at a depth
    of 8192 3296 and 2818, since attention is not split; with Dawn (without copies, see late_stores) 1606 and 3994. Of
    1B they take 510 and 481.
    """
    return rows >= NORM_STAGE_ROWS or (rows > 1 and caps.tint and dim > TINT_PROLOGUE_DIM)


def fuses_context(attention: Attention, dim: int, rows: int, segments: int, bucket: int, caps: Caps) -> bool:
    """Whether a fused step is fast over such a context.

    Without splits attention needs many workgroups where the context is long. It does not share keys and values between
    rows: 16 rows of one sequence of 1B at a depth of 2048 take 1382 us on an H200 (2026-11-17), unfused 1426; at 8192,
    the end of that bucket, 2897 and 1735. Of 16 rows memory for partial results lets heads of 128 have few subgroups:
    from depths of 0 and 160, 16 sequences of 8B take 3.1 us more for each position, unfused 2.5, and would be as fast
    at some 500.
    """
    if not has_norm_stages(rows, dim, caps) or bucket < LONG_CONTEXT:
        return True
    kv_heads = attention.kv_heads
    busy = rows * kv_heads * unsplit_shares(attention.heads_per_kv, kv_heads, rows) >= ENOUGH_WORKGROUPS // 2
    return busy and (rows <= 8 or (attention.head_dim <= 64 and (rows < 2 * segments or bucket < FAR_CONTEXT)))


def unsplit_shares(heads_per_kv: int, kv_heads: int, rows: int) -> int:
    """Workgroups that share the query heads of a KV head in a fused kernel, where no splits keep the cores busy."""
    fitting = (n for n in range(1, heads_per_kv + 1) if n * kv_heads * rows <= ENOUGH_WORKGROUPS)
    return max((n for n in fitting if heads_per_kv % n == 0), default=1)


def row_bytes(rows: int, grid: GridSize, caps: Caps) -> int:
    """Workgroup memory of a linear of several rows besides its inputs: sums by subgroup, results for int8 blocks."""
    return rows * (8 * grid.invocations // caps.subgroup + 4 * 32)


def piece_blocks(half_sums: bool, caps: Caps) -> int:
    """Most int8 blocks of all rows in workgroup memory at a time: a power of two."""
    return 1 << (((caps.shared_bytes - FUSED_BYTES) // input_block_bytes(half_sums)).bit_length() - 1)


def input_block_bytes(half_sums: bool) -> int:
    """Of an int8 block in workgroup memory, see prologue_int8."""
    return 48 if half_sums else 40


def piece_width(s: Linear, route: Route[Linear], half_sums: bool, caps: Caps) -> int:
    """Inputs of a token that a fused linear copies to workgroup memory at once: all, or those of a turn of its loop."""
    whole = s.m * s.k // 32 <= piece_blocks(half_sums, caps)
    return s.k if whole else min(s.k, 32 * route.consts["LANES"] * route.consts["PREFETCH"])


def fused_widths(dim: int, attention: Attention, int8: bool, half_sums: bool, caps: Caps) -> tuple[int, ...]:
    """For how many token rows the layers can be one kernel: their int8 inputs fit into workgroup memory.

    Only where the barrier was measured: elsewhere each kernel would have to be compared with unfused layers first.
    """
    width, subgroup = max(dim, attention.heads * attention.head_dim), caps.subgroup
    if not int8 or not caps.measured_barrier or dim % (8 * subgroup):
        return ()

    def fits(rows: int, grid: GridSize) -> bool:
        lanes = int8_result_lanes(rows, grid, caps)
        covered = 2 * grid.invocations // lanes  # rows of a workgroup at once
        piece = piece_blocks(half_sums, caps)
        staged = has_norm_stages(rows, dim, caps)
        copied = piece if staged or caps.tint else 0
        blocks = copied if staged else max(copied, rows * width // 32)
        squares = 0 if staged else rows * dim // (2 * subgroup)
        memory = blocks * input_block_bytes(half_sums) + row_bytes(rows, grid, caps) + squares
        memory += fused_shared_bytes(attention, grid, caps, rows, staged)
        if sums_leave_blocks(dim, rows, grid, piece, caps):
            memory += rows * (2 * SUM_UNIT + 4)  # a sum of squares for two rows, and 1 / rms
        spare = caps.shared_bytes - SPARE_BYTES
        in_turn = rows * lanes * FUSED_PREFETCH[rows]  # blocks that a turn of the loop needs
        sees_rows = not caps.tint or positions_at_once(attention, grid, caps, rows, staged) >= rows
        return covered in (16, 32, 64) and rows <= subgroup and memory <= spare and in_turn <= piece and sees_rows

    def faster(rows: int) -> bool:
        most = TINT_ROWS if caps.tint else FUSED_ROWS
        return dim <= MAX_FUSED_DIM and rows <= (min(most, HALF_SUM_ROWS) if half_sums else most)

    sizes = {rows_grid(grid) for grid in grid_sizes(dim, attention.heads_per_kv, caps)}
    return tuple(rows for rows in FUSED_PREFETCH if faster(rows) and all(fits(rows, grid) for grid in sizes))


SHORT_SPLIT = constants("split_count_dynamic")["SHORT_SPLIT"]  # positions of a split of a short context, at most


def fused_head_consts(
    attention: Attention, grid: GridSize, caps: Caps, rows: int = 1, staged: bool = False
) -> dict[str, int]:
    """attend_split in a fused kernel: the query heads of a workgroup share its subgroups. Where those see fewer
    positions at once than a short split has (of an f16 KV cache; of q8_0 they see twice as many), workgroups share the
    heads: on an H200 (2026-11-17) a token of Gemma 3 1B takes 634 us instead of 680, of Qwen 3 30B-A3B 1408 instead of
    1457. So they do where there are no splits to keep the cores busy."""
    lanes = position_lanes(attention.head_dim, 8, caps, rows)
    positions = caps.subgroup // lanes["LANES_PER_POSITION"] * lanes["POSITIONS_IN_FLIGHT"]  # of a subgroup, at once
    subgroups = grid.invocations // caps.subgroup
    heads = attention.heads_per_kv
    shares = unsplit_shares(heads, attention.kv_heads, rows) if staged else 1
    heads //= shares
    while not staged and heads % 2 == 0 and subgroups // heads * positions < SHORT_SPLIT:
        shares, heads = 2 * shares, heads // 2
    per_head = max(1, subgroups // heads)
    if staged:  # what half of them leave has to fit beside a piece of inputs
        partials = (FUSED_BYTES - SPARE_BYTES - row_bytes(rows, grid, caps)) // (heads * (4 * attention.head_dim + 8))
        per_head = min(per_head, 2 * max(1, partials))
    own = {"HEAD_SHARES": shares, "SUBGROUPS_PER_HEAD": 1 << (per_head.bit_length() - 1)}
    return own | {"POSITIONS_IN_FLIGHT": lanes["POSITIONS_IN_FLIGHT"]}


def positions_at_once(attention: Attention, grid: GridSize, caps: Caps, rows: int, staged: bool) -> int:
    """Positions of a head that attention in a fused kernel looks at together, a step of its lanes."""
    consts = fused_head_consts(attention, grid, caps, rows, staged)
    lanes = position_lanes(attention.head_dim, 8, caps, rows)["LANES_PER_POSITION"]
    return consts["SUBGROUPS_PER_HEAD"] * caps.subgroup // lanes


def fused_max_splits(kv_heads: int, rows: int = 1, shares: int = 1) -> int:
    """The number of splits that gives 128 workgroups."""
    return max(1, 128 // (kv_heads * shares * rows))


MIN_FUSED_BINDINGS = 12  # storage buffers of a fused kernel, if ranges of a buffer share a binding; with Dawn 13


def can_fuse(dim: int, hidden: int, attention: Attention, int8: bool, caps: Caps, expert_bytes: int = 0) -> bool:
    """Whether the layers of one token can be one kernel: the inputs of its linears fit into workgroup memory (but the
    widest, as f32), a binding can begin at any layer, and a kernel may bind enough buffers.

    `hidden`: inputs of the down projection; `expert_bytes`: workgroup memory that experts take.
    """
    aligned = dim % 64 == 0 and hidden % 32 == 0 and attention.head_dim % 64 == 0
    if (
        not caps.grid_barrier
        or caps.scalar
        or caps.subgroup < 4
        or caps.storage_buffers < MIN_FUSED_BINDINGS
        or not aligned
    ):
        return False
    widest = max(dim, attention.heads * attention.head_dim, hidden if int8 else 0)
    return all(
        attention.heads_per_kv * caps.subgroup <= grid.invocations <= caps.invocations
        and fits_shared_memory(widest, attention, int8, grid, caps, expert_bytes)
        for grid in grid_sizes(dim, attention.heads_per_kv, caps, expert_bytes > 0)
    )


def fits_shared_memory(width: int, attention: Attention, int8: bool, grid: GridSize, caps: Caps, more: int = 0) -> bool:
    """Whether `width` inputs of a linear fit into workgroup memory with `more` bytes, as int8 blocks or as f32."""
    inputs = width * 3 // 2 if int8 else width * 4
    return inputs + fused_shared_bytes(attention, grid, caps) + more <= caps.shared_bytes


def fused_shared_bytes(attention: Attention, grid: GridSize, caps: Caps, rows: int = 1, staged: bool = False) -> int:
    """Workgroup memory besides a linear's inputs: partial results of attention's subgroups, and sums by subgroup."""
    consts = fused_head_consts(attention, grid, caps, rows, staged)
    partials = attention.heads_per_kv // consts["HEAD_SHARES"] * max(1, consts["SUBGROUPS_PER_HEAD"] // 2)
    return partials * (4 * attention.head_dim + 8) + 16 * grid.invocations // caps.subgroup


# Row-wise operations

NORM: Table[RowWise] = (
    Route("rms_norm_vec4", lambda s, c: s.width % 4 == 0, "width % 4 = 0", row_grid, (Role.REDUCE,)),
    Route("rms_norm", lambda s, c: True, "-", row_grid, (Role.REDUCE,)),
)

BLOCKS_NORM_PARTS = (Role.BLOCKS, Role.REDUCE, Role.RESIDUAL)
NORM_BLOCKS: Table[RowWise] = (
    Route(
        "rms_norm_blocks",
        lambda s, c: s.width % 32 == 0 and s.width > 2048 and c.invocations >= 512,
        "width % 32 = 0, over 2048",
        row_grid,
        BLOCKS_NORM_PARTS,
        {"WORKGROUP": 512},
    ),
    Route("rms_norm_blocks", lambda s, c: s.width % 32 == 0, "width % 32 = 0", row_grid, BLOCKS_NORM_PARTS),
)

QUANTISE: Table[RowWise] = (
    Route("to_blocks", lambda s, c: s.width % 32 == 0, "width % 32 = 0", eighths_grid, (Role.BLOCKS,)),
)

ADD_NORM: Route[RowWise] = Route("add_rms_norm", lambda s, c: True, "-", row_grid, (Role.REDUCE,))

SUM_NORM: Route[RowWise] = Route("sum_rms_norm", lambda s, c: True, "a fused stage", row_grid, (Role.REDUCE,))

SHORT_CONV: Route[RowWise] = Route(
    "short_conv", lambda s, c: s.width % 2 == 0, "width % 2 = 0", eighths_grid, (Role.BLOCKS, Role.PAGES)
)

SCALE: Route[RowWise] = Route("scale", lambda s, c: True, "-", value_grid)

GLU_MUL: Table[RowWise] = (Route("glu_mul", lambda s, c: True, "-", value_grid),)

SOFT_CAP: Route[RowWise] = Route("soft_cap", lambda s, c: True, "-", value_grid)

EMBED: Table[Linear] = (
    Route("embed", lambda s, c: word_aligned(s, 8), "k and group % 8 = 0", embed_grid, (Role.WEIGHT,)),
    Route("embed_any", lambda s, c: True, "-", embed_value_grid, (Role.WEIGHT,)),
)

# Attention

SPLIT_ROWS, SPLIT_ROWS_F32 = 8, 64  # up to so many rows attend_split runs at any depth, with int8 and without
DEEP_PREFETCH_ROWS = 8  # up to so many, but not one alone, it has 8 positions in flight
FEW_SCORES = 12288  # rows x positions up to which it is the fastest for more rows, too
TILE_ROWS = 17  # fewest rows of attend_tile
LARGE_TILE_ROWS = 257  # fewest rows of attend_int8's large tiles
LARGE_MATRIX_TILE = 256  # invocations of attend_matrix's large tiles: twice their rows
SMALL_TILES = 8192  # rows of all heads up to which attend_matrix has small tiles: 128 workgroups of 64


def split_rows_fit(s: Attention, c: Caps) -> bool:
    """Whether each query head of a KV head gets a subgroup of attend_split and memory to merge, and no tile is faster.

    attend_split reads keys and values again for each row, which costs nothing where most rows are of sequences of their
    own. On an H200 (2026-11-16), Llama 1B, us for a layer, against attend_int8: 32 rows at a depth of 0 4 : 10, of 1024
    32 : 21, of 4096 97 : 41; 128 rows at 0 12 : 14. Without int8 it is the faster one up to 64 rows.
    """
    subgroups = c.subgroup >= 4 and s.heads_per_kv * c.subgroup <= c.invocations
    always = SPLIT_ROWS if int8_attention(s, c) else SPLIT_ROWS_F32
    few = s.m <= always or s.m < 2 * s.segments or s.m * (s.bucket + s.m // 2) <= FEW_SCORES
    few = few and (not s.sinks or s.m <= MAX_SPLITS)  # whose results are merged: there is memory for so many
    fits = subgroups and s.heads_per_kv * (s.head_dim + 2) * 4 <= c.shared_bytes  # see subgroups_per_head
    return few and s.head_dim % 64 == 0 and fits


def tile_rows_fit(s: Attention, c: Caps) -> bool:
    """Whether attend_tile fits: its workgroups have at least 32 rows, which hold a token of each query head."""
    dims = s.head_dim in range(32, 257, 32) and tile_bytes(s.head_dim) <= c.shared_bytes
    fits = dims and c.subgroup >= tile_owners(s.head_dim) and s.heads_per_kv <= 32
    return s.m >= TILE_ROWS and fits


def int8_attention(s: Attention, c: Caps, workgroup: int = 128) -> bool:
    """Whether attend_int8 may and can run: workgroups have a row for each query head of a KV head."""
    heads = s.head_dim in (64, 128) and s.heads_per_kv <= workgroup // 2 and not s.soft_cap and not s.sinks
    return s.int8 and s.m > 1 and heads and c.subgroup >= 8 and int8_tile_bytes(s.head_dim, workgroup) <= c.shared_bytes


def large_int8_tiles(s: Attention, c: Caps) -> bool:
    """Whether attend_int8 has enough rows for large tiles: 16 % faster with heads of 128 on an H200, slower with 64."""
    return s.head_dim == 128 and s.m >= LARGE_TILE_ROWS and int8_attention(s, c, 256)


def matrix_attention(s: Attention, c: Caps, workgroup: int) -> bool:
    """Whether attend_matrix may and can run: enough rows for its tiles."""
    heads = (s.head_dim == 128 or (s.head_dim == 64 and workgroup == 128)) and not s.soft_cap and not s.sinks
    fits = c.matrices and matrix_attention_bytes(s, c, workgroup) <= c.shared_bytes
    return s.half and s.m > 64 and heads and fits


def large_matrix_tiles(s: Attention, c: Caps) -> bool:
    """Whether attend_matrix should have large tiles: with heads of 128 a core of an H200 runs one workgroup at a time,
    and one with twice the rows takes 1.3 times as long. Where small tiles leave cores idle, they are better."""
    return s.head_dim == 128 and s.heads * s.m > SMALL_TILES and matrix_attention(s, c, LARGE_MATRIX_TILE)


ATTEND: Table[Attention] = (
    Route(
        "attend_split",
        split_rows_fit,
        "few rows or positions, head_dim % 64 = 0, a subgroup and memory for each head of a KV head",
        lambda s, c, caps, rows, position: (s.kv_heads * c["HEAD_SHARES"], s.splits, rows),
        (Role.KV_RUN, Role.PAGES, Role.INT8_BLOCK, Role.BLOCKS),
    ),
    Route(
        "attend_matrix",
        large_matrix_tiles,
        f"more than {SMALL_TILES} rows of all heads, f16 will do, matrix units, head_dim 128",
        matrix_attention_grid,
        (Role.MATRIX, Role.SCORES, Role.PAGES, Role.BLOCKS),
        {"WORKGROUP": LARGE_MATRIX_TILE},
    ),
    Route(
        "attend_matrix",
        partial(matrix_attention, workgroup=128),
        "m > 64, f16 will do, matrix units, head_dim 64 or 128",
        matrix_attention_grid,
        (Role.MATRIX, Role.SCORES, Role.PAGES, Role.BLOCKS),
        {"WORKGROUP": 128},
    ),
    Route(
        "attend_int8",
        large_int8_tiles,
        f"m >= {LARGE_TILE_ROWS}, int8 will do, head_dim 128, subgroups of 8, 128 heads to a KV head",
        int8_tile_grid,
        (Role.PAGES, Role.INT8_BLOCK, Role.BLOCKS),
        {"WORKGROUP": 256},
    ),
    Route(
        "attend_int8",
        int8_attention,
        "m > 1, int8 will do, head_dim 64 or 128, subgroups of 8, 64 heads to a KV head",
        int8_tile_grid,
        (Role.PAGES, Role.INT8_BLOCK, Role.BLOCKS),
        {"WORKGROUP": 128},
    ),
    Route(
        "attend_tile",
        tile_rows_fit,
        f"m >= {TILE_ROWS}, head_dim % 32 = 0, <= 256, subgroups of 4 (over 64: of 8), 32 heads to a KV head",
        query_tile_grid,
        (Role.KV8, Role.PAGES, Role.BLOCKS, Role.SINKS),
    ),
    Route(
        "attend",
        lambda s, c: s.head_dim % 4 == 0 and s.head_dim <= 256,
        "head_dim % 4 = 0, <= 256",
        lambda s, c, caps, rows, position: (s.heads, rows, 1),
        (Role.KV4, Role.PAGES, Role.SINKS),
    ),
    Route(
        "attend_any",
        lambda s, c: True,
        "-",
        lambda s, c, caps, rows, position: fold(-(-rows * s.heads // c["WORKGROUP"]), caps),
        (Role.KV4, Role.PAGES, Role.SINKS),
    ),
)
ROTATE: Route[Attention] = Route(
    "rotate",
    lambda s, c: True,
    "QK norm or attention temperature",
    lambda s, c, caps, rows, position: (3 if c["ROW_NORM"] else s.heads + 2 * s.kv_heads, rows, 1),
    (Role.REDUCE,),
)
QUANTISE_KV: Route[Attention] = Route(
    "quantise_kv",
    int8_attention,
    "as attend_int8",
    lambda s, c, caps, rows, position: (s.kv_heads, -(-(position + rows) // c["KV_TILE"]), s.segments),
    (Role.KV8, Role.PAGES, Role.INT8_BLOCK),
)
STORE_KV: Route[Attention] = Route(
    "store_kv",
    lambda s, c: True,
    "q8_0 KV cache, head_dim % 32 = 0",
    lambda s, c, caps, rows, position: fold(-(-rows * 2 * s.kv_heads * -(-s.head_dim // 64) // c["WORKGROUP"]), caps),
    (Role.KV_LAYOUT, Role.INT8_BLOCK),
)
MERGE: Route[Attention] = Route(
    "attend_merge",
    lambda s, c: True,
    "splits, head_dim % 32 = 0",
    lambda s, c, caps, rows, position: (-(-s.heads * s.head_dim // (8 * c["WORKGROUP"] // merge_teams(s))), rows, 1),
    (Role.BLOCKS, Role.SINKS),
)
# These can write blocks themselves
QUANTISING_ATTENTION = ("attend_split", "attend_int8", "attend_matrix", "attend_tile")


def attention_quantises(s: Attention, caps: Caps) -> bool:
    """Whether attention writes int8 blocks for any number of token rows: then its f32 results are not needed."""
    widths = (1, 2, SPLIT_ROWS + 1, TILE_ROWS, SPLIT_ROWS_F32 + 1, LARGE_TILE_ROWS)
    shapes = (replace(s, m=m, bucket=bucket) for m in widths for bucket, _, _ in CONTEXT_BUCKETS)
    return all(select(ATTEND, shape, caps).kernel in QUANTISING_ATTENTION for shape in shapes)


def tile_owners(head_dim: int) -> int:
    """Invocations that share two rows of attend_tile, so that the rows stay in registers."""
    return 8 if head_dim > 64 and head_dim % 64 == 0 else 4


def tile_bytes(head_dim: int) -> int:
    """Workgroup memory of attend_tile: keys and values as f32."""
    return constants("attend_tile")["KV_TILE"] * head_dim * 8


def int8_tile_bytes(head_dim: int, workgroup: int) -> int:
    """Workgroup memory of attend_int8: a kv tile with its scales, queries, weights and their factors."""
    rows = workgroup // 2
    return 128 * head_dim + 512 + head_dim * (rows + 2) + 64 * (rows + 4) + 32 * rows


def half_scores(s: Attention, c: Caps) -> bool:
    """Whether attend_matrix rounds scores to f16."""
    return s.half_scores and c.half_sums


def matrix_attention_bytes(s: Attention, c: Caps, workgroup: int) -> int:
    """Workgroup memory of attend_matrix: kv tiles of keys and of values, scores and weights of its rows."""
    own = constants("attend_matrix")
    regions = constants("scores_f16" if half_scores(s, c) else "scores_f32")["REGIONS"]
    return 16 * (2 * own["KV_TILE"] * (s.head_dim // 8 + 1) + regions * workgroup // 2 * own["ROW_PITCH"])


def int8_kv_bytes(s: Attention, capacity: int) -> int:
    """What quantise_kv writes: records of 64 positions."""
    tile = constants("quantise_kv")["KV_TILE"]
    return s.kv_heads * -(-capacity // tile) * tile * int8_position_bytes(s.head_dim)


def int8_position_bytes(head_dim: int) -> int:
    """Of a position and KV head: keys and values, their scales, and its share of the square roots."""
    return 2 * head_dim + 8 + head_dim // 8


# attend_split by the positions that it looks back over: (from, splits at most, subgroups per head at most). Whole
# tokens of four models were timed with 20 settings each at 16 to 2048 positions on an H200 (2026-11-15).
CONTEXT_BUCKETS = ((1, 4, 2), (65, 4, 4), (193, 8, 4), (513, 16, 8), (1537, 32, 8), (8192, 64, 8))
LONG_CONTEXT, FAR_CONTEXT = (CONTEXT_BUCKETS[i][0] for i in (3, 4))
ENOUGH_WORKGROUPS = 128  # to keep the cores of an H200 busy
MAX_SPLITS = 64
MAX_SPLIT_ROWS = 512  # rows x splits of attend_int8, for which there is memory
MATRIX_SPLIT_ROWS = 2048  # of attend_matrix


def context_bucket(positions: int) -> int:
    """The context bucket of a position: the first number of its row of CONTEXT_BUCKETS."""
    return max(first for first, _, _ in CONTEXT_BUCKETS if first <= positions)


def split_count(bucket: int, kv_heads: int, m: int = 1) -> int:
    """The splits of the context in attend_split: at most as many as give enough workgroups, twice as many for the
    longest context; for m tokens proportionally fewer, and none where the tokens alone give enough."""
    most = next(splits for first, splits, _ in CONTEXT_BUCKETS if first == bucket)
    enough = max(2, 1 << max(0, (ENOUGH_WORKGROUPS // kv_heads - 1).bit_length())) * (2 if bucket >= 8192 else 1)
    return max(1, min(most, enough) // m) if m * kv_heads < ENOUGH_WORKGROUPS else 1


def int8_split_count(s: Attention, caps: Caps) -> int:
    """The splits of the context in attend_int8: a power of two, up to 256 workgroups, at least 128 positions each."""
    workgroups = s.kv_heads * -(-s.m // int8_tokens(s, select(ATTEND, s, caps).consts))
    most = min(256 // workgroups, (s.bucket + s.m) // 128, MAX_SPLIT_ROWS // s.m)
    return 1 << (most.bit_length() - 1) if most > 1 else 1


def matrix_split_count(s: Attention, caps: Caps) -> int:
    """The splits of the context in attend_matrix: a power of two, at least 128 positions each. Rows of several
    segments are counted as if they were one's.

    Where the last round of workgroups leaves cores idle, more and shorter ones are faster. On an H200 (2026-11-19) 512
    rows of Llama 3B at a depth of 8192 make 96 workgroups for 132 cores: 279 us, in four splits 247, of which
    attend_merge takes 11. Beside its kv tiles a workgroup takes as long as 8 of them.
    """
    rows = select(ATTEND, s, caps).consts["WORKGROUP"] // 2
    workgroups = s.kv_heads * -(-s.m * s.heads_per_kv // rows)
    cores = CORES * (128 // s.head_dim)  # two workgroups with heads of 64 share a core
    tiles = (s.bucket + s.m) // constants("attend_matrix")["KV_TILE"]

    def time(splits: int) -> int:  # in kv tiles
        return -(-workgroups * splits // cores) * (-(-tiles // splits) + 8) + (10 if splits > 1 else 0)

    most = min(tiles // 4, matrix_split_rows(s.heads * s.head_dim, caps) // s.m)
    return min((1 << i for i in range(max(1, most).bit_length())), key=time)


def matrix_split_rows(width: int, caps: Caps) -> int:
    """Rows x splits of attend_matrix for which there is memory: partial sums of `width` numbers each."""
    return min(MATRIX_SPLIT_ROWS, caps.binding_bytes // (4 * width))


def in_splits(s: Attention, caps: Caps) -> Attention:
    """The shape with the splits that its kernel takes."""
    counts = {"attend_int8": int8_split_count, "attend_matrix": matrix_split_count}
    kernel = select(ATTEND, s, caps).kernel
    if kernel == "attend_split":
        return replace(s, splits=split_count(s.bucket, s.kv_heads, s.m))
    return replace(s, splits=counts[kernel](s, caps)) if kernel in counts else s


@cache
def depends_on_context(s: Attention, caps: Caps) -> bool:
    """Whether the dispatches of a step differ between context buckets."""
    near, far = (in_splits(replace(s, bucket=CONTEXT_BUCKETS[i][0]), caps) for i in (0, -1))
    kernels = {select(ATTEND, shape, caps).kernel for shape in (near, far)}
    return "attend_split" in kernels or near.splits != far.splits


def merges(s: Attention, caps: Caps) -> bool:
    """Whether attention leaves partial results for attend_merge: of splits, or to be merged with sinks."""
    return s.splits > 1 or (s.sinks and select(ATTEND, s, caps).kernel == "attend_split")


def stores_own_row(s: Attention, caps: Caps) -> bool:
    """Whether attention over a q8_0 cache quantises and stores the key and value of its row: in a step of several rows
    one would need those of another."""
    return s.m == 1 and select(ATTEND, s, caps).kernel == "attend_split"


def position_lanes(head_dim: int, run: int, caps: Caps, rows: int = 1) -> dict[str, int]:
    """attend_split's lanes for a position, each with runs of so many dimensions, and positions in flight.

    On an H200 (2026-11-15) 16 lanes save 3 to 4 % of 3B's and 8B's token, 4 positions 4 % of 1B's at a depth of 4096
    (and cost 1 % of it at none). 32 lanes save 4 to 6 % of a token of Gemma 3, with heads of 256 (2026-11-17). For a
    few rows 8 positions save 10 to 12 % of a fused step (1B 4 rows 679 to 596 us, 8B 2 rows 2083 to 1874) and 1 % of
    others; they cost 3 % of 16 rows, and of one row 1 % (8B) to 5 % (1B, Dawn).
    """
    lanes = min(max(gcd(head_dim, 256), 64) // run, caps.subgroup)
    further = 1 < rows <= DEEP_PREFETCH_ROWS and head_dim == run * lanes  # with one run a lane: more take the registers
    return {"LANES_PER_POSITION": lanes, "POSITIONS_IN_FLIGHT": 8 if further else 4}


def head_shares(s: Attention) -> int:
    """Workgroups of attend_split that share the query heads of a KV head, of several rows that leave cores idle. On an
    H200 (2026-11-17) a step of 8 sequences of 1B at a depth of 160 takes 863 us instead of 888, and 4 sequences of 8B
    decode 4 % faster."""
    shares, workgroups = 1, s.m * s.kv_heads * s.splits
    if s.m > 1 and s.bucket > 1:
        while s.heads_per_kv % (2 * shares) == 0 and 2 * shares * workgroups <= ENOUGH_WORKGROUPS:
            shares *= 2
    return shares


def subgroups_per_head(s: Attention, caps: Caps) -> int:
    """Subgroups that attend_split gives each query head of a KV head: a power of two that the workgroup holds.

    To merge them, half of them pass head_dim + 2 numbers of 4 bytes through workgroup memory. Several rows have fewer
    splits: they take as many subgroups as for a long context, while each workgroup has a core of its own. On an H200
    (2026-11-17) 8 sequences at a depth of 500 take 13.5 us instead of 17.4 for a layer of 1B, 19.9 instead of 28.6 for
    one of 8B; 64 of 1B would take 50.8 instead of 39.8.
    """
    wanted = next(subgroups for first, _, subgroups in CONTEXT_BUCKETS if first == s.bucket)
    if 1 < s.m <= ENOUGH_WORKGROUPS // s.kv_heads and s.bucket > 1:
        wanted = CONTEXT_BUCKETS[-1][2]
    heads = s.heads_per_kv // head_shares(s)
    in_memory = caps.shared_bytes // (heads * (s.head_dim + 2) * 2)
    most = max(1, min(wanted, caps.invocations // (caps.subgroup * heads), in_memory))
    return 1 << (most.bit_length() - 1)


def merge_teams(s: Attention) -> int:
    """Invocations of attend_merge that share the splits of 8 dimensions: of few splits none is left over."""
    return 8 if s.splits >= 8 else 1


def merge_in_linear(k: int, splits: int) -> bool:
    """Whether the linear after attention merges its splits: every workgroup reads all k * splits partial sums."""
    return k * splits <= 32768


def norm_in_linear(k: int, caps: Caps) -> bool:
    """Whether the linears of one token normalise and quantise their input themselves."""
    return k <= 4096 and caps.storage_buffers >= 10 and caps.shared_bytes >= 32768


# The texture backend: a CPU adapter runs whole models on textures (engine/texture_model.py), 4 values of x, y and the
# cache to a texel

TEXTURE_PARTS = (Role.TEXTURE, Role.BROADCAST)

TEXTURE_LINEAR: Table[Linear] = (
    Route(
        "linear_texture_gemv",
        lambda s, c: s.m == 1 and (s.storage is Storage.TEXTURE_F32 or s.group % 32 == 0),
        "m = 1, group % 32 = 0",
        texture_grid,
        (*TEXTURE_PARTS, Role.REDUCE, Role.EPILOGUE),
        {"STRIDE": 32},
        one_vector=True,
    ),
    Route(
        "linear_texture_gemv",
        lambda s, c: s.m == 1,
        "m = 1",
        texture_grid,
        (*TEXTURE_PARTS, Role.REDUCE, Role.EPILOGUE),
        {"STRIDE": 16},
        one_vector=True,
    ),
    Route(
        "linear_texture",
        lambda s, c: True,
        "-",
        texture_grid,
        (*TEXTURE_PARTS, Role.EPILOGUE),
        one_vector=True,
    ),
)

TEXTURE_NORM: Table[RowWise] = (
    Route("rms_norm_texture", lambda s, c: True, "-", row_grid, (Role.REDUCE,), one_vector=True),
)

TEXTURE_ATTEND: Table[Attention] = (
    Route(
        "attend_texture_decode",
        lambda s, c: 1 < s.m == s.segments and s.heads_per_kv < vector_lanes(c) == c.subgroup,
        "m > 1, a row of each sequence, a subgroup is a vector of more lanes than heads that share a kv head",
        lambda s, c, caps, rows, position: (s.kv_heads, rows, 1),
        (Role.PAGES,),
        one_vector=True,
    ),
    Route(
        "attend_texture",
        lambda s, c: s.m > 1,
        "m > 1, else",
        lambda s, c, caps, rows, position: (-(-rows * s.heads_per_kv // c["WORKGROUP"]), s.kv_heads, s.segments),
        (Role.PAGES, Role.BROADCAST),
        one_vector=True,
    ),
    Route(
        "attend_texture_scores",
        lambda s, c: True,
        "-",
        lambda s, c, caps, rows, position: (score_workgroups(position, c["WORKGROUP"]), s.kv_heads, 1),
        (Role.PAGES,),
        one_vector=True,
    ),
)

TEXTURE_VALUES: Table[Attention] = (
    Route("attend_texture_values", lambda s, c: True, "-", head_dims_grid, (Role.PAGES,), one_vector=True),
)

TEXTURE_EMBED: Table[Linear] = (
    Route("embed_texture", lambda s, c: True, "-", embed_grid, (Role.TEXTURE,), one_vector=True),
)

TEXTURE_ROTATE = replace(ROTATE, kernel="rotate_texture", one_vector=True)

TEXTURE_CONV_INPUTS: Route[RowWise] = Route("conv_inputs_texture", lambda s, c: True, "-", texels_grid, one_vector=True)

TEXTURE_SHORT_CONV: Route[RowWise] = Route(
    "short_conv_texture", lambda s, c: True, "-", texels_grid, (Role.PAGES,), one_vector=True
)

TEXTURE_SCALE: Route[RowWise] = Route("scale_texture", lambda s, c: True, "-", texels_grid, one_vector=True)

TEXTURE_SILU_MUL: Table[RowWise] = (Route("silu_mul_texture", lambda s, c: True, "-", texels_grid, one_vector=True),)


def score_workgroups(position: int, workgroup: int) -> int:
    """Workgroups of attend_texture_scores for a token, 4 positions a lane: a power of two, so that plans are few."""
    return 1 << (position // (4 * workgroup)).bit_length()


def suits_textures(
    dim: int, ffn_dim: int, head_dim: int, rope_dims: int, layouts: Iterable[Layout], caps: Caps
) -> bool:
    """Whether a model runs on textures: a CPU adapter, rows in multiples of 8 (gate and up are 4 each), heads whose
    loops llvmpipe unrolls, 16 k or more under a scale, nothing wider than a texture. `layouts` are texture layouts.
    """
    aligned = dim % 8 == 0 and ffn_dim % 4 == 0 and head_dim % 8 == 0 and head_dim <= 128 and rope_dims % 8 == 0
    return (
        caps.cpu
        and not caps.scalar
        and aligned
        and all(
            (layout.storage is Storage.TEXTURE_F32 or layout.group % 16 == 0) and layout.texels <= caps.texture_side
            for layout in layouts
        )
    )


# Sizes of steps and of the context


def plan_width(rows: int, chunk: int) -> int:
    """For how many token rows the plan is built that runs a step of `rows`."""
    return next((width for width in (1, *GEMV_WIDTHS, *GEMM_WIDTHS) if rows <= width), chunk)


def default_chunk(caps: Caps, int8: bool, textures: bool = False) -> int:
    """The default for the most token rows of a step.

    On an H200 1024 are 4 % faster than 512 in int8, and in f32, where they take more memory, 4 % slower. On matrices
    2048 are faster than 1024 by 10 % (1B) and 3 % (8B). On textures, which only a CPU uses, the number makes no
    difference (SmolLM2 on llvmpipe: 61 tok/s with 32, 63 with 128), and Ctrl-C and the progress wait for a step.
    """
    if textures:
        return 32
    if int8 and caps.matrices:
        return 2048
    return 1024 if int8 and not caps.cpu else 512


def max_chunk(width: int, caps: Caps) -> int:
    """The most token rows whose f32 activations, `width` each, fit a binding."""
    return max(1, caps.binding_bytes // (4 * width))


def max_positions(head_dim: int, caps: Caps, textures: bool) -> int | None:
    """The most positions that attention can read; None: no limit.

    llvmpipe ends the loops of an invocation after 65535 iterations in sum, without an error; inner loops count unless
    it unrolls them. `attend` was wrong from 16 k (head_dim 256) to 31 k (8) positions on.
    """
    if not caps.cpu:
        return None
    if textures:
        return 63488  # a page counts as two more
    return 8192 if head_dim % 4 == 0 and head_dim <= 256 and not caps.scalar else 65000 // (head_dim + 8)
