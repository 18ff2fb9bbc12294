"""Which kernel runs which shape: the rules of the tables, pinned without a GPU."""

import ast
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from llamagpu.gpu import routes, shaders
from llamagpu.gpu.routes import Caps, Linear, fold, pick

GPU = Caps(
    cpu=False, half=True, subgroup=32, workgroups=65535, binding_bytes=1 << 31, workgroup_bytes=1 << 15,
    invocations=1024, storage_buffers=16,
)  # fmt: skip
FLOOR = Caps(
    cpu=False, half=False, subgroup=0, workgroups=65535, binding_bytes=128 << 20, workgroup_bytes=1 << 14,
    invocations=256, storage_buffers=8,
)  # fmt: skip
CPU = replace(FLOOR, cpu=True)
EVERY_CAPS = pytest.mark.parametrize("caps", [GPU, FLOOR, CPU], ids=["gpu", "floor", "cpu"])
NOT_CPU = pytest.mark.parametrize("caps", [GPU, FLOOR], ids=["gpu", "floor"])

LINEAR = [  # m, n, k, group, form -> kernel
    # one token, f32 inputs: u32 words where 8 weights do, of q8 and f16 16-byte loads
    (1, 4096, 4096, 32, "q4", "linear_gemv_word"),
    (1, 577, 96, 32, "q4", "linear_gemv_word"),
    (1, 1, 32, 32, "q4", "linear_gemv_word"),
    (1, 64, 256, 128, "q4", "linear_gemv_word"),
    (1, 64, 256, 16, "q4", "linear_gemv_word"),
    (1, 64, 4096, 32, "q8", "linear_gemv"),
    (1, 64, 576, 576, "f16", "linear_gemv"),
    (1, 64, 64, 8, "q4", "linear_gemv_word"),
    (1, 64, 72, 24, "q4", "linear_gemv_word"),
    (1, 64, 40, 40, "q4", "linear_gemv_word"),
    (1, 64, 32, 8, "q8", "linear_gemv_word"),
    (1, 64, 40, 40, "f16", "linear_gemv_word"),
    # a few tokens: rows are read once for all of them
    (2, 64, 64, 32, "q4", "linear_gemv_few"),
    (16, 64, 256, 16, "q8", "linear_gemv_few"),
    # many: tiles
    (17, 8192, 64, 32, "q4", "linear_gemm"),
    (65, 64, 64, 32, "q4", "linear_gemm"),
    # but where few would run
    (17, 64, 64, 32, "q4", "linear_gemm_rows"),
    (64, 2048, 2048, 32, "q4", "linear_gemm_rows"),
    (512, 4096, 4096, 32, "q4", "linear_gemm"),
    (33, 1, 8, 8, "q4", "linear_gemm_rows"),
    (7, 64, 40, 40, "f16", "linear_gemm_rows"),
    # the plain kernel for the rest
    (1, 64, 36, 12, "q4", "linear_any"),
    (1, 64, 30, 5, "q4", "linear_any"),
    (1, 64, 96, 3, "q8", "linear_any"),
    (1, 64, 129, 129, "f16", "linear_any"),
    (2, 64, 36, 12, "q4", "linear_any"),
    (2, 64, 129, 129, "f16", "linear_any"),
]


@NOT_CPU
@pytest.mark.parametrize("form, group", [("q4", 32), ("q4", 16), ("q6", 16), ("q8", 32), ("f16", 4096)])
@pytest.mark.parametrize("out", ["out_add", "out_logits"])
def test_linear_of_int8_records(caps, form, group, out):
    """16-byte loads for one token, whatever the form; logits with f32 inputs too."""
    assert pick(routes.LINEAR, Linear(1, 4096, 4096, group, form, "i8", out), caps).kernel == "linear_gemv"
    assert pick(routes.LINEAR, Linear(1, 4096, 4096, group, form, "f32", "out_logits"), caps).kernel == "linear_gemv"


@NOT_CPU
@pytest.mark.parametrize("m, n, k, group, form, kernel", LINEAR)
def test_linear(caps, m, n, k, group, form, kernel):
    assert pick(routes.LINEAR, Linear(m, n, k, group, form), caps).kernel == kernel


ON_CPU = [
    (1, 4096, 4096, 32, "q4", "linear_rows"),
    (1, 64, 64, 32, "q8", "linear_rows"),
    (1, 64, 40, 40, "f16", "linear_rows"),
    (1, 64, 129, 129, "f16", "linear_any"),
    (2, 64, 129, 129, "f16", "linear_any"),
]


@pytest.mark.parametrize("m, n, k, group, form, kernel", ON_CPU)
def test_linear_on_a_cpu(m, n, k, group, form, kernel):
    """Whole rows per lane: barriers and shared reductions cost a CPU more than the products."""
    assert pick(routes.LINEAR, Linear(m, n, k, group, form), CPU).kernel == kernel


@EVERY_CAPS
@pytest.mark.parametrize("width", [1, 3, 4, 576, 577, 4096])
def test_norm(caps, width):
    assert pick(routes.NORM, width, caps).kernel == ("rms_norm" if width % 4 else "rms_norm_vec4")


@pytest.mark.parametrize("head_dim", [6, 32, 48, 64, 80, 96, 128, 256, 260, 288])
def test_attention_of_many_tokens(head_dim):
    """Without subgroups: V along head_dim, 16 bytes at a time, where that can be done. With them: tiles of rows."""
    kernel = "attend" if head_dim % 4 == 0 and head_dim <= 256 else "attend_any"
    assert pick(routes.ATTEND, head_dim, 33, FLOOR).kernel == kernel
    tiled = head_dim in (32, 64, 96, 128, 256)
    assert pick(routes.ATTEND, head_dim, 33, GPU).kernel == ("attend_tile" if tiled else kernel)


def test_attention_of_a_few_tokens():
    assert pick(routes.ATTEND, 128, 16, GPU).kernel == "attend_split"
    assert pick(routes.ATTEND, 96, 16, GPU).kernel == "attend"


@pytest.mark.parametrize(
    "head_dim, subgroup, team", [(64, 32, 8), (128, 32, 16), (192, 32, 8), (256, 64, 16), (128, 8, 8), (64, 4, 4)]
)
def test_lanes_of_a_position(head_dim, subgroup, team):
    assert routes.teams(head_dim, replace(GPU, subgroup=subgroup))["TEAM"] == team
    assert head_dim % (8 * team) == 0 and subgroup % team == 0


def test_attention_of_many_heads_to_a_kv_head():
    """A workgroup of attend_split has room for 32 of them, one of attend_tile too."""
    kernels = [{r.kernel for r in routes.attention(group, GPU)} for group in (1, 32, 33)]
    assert kernels[0] == kernels[1] == {"attend_split", "attend_tile", "attend", "attend_any"}
    assert kernels[2] == {"attend", "attend_any"}


def test_attention_of_one_token():
    assert pick(routes.ATTEND, 128, 1, GPU).kernel == "attend_split"
    assert pick(routes.ATTEND, 128, 1, FLOOR).kernel == "attend"  # the split kernel needs subgroups
    assert pick(routes.ATTEND, 80, 1, GPU).kernel == "attend"
    assert pick(routes.ATTEND, 6, 1, GPU).kernel == "attend_any"


def test_tiles_of_attention_stay_in_a_subgroup():
    """Rows of a head of 128 are shared by eight lanes: four do not hold them."""
    assert pick(routes.ATTEND, 64, 33, replace(GPU, subgroup=4)).kernel == "attend_tile"
    assert pick(routes.ATTEND, 128, 33, replace(GPU, subgroup=4)).kernel == "attend"


def test_int8_attention_needs_a_key_in_a_subgroup():
    able = replace(GPU, f16=True)
    assert [routes.rough_tile(d, able) for d in (32, 64, 96, 128, 256)] == [True, True, False, True, True]
    assert not routes.rough_tile(128, replace(able, subgroup=8)) and not routes.rough_tile(64, GPU)


@pytest.mark.parametrize("m", [1, 2, 16, 17, 32, 33, 100, 256, 300, 512])
def test_a_plan_holds_its_tokens(m):
    assert m <= routes.width(m, 512) <= 512


@pytest.mark.parametrize("n", [16384, 2048, 960, 64])
def test_small_matrices_get_small_tiles(n):
    """512 tokens fill a large GPU with tiles of 64 x 64 or smaller ones; 32 tokens take smaller ones still."""
    for m in (512, 32):
        shape = Linear(m, n, 2048, 32, "q4", "i8")
        route = pick(routes.LINEAR, shape, GPU)
        x, y, _ = route.grid(shape, route.consts, GPU, m, 0)
        least = min(-(-m // 32) * -(-n // 16), 96)  # what the smallest tile would make
        assert route.kernel == "linear_gemm_i8" and x * y >= least


@EVERY_CAPS
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("group", [1, 8, 32, 33, 64, 65, 128])
def test_attention_of_heads_that_share_a_key(caps, group, head_dim):
    """Each of them has a subgroup of attend_split, and at least one row of attend_tile."""
    table = routes.attention(group, caps)
    assert pick(table, head_dim, 1, caps).kernel != "attend_split" or group * caps.subgroup <= caps.invocations
    tile = pick(table, head_dim, 33, caps)
    if tile.kernel == "attend_tile":
        share = routes.tile_share(head_dim, rough=False)
        assert tile.grid((group, 1, share), shaders.constants(tile.kernel), caps, 33, 0)[1] <= 33
    else:
        assert group > 32 or not caps.subgroup


@EVERY_CAPS
def test_embedding(caps):
    assert pick(routes.EMBED, Linear(1, 9, 64, 32, "q4"), caps).kernel == "embed"
    assert pick(routes.EMBED, Linear(1, 9, 33, 33, "f16"), caps).kernel == "embed_any"
    assert pick(routes.EMBED, Linear(1, 9, 30, 5, "q4"), caps).kernel == "embed_any"


@EVERY_CAPS
def test_the_last_row_fits_every_shape(caps):
    for m in (1, 2, 513):
        for k, group in ((1, 1), (7, 7), (30, 3), (4096, 32)):
            for form in ("q4", "q8", "f16"):
                assert routes.LINEAR[-1].fits(Linear(m, 1, k, group, form), caps)
                assert routes.EMBED[-1].fits(Linear(m, 1, k, group, form), caps)
        assert all(routes.ATTEND[-1].fits(head_dim, m, caps) for head_dim in (2, 6, 1000))
    assert all(routes.NORM[-1].fits(width, caps) for width in (1, 3, 8191))


@pytest.mark.parametrize("count", [1, 2, 65534, 65535, 65536, 131070, 131071, 10_000_000])
def test_fold(count):
    x, y, z = fold(count, GPU)
    assert x <= 65535 and y <= 65535 and z == 1
    assert count <= x * y < count + x  # all of them, and less than one row too many


def rows_made(route: routes.Route, own: dict[str, int]) -> int:
    """Rows of the result that one workgroup makes."""
    if route.grid is routes.row_pairs:
        return 2 * own.get("PAIRS", 1) * own["WORKGROUP"] // own["LANES"]
    if route.grid is routes.whole_rows:
        return own["ROWS"] * own["WORKGROUP"]
    if route.grid is routes.tiles:
        return own["TILE_N"]
    if route.grid is routes.pairs_and_tokens:
        return 2
    assert route.grid is routes.pairs_by_token, "a new grid: say how many rows its workgroups make"
    return 2 * own["WORKGROUP"]


@pytest.mark.parametrize("route", routes.LINEAR, ids=lambda r: f"{r.kernel} {r.needs}")
def test_linear_grids_cover_every_row_and_token(route):
    own = shaders.constants(route.kernel) | route.consts
    for n, m in product((1, 2, 63, 64, 65, 4097, 128256, 4_000_000), (1, 2, 64, 65, 512)):
        shape = Linear(m, n, 4096, 32, "q4", "i8" if route.kernel == "linear_gemm_i8" else "f32")
        if route.kernel == "linear_gemm_i8" and pick(routes.LINEAR, shape, GPU) is not route:
            continue  # small tiles are for small matrices
        x, y, z = route.grid(shape, own, GPU, m, 0)
        assert max(x, y, z) <= 65535
        if route.grid is routes.tiles:
            assert x * own["TILE_N"] >= n and y * own["TILE_M"] >= m and z == 1
        else:
            assert x * y * rows_made(route, own) >= n
            assert (x * y - x) * rows_made(route, own) < n  # no more than one row of the grid too many
            assert z == (m if route.grid in (routes.pairs_by_token, routes.pairs_and_tokens) else 1)


@pytest.mark.parametrize("table", ["LINEAR", "NORM", "NORM_I8", "ATTEND", "EMBED", "TO_I8", "SILU_MUL"])
def test_rows_name_real_kernels_and_constants(table):
    for route in getattr(routes, table):
        known = shaders.constants(route.kernel) | shaders.constants("out_swiglu_i8")
        assert set(route.consts) <= set(known), route.kernel
        assert route.needs


@pytest.mark.parametrize("kv_heads", [1, 3, 8, 32])
def test_splits(kv_heads):
    """More positions are never cut into fewer parts, nor into more than there is room for."""
    splits = [routes.splits(routes.reach(n), kv_heads) for n in (1, 2, 64, 100, 256, 385, 1000, 8192, 131072)]
    assert splits == sorted(splits) and splits[-1] <= routes.MOST_SPLITS
    few = [routes.splits(routes.reach(n), kv_heads, 16) * 16 for n in (1, 100, 8192)]
    assert all(count <= max(16, routes.MOST_SPLITS) for count in few)  # the same buffer holds them


def test_the_tables_need_no_gpu():
    """`devices --kernels` and these tests read them without a driver."""
    source = ast.parse(Path(routes.__file__).read_text())
    imported = {name.name for node in ast.walk(source) if isinstance(node, ast.Import) for name in node.names}
    imported |= {str(node.module) for node in ast.walk(source) if isinstance(node, ast.ImportFrom)}
    assert imported <= {"collections.abc", "dataclasses"}


def test_scalar_takes_the_last_rows():
    scalar = replace(GPU, scalar=True)
    assert pick(routes.LINEAR, Linear(1, 64, 64, 32, "q4"), scalar).kernel == "linear_any"
    assert pick(routes.LINEAR, Linear(9, 64, 64, 32, "q4", "i8"), scalar).kernel == "linear_gemm_i8"  # the rest cannot
    assert pick(routes.ATTEND, 64, 1, scalar).kernel == "attend_any"
    assert not routes.tileable(64, 64, 64, 64, [], replace(CPU, scalar=True))


@pytest.mark.parametrize("subgroup, lanes", [(0, 8), (4, 4), (8, 8), (16, 16), (32, 8)])
def test_a_vector_is_a_subgroup(subgroup, lanes):
    assert routes.vector(replace(CPU, subgroup=subgroup)) == lanes
