"""Attention kernels against float64: every row of the route table, in a KV cache of several sequences."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import wgpu
from kernel_cases import (
    GUARD,
    SLOTS,
    Steps,
    attended,
    check_blocks,
    covers,
    fill,
    on_gpus,
    only,
    per_row,
    per_segment,
    run,
    runs,
    same_first_page,
    segment,
)
from reference import assert_close

from llamagpu.engine import baselines, ops, routes
from llamagpu.engine.kv_cache import head_values
from llamagpu.engine.ops import AttentionBuffers, AttentionMode
from llamagpu.engine.options import KvType
from llamagpu.engine.pages import PAGE
from llamagpu.engine.routes import Attention, Inputs, Table
from llamagpu.engine.step_inputs import Segment
from llamagpu.engine.synthetic import synthetic_config
from llamagpu.files.architectures import QkNorm
from llamagpu.files.config import LayerKind
from llamagpu.verify.kernels import HALF_ATTENTION, HALF_SCORES, INT8_ATTENTION
from llamagpu.verify.reference import (
    F32,
    ROUNDED_F16,
    Array,
    Bound,
    Floats,
    blocks_of_planes,
    cache_bytes,
    dequantise_blocks,
    fits,
    ops_at,
    random,
    round_kv,
    values_of_f16,
)
from llamagpu.verify.reference import only as always


@dataclass(frozen=True)
class Heads:
    head_dim: int
    heads: int
    kv_heads: int
    kv_type: KvType
    window: int = 0
    m: int = 1  # most rows of the plan

    first = True

    @property
    def name(self) -> str:
        window = f"-window{self.window}" if self.window else ""
        return f"{self.heads}of{self.head_dim}-kv{self.kv_heads}-{self.kv_type}{window}-m{self.m}"

    @property
    def main(self) -> bool:
        return self.head_dim == 64

    def shape(self, m: int, splits: int = 1) -> Attention:
        return Attention(m, self.heads, self.kv_heads, self.head_dim, self.window, self.head_dim**-0.5, splits)

    def fits(self, route, caps) -> bool:
        return fits(route, self.shape(self.m), caps)


KV_F16, KV_F32, KV_Q8_0 = KvType
HEADS = (
    Heads(64, 4, 2, KV_F16),
    Heads(64, 8, 1, KV_F16, window=16),
    Heads(128, 2, 2, KV_F32),
    Heads(256, 1, 1, KV_F16),
    Heads(48, 4, 1, KV_F16),
    Heads(48, 2, 1, KV_F32, window=100),
    Heads(80, 8, 1, KV_F32),
    Heads(260, 1, 1, KV_F32),
    Heads(64, 4, 2, KV_Q8_0, window=100),
    Heads(96, 6, 2, KV_Q8_0),
    Heads(6, 8, 2, KV_F16),
    Heads(6, 2, 2, KV_F32),
    Heads(6, 2, 1, KV_F16, window=3),
)
ATTEND = runs(
    (*routes.ATTEND, baselines.ATTEND_STRIDED),
    [replace(case, m=m) for case in HEADS for m in (1, 33)] + [replace(case, m=8) for case in HEADS[:3]],
    at_minimum=lambda case: case.head_dim in (48, 96),
)
CAPACITY = 240
MOST = 33
STEPS = {  # most rows of the plan: steps, around the ends of a block of 64 positions
    1: [[segment(1, position, 1)] for position in (0, 1, 63, 64, 65, 200)],
    8: [
        *([segment(1, position, rows)] for rows, position in ((2, 0), (8, 60), (5, 200))),
        [segment(2, 0, 1), segment(0, 63, 2), segment(1, 200, 4)],
    ],
    33: [
        *([segment(1, position, rows)] for rows, position in ((5, 0), (33, 0), (5, 1), (5, 63), (33, 65), (5, 200))),
        [segment(2, 0, 5), segment(0, 100, 18), segment(1, 64, 9)],  # the last two share a page
    ],
}


@on_gpus(ATTEND)
def test_attend(any_gpu, route, case):
    assert check_attend(any_gpu, case, only(any_gpu, route, case), STEPS[case.m]) == route.kernel


@pytest.mark.parametrize(
    "case",
    [Heads(64, 66, 1, KV_F32), Heads(64, 66, 1, KV_F32, m=33), Heads(256, 33, 1, KV_F32, m=33)],
    ids=lambda case: case.name,
)
def test_attend_with_many_heads_per_kv_head(gpu, case):
    """More heads share a KV head than some workgroups have rows or subgroups: the table has other routes for them."""
    check_attend(gpu, case, routes.ATTEND, STEPS[case.m][-2:])


def check_attend(gpu, case: Heads, table: Table[Attention], steps: Sequence[Sequence[Segment]]) -> str:
    """Run the case, check its results and guards; return the kernel's name."""
    rng, d = random(case.name), case.head_dim
    q = rng.standard_normal((MOST, case.heads, d)).astype(np.float32)
    cache = (SLOTS, case.kv_heads, CAPACITY, d)
    # keys of unequal size, so that some positions dominate; numbers that the cache holds exactly
    sizes = rng.uniform(0, 3, (SLOTS, 1, CAPACITY, 1))
    k = same_first_page(round_kv(rng.standard_normal(cache) * sizes, case.kv_type))
    v = same_first_page(round_kv(rng.standard_normal(cache), case.kv_type))
    y, stats = gpu.zeros((MOST + 1) * case.heads * d * 4, "y"), gpu.zeros(MOST * case.heads * 8, "stats")
    step = Steps(gpu, CAPACITY, SLOTS)
    buffers = AttentionBuffers(gpu.upload(q, "q"), *empty_caches(gpu, step, case), y, stats)
    shape = replace(case.shape(case.m), segments=SLOTS)
    [dispatch] = step.ops.attend(shape, buffers, AttentionMode(case.kv_type), table)
    for segments in steps:
        m = len(per_row(segments))
        step.write(*segments)
        write_caches(gpu, step, case, (buffers.keys, k), (buffers.values, v), segments)
        fill(gpu, y, MOST + 1, case.heads, d)
        run(gpu, [with_grid(dispatch, segments)], m)
        got = gpu.read(y, np.float32, (MOST + 1) * case.heads * d).reshape(MOST + 1, case.heads, d)
        assert_close(got[:m], attended(q, k, v, segments, case.window), *F32, f"{segments}")
        assert (got[m:] == GUARD).all(), f"{segments}: wrote behind the last row"
    return dispatch.kernel


def empty_caches(gpu, step: Steps, case: Heads):
    size = case.kv_heads * step.table.capacity * case.kv_type.head_bytes(case.head_dim)
    return gpu.zeros(size, "k"), gpu.zeros(size, "v")


def write_caches(gpu, step: Steps, case: Heads, keys, values, segments: Sequence[Segment], unseen: float = 1e4) -> None:
    """Pairs of buffers and numbers of each sequence."""
    for buffer, numbers in (keys, values):
        gpu.write(buffer, cache_bytes(step.paged(numbers, segments, unseen), case.kv_type))


def with_grid(dispatch, segments: Sequence[Segment]):
    """Kernels of tiles have segments in z; the others take any rows."""
    tiles = dispatch.kernel in ("attend_tile", "attend_int8", "quantise_kv")
    return per_segment(dispatch, segments) if tiles else dispatch


def attend_data(case: Heads, rows: int) -> tuple[Array, Array, Array]:
    rng = random(case.name)
    k, v = rng.standard_normal((2, SLOTS, case.kv_heads, CAPACITY, case.head_dim))
    q = rng.standard_normal((rows, case.heads, case.head_dim)).astype(np.float32)
    return q, same_first_page(round_kv(k, case.kv_type)), same_first_page(round_kv(v, case.kv_type))


def check_attended(got: Array, want: Floats, out: Inputs, bounds: Bound) -> None:
    if out is Inputs.F16:
        result = values_of_f16(got[:-4], len(want))
    else:
        result = blocks_of_planes(got[:-4], len(want)) if out is Inputs.INT8 else got[:-4].reshape(want.shape)
    if out is Inputs.INT8 and bounds == F32:
        check_blocks(result, want)
    else:
        assert_close(dequantise_blocks(result) if out is Inputs.INT8 else result, want, *bounds)
    assert (got[-4:] == GUARD).all()


def rounded(out: Inputs) -> Bound:
    return ROUNDED_F16 if out is Inputs.F16 else F32


def result_words(case: Heads, rows: int, out: Inputs) -> int:
    words = {Inputs.F32: 32, Inputs.INT8: 12, Inputs.F16: 16}[out]
    return rows * case.heads * case.head_dim * words // 32


SPLIT = (
    *(Heads(64, 2, 1, KV_F32), Heads(64, 12, 2, KV_F16)),
    *(Heads(128, 4, 2, KV_F16, window=150), Heads(128, 4, 2, KV_Q8_0)),
)
SPLIT_STEPS = [
    *([segment(1, position, 1)] for position in (0, 1, 14, 63, 200, 239)),
    *([segment(2, position, rows)] for rows, position in ((3, 0), (3, 63), (2, 200))),
    [segment(2, 14, 1), segment(0, 200, 1), segment(1, 0, 1)],
]


@covers("attend_merge")
@pytest.mark.parametrize("out", [Inputs.F32, Inputs.INT8, Inputs.F16])
@pytest.mark.parametrize("splits", [1, 2, 16])
@pytest.mark.parametrize("case", SPLIT, ids=lambda case: case.name)
def test_attend_in_splits(gpu, case, splits, out):
    """The context of a row is cut into splits, which are merged again; the result as f32 or as int8 blocks."""
    route = next(route for route in routes.ATTEND if route.kernel == "attend_split")
    table, d = only(gpu, route, case), case.head_dim
    q, k, v = attend_data(case, 3)
    step, mode = Steps(gpu, CAPACITY, SLOTS), AttentionMode(case.kv_type, out)
    qs, (ks, vs) = gpu.upload(q, "q"), empty_caches(gpu, step, case)
    partial = gpu.zeros(3 * case.heads * splits * d * 4, "partial")
    stats = gpu.zeros(3 * case.heads * splits * 8, "stats")
    make = step.ops
    for segments in SPLIT_STEPS:
        m = len(per_row(segments))
        size = result_words(case, m, out)
        step.write(*segments)
        write_caches(gpu, step, case, (ks, k), (vs, v), segments)
        y = gpu.upload(np.full(size + 4, GUARD, np.float32), "y")
        shape = replace(case.shape(1 if m == 1 else 4, splits), bucket=1 if m == 1 else 65)
        buffers = AttentionBuffers(qs, ks, vs, y if splits == 1 else partial, stats)
        plan = make.attend(shape, buffers, mode, table)
        assert m == 1 or splits == 16 or plan[0].consts["HEAD_SHARES"] == 2
        if splits > 1:  # with 16 some have nothing to do
            plan.append(make.attend_merge(shape, partial, stats, y, out))
        run(gpu, plan, m)
        want = attended(q, k, v, segments, case.window).reshape(m, -1)
        check_attended(gpu.read(y, np.float32, size + 4), want, out, rounded(out))


def test_attend_in_splits_with_16_lanes_per_position(gpu):
    in_process_with_lanes(gpu, 16, "test_attend_in_splits and 4of128")


def in_process_with_lanes(gpu, lanes: int, tests: str) -> None:
    """llvmpipe reads its vector width when it starts: a separate process has more lanes than usual."""
    if "llvmpipe" not in gpu.name:
        pytest.skip("the lanes of other adapters are fixed")
    other, arguments = 77, ["-q", "-p", "no:cacheprovider", __file__, "-k", tests]
    code = "import sys, pytest; from llamagpu.gpu.device import Gpu; lanes = Gpu.open().caps.subgroup; "
    code += f"sys.exit(pytest.main({arguments!r}) if lanes == {lanes} else {other})"
    env = os.environ | {"LP_NATIVE_VECTOR_WIDTH": str(32 * lanes)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    if done.returncode == other:
        pytest.skip(f"the adapter does not have {lanes} lanes")
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]


STORED = (Heads(64, 4, 2, KV_Q8_0), Heads(96, 3, 3, KV_Q8_0), Heads(32, 1, 1, KV_Q8_0))


@covers("copy_page")
@pytest.mark.parametrize(("source", "target"), [(0, 4), (4, 1), (2, 2)])
def test_copy_page(any_gpu, source, target):
    """One page of every KV head; the others stay."""
    gpu, caches = any_gpu, random("copy_page").integers(0, 1 << 32, (2, 3, 5, 4 * 300), np.uint32)
    k, v = (gpu.upload(cache, "cache") for cache in caches)
    pair = gpu.zeros(16, "pair", wgpu.BufferUsage.UNIFORM)
    gpu.write(pair, np.array([source, target], np.uint32))
    bindings = {"k_cache": k, "v_cache": v, "pair": pair}
    run(gpu, [gpu.dispatch("copy_page", (), {"PAGES": 5, "PAGE_VEC4S": 300}, bindings, (3, 2, 1))])
    caches[:, :, target] = caches[:, :, source]
    assert [gpu.read(cache, np.uint32, caches[0].size).tolist() for cache in (k, v)] == caches.reshape(2, -1).tolist()


@covers("store_kv")
@pytest.mark.parametrize("any_gpu", ["full", "minimum"], indirect=True)
@pytest.mark.parametrize("case", STORED, ids=lambda case: case.name)
def test_store_kv(any_gpu, case):
    """Keys and values of any sequences, rounded to int8 in the cells of their rows; all other cells stay."""
    gpu, d, step = any_gpu, case.head_dim, Steps(any_gpu, CAPACITY, SLOTS)
    kv = random(case.name).standard_normal((MOST, 2, case.kv_heads, d)).astype(np.float32)
    kv[0, 0], kv[1, 1] = 0, 1e-7 * kv[1, 1]  # all zero; smaller than any scale
    rows, caches = gpu.upload(kv, "rows"), empty_caches(gpu, step, case)
    for segments in STEPS[1][2:3] + STEPS[33][-2:]:
        m = len(per_row(segments))
        step.write(*segments)
        for cache in caches:
            gpu.write(cache, np.full(cache.size, 0x5A, np.uint8))
        run(gpu, [step.ops.store_kv(case.shape(1 if m == 1 else MOST), rows, *caches)], m)
        cells = [step.table.cells(slot, np.array(position)) for slot, position in per_row(segments)]
        for cache, numbers in zip(caches, kv[:m].swapaxes(0, 1), strict=True):
            check_stored(gpu, cache, case, cells, numbers)


def check_stored(gpu, cache, case: Heads, cells, numbers: Array) -> None:
    """`numbers` [cells, kv_heads, d] are in these cells of a q8_0 cache, and 0x5A in all others."""
    d = case.head_dim
    pages = gpu.read(cache, np.uint8, cache.size).reshape(case.kv_heads, -1, PAGE * case.kv_type.head_bytes(d))
    got = np.array([[head_values(page, case.kv_type, d) for page in head] for head in pages])
    stored = got.reshape(case.kv_heads, -1, d)[:, cells].swapaxes(0, 1).reshape(len(cells), -1, 32)
    blocks = numbers.astype(np.float64).reshape(stored.shape)
    step = np.abs(blocks).max(axis=2, keepdims=True) / 127
    largest = 0.501 * step + 127 * (2.0**-11 * step + 2.0**-25)  # of rounding the number, then the f16 scale
    assert (np.abs(stored - blocks) <= largest).all()
    assert_close(stored.reshape(numbers.shape), round_kv(numbers, case.kv_type), 1e-6, 1e-2)  # few ties
    planes = np.split(pages, [PAGE * d], axis=2)
    for plane in planes:
        by_cell = plane.reshape(case.kv_heads, -1, plane.shape[2] // PAGE).copy()
        by_cell[:, cells] = 0x5A
        assert (by_cell == 0x5A).all(), "wrote outside its cells"


@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("case", [Heads(64, 4, 2, KV_Q8_0, window=70), Heads(128, 2, 1, KV_Q8_0)], ids=lambda c: c.name)
def test_attend_split_stores_its_own_row(gpu, case, splits):
    """The key and value of the row's own position are in no cell yet: attention quantises, uses and stores them."""
    route = next(route for route in routes.ATTEND if route.kernel == "attend_split")
    table, d, step = only(gpu, route, case), case.head_dim, Steps(gpu, CAPACITY, SLOTS)
    q, k, v = attend_data(case, 1)
    mode, shape = AttentionMode(case.kv_type, own_row=True), case.shape(1, splits)
    partial = gpu.zeros(case.heads * splits * d * 4, "partial")
    stats, y = gpu.zeros(case.heads * splits * 8, "stats"), gpu.zeros(q.nbytes, "y")
    caches = empty_caches(gpu, step, case)
    for position in (0, 63, 64, 200):
        segments = [segment(1, position, 1)]
        step.write(*segments)
        [cell] = step.table.cells(1, np.array([position]))
        own = np.stack([numbers[1, :, position] for numbers in (k, v)]).astype(np.float32)
        for cache, numbers in zip(caches, (k, v), strict=True):
            paged = step.paged(numbers, segments)
            paged[:, cell] = 1e4
            gpu.write(cache, cache_bytes(paged, case.kv_type))
        before = [gpu.read(cache, np.uint8, cache.size) for cache in caches]
        out = y if splits == 1 else partial
        buffers = AttentionBuffers(gpu.upload(q, "q"), *caches, out, stats, kv_rows=gpu.upload(own, "rows"))
        plan = step.ops.attend(shape, buffers, mode, table)
        if splits > 1:
            plan.append(step.ops.attend_merge(shape, partial, stats, y, Inputs.F32))
        run(gpu, plan, 1)
        want = attended(q, k, v, segments, case.window)
        assert_close(gpu.read(y, np.float32, q.size).reshape(q.shape), want, *F32, f"{position}")
        for cache, numbers, old in zip(caches, (k, v), before, strict=True):
            want_bytes = cache_bytes(step.paged(numbers, segments), case.kv_type)
            assert (gpu.read(cache, np.uint8, cache.size) == want_bytes).all() and (old != want_bytes).any()


TILE = (Heads(64, 6, 2, KV_F16), Heads(64, 2, 1, KV_F32, window=40), Heads(32, 4, 1, KV_F16))
TILE_STEPS = [
    [segment(0, 0, 33)],
    [segment(1, 200, 5)],
    [segment(2, 107, 33)],
    [segment(1, 62, 2), segment(2, 30, 4), segment(0, 222, 3)],  # the first token is the last of a kv tile, or nearly
    [segment(1, 60, 20), segment(2, 0, 4), segment(0, 200, 9)],
    [segment(2, 70, 3), segment(0, 130, 12), segment(1, 64, 5)],  # all share a page
]


def check_tiles(
    gpu,
    case: Heads,
    table: Table[Attention],
    shape: Attention,
    out: Inputs,
    bounds: Bound,
    steps: Sequence[Sequence[Segment]],
    sharpness: float = 1,
    unseen: float = 1e4,
) -> None:
    q, k, v = attend_data(case, MOST)
    q *= sharpness
    step, mode = Steps(gpu, CAPACITY, SLOTS), AttentionMode(case.kv_type, out)
    qs, (ks, vs) = gpu.upload(q, "q"), empty_caches(gpu, step, case)
    partial = gpu.zeros(MOST * case.heads * shape.splits * case.head_dim * 4, "partial")
    stats = gpu.zeros(MOST * case.heads * shape.splits * 8, "stats")
    int8_kv = gpu.zeros(routes.int8_kv_bytes(shape, step.table.capacity), "int8_kv")
    make = step.ops
    for segments in steps:
        m = len(per_row(segments))
        size = result_words(case, m, out)
        step.write(*segments)
        write_caches(gpu, step, case, (ks, k), (vs, v), segments, unseen)
        y = gpu.upload(np.full(size + 4, GUARD, np.float32), "y")
        buffers = AttentionBuffers(qs, ks, vs, y if shape.splits == 1 else partial, stats, int8_kv)
        plan = [with_grid(dispatch, segments) for dispatch in make.attend(shape, buffers, mode, table)]
        if shape.splits > 1:
            plan.append(make.attend_merge(shape, partial, stats, y, out))
        run(gpu, plan, m, max(seg.position for seg in segments))
        want = attended(q, k, v, segments, case.window).reshape(m, -1)
        check_attended(gpu.read(y, np.float32, size + 4), want, out, bounds)


@pytest.mark.parametrize("out", [Inputs.F32, Inputs.INT8, Inputs.F16])
@pytest.mark.parametrize("case", TILE, ids=lambda case: case.name)
def test_attend_tile(gpu, case, out):
    route = next(route for route in routes.ATTEND if route.kernel == "attend_tile")
    table = only(gpu, route, replace(case, m=MOST))
    check_tiles(gpu, case, table, replace(case.shape(MOST), segments=SLOTS), out, rounded(out), TILE_STEPS)
    check_tiles(gpu, case, table, case.shape(MOST), out, rounded(out), TILE_STEPS[2:3])


LARGE_MATRIX, SMALL_MATRIX = (route for route in routes.ATTEND if route.kernel == "attend_matrix")
LARGE, SMALL = (route for route in routes.ATTEND if route.kernel == "attend_int8")
# llvmpipe takes seconds to compile the kernel: few cases, each with something of its own. Large tiles are for heads of
# 128, for which it has no memory.
INT8 = [
    pytest.param(
        "full", LARGE, Heads(64, 12, 2, KV_F16), 3, Inputs.F32, id="splits"
    ),  # 21 tokens to a tile; empty splits
    pytest.param("full", SMALL, Heads(128, 2, 1, KV_F32, window=40), 1, Inputs.INT8, id="window"),
    pytest.param("full", SMALL, Heads(64, 4, 2, KV_Q8_0), 1, Inputs.F16, id="q8_0"),
]


@covers("attend_int8", "quantise_kv")
@pytest.mark.parametrize("any_gpu, route, case, splits, out", INT8, indirect=["any_gpu"])
def test_attend_int8(any_gpu, route, case, splits, out):
    shape = replace(case.shape(MOST, splits), segments=SLOTS, int8=True)
    if not routes.int8_attention(shape, any_gpu.caps, route.consts["WORKGROUP"]):
        pytest.skip(f"the adapter lacks what attend_int8 needs ({route.needs})")
    check_tiles(any_gpu, case, always(route), shape, out, INT8_ATTENTION, TILE_STEPS)


def test_attend_int8_with_8_lanes(gpu):
    if gpu.caps.subgroup >= 8:
        pytest.skip("test_attend_int8 has run")
    in_process_with_lanes(gpu, 8, "test_attend_int8 and not lanes")


# llvmpipe compiles heads of 128 for 40 s, and has no memory for large tiles: these run on a GPU, and in `verify` there.
# A tile ends between the heads of a token where 3 or 6 of them share a KV head.
MATRIX = [
    pytest.param(SMALL_MATRIX, Heads(64, 12, 2, KV_F16), 2, True, Inputs.F32, id="splits"),
    pytest.param(SMALL_MATRIX, Heads(64, 6, 2, KV_F16, window=40), 1, False, Inputs.F16, id="window"),
    pytest.param(SMALL_MATRIX, Heads(64, 4, 2, KV_F16), 1, True, Inputs.INT8, id="whole"),
    pytest.param(
        SMALL_MATRIX, Heads(128, 2, 1, KV_F16, window=40), 1, True, Inputs.F16, id="128", marks=pytest.mark.slow
    ),
    pytest.param(LARGE_MATRIX, Heads(128, 6, 2, KV_F16), 2, True, Inputs.F32, id="large"),
    pytest.param(LARGE_MATRIX, Heads(128, 4, 2, KV_F16), 2, False, Inputs.F32, id="large in f32"),
]


@covers("attend_matrix")
@pytest.mark.parametrize("matrix", ["16x16", *(pytest.param(m, marks=pytest.mark.slow) for m in ("16x8", "8x8"))])
@pytest.mark.parametrize("route, case, splits, half_scores, out", MATRIX)
def test_attend_matrix(matrix_gpu, route, case, splits, half_scores, out):
    shape, memory = replace(case.shape(MOST, splits), segments=SLOTS, half=True), matrix_gpu.caps.shared_bytes
    shape = replace(shape, half_scores=half_scores)
    if half_scores and matrix_gpu.caps.matrix != "16x16":
        pytest.skip("smaller matrices have f32 sums")
    size = routes.matrix_attention_bytes(shape, matrix_gpu.caps, route.consts["WORKGROUP"])
    if size > memory:
        pytest.skip(f"{size} bytes of workgroup memory needed, {memory} available")
    steps = TILE_STEPS if matrix_gpu.matrices or splits == 1 else TILE_STEPS[2:4]  # a step takes seconds
    sharpness, unseen = 8, np.nan  # scores that grow in later tiles; cells that nobody wrote
    bound = HALF_SCORES if routes.half_scores(shape, matrix_gpu.caps) else HALF_ATTENTION
    bound = INT8_ATTENTION if out is Inputs.INT8 else bound
    check_tiles(matrix_gpu, case, always(route), shape, out, bound, steps, sharpness, unseen)


LONGEST = [
    *(
        (r, d)
        for r in (*routes.ATTEND, baselines.ATTEND_STRIDED)
        for d in (64, 256)
        if r.kernel not in ("attend_any", "attend_int8", "attend_matrix")
    ),
    *((routes.ATTEND[-1], d) for d in (6, 130, 260)),
]


@pytest.mark.parametrize("route, d", LONGEST, ids=lambda value: value if isinstance(value, int) else value.kernel)
def test_attend_over_the_longest_context(any_gpu, route, d):
    """The most positions of a CPU adapter: llvmpipe ends loops after 65535 iterations, without an error.

    All scores are equal, so that the result is the mean of the values.
    """
    gpu, m = any_gpu, MOST if route.kernel == "attend_tile" else 1
    case = Heads(d, 1, 1, KV_F32, m=m)
    table = only(gpu, route, case)
    positions = routes.max_positions(d, replace(gpu.caps, cpu=True), textures=False)
    values = np.arange(-(-positions // 4) * 4, dtype=np.float32) / positions
    position, y = positions - m, gpu.zeros(m * d * 4, "y")
    queries = gpu.zeros(m * d * 4, "q")
    keys, repeated = gpu.zeros(values.nbytes * d, "k"), gpu.upload(np.repeat(values, d), "v")
    make = ops_at(gpu, m, position, len(values))
    buffers = AttentionBuffers(queries, keys, repeated, y, gpu.zeros(m * case.heads * 8, "stats"))
    run(gpu, make.attend(case.shape(m), buffers, AttentionMode(KV_F32), table), m)
    want = np.array([[values[: position + t + 1].mean(dtype=np.float64)] * d for t in range(m)])
    assert_close(gpu.read(y, np.float32, m * d).reshape(m, d), want, 1e-8, 1e-4, f"{positions} positions")


def test_attend_any_with_folded_grid(gpu, monkeypatch):
    case = Heads(8, 8, 2, KV_F32, m=MOST)  # 264 results: five workgroups of 64
    rng, segments = random("folded"), [segment(0, 0, MOST)]
    q = rng.standard_normal((MOST, 8, 8)).astype(np.float32)
    k, v = rng.standard_normal((2, 2, 36, 8)).astype(np.float32)
    y = gpu.zeros(q.nbytes, "y")
    monkeypatch.setattr(gpu, "caps", replace(gpu.caps, workgroups=3))
    buffers = AttentionBuffers(gpu.upload(q, "q"), gpu.upload(k, "k"), gpu.upload(v, "v"), y)
    make, table = ops_at(gpu, MOST, 0, 36), only(gpu, routes.ATTEND[-1], case)
    [dispatch] = make.attend(case.shape(MOST), buffers, AttentionMode(KV_F32), table)
    assert dispatch.kernel == "attend_any" and dispatch.grid_for(MOST, 0) == (3, 2, 1)
    run(gpu, [dispatch], MOST)
    got = gpu.read(y, np.float32, q.size).reshape(q.shape)
    assert_close(got, attended(q, k[None], v[None], segments, 0), *F32)


@covers("rotate")
@pytest.mark.parametrize("qk_norm", list(QkNorm))
@pytest.mark.parametrize("kv_type", [KvType.F16, KvType.F32], ids=lambda kv_type: f"kv_{kv_type}")
def test_rotate(any_gpu, kv_type, qk_norm):
    """q and k are normalised and rotated, q is scaled by position. k and v go to the cell of their row."""
    gpu, capacity, m, temperature, run_length = any_gpu, 80, 3, 0.1, 16
    config = replace(synthetic_config("tiny"), heads=3, kv_heads=2, head_dim=10, rope_dims=6, qk_norm=qk_norm)
    config = replace(config, temperature=temperature, rope_orig_context=run_length)
    rng, dtype = random("rotate"), np.float32 if kv_type is KvType.F32 else np.float16
    x = rng.standard_normal((m, 7, 10)).astype(np.float32) * 3
    weights = rng.uniform(0.5, 1.5, max(1, sum(config.qk_norm_widths))).astype(np.float32)
    angle = rng.uniform(0, 6, (capacity, 3))
    rope = np.stack([np.cos(angle), np.sin(angle)], axis=2).astype(np.float32)
    step = Steps(gpu, capacity, 3)
    cache_shape = (2, step.table.capacity, 10)
    q, k, v = (gpu.zeros(size, "out") for size in (m * 120, *[np.empty(cache_shape, dtype).nbytes] * 2))
    buffers = ops.QkvBuffers(q, k, v, gpu.upload(rope, "rope"))
    norm = None if qk_norm is QkNorm.NONE else gpu.upload(weights, "norm")
    segments = [segment(2, 40, 1), segment(1, 15, 2)]
    step.write(*segments)
    run(gpu, [step.ops.rotate(config, LayerKind(), gpu.upload(x, "x"), norm, buffers, kv_type, m)], m)
    want, at = x.astype(np.float64), per_row(segments)
    positions = np.array([position for _, position in at])
    for heads, own in zip((slice(0, 3), slice(3, 5)), np.split(weights, [config.qk_norm_widths[0]]), strict=True):
        if qk_norm is not QkNorm.NONE:
            axes = (1, 2) if qk_norm is QkNorm.ROW else 2
            rms = np.sqrt(np.square(want[:, heads]).mean(axis=axes, keepdims=True) + config.norm_eps)
            want[:, heads] = want[:, heads] / rms * own.reshape(-1, 10)
    cos, sin = np.moveaxis(rope[positions, None].astype(np.float64), 3, 0)
    a, b = want[:, :5, 0:6:2].copy(), want[:, :5, 1:6:2].copy()
    want[:, :5, 0:6:2], want[:, :5, 1:6:2] = a * cos - b * sin, a * sin + b * cos
    want[:, :3] *= (1 + temperature * np.log(1 + positions // run_length))[:, None, None]
    assert_close(gpu.read(q, np.float32, m * 30).reshape(m, 3, 10), want[:, :3], *F32, "q")
    for name, buffer, rows in (("k", k, want[:, 3:5]), ("v", v, want[:, 5:])):
        cache = gpu.read(buffer, dtype, np.prod(cache_shape)).reshape(cache_shape)
        here = np.array([cache[:, step.table.cells(slot, np.array(position))] for slot, position in at])
        assert_close(here, rows, *(F32 if kv_type is KvType.F32 else (1e-6, 1e-3)), name)
