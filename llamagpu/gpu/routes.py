"""Which kernel runs which shape: the only file that compares m, n, k, group or head_dim with a number.

A table is read from the top; the first row that fits wins; the last row fits every shape.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Caps:
    """What the adapter offers, as far as routes ask."""

    cpu: bool  # a software adapter
    half: bool  # converts f16 itself
    subgroup: int  # lanes of a subgroup, 0: none
    workgroups: int  # per dimension of a dispatch
    binding_bytes: int  # of one storage binding, and of a buffer for it
    workgroup_bytes: int
    invocations: int = 256  # of one workgroup
    storage_buffers: int = 8  # of one kernel
    image_side: int = 8192  # texels of a storage texture, each way
    scalar: bool = False  # take the last row that fits instead: the kernels for every shape, as a baseline
    f16: bool = False  # computes with f16
    join: bool = False  # workgroups may wait for each other


@dataclass(frozen=True, slots=True)
class Linear:
    """y[m, n] = x[m, k] @ W[n, k]^T with W stored as `form` ("q4", "q6", "q8", "f16") in groups of `group`."""

    m: int
    n: int
    k: int
    group: int
    form: str
    inputs: str = "f32"  # or "i8" records, "quads_f32"; made by the kernel itself: "norm", "merge" ("_f32": no i8)
    out: str = "out_store"  # the part that takes the results


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention's shape."""

    count: int
    kv: int
    dim: int

    @property
    def share(self) -> int:
        """Heads that read one kv head."""
        return self.count // self.kv


Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Route:
    kernel: str  # kernels/*/<kernel>.wgsl
    fits: Callable[..., bool]  # of (shape, caps)
    needs: str  # the same in words, for `devices --kernels`
    grid: Callable[..., Grid]  # of (shape, the kernel's constants, caps, m, pos)
    parts: tuple[str, ...] = ()  # by role: "weight" becomes weight_q4, "reduce" reduce_tree, ...
    consts: dict[str, int] = field(default_factory=dict)  # tuning; the file's own values otherwise
    vector: bool = False  # a workgroup is as many invocations as a CPU adapter's vector has lanes

    @property
    def collects(self) -> bool:
        """The kernel calls `finish` of its out part, which then sees a whole workgroup's rows."""
        return "dot" in self.parts or "planes" in self.parts


def fold(count: int, caps: Caps) -> Grid:
    """A 1-D count of workgroups as a grid: y takes what the limit on x cannot hold; kernels undo it."""
    x = min(count, caps.workgroups)
    return x, -(-count // x), 1


def vector(caps: Caps) -> int:
    """Lanes of a CPU adapter's vector. A workgroup of just one has no lane idle and the smallest share of the work, so
    that few workgroups come out even between the threads."""
    return caps.subgroup if caps.subgroup in (4, 8, 16) else 8


def rows_each(c: dict[str, int]) -> int:
    """Rows of a workgroup whose LANES share pairs of rows."""
    return 2 * c.get("PAIRS", 1) * c["WORKGROUP"] // c["LANES"]


def row_pairs(s: Linear, c: dict[str, int], caps: Caps, m: int, pos: int) -> Grid:
    return fold(-(-s.n // rows_each(c)), caps)


def tile_share(head_dim: int, rough: bool) -> int:
    """Invocations that share two rows of attend_tile, so that the rows stay in registers."""
    return 8 if head_dim > (128 if rough else 64) and head_dim % 64 == 0 else 4


def tile_places(rough: bool) -> int:
    """Positions whose keys and values attend_tile has in workgroup memory: the faster of 16 and 32 on an H200."""
    return 32 if rough else 16


def rough_tile(head_dim: int, caps: Caps) -> bool:
    """Whether attend_tile can multiply in int8 and f16."""
    return caps.f16 and head_dim in (32, 64, 128, 256) and caps.subgroup >= head_dim // 8


def query_tiles(attention: tuple[int, int, int], c: dict[str, int], caps: Caps, m: int, pos: int) -> Grid:
    heads, kv_heads, share = attention
    tokens = 2 * c["WORKGROUP"] // share // (heads // kv_heads)
    return kv_heads, -(-m // tokens), 1


def whole_rows(s: Linear, c: dict[str, int], caps: Caps, m: int, pos: int) -> Grid:
    return fold(-(-s.n // (c["ROWS"] * c["WORKGROUP"])), caps)


def tiles(s: Linear, c: dict[str, int], caps: Caps, m: int, pos: int) -> Grid:
    return -(-s.n // c["TILE_N"]), -(-m // c["TILE_M"]), 1


def row_groups(s: Linear, c: dict[str, int], caps: Caps, m: int, pos: int) -> Grid:
    return -(-s.n // (8 * c["WORKGROUP"])), -(-m // 4), 1


def eight_dims(heads: Heads, c: dict[str, int], caps: Caps, m: int, pos: int) -> Grid:
    return -(-heads.kv * heads.dim // (8 * c["WORKGROUP"])), 1, 1


def pairs_by_token(s: Linear, c: dict[str, int], caps: Caps, m: int, pos: int) -> Grid:
    x, y, _ = fold(-(-s.n // (2 * c["WORKGROUP"])), caps)
    return x, y, m


def pairs_and_tokens(s: Linear, c: dict[str, int], caps: Caps, m: int, pos: int) -> Grid:
    x, y, _ = fold(-(-s.n // 2), caps)
    return x, y, m


def rows(width: int, c: dict[str, int], caps: Caps, m: int, pos: int) -> Grid:
    return m, 1, 1


def values(width: int, c: dict[str, int], caps: Caps, m: int, pos: int) -> Grid:
    return fold(-(-m * width // c["WORKGROUP"]), caps)


def words(s: Linear, weights: int) -> bool:
    """A load of `weights` weights stays inside a row and a group, and x is plain f32."""
    return s.inputs == "f32" and s.k % weights == 0 and (s.form == "f16" or s.group % weights == 0)


def blocks(s: Linear) -> bool:
    """Blocks of 32 inputs, each under one scale or two."""
    return s.k % (64 if s.form == "q6" else 32) == 0 and (s.form == "f16" or s.group % 32 == 0 or s.group == 16)


COLLECTING = ("out_swiglu_i8", "out_logits")  # these need a whole workgroup's rows at once

MADE = ("norm", "merge")  # inputs that a kernel makes itself


def plain(s: Linear) -> bool:
    """Inputs as they lie, results one by one."""
    return s.inputs not in MADE and s.out not in COLLECTING


VECTOR = {"q4": 32, "q6": 1 << 30, "q8": 16, "f16": 8}  # the smallest group (k for f16) that 16-byte loads take


def one(s: Linear) -> bool:
    return s.m == 1 and blocks(s)


# Lanes that share rows, pairs of rows they share, invocations of a workgroup: the best of 5 to 36 settings per shape
# of Llama 1B and 8B and SmolLM2 on an H200 (2026-11-15); the choice moves a kernel by up to 2x.
GEMV_SHAPES: tuple[tuple[str, Callable[[Linear, Caps], bool], dict[str, int]], ...] = (
    ("logits", lambda s, c: one(s) and s.out == "out_logits", {"WORKGROUP": 256, "LANES": 32, "PAIRS": 2}),
    ("records out, k <= 1024", lambda s, c: one(s) and s.out in COLLECTING and s.k <= 1024 and c.invocations >= 1024,
     {"WORKGROUP": 1024, "LANES": 32, "PAIRS": 1}),
    ("records out, k < 4096", lambda s, c: one(s) and s.out in COLLECTING and s.k < 4096 and c.invocations >= 512,
     {"WORKGROUP": 512, "LANES": 32, "PAIRS": 2}),
    ("records out", lambda s, c: one(s) and s.out in COLLECTING, {"WORKGROUP": 256, "LANES": 32, "PAIRS": 4}),
    ("made inside, k < 3072", lambda s, c: one(s) and s.inputs in MADE and s.k < 3072 and c.invocations >= 512,
     {"WORKGROUP": 512, "LANES": 32}),
    ("made inside", lambda s, c: one(s) and s.inputs in MADE and c.invocations >= 512,
     {"WORKGROUP": 512, "LANES": 64}),
    ("made inside, small workgroups", lambda s, c: one(s) and s.inputs in MADE, {"WORKGROUP": 256, "LANES": 32}),
    ("k <= 2048", lambda s, c: one(s) and s.k <= 2048, {"WORKGROUP": 256, "LANES": 64}),
    ("k > 2048", lambda s, c: one(s), {"WORKGROUP": 256, "LANES": 128}),
)  # fmt: skip

FEW = (4, 8, 16)  # token counts with kernels of their own between one and many
SOME = (32, 64, 128, 256)  # and with tiles of their own

FEW_SHAPES = (  # likewise, and for how many tokens: more than 8 do not leave room for two pairs of rows
    ("records out", 8, lambda s, c: s.out == "out_swiglu_i8" and c.invocations >= 512,
     {"WORKGROUP": 512, "LANES": 32, "PAIRS": 2}),
    ("results one by one", 16, lambda s, c: plain(s), {"WORKGROUP": 256, "LANES": 64, "PAIRS": 1}),
)  # fmt: skip

RECORD_TILE = {"TILE_N": 64, "WORKGROUP": 128}  # out_swiglu_i8 takes 64 rows, and knows another workgroup by default


def tile_count(s: Linear, tile_m: int, tile_n: int) -> int:
    return -(-s.m // tile_m) * -(-s.n // tile_n)


# Tiles of linear_gemm_i8: tokens, rows. The smaller, the more k is split within a workgroup, and the more work it is; a
# small matrix takes the largest that still gives a large GPU's 132 cores enough of them. Measured on an H200 with the
# matrices of Llama 1B and m = 16 to 512 (2026-11-15): the wrong tile costs up to 3x.
TILES: tuple[tuple[str, Callable[[Linear], bool], dict[str, int]], ...] = (
    ("m <= 32, records out", lambda s: s.m <= 32 and not plain(s), RECORD_TILE | {"TILE_M": 32, "TOKENS": 32}),
    ("records out", lambda s: not plain(s), RECORD_TILE | {"TILE_M": 64, "TOKENS": 64}),
    ("256 tiles of 64 x 64", lambda s: tile_count(s, 64, 64) >= 256, {"TILE_M": 64, "TILE_N": 64}),
    ("192 tiles of 64 x 32", lambda s: s.m > 32 and tile_count(s, 64, 32) >= 192, {"TILE_M": 64, "TILE_N": 32}),
    # (smaller ones of groups of 16 take more than 32 KiB of workgroup memory)
    ("96 tiles of 32 x 32, or groups of 16", lambda s: tile_count(s, 32, 32) >= 96 or s.group == 16,
     {"TILE_M": 32, "TILE_N": 32}),
    ("fewer", lambda s: True, {"TILE_M": 32, "TILE_N": 16}),
)


def int8_tiles(s: Linear, c: Caps) -> bool:
    return s.inputs == "i8" and s.k % 64 == 0 and blocks(s) and s.form != "f16" and s.out != "out_logits"

LINEAR = (
    Route("linear_rows", lambda s, c: c.cpu and s.out not in COLLECTING and s.m == 1 and words(s, VECTOR[s.form]),
          "CPU adapter, m = 1, k and group % 32 = 0 (q8: 16, f16: k % 8)", whole_rows, ("block", "out")),
    # f32 inputs: lanes that take 8 weights read x side by side, lanes that take 32 do not (14 % of a token on an H200)
    Route("linear_gemv_word", lambda s, c: one(s) and s.form == "q4" and s.out not in COLLECTING and words(s, 8),
          "m = 1, q4, f32 x, k % 32 = 0, group % 32 = 0 or 16", row_pairs, ("weight", "out", "reduce")),
    *(
        Route("linear_gemv", fits, f"m = 1, k % 32 = 0, group % 32 = 0 or 16, {case}",
              row_pairs, ("dot", "out", "reduce"), consts)
        for case, fits, consts in GEMV_SHAPES
    ),
    Route("linear_gemv_word", lambda s, c: s.m == 1 and words(s, 8),
          "m = 1, k and group % 8 = 0", row_pairs, ("weight", "out", "reduce")),
    *(
        Route("linear_gemv_few",
              lambda s, c, most=most, fits=fits: 1 < s.m <= most and s.inputs not in MADE and blocks(s) and fits(s, c),
              f"m <= {most}, k % 32 = 0, group % 32 = 0 or 16, {case}", row_pairs, ("dot", "out", "reduce"),
              {"TOKENS": most} | consts)
        for most in FEW for case, limit, fits, consts in FEW_SHAPES if most <= limit
    ),
    *(
        Route("linear_gemm_i8", lambda s, c, fits=fits: int8_tiles(s, c) and fits(s) and c.workgroup_bytes >= 32768,
              f"int8 x, k % 64 = 0, group % 32 = 0 or 16, {case}", tiles, ("planes", "out"), consts)
        for case, fits, consts in TILES
    ),
    # a tile of 64 x 64 is all there is for f32: where few of them would run, 2 to 5 times slower than no tile (H200)
    Route("linear_gemm_rows",
          lambda s, c: not c.cpu and 1 < s.m <= 64 and tile_count(s, 64, 64) < 128 and words(s, 8) and plain(s),
          "f32 x, m <= 64, fewer than 128 tiles of 64 x 64, k and group % 8 = 0", pairs_and_tokens,
          ("weight", "out", "reduce")),
    Route("linear_gemm", lambda s, c: words(s, 8), "k and group % 8 = 0", tiles, ("weight", "out")),
    Route("linear_any", lambda s, c: s.inputs == "f32" and plain(s), "-", pairs_by_token, ("weight", "out")),
)  # fmt: skip

# A kernel of whole layers (gpu/join.py): its workgroups must all run at the same time, so there are few and large ones


@dataclass(frozen=True, slots=True)
class Crew:
    """The workgroups of such a kernel."""

    count: int  # a power of two
    invocations: int  # of each


def crews(dim: int, caps: Caps) -> tuple[Crew, ...]:
    """What to try, in this order. On an H200 (2026-11-15) many small workgroups are better for a model with little to
    do in a layer (SmolLM2 -8 %), few large ones for the others (1B, 8B -2 %); fewer than 128 are for smaller GPUs."""
    if caps.cpu:
        return (Crew(1, 256),)  # for tests: llvmpipe runs as many as it has threads, and ends long loops
    first = (Crew(256, 256),) if dim < 1024 else ()
    return (*first, *(Crew(count, 512) for count in (128, 64, 32, 16)))


def joined_linear(s: Linear, crew: Crew, caps: Caps) -> Route:
    """As many lanes share two rows as give every subgroup something to do. Fewer weights are on their way where f32
    inputs or f16 weights take the registers (F16 -10 %, f32 inputs -2 to -5 % on an H200, 2026-11-15)."""
    lanes = caps.subgroup
    while 2 * lanes <= crew.invocations and lanes < s.k // 32 and s.n * lanes <= crew.count * crew.invocations:
        lanes *= 2
    ahead = 2 if "f32" in s.inputs or s.form == "f16" else 4
    consts = {"WORKGROUP": crew.invocations, "LANES": lanes, "AHEAD": ahead}
    return Route("linear_turns", lambda s, c: one(s), "a stage", row_pairs, ("dot", "out", "reduce"), consts)


def joined_strands(group: int, crew: Crew, caps: Caps) -> int:
    return 1 << ((crew.invocations // caps.subgroup // group).bit_length() - 1)


def joined_splits(kv_heads: int) -> int:
    """Splits at most: as many as make 128 workgroups."""
    return max(1, 128 // kv_heads)


def joinable(dim: int, ffn_dim: int, heads: Heads, fast: bool, caps: Caps) -> bool:
    """Whether the layers of one token can be one kernel: the inputs of its linears fit into workgroup memory (but the
    widest, as f32), a binding can begin at any layer, and a kernel may bind enough."""
    whole = dim % 64 == 0 and ffn_dim % 64 == 0 and heads.dim % 64 == 0
    if not caps.join or caps.scalar or caps.subgroup < 4 or caps.storage_buffers < 30 or not whole:
        return False
    widest = max(dim, heads.count * heads.dim, ffn_dim if fast else 0)
    return all(
        heads.share * caps.subgroup <= crew.invocations <= caps.invocations and held(widest, heads, fast, crew, caps)
        for crew in crews(dim, caps)
    )


def held(width: int, heads: Heads, fast: bool, crew: Crew, caps: Caps) -> bool:
    """Whether the inputs of a linear fit into workgroup memory, as records or as f32."""
    inputs = width * 3 // 2 if fast else width * 4
    return inputs + joined_bytes(heads, crew, caps) <= caps.workgroup_bytes


def joined_bytes(heads: Heads, crew: Crew, caps: Caps) -> int:
    """Of workgroup memory, besides a linear's inputs: what attention's strands hand over, and sums by subgroup."""
    strands = max(1, joined_strands(heads.share, crew, caps) // 2)
    return heads.share * strands * (4 * heads.dim + 8) + 12 * crew.invocations // caps.subgroup


NORM = (
    Route("rms_norm_vec4", lambda width, c: width % 4 == 0, "width % 4 = 0", rows, ("reduce",)),
    Route("rms_norm", lambda width, c: True, "-", rows, ("reduce",)),
)

NORM_I8 = (Route("rms_norm_i8", lambda width, c: width % 32 == 0, "width % 32 = 0", rows, ("record", "reduce")),)

ATTEND = (
    Route("attend_split", lambda head_dim, m, c: m <= FEW[-1] and c.subgroup >= 4 and head_dim % 64 == 0,
          f"m <= {FEW[-1]}, head_dim % 64 = 0, subgroups", lambda grid, c, caps, m, pos: (*grid, m), ("kv8", "record")),
    Route("attend_tile", lambda d, m, c: m > FEW[-1] and d in range(32, 257, 32) and c.subgroup >= tile_share(d, False),
          f"m > {FEW[-1]}, head_dim % 32 = 0, <= 256, subgroups of 4 (over 64: of 8)", query_tiles,
          ("score", "kv8", "record")),
    Route("attend", lambda head_dim, m, c: head_dim % 4 == 0 and head_dim <= 256,
          "head_dim % 4 = 0, <= 256", lambda heads, c, caps, m, pos: (heads, m, 1), ("kv",)),
    Route("attend_any", lambda head_dim, m, c: True, "-", values, ("kv",)),
)  # fmt: skip

EMBED = (
    Route("embed", lambda s, c: words(s, 8), "k and group % 8 = 0",
          lambda s, c, caps, m, pos: (-(-s.k // (8 * c["WORKGROUP"])), m, 1), ("weight",)),
    Route("embed_any", lambda s, c: True, "-",
          lambda s, c, caps, m, pos: (-(-s.k // c["WORKGROUP"]), m, 1), ("weight",)),
)  # fmt: skip

TO_I8 = (
    Route("to_i8", lambda width, c: width % 32 == 0, "width % 32 = 0",
          lambda width, c, caps, m, pos: fold(-(-m * width // 8 // c["WORKGROUP"]), caps), ("record",)),
)  # fmt: skip

SILU_MUL = (Route("silu_mul", lambda width, c: True, "-", values),)


# A CPU adapter runs whole models on images (engine/tiled.py): tiled weights, 4 values of x, y and the caches a texel

LINEAR_IMAGE = (
    Route("linear_image_gemv", lambda s, c: s.m == 1 and (s.form == "tile_f32" or s.group % 32 == 0),
          "m = 1, group % 32 = 0", row_groups, ("tile", "spread", "reduce", "out"), {"STRIDE": 32}, vector=True),
    Route("linear_image_gemv", lambda s, c: s.m == 1,
          "m = 1", row_groups, ("tile", "spread", "reduce", "out"), {"STRIDE": 16}, vector=True),
    Route("linear_image", lambda s, c: True, "-", row_groups, ("tile", "spread", "out"), vector=True),
)  # fmt: skip

NORM_IMAGE = (Route("rms_norm_image", lambda width, c: True, "-", rows, ("reduce",), vector=True),)

ATTEND_IMAGE = (
    Route("attend_image", lambda heads, m, c: m > 1, "m > 1",
          lambda heads, c, caps, m, pos: (-(-m * heads.share // c["WORKGROUP"]), heads.kv, 1), ("spread",),
          vector=True),
    Route("attend_image_scores", lambda heads, m, c: True, "-",
          lambda heads, c, caps, m, pos: (score_groups(pos, c["WORKGROUP"]), heads.kv, 1), vector=True),
)  # fmt: skip

VALUES_IMAGE = (Route("attend_image_values", lambda heads, m, c: True, "-", eight_dims, vector=True),)

EMBED_IMAGE = (
    Route("embed_image", lambda s, c: True, "-",
          lambda s, c, caps, m, pos: (-(-s.k // (8 * c["WORKGROUP"])), m, 1), ("tile",), vector=True),
)  # fmt: skip

SILU_MUL_IMAGE = (
    Route("silu_mul_image", lambda width, c: True, "-",
          lambda width, c, caps, m, pos: (-(-width // (4 * c["WORKGROUP"])), m, 1), vector=True),
)  # fmt: skip


def attention(group: int, caps: Caps) -> tuple[Route, ...]:
    """The rows of ATTEND for `group` query heads per kv head: a workgroup of attend_split has a subgroup for each, one
    of attend_tile has 32 rows or more, which are at least one token of each."""
    unfit = {"attend_split"} if group * caps.subgroup > caps.invocations else set()
    unfit |= {"attend_tile"} if group > 32 else set()
    return tuple(route for route in ATTEND if route.kernel not in unfit)


RECORDING = ("attend_split", "attend_tile")  # these make int8 records themselves


def attention_records(head_dim: int, group: int, caps: Caps) -> bool:
    """Whether attention makes int8 records for any number of tokens: then nobody needs its f32 results."""
    table = attention(group, caps)
    return all(pick(table, head_dim, m, caps).kernel in RECORDING for m in (1, FEW[-1], FEW[-1] + 1))


def score_groups(pos: int, workgroup: int) -> int:
    """Workgroups of attend_image_scores for a token at `pos`, 4 positions a lane: a power of two, for few plans."""
    return 1 << (pos // (4 * workgroup)).bit_length()


def most_positions(head_dim: int, caps: Caps, images: bool) -> int | None:
    """How far attention may look back. llvmpipe ends the loops of an invocation after 65535 turns in sum, in silence;
    inner loops count unless it unrolls them. `attend` was wrong from 16 k (head_dim 256) to 31 k (8) positions on."""
    if not caps.cpu:
        return None
    if images:
        return 65532
    return 8192 if head_dim % 4 == 0 and head_dim <= 256 and not caps.scalar else 65000 // (head_dim + 8)


def tileable(dim: int, ffn_dim: int, head_dim: int, rope_dims: int, matrices: Iterable[Linear], caps: Caps) -> bool:
    """Whether a model runs on images: a CPU adapter, rows in whole tiles of 8 (gate and up are 4 each), heads whose
    loops llvmpipe unrolls, 16 k or more under a scale, nothing wider than an image."""
    whole = dim % 8 == 0 and ffn_dim % 4 == 0 and head_dim % 8 == 0 and head_dim <= 128 and rope_dims % 8 == 0
    return caps.cpu and not caps.scalar and whole and all(
        (s.form == "f16" or s.group % 16 == 0) and tile_texels(s) <= caps.image_side for s in matrices
    )  # fmt: skip


def tile_texels(s: Linear) -> int:
    """What 8 rows take: 2 texels for 8 k of q4, 4 of q8, 16 of f16 (stored as f32), and 4 for the scales of a group."""
    if s.form == "f16":
        return 2 * (-(-s.k // 32) * 32)
    return s.k // {"q4": 4, "q8": 2}[s.form] + s.k // s.group * 4


def merge_in_linear(k: int, splits: int) -> bool:
    """Whether the linear after attention joins its splits: every workgroup reads all k * splits partial sums."""
    return k * splits <= 32768


def norm_in_linear(k: int, caps: Caps) -> bool:
    """Whether the linears of one token normalise and quantise their input themselves."""
    return k <= 4096 and caps.storage_buffers >= 10 and caps.workgroup_bytes >= 32768


# attend_split by the positions it looks back over: (from, splits at most, strands at most). Whole tokens of four models
# were timed with 20 settings each at 16 to 2048 positions on an H200 (2026-11-15).
REACHES = ((1, 4, 2), (65, 4, 4), (193, 8, 4), (513, 16, 8), (1537, 32, 8), (8192, 64, 8))
MOST_SPLITS = 64


def reach(positions: int) -> int:
    """The row of REACHES, by its first number."""
    return max(first for first, _, _ in REACHES if first <= positions)


def splits(reach: int, kv_heads: int, m: int = 1) -> int:
    """Into how many parts attend_split cuts the context: no more than make 128 workgroups, 256 for the longest; for m
    tokens all the fewer."""
    most = next(splits for first, splits, _ in REACHES if first == reach)
    enough = max(2, 1 << max(0, (128 // kv_heads - 1).bit_length())) * (2 if reach >= 8192 else 1)
    return max(1, min(most, enough) // m)


def teams(head_dim: int, caps: Caps) -> dict[str, int]:
    """attend_split's lanes for a position, and positions that they have on their way. On an H200 (2026-11-15) 16 lanes
    save 3 to 4 % of 3B's and 8B's token, 4 positions 4 % of 1B's at a depth of 4096 (and cost 1 % of it at none)."""
    return {"TEAM": min(16 if head_dim % 128 == 0 else 8, caps.subgroup), "TAKES": 4}


def strands(group: int, head_dim: int, reach: int, caps: Caps) -> int:
    """Subgroups that attend_split gives each query head of a group: a power of two that the workgroup holds. Half of
    them hand over head_dim + 2 numbers of 4 bytes."""
    wanted = next(strands for first, _, strands in REACHES if first == reach)
    held = caps.workgroup_bytes // (group * (head_dim + 2) * 2)
    most = max(1, min(wanted, caps.invocations // (caps.subgroup * group), held))
    return 1 << (most.bit_length() - 1)


def width(m: int, chunk: int) -> int:
    """For how many tokens the plan that takes m of them is built."""
    return next((most for most in (1, *FEW, *SOME) if m <= most), chunk)


def chunk(caps: Caps, fast: bool) -> int:
    """Most tokens of a prompt's step where the user does not say. On an H200 1024 are 4 % faster than 512 in int8, and
    in f32, where they take more room, 4 % slower. (Prompts of F16 weights are f32 in `fast`, too: not measured.)"""
    return 1024 if fast and not caps.cpu else 512


def fits_any(table: tuple[Route, ...], *facts: object) -> bool:
    return any(route.fits(*facts) for route in table)


def pick(table: tuple[Route, ...], *facts: object) -> Route:
    """`facts`: the shape, then the Caps."""
    caps = facts[-1]
    rows = reversed(table) if isinstance(caps, Caps) and caps.scalar else table
    return next(route for route in rows if route.fits(*facts))
