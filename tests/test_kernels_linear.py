"""Linear kernels against float64: every row of the route table, real shapes and ragged ones."""

import re
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
from kernel_cases import (
    FULL_CAPS,
    GUARD,
    SLOTS,
    SLOW,
    Steps,
    check_blocks,
    covers,
    fill,
    on_gpus,
    one_per_kernel,
    only,
    per_row,
    run,
    runs,
    segment,
    upload,
    upload_shards,
)
from reference import assert_close

from llamagpu.engine import baselines, ops, routes
from llamagpu.engine.ops import Ops, Output
from llamagpu.engine.options import KvType
from llamagpu.engine.routes import Epilogue, GridSize, Inputs, Linear, Prologue
from llamagpu.engine.synthetic import synthetic_config
from llamagpu.engine.weights import MatrixShard
from llamagpu.files.architectures import Activation
from llamagpu.files.config import LayerKind
from llamagpu.files.storage import Storage
from llamagpu.gpu.caps import MATRICES
from llamagpu.gpu.device import Dispatch
from llamagpu.verify import reference as verify_reference
from llamagpu.verify.kernels import linear_bound, matrix_case, mode_bound, swiglu_blocks
from llamagpu.verify.reference import (
    F32,
    HALVES,
    INT8_BLOCK,
    REQUANTISED,
    REQUANTISED_HALVES,
    ROUNDED_F16,
    TWO_HALVES,
    Weight,
    fits,
    linear_inputs,
    matrix_of,
    random,
    read_blocks,
    swiglu,
)

Q4, Q6, Q8, F16, BF16 = Storage.Q4, Storage.Q6, Storage.Q8, Storage.F16, Storage.BF16
SPLIT_K = (512, 1024, 2048)  # split twice, four and eight times
WEIGHTS = (
    Weight(Q4, 71, 576),  # Q4_0, the width of SmolLM2; odd n
    Weight(Q8, 71, 576),  # Q8_0; odd n
    Weight(F16, 71, 576),  # odd n
    Weight(Q4, 10, 8192, has_offset=True, scale_bits=8),  # Q4_K, the down projection of Llama 1B
    Weight(Q4, 10, 2048, has_offset=True, scale_bits=32),  # an AWQ file's offsets
    Weight(Q4, 130, 64, has_offset=True),  # Q4_1; a third tile of 2 rows
    Weight(Q4, 66, 256, 16, scale_bits=8),  # Q3_K
    Weight(Q4, 67, 768, 16, has_offset=True, scale_bits=8),  # Q2_K; an odd number of super-blocks, and of rows
    Weight(Q4, 64, 96, 16, has_offset=True, scale_bits=32),  # an odd number of blocks
    Weight(Q4, 3, 128, 16, has_offset=True),  # groups of 16 with offsets in f16
    Weight(Q4, 34, 256, 128),  # a group of four loads
    Weight(Q4, 9, 40, 8),  # a group of one u32
    Weight(Q4, 9, 36, 12, has_offset=True),  # k and group not % 8; words shared by rows
    Weight(Q4, 7, 30, 5),  # an odd group: the nibbles of a byte have two scales
    Weight(Q4, 1, 32),  # one row
    Weight(Q8, 10, 2048, has_offset=True, scale_bits=8),  # Q5_K
    Weight(Q8, 11, 512, scale_bits=8),  # IQ4_XS
    Weight(Q8, 66, 64, has_offset=True),  # Q5_1
    Weight(Q6, 71, 576, 16, scale_bits=32),  # Q6_K where f16 cannot be converted; odd n
    Weight(Q6, 130, 256, 16, scale_bits=8),  # Q6_K
    Weight(Q6, 7, 2048, 16, scale_bits=8),  # Q6_K, many super-blocks
    Weight(Q6, 1, 64, 16, scale_bits=32),  # the smallest
    Weight(Q8, 130, 96, 16, scale_bits=32),  # two scales per block
    Weight(Q8, 9, 32, 8),  # a group of 8
    Weight(Q8, 5, 96, 3, has_offset=True),  # an odd group
    Weight(Q8, 1, 32, 16, scale_bits=32),  # one row, one block
    Weight(F16, 65, 40),  # k % 8 but not % 32
    Weight(F16, 12, 129),  # odd k: padded rows
    Weight(BF16, 35, 192),  # beyond f16
    Weight(BF16, 12, 129),
    Weight(F16, 3, 6),  # less than one load
    Weight(F16, 1, 1),  # one weight
    Weight(Q4, 8193, 192),  # tiles enough for a large GPU; blocks left over when k is split
    Weight(Q8, 3073, 192, 16),  # fewer
    *(Weight(Q4, 70, k) for k in SPLIT_K),
)
TOKENS = (1, 2, 3, 7, 8, 9, 32, 33, 65, 70)
WIDTHS = {  # k that these inputs are tried with
    (Inputs.F32, Prologue.NONE): range(1, 8193),
    (Inputs.INT8, Prologue.NONE): (128, 192, 256, 512, 576, 1024, 2048),
    (Inputs.INT8, Prologue.NORM): (576,),
    (Inputs.INT8, Prologue.MERGE): (576,),
}


@dataclass(frozen=True)
class LinearCase:
    weight: Weight
    inputs: Inputs = Inputs.F32
    prologue: Prologue = Prologue.NONE
    epilogue: Epilogue = Epilogue.STORE

    @property
    def name(self) -> str:
        x = [self.inputs] * (self.inputs is not Inputs.F32) + [self.prologue] * (self.prologue is not Prologue.NONE)
        return "-".join([*self.weight.name.split(), *x])

    @property
    def first(self) -> bool:
        split = self.inputs is Inputs.INT8 and self.weight in WEIGHTS[-len(SPLIT_K) :]
        return self.weight == WEIGHTS[0] or self.epilogue is not Epilogue.STORE or self.weight.n > 2000 or split

    @property
    def main(self) -> bool:
        no_prologue = (self.inputs, self.prologue) == (Inputs.F32, Prologue.NONE)
        return self.epilogue is not Epilogue.STORE or (self.weight.k == 576 and (no_prologue or self.first))

    def bound(self, gpu, route) -> verify_reference.Bound:
        return linear_bound(gpu, route, self.weight, (self.inputs, self.prologue))

    def shape(self, m: int) -> Linear:
        return self.weight.shape(m, self.inputs, self.prologue, self.epilogue)

    def tokens(self, route, caps) -> list[int]:
        """The numbers of token rows that the route takes."""
        return [m for m in TOKENS if fits(route, self.shape(m), caps)]

    def fits(self, route, caps) -> bool:
        """Workgroup epilogues run only on routes that no plain epilogue fits: the others have cases enough."""
        stores = self.epilogue is not Epilogue.STORE and replace(self, epilogue=Epilogue.STORE).fits(route, caps)
        return bool(self.tokens(route, caps)) and not stores


LINEAR = runs(
    (*routes.LINEAR, baselines.GEMM_ROWS),
    [LinearCase(weight, *mode) for weight in WEIGHTS for mode, widths in WIDTHS.items() if weight.k in widths],
    at_minimum=lambda case: case.weight.k == 576,
)


@covers("linear_sum")
@on_gpus(LINEAR)
def test_linear(any_gpu, route, case):
    gpu, table, tokens = any_gpu, only(any_gpu, route, case), case.tokens(route, any_gpu.caps)
    shard, w = upload(gpu, case.weight)
    matrix, n, most = matrix_of(shard), case.weight.n, max(tokens)
    given = linear_inputs(gpu, most, case.weight.k, case.inputs, case.prologue)
    want = given.values @ w.T
    y, step = gpu.zeros((most + 1) * n * 4, "y"), Steps(gpu)
    make, output = Ops(gpu, step.buffer), ops.store(y, matrix)
    tried = {1, 3, 9, 33} if n > 2000 else {m for m in tokens if m < 64 or n * case.weight.k < 20_000}  # for time
    for m in tried.intersection(tokens) or {min(tokens)}:
        step.write_rows(m)
        fill(gpu, y, most + 1, n)
        plan = make.linear(given.x, matrix, 1 if m == 1 else most, output, given.inputs, given.prologue, table)
        sums = ["linear_sum"] if "GRID_SPLIT" in route.consts else []
        assert [dispatch.kernel for dispatch in plan] == [route.kernel, *sums]
        run(gpu, plan, m)
        got = gpu.read(y, np.float32, (most + 1) * n).reshape(-1, n)
        assert_close(got[:m], want[:m], *case.bound(gpu, route), f"{m} rows")
        assert (got[m:] == GUARD).all(), f"{m} rows: wrote behind the last"


MATRIX_TILES = [r for r in routes.LINEAR if r.kernel == "linear_matrix"]


ON_MATRICES = [("16x16", w) for w in WEIGHTS if w.k in (256, 576, 768)] + [("16x8", WEIGHTS[0]), ("8x8", WEIGHTS[0])]


@covers("linear_matrix")
@pytest.mark.parametrize(
    "matrix, weight",
    [
        pytest.param(matrix, w, marks=[pytest.mark.slow] if i else [], id=f"{matrix}-{w.name}")
        for i, (matrix, w) in enumerate(ON_MATRICES)
    ],
)
def test_linears_on_matrices(matrix_gpu, weight):
    """On an adapter without matrices few tiles on Q4_0: its compiler takes seconds. One on the other storages."""
    tiles = [route for route in MATRIX_TILES if routes.matrix_tile_bytes(route.consts) <= matrix_gpu.caps.shared_bytes]
    if not matrix_gpu.matrices:
        tiles = [
            route for route in tiles if route.consts.get("GRID_SPLIT", 1) == (2 if route.consts["TILE_M"] == 64 else 1)
        ]
    last = {route.consts.get("TERMS", 1): route for route in tiles}  # of f16 and of f32 inputs
    for route in tiles if weight == WEIGHTS[0] else last.values():
        case = matrix_case(matrix_gpu, route, weight)
        assert_close(*case.compare(), *case.bound, case.shape)


@pytest.mark.parametrize("matrix", ["16x16"])
@pytest.mark.parametrize(
    "weight, rows, columns, splits, scales",
    [
        (Weight(Q4, 70, 768), 16, 32, 1, "words"),
        (Weight(Q4, 70, 768), 16, 32, 7, "words"),
        (Weight(Q4, 70, 768), 32, 64, 1, "words"),
        (Weight(Storage.Q8, 70, 768), 16, 32, 7, "words"),
        (Weight(Q4, 70, 768, has_offset=True, scale_bits=8), 16, 32, 7, "super_block"),
        (Weight(Q6, 70, 768, 16, scale_bits=8), 32, 64, 1, "super_block"),
        (Weight(Q4, 70, 768, 16, has_offset=True, scale_bits=8), 16, 32, 1, "v"),  # as Q2_K has them
        (Weight(Storage.F16, 70, 768), 16, 32, 7, "none"),
    ],
    ids=lambda given: given.name if isinstance(given, Weight) else None,
)
def test_rounds_of_eight_blocks(matrix_gpu, weight, rows, columns, splits, scales):
    """Three rounds, so that four of seven splits are empty. Fewer rows than the plan takes.

    `scales` is what an invocation keeps of them: of eight blocks, of a super-block, of one block, nothing.
    """
    gpu, most, m = matrix_gpu, 21, 18
    shard, packed = weight.upload(gpu, keep_scales=True)
    given, step = linear_inputs(gpu, most, weight.k, Inputs.F16), Steps(gpu)
    y, make = gpu.zeros((most + 1) * weight.n * 4, "y"), Ops(gpu, step.buffer)
    fill(gpu, y, most + 1, weight.n)
    fill(gpu, make.partial_sums(splits * most * weight.n * 4), splits, most, weight.n)
    tile = {"TILE_M": rows, "TILE_N": columns}
    whole = [route for route in MATRIX_TILES if "TERMS" not in route.consts and tile.items() <= route.consts.items()]
    table = verify_reference.only(next(route for route in whole if route.consts.get("GRID_SPLIT", 1) == splits))
    plan = make.linear(given.x, matrix_of(shard), most, ops.store(y, matrix_of(shard)), Inputs.F16, table=table)
    assert f"struct BlockScale {{ {scales}: " in plan[0].source
    step.write_rows(m)
    run(gpu, plan, m)
    got = gpu.read(y, np.float32, (most + 1) * weight.n).reshape(-1, weight.n)
    want = given.values @ verify_reference.rows_of(packed, np.arange(weight.n)).T
    assert_close(got[:m], want[:m], *HALVES)
    assert (got[m:] == GUARD).all(), "wrote behind the last row"


SKINNY = [r for r in routes.LINEAR if r.kernel == "linear_skinny"]


@covers("linear_skinny")
@pytest.mark.parametrize("matrix", ["16x16"])
@pytest.mark.parametrize(
    "storage, teams, splits",
    [
        (Q4, 8, 3),
        (Q6, 4, 1),
        pytest.param(Q4, 4, 1, marks=pytest.mark.slow),
    ],
)
def test_skinny(matrix_gpu, storage, teams, splits):
    """Into the residual stream, of fewer rows than the plan takes. Two workgroups take the strips in turn.

    A GPU with matrices runs all routes that are not gated, of Q6_K also in splits. test_model.py has one that is.
    """
    of_all = [route for route in SKINNY if "EPILOGUE_ROWS" not in route.consts]
    of_all = [route for route in of_all if routes.has_room_for_skinny(route.consts["TEAMS"], matrix_gpu.caps)]
    chosen = [r for r in of_all if (r.consts["TEAMS"], r.consts.get("GRID_SPLIT", 1)) == (teams, splits)]
    for route in of_all if matrix_gpu.matrices else chosen:
        splits, most, n = route.consts.get("GRID_SPLIT", 1), 16, 80
        in_turn = replace(route, grid=lambda *_, z=splits: (1, 2, z))
        k = routes.SKINNY_SLICE * route.consts["TEAMS"] * splits
        weight = Weight(Q4, n, k) if storage is Q4 else Weight(Q6, n, k, 16, scale_bits=8)
        check_skinny(matrix_gpu, in_turn, weight, most)


def check_skinny(gpu, route, weight, most):
    shard, w = upload(gpu, weight)
    given, step, matrix = linear_inputs(gpu, most, weight.k, Inputs.F16), Steps(gpu), matrix_of(shard)
    residual = random("y").standard_normal((most + 1, weight.n)).astype(np.float32)
    make, splits = Ops(gpu, step.buffer), route.consts.get("GRID_SPLIT", 1)
    fill(gpu, make.partial_sums(splits * most * weight.n * 4), splits, most, weight.n)
    for m in (9, 16):
        y = gpu.upload(residual, "y")
        table = verify_reference.only(route)
        plan = make.linear(given.x, matrix, most, ops.add(y, matrix), Inputs.F16, table=table)
        assert [d.kernel for d in plan] == ["linear_skinny", *["linear_sum"] * (splits > 1)]
        step.write_rows(m)
        run(gpu, plan, m)
        got = gpu.read(y, np.float32, residual.size).reshape(residual.shape)
        assert_close(got[:m], residual[:m] + given.values[:m] @ w.T, *HALVES, f"{m} rows")
        assert (got[m:] == residual[m:]).all(), f"{m} rows: wrote behind the last"


TWO_HALVES_TILES = [r for r in MATRIX_TILES if r.consts.get("TERMS") == 3 and r.consts["TILE_M"] == 64]


@pytest.mark.parametrize("matrix", ["16x16"])
def test_any_f32_on_matrices(matrix_gpu):
    """Small and large numbers, and what is none: it must not become one."""
    gpu, m, weight = matrix_gpu, 70, Weight(Q4, 71, 576)
    shard, w = upload(gpu, weight)
    y, step, x = gpu.zeros(m * weight.n * 4, "y"), Steps(gpu), random("x").standard_normal((m, weight.k)) * 10.0**-2
    x[3], x[4] = 5e6 * x[3], 1e-2 * x[4]
    x[7, 9], x[8, 10], x[9, 11], x[10, 12] = np.nan, np.inf, -np.inf, 1e6
    given = gpu.upload(x.astype(np.float32), "x")
    step.write_rows(m)
    output, table = ops.store(y, matrix_of(shard)), verify_reference.only(TWO_HALVES_TILES[0])
    run(gpu, Ops(gpu, step.buffer).linear(given, matrix_of(shard), m, output, table=table), m)
    got = gpu.read(y, np.float32, m * weight.n).reshape(m, weight.n)
    bad = np.arange(7, 11)
    assert not np.isfinite(got[bad]).any()
    with np.errstate(invalid="ignore"):
        want = x.astype(np.float32).astype(np.float64) @ w.T
    others = np.delete(np.arange(m), [3, 4, *bad])
    for rows in (others, [3]):
        assert_close(got[rows], want[rows], *TWO_HALVES)
    assert_close(got[[4]], want[[4]], *HALVES)  # numbers of 1e-4 are whole 2^-22


@pytest.mark.parametrize("matrix", ["16x16"])
def test_the_largest_f16_weights_on_matrices(matrix_gpu):
    gpu, m, n, k = matrix_gpu, 66, 64, 64
    w = random("w").standard_normal((n, k)).astype(np.float16)
    w[3, 5], w[60, 7] = 65504, -5000
    shard = MatrixShard(0, n, Weight(F16, n, k).upload(gpu)[0].layout, gpu.upload(w.view(np.uint32), "w"), None)
    y, step, given = gpu.zeros(m * n * 4, "y"), Steps(gpu), linear_inputs(gpu, m, k)
    step.write_rows(m)
    output, table = ops.store(y, matrix_of(shard)), verify_reference.only(TWO_HALVES_TILES[0])
    run(gpu, Ops(gpu, step.buffer).linear(given.x, matrix_of(shard), m, output, table=table), m)
    want = given.values @ w.astype(np.float64).T
    assert_close(gpu.read(y, np.float32, m * n).reshape(m, n), want, *TWO_HALVES)


@pytest.mark.parametrize("matrix", ["16x16"])
def test_f32_on_matrices_in_shards_with_splits_and_a_bias(matrix_gpu):
    gpu, m = matrix_gpu, 66
    matrix, w, bias = upload_shards(gpu, Weight(Q4, 70, 576), Weight(Q4, 34, 576))
    given, step, residual = linear_inputs(gpu, m, 576), Steps(gpu), random("y").standard_normal((m, matrix.n))
    step.write_rows(m)
    for route in TWO_HALVES_TILES[:2]:  # whole and split
        y = gpu.upload(residual.astype(np.float32), "y")
        table = verify_reference.only(route)
        run(gpu, Ops(gpu, step.buffer).linear(given.x, matrix, m, ops.add(y, matrix), table=table), m)
        got = gpu.read(y, np.float32, m * matrix.n).reshape(m, matrix.n)
        want = residual.astype(np.float32) + given.values @ w.T + bias
        assert_close(got, want, *TWO_HALVES, route.needs)


@pytest.mark.parametrize("matrix", MATRICES)
def test_gated_units_on_matrices(matrix_gpu):
    tiles = [route for route in MATRIX_TILES if routes.matrix_tile_bytes(route.consts) <= matrix_gpu.caps.shared_bytes]
    whole = [route for route in tiles if not {"GRID_SPLIT", "TERMS"} & set(route.consts)]
    for route in whole if matrix_gpu.matrices else (*whole[:3], whole[-1]):
        m = route.consts["TILE_M"] + 5
        assert_close(*swiglu_blocks(matrix_gpu, route, Inputs.F16, m, Inputs.F16), *HALVES, route.needs)
        if "EPILOGUE_ROWS" not in route.consts and (matrix_gpu.matrices or route == whole[1]):
            assert_close(*swiglu_blocks(matrix_gpu, route, Inputs.F16, m), *REQUANTISED_HALVES, route.needs)


@pytest.mark.parametrize("matrix", ["16x16"])
def test_half_blocks_of_shards(matrix_gpu):
    gpu, m = matrix_gpu, 18
    matrix, w, bias = upload_shards(gpu, Weight(Q4, 192, 64), Weight(Q4, 64, 64))
    given, step, y = linear_inputs(gpu, m, 64, Inputs.F16), Steps(gpu), gpu.zeros(m * matrix.n, "y")
    step.write_rows(m)
    table = verify_reference.only(MATRIX_TILES[0])
    assert table[0].consts["EPILOGUE_ROWS"] == 32
    make, output = Ops(gpu, step.buffer), partial(ops.glu_blocks, y, matrix, Activation.SILU)
    run(gpu, make.linear(given.x, matrix, m, output(blocks=Inputs.F16), Inputs.F16, table=table), m)
    got = verify_reference.read_values(gpu, y, m, matrix.n // 2, Inputs.F16)
    assert_close(got, verify_reference.swiglu(given.values @ w.T + bias), *HALVES)
    with pytest.raises(AssertionError, match="as a whole"):
        make.linear(given.x, matrix, m, output(), Inputs.F16, table=table)


F32_TILES = [r for r in routes.LINEAR if r.kernel == "linear_gemm"]


@pytest.mark.parametrize("weight", [Weight(Q4, 71, 576), Weight(F16, 66, 40)], ids=lambda weight: weight.name)
@pytest.mark.parametrize(
    "route",
    F32_TILES,
    ids=lambda r: f"{r.consts['TILE_M']}x{r.consts['TILE_N']}",
)
def test_every_f32_tile(gpu, route, weight):
    """Two tiles of tokens, the last one ragged, whether or not a GPU would have enough of them."""
    if gpu.caps.shared_bytes < 24576:
        pytest.skip("the adapter lacks workgroup memory for the large tile")
    shard, w = upload(gpu, weight)
    m, matrix = 130, matrix_of(shard)
    given, step = linear_inputs(gpu, m, weight.k), Steps(gpu)
    y = gpu.zeros((m + 1) * weight.n * 4, "y")
    fill(gpu, y, m + 1, weight.n)
    step.write_rows(m)
    table = verify_reference.only(route)
    run(gpu, Ops(gpu, step.buffer).linear(given.x, matrix, m, ops.store(y, matrix), table=table), m)
    got = gpu.read(y, np.float32, (m + 1) * weight.n).reshape(-1, weight.n)
    assert_close(got[:m], given.values @ w.T, *F32)
    assert (got[m:] == GUARD).all(), "wrote behind the last row"


BATCH_ROUTES = [route for route in routes.LINEAR if route.kernel == "linear_gemv_batch"]
LARGE_MATRICES = [route for route in BATCH_ROUTES if re.search("large matrix|vocabulary", route.needs)]
LARGE_GATED_UNITS = [route for route in BATCH_ROUTES if "int8 results, n >" in route.needs]
LARGE = (*LARGE_MATRICES, *LARGE_GATED_UNITS)


@pytest.mark.parametrize("weight", [Weight(Q4, 71, 576), Weight(Q6, 67, 2048, 16, scale_bits=8)], ids=lambda w: w.name)
@pytest.mark.parametrize("route", LARGE_MATRICES, ids=lambda r: f"{r.consts['TOKENS']}-{r.consts['LANES']}")
def test_gemv_batch_of_large_matrices(gpu, route, weight):
    """On small ones, for time."""
    most = route.consts["TOKENS"]
    check_rows(gpu, weight, most, (most, most // 2 + 1), Inputs.INT8, verify_reference.only(route))


OTHER_LAYOUTS = (
    Weight(Q4, 130, 64, has_offset=True),
    Weight(Q4, 66, 256, 16, scale_bits=8),
    Weight(Q4, 30, 768, has_offset=True, scale_bits=8),
    Weight(Q8, 66, 64, has_offset=True),
    Weight(Q8, 130, 96, 16, scale_bits=32),
    Weight(BF16, 35, 192),
)


@pytest.mark.parametrize("weight", OTHER_LAYOUTS, ids=lambda w: w.name)
def test_gemv_batch_of_other_layouts(gpu, weight):
    """In f32, in the kernel of few rows, which compiles faster than that of many."""
    (dispatch,) = check_rows(gpu, weight, 4, (4, 3), Inputs.F32, routes.LINEAR)
    assert dispatch.kernel == "linear_gemv_batch" or gpu.caps.subgroup < 4


def check_rows(gpu, weight, most, counts, inputs, table) -> list[Dispatch]:
    """A linear of up to so many rows, with each of these numbers of them."""
    shard, w = upload(gpu, weight)
    matrix = matrix_of(shard)
    given, step = linear_inputs(gpu, most, weight.k, inputs), Steps(gpu)
    y = gpu.zeros((most + 1) * weight.n * 4, "y")
    plan = Ops(gpu, step.buffer).linear(given.x, matrix, most, ops.store(y, matrix), inputs, table=table)
    for m in counts:
        fill(gpu, y, most + 1, weight.n)
        step.write_rows(m)
        run(gpu, plan, m)
        got = gpu.read(y, np.float32, (most + 1) * weight.n).reshape(-1, weight.n)
        assert_close(got[:m], (given.values @ w.T)[:m], *mode_bound(gpu, (inputs, Prologue.NONE)), f"{m} rows")
        assert (got[m:] == GUARD).all(), "wrote behind the last row"
    return plan


@pytest.mark.parametrize("route", LARGE_GATED_UNITS, ids=lambda route: str(route.consts["TOKENS"]))
def test_gemv_batch_of_large_gated_units(gpu, route):
    """On small ones, for time."""
    for m in (route.consts["TOKENS"], route.consts["TOKENS"] - 1):
        assert_close(*swiglu_blocks(gpu, route, Inputs.INT8, m), *REQUANTISED, f"{m} rows")


STAGES = (
    Weight(Q4, 71, 576),
    Weight(Q4, 70, 2048, has_offset=True),
    Weight(Q6, 71, 768, 16, scale_bits=8),
    Weight(Q4, 30, 5376, has_offset=True, scale_bits=8),
    Weight(Q8, 71, 192),
    Weight(F16, 70, 576),
    Weight(BF16, 6, 192),
)


@covers("linear_gemv_fused")
@pytest.mark.parametrize("inputs", [Inputs.INT8, Inputs.F32])
@pytest.mark.parametrize("prologue", [Prologue.NORM, Prologue.SUM_NORM, Prologue.MERGE, Prologue.MERGE_SINKS])
@pytest.mark.parametrize("weight", STAGES, ids=lambda weight: weight.name)
def test_linear_gemv_fused(gpu, weight, prologue, inputs):
    """A stage of fused decode as a separate kernel: a grid-stride loop over 1, 3 and as many workgroups as rows
    need."""
    if not gpu.caps.subgroup:
        pytest.skip("the adapter lacks subgroups")
    shard, w = upload(gpu, weight)
    matrix, y = matrix_of(shard), gpu.zeros(weight.n * 4, "y")
    given = linear_inputs(gpu, 1, weight.k, inputs, prologue)
    make = Ops(gpu, verify_reference.step_buffer(gpu, 1))
    for count in (1, 3, 64):
        table = (routes.fused_linear(shard.shape(1, inputs, prologue), GridSize(count, 128), gpu.caps),)
        (found,) = make.linear(given.x, matrix, 1, ops.store(y, matrix), inputs, given.prologue, table)
        fill(gpu, y, weight.n)
        run(gpu, [replace(found, grid=(min(count, found.grid_for(1, 0)[0]), 1, 1))])
        bound = mode_bound(gpu, (inputs, prologue))
        assert_close(gpu.read(y, np.float32, weight.n), (given.values @ w.T)[0], *bound, f"{count} workgroups")


@covers("linear_gemv_fused_batch")
@pytest.mark.parametrize(
    "weight, prologue, rows",
    [
        *((STAGES[0], prologue, 4) for prologue in (Prologue.NONE, Prologue.NORM, Prologue.MERGE)),
        *((weight, Prologue.NONE, 2) for weight in STAGES[1:]),
        (STAGES[2], Prologue.NORM, 2),
        *((STAGES[0], Prologue.BLOCKS, rows) for rows in routes.FUSED_PREFETCH),
        *((weight, Prologue.BLOCKS, 4) for weight in STAGES[1:]),
    ],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_linear_gemv_fused_batch(gpu, weight, prologue, rows):
    """A stage of fused decode of several rows as a separate kernel, also with fewer rows than it takes, and with inputs
    that are copied in pieces."""
    if gpu.caps.subgroup < 2 or (prologue is Prologue.NORM and weight.k % (8 * gpu.caps.subgroup)):
        pytest.skip("the adapter lacks subgroups, or a row is no whole number of them")
    shard, w = upload(gpu, weight)
    matrix, y = matrix_of(shard), gpu.zeros((rows + 1) * weight.n * 4, "y")
    given = linear_inputs(gpu, rows, weight.k, Inputs.INT8, prologue)
    want, step = given.values @ w.T, Steps(gpu)
    make = Ops(gpu, step.buffer)
    for m, count in ((rows, 1), (rows - 1, 64)):
        step.write_rows(m)
        route = routes.fused_linear(shard.shape(rows, Inputs.INT8, prologue), GridSize(count, 128), gpu.caps)
        spec = given.prologue
        if prologue is Prologue.BLOCKS:
            piece = 32 * route.consts["LANES"] * route.consts["PREFETCH"]
            whole = routes.piece_width(shard.shape(rows), route, half_sums=True, caps=gpu.caps)
            spec = replace(spec, consts={"INPUT_WIDTH": min(piece, weight.k) if count == 1 else whole})
        (found,) = make.linear(given.x, matrix, rows, ops.store(y, matrix), Inputs.INT8, spec, (route,))
        fill(gpu, y, rows + 1, weight.n)
        run(gpu, [replace(found, grid=(min(count, found.grid_for(m, 0)[0]), 1, 1))], m)
        got = gpu.read(y, np.float32, (rows + 1) * weight.n).reshape(-1, weight.n)
        bound = mode_bound(gpu, (Inputs.INT8, prologue))
        assert_close(got[:m], want[:m], *bound, f"{m} rows, {count} workgroups")
        assert (got[m:] == GUARD).all(), f"{m} rows: wrote behind the last"


@pytest.mark.parametrize("rows, m", [(4, 4), (8, 7), (8, 3), (16, 16)])
def test_units_that_two_workgroups_share(gpu, rows, m):
    """Each computes half of the tokens: of 6 units for 4 workgroups the last two."""
    if gpu.caps.subgroup < 2:
        pytest.skip("the adapter lacks subgroups")
    shard, w = upload(gpu, Weight(Q4, 384, 192))
    matrix, given = matrix_of(shard), linear_inputs(gpu, rows, 192, Inputs.INT8, Prologue.BLOCKS)
    shape, grid = shard.shape(rows, Inputs.INT8, Prologue.BLOCKS, Epilogue.GLU_BLOCKS), GridSize(4, 128)
    route = routes.fused_linear(shape, grid, gpu.caps)
    assert route.consts["SHARED_UNITS"] == 2
    y = gpu.zeros((rows + 1) * 6 * INT8_BLOCK.itemsize, "y")
    fill(gpu, y, (rows + 1) * 6, 12)
    make = Ops(gpu, verify_reference.step_buffer(gpu, m))
    output = ops.glu_blocks(y, matrix, Activation.SILU, persistent=True)
    (found,) = make.linear(given.x, matrix, rows, output, Inputs.INT8, given.prologue, (route,))
    run(gpu, [replace(found, grid=(grid.workgroups, 1, 1))], m)
    got = read_blocks(gpu, y, rows + 1, 6)
    check_blocks(got[:m], swiglu(given.values @ w.T)[:m], mode_bound(gpu, (Inputs.INT8, Prologue.BLOCKS)))
    assert (got[m:].view(np.float32) == GUARD).all()


@pytest.mark.parametrize("prologue", [Prologue.NORM, Prologue.MERGE])
def test_rows_that_half_a_subgroup_shares(gpu, prologue):
    """As with Tint, where a whole one would have idle lanes."""
    if (subgroup := gpu.caps.subgroup) < 4:
        pytest.skip("the adapter lacks subgroups")
    # all invocations have rows, a subgroup of them one and a half blocks for each lane
    caps, weight = replace(gpu.caps, tint=True), Weight(Q4, 512 // subgroup - 1, 32 * subgroup // 2 * 3)
    shard, w = upload(gpu, weight)
    matrix, y = matrix_of(shard), gpu.zeros(weight.n * 4, "y")
    given = linear_inputs(gpu, 1, weight.k, Inputs.INT8, prologue)
    route = routes.fused_linear(shard.shape(1, Inputs.INT8, prologue), GridSize(1, 128), caps)
    assert route.consts["LANES"] == subgroup // 2
    make = Ops(gpu, verify_reference.step_buffer(gpu, 1))
    (found,) = make.linear(given.x, matrix, 1, ops.store(y, matrix), Inputs.INT8, given.prologue, (route,))
    run(gpu, [replace(found, grid=(1, 1, 1))])
    bound = mode_bound(gpu, (Inputs.INT8, prologue))
    assert_close(gpu.read(y, np.float32, weight.n), (given.values @ w.T)[0], *bound, str(route.consts))


# Epilogues, in a matrix of two shards of different storage, cut inside a head, with a bias

SHARDS = (Weight(Q4, 14, 64), Weight(Q8, 58, 64, has_offset=True, scale_bits=32))
MIXED = LinearCase(SHARDS[0])
STORE_ROUTES = one_per_kernel([route for route in routes.LINEAR if MIXED.fits(route, FULL_CAPS)])


@pytest.mark.parametrize("epilogue", [Epilogue.ADD, Epilogue.GLU])
@pytest.mark.parametrize("route", [r for r in STORE_ROUTES if r.kernel not in SLOW], ids=lambda r: r.kernel)
def test_epilogue_add_and_swiglu(gpu, route, epilogue):
    matrix, w, bias = upload_shards(gpu, *SHARDS)
    table, tokens = only(gpu, route, MIXED), MIXED.tokens(route, gpu.caps)
    most = max(tokens)
    given = linear_inputs(gpu, most, 64)
    sums = given.values @ w.T + bias
    before = random("y").standard_normal((most + 1, 36 if epilogue is Epilogue.GLU else 72)).astype(np.float32)
    y, step = gpu.zeros(before.nbytes, "y"), Steps(gpu)
    make = Ops(gpu, step.buffer)
    if epilogue is Epilogue.ADD:
        output, want = ops.add(y, matrix), before[:-1] + sums
    else:
        output, want = ops.glu(y, matrix, Activation.SILU), swiglu(sums)
    for m in {min(tokens), most, min(9, most)}:
        step.write_rows(m)
        gpu.write(y, before)
        run(gpu, make.linear(given.x, matrix, 1 if m == 1 else most, output, table=table), m)
        got = gpu.read(y, np.float32, before.size).reshape(before.shape)
        assert_close(got[:m], want[:m], *F32, f"{m} rows")
        assert (got[m:] == before[m:]).all(), f"{m} rows: wrote behind the last"


@pytest.mark.parametrize("kv_type", [KvType.F16, KvType.F32], ids=lambda kv_type: f"kv_{kv_type}")
@pytest.mark.parametrize("route", STORE_ROUTES, ids=lambda route: route.kernel)
def test_epilogue_qkv(gpu, route, kv_type):
    """q is rotated and stored. k, rotated, and v go to the slot and position of their row, and nowhere else."""
    c, capacity = replace(synthetic_config("tiny"), heads=8, kv_heads=2, head_dim=6, rope_dims=4), 80
    matrix, w, bias = upload_shards(gpu, *SHARDS)
    table, tokens = only(gpu, route, MIXED), MIXED.tokens(route, gpu.caps)
    most = max(tokens)
    given = linear_inputs(gpu, most, 64)
    angle = random("qkv").uniform(0, 6, (capacity, 2))
    rope = np.stack([np.cos(angle), np.sin(angle)], axis=2).astype(np.float32)
    dtype = np.float32 if kv_type is KvType.F32 else np.float16
    step = Steps(gpu, capacity, SLOTS)
    cache_shape = (2, step.table.capacity, 6)
    q = gpu.zeros((most + 1) * 48 * 4, "q")
    k, v = (gpu.zeros(np.empty(cache_shape, dtype).nbytes, name) for name in "kv")
    make, buffers = step.ops, ops.QkvBuffers(q, k, v, gpu.upload(rope, "rope"))
    steps = [[segment(1, 0, min(tokens))], [segment(2, capacity - most, most)]]
    if most > 1:  # of three sequences
        steps.append([segment(2, 3, 1), segment(0, 79, 1), segment(1, 17, min(9, most) - 2)])
    for segments, one_segment in [*((s, False) for s in steps), (steps[1], True)]:
        m, rows_at = len(per_row(segments)), per_row(segments)
        output = ops.qkv(c, LayerKind(), matrix, buffers, kv_type, one_segment)
        step.write(*segments)
        fill(gpu, q, most + 1, 48)
        fill(gpu, k, *cache_shape, dtype=dtype)
        fill(gpu, v, *cache_shape, dtype=dtype)
        run(gpu, make.linear(given.x, matrix, 1 if m == 1 else most, output, table=table), m)
        rows = (given.values[:m] @ w.T + bias).reshape(m, 12, 6)
        cos, sin = np.moveaxis(rope[[position for _, position in rows_at], None].astype(np.float64), 3, 0)
        a, b = rows[:, :10, 0:4:2].copy(), rows[:, :10, 1:4:2].copy()
        rows[:, :10, 0:4:2], rows[:, :10, 1:4:2] = a * cos - b * sin, a * sin + b * cos
        got = gpu.read(q, np.float32, (most + 1) * 48).reshape(-1, 8, 6)
        assert_close(got[:m], rows[:, :8], *F32, f"q, {segments}")
        assert (got[m:] == GUARD).all(), f"q, {segments}: wrote behind the last"
        for name, buffer, heads in (("k", k, rows[:, 8:10]), ("v", v, rows[:, 10:])):
            cache = gpu.read(buffer, dtype, np.prod(cache_shape)).reshape(cache_shape).copy()
            cells = [step.table.cells(slot, np.array(position)) for slot, position in rows_at]
            here = np.array([cache[:, cell] for cell in cells])
            assert_close(here, heads, *(F32 if kv_type is KvType.F32 else ROUNDED_F16), f"{name}, {segments}")
            cache[:, cells] = GUARD
            assert (cache == GUARD).all(), f"{name}, {segments}: wrote outside its positions"
        if kv_type is KvType.F16:
            continue
        # a q8_0 cache gets its keys and values from another kernel: here they stay f32, by row
        rows_f32 = gpu.zeros((most + 1) * 24 * 4, "kv_rows")
        fill(gpu, rows_f32, most + 1, 24)
        output = ops.qkv(c, LayerKind(), matrix, replace(buffers, kv_rows=rows_f32), KvType.Q8_0, one_segment)
        run(gpu, make.linear(given.x, matrix, 1 if m == 1 else most, output, table=table), m)
        got = gpu.read(rows_f32, np.float32, (most + 1) * 24).reshape(-1, 4, 6)
        assert_close(got[:m], rows[:, 8:], *F32, f"rows of a q8_0 cache, {segments}")
        assert (got[m:] == GUARD).all()


@pytest.mark.parametrize("route", [r for r in STORE_ROUTES if r.grid is not routes.tile_grid], ids=lambda r: r.kernel)
def test_linear_with_folded_grid(gpu, monkeypatch, route):
    """More workgroups than one dimension of a grid holds: here 3 instead of 65,535."""
    case = LinearCase(Weight(Q4, 1030, 32))
    table, most = only(gpu, route, case), min(2, max(case.tokens(route, gpu.caps)))
    shard, w = upload(gpu, case.weight)
    matrix, given = matrix_of(shard), linear_inputs(gpu, most, 32)
    y, make = gpu.zeros(most * 1030 * 4, "y"), Ops(gpu, verify_reference.step_buffer(gpu, most))
    monkeypatch.setattr(gpu, "caps", replace(gpu.caps, workgroups=3))
    run(gpu, make.linear(given.x, matrix, most, ops.store(y, matrix), table=table), most)
    got = gpu.read(y, np.float32, most * 1030).reshape(most, 1030)
    assert_close(got, given.values @ w.T, *F32)


# Workgroup epilogues. Of two shards, the second one starts where the first one ends.

LOGITS = runs(
    routes.LINEAR,
    [LinearCase(Weight(Q4, 192, 64), inputs, epilogue=Epilogue.LOGITS) for inputs in (Inputs.F32, Inputs.INT8)],
    at_minimum=lambda case: case.inputs is Inputs.F32,
)


@on_gpus(LOGITS)
def test_logits_and_candidates(any_gpu, route, case):
    gpu, table = any_gpu, only(any_gpu, route, case)
    matrix, w, _ = upload_shards(gpu, case.weight, Weight(F16, 71, 64))
    matrix = replace(matrix, bias=None)
    given = linear_inputs(gpu, 1, 64, case.inputs)
    y, candidates = gpu.zeros(264 * 4, "y"), gpu.zeros(264 * 8, "candidates")
    fill(gpu, y, 264)
    output, make = Output(Epilogue.LOGITS, {"y": y, "candidates": candidates}), Ops(gpu, Steps(gpu).buffer)
    run(gpu, make.linear(given.x, matrix, 1, output, given.inputs, table=table))
    got = gpu.read(y, np.float32, 264)
    assert_close(got[:263], (given.values @ w.T)[0], *F32)
    assert got[263] == GUARD
    rows = routes.rows_per_workgroup(make.constants(route))
    starts = [*range(0, 192, rows), *range(192, 263, rows)]
    ends = [min(start + rows, 192 if start < 192 else 263) for start in starts]
    largest = [start + int(got[start:end].argmax()) for start, end in zip(starts, ends, strict=True)]
    found = gpu.read(candidates, np.uint32, 2 * 264).reshape(-1, 2)
    assert found[: len(starts), 1].tolist() == largest
    assert (found[: len(starts), 0].copy().view(np.float32) == got[largest]).all()
    assert (found[len(starts) :] == 0).all()


HIDDEN = Weight(Q4, 128, 576)
SWIGLU = runs(
    routes.LINEAR,
    [LinearCase(HIDDEN, inputs, epilogue=Epilogue.GLU_BLOCKS) for inputs in (Inputs.F32, Inputs.INT8)],
    at_minimum=lambda case: case.inputs is Inputs.INT8,
)


@on_gpus(SWIGLU)
def test_swiglu_to_int8_blocks(any_gpu, route, case):
    gpu, table, tokens = any_gpu, only(any_gpu, route, case), case.tokens(route, any_gpu.caps)
    matrix, w, bias = upload_shards(gpu, HIDDEN, Weight(Q8, 64, 576, 16, scale_bits=32))
    most, step = max(tokens), Steps(gpu)
    given = linear_inputs(gpu, most, HIDDEN.k, case.inputs)
    want = swiglu(given.values @ w.T + bias)
    count = (most + 1) * 3
    y, make = gpu.zeros(count * INT8_BLOCK.itemsize, "y"), Ops(gpu, step.buffer)
    for m in {min(tokens), most, min(9, most)}:
        step.write_rows(m)
        fill(gpu, y, count, 12)
        run(
            gpu,
            make.linear(given.x, matrix, most, ops.glu_blocks(y, matrix, Activation.SILU), given.inputs, table=table),
            m,
        )
        got = read_blocks(gpu, y, most + 1, 3)
        check_blocks(got[:m], want[:m], case.bound(gpu, route))
        assert (got[m:].view(np.float32) == GUARD).all()


TILES = list({str(r.consts): r for r in routes.LINEAR if r.kernel == "linear_gemm_int8"}.values())


@pytest.mark.parametrize("route", TILES, ids=lambda r: " ".join(f"{k.lower()} {v}" for k, v in r.consts.items()))
def test_tiles_stay_in_workgroup_memory(gpu, monkeypatch, route):
    """A read out of bounds would give other numbers with bounds checks than in unchecked shaders."""
    if gpu.caps.shared_bytes < 32768:
        pytest.skip("the adapter has too little workgroup memory")
    monkeypatch.setattr(gpu, "unchecked", False)
    monkeypatch.setattr(gpu, "pipelines", {})
    to_blocks = "TOKENS" in route.consts
    table, m = verify_reference.only(route), min(33, route.consts["TILE_M"])
    shard, w = upload(gpu, HIDDEN)
    matrix, given = matrix_of(shard), linear_inputs(gpu, m, HIDDEN.k, Inputs.INT8)
    y, want = gpu.zeros(m * HIDDEN.n * 4, "y"), given.values @ w.T
    output = ops.glu_blocks(y, matrix, Activation.SILU) if to_blocks else ops.store(y, matrix)
    make, bound = Ops(gpu, verify_reference.step_buffer(gpu, m)), mode_bound(gpu, (Inputs.INT8, Prologue.NONE))
    run(gpu, make.linear(given.x, matrix, m, output, Inputs.INT8, table=table), m)
    if to_blocks:
        check_blocks(read_blocks(gpu, y, m, 2), swiglu(want), bound)
    else:
        assert_close(gpu.read(y, np.float32, want.size).reshape(want.shape), want, *bound)
