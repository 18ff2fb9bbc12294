"""Which kernel runs which shape: the rules that hold for every route, pinned without a GPU.

Whether grids cover their results is tested where kernels run (test_kernels_*.py, with folded grids too).
"""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from llamagpu.engine import routes
from llamagpu.engine.routes import Attention, Epilogue, Inputs, Linear, Prologue, RowWise, fold, select
from llamagpu.files.storage import Layout, Storage
from llamagpu.gpu import shaders
from llamagpu.gpu.caps import MATRICES, Caps

Q4, Q6, Q8, F16 = Storage.Q4, Storage.Q6, Storage.Q8, Storage.F16
GPU = Caps(
    cpu=False,
    native_f16=True,
    subgroup=32,
    workgroups=65535,
    binding_bytes=1 << 31,
    shared_bytes=1 << 15,
    invocations=1024,
    storage_buffers=16,
)
MINIMUM = Caps(cpu=False, native_f16=False, subgroup=0, workgroups=65535, binding_bytes=128 << 20, shared_bytes=1 << 14)
CPU = replace(MINIMUM, cpu=True, subgroup=8)
EVERY_CAPS = pytest.mark.parametrize("caps", [GPU, MINIMUM, CPU], ids=["gpu", "minimum", "cpu"])
NOT_CPU = pytest.mark.parametrize("caps", [GPU, MINIMUM], ids=["gpu", "minimum"])


def linear_kernel(shape: Linear, caps: Caps) -> str:
    return select(routes.LINEAR, shape, caps).kernel


# The rules of the design: cooperative GEMV for one row, 16-byte loads, tiles for many rows, scalar kernels for the rest


@NOT_CPU
@pytest.mark.parametrize(
    "k, group, storage, kernel",
    [
        (4096, 32, Q4, "linear_gemv_word"),  # f32 x: lanes that take one word of weights read x side by side
        (256, 16, Q4, "linear_gemv_word"),
        (4096, 32, Q8, "linear_gemv"),  # 16-byte loads
        (576, 576, F16, "linear_gemv"),
        (72, 24, Q4, "linear_gemv_word"),  # k and group are multiples of 8 only
        (32, 8, Q8, "linear_gemv_word"),
        (40, 40, F16, "linear_gemv_word"),
        (36, 12, Q4, "linear_any"),  # of 4 only
        (129, 129, F16, "linear_any"),
    ],
)
def test_one_row(caps, k, group, storage, kernel):
    assert linear_kernel(Linear(1, 64, k, group, storage), caps) == kernel


@NOT_CPU
@pytest.mark.parametrize("storage, group", [(Q4, 32), (Q4, 16), (Q6, 16), (Q8, 32), (F16, 4096)])
def test_one_row_of_int8_blocks(caps, storage, group):
    """16-byte loads, whatever the storage; logits and their candidates come from the same kernel, with f32 x too."""
    for inputs, epilogue in product((Inputs.F32, Inputs.INT8), (Epilogue.ADD, Epilogue.LOGITS)):
        shape = Linear(1, 4096, 4096, group, storage, inputs, epilogue=epilogue)
        if inputs is Inputs.INT8 or epilogue is Epilogue.LOGITS:
            assert linear_kernel(shape, caps) == "linear_gemv"


@pytest.mark.parametrize("k, group, storage", [(4096, 32, Q4), (64, 32, Q8), (40, 40, F16)])
def test_one_row_on_a_cpu(k, group, storage):
    """Whole rows per lane: barriers and shared reductions cost a CPU more than the products."""
    assert linear_kernel(Linear(1, 64, k, group, storage), CPU) == "linear_rows"


@NOT_CPU
@pytest.mark.parametrize("m", [2, 8, 16])
def test_a_few_rows_read_the_weights_once(caps, m):
    assert linear_kernel(Linear(m, 64, 64, 32, Q4), caps) == "linear_gemv_batch"


@pytest.mark.parametrize(
    "m, n, tile", [(512, 16384, (128, 64)), (512, 2048, (64, 64)), (128, 2048, (32, 32)), (32, 2048, (32, 16))]
)
def test_f32_tiles_are_small_where_large_ones_would_be_few(m, n, tile):
    route = select(routes.LINEAR, Linear(m, n, 2048, 32, Q4), GPU)
    assert route.kernel == "linear_gemm" and (route.consts["TILE_M"], route.consts["TILE_N"]) == tile


def test_f32_tiles_fit_into_the_smallest_workgroup_memory():
    small = replace(GPU, shared_bytes=16384)
    for m, n in ((512, 16384), (17, 64)):
        consts = select(routes.LINEAR, Linear(m, n, 2048, 32, Q4), small).consts
        split_k = consts["WORKGROUP"] * 64 // (consts["TILE_M"] * consts["TILE_N"])
        assert split_k * consts["TILE_K"] * (consts["TILE_M"] + consts["TILE_N"]) * 4 <= 16384


@pytest.mark.parametrize("n, k", [(16384, 2048), (2048, 8192), (6144, 4096), (960, 576), (64, 64)])
def test_int8_tiles_fill_a_large_gpu(n, k):
    """Few tiles are shared by workgroups that split k, as long as each gets 256 of it."""
    for m in (17, 32, 64, 128, 512):
        shape = Linear(m, n, k, 32, Q4, Inputs.INT8)
        route = select(routes.LINEAR, shape, GPU)
        x, y, splits = route.grid(shape, route.consts, GPU, m, 0)
        assert route.kernel == "linear_gemm_int8" and splits == route.consts.get("GRID_SPLIT", 1)
        assert x * y * splits >= 256 or m > 128 or splits == 8 or 256 * 2 * splits > k
        assert splits == 1 or 256 * splits <= k


@pytest.mark.parametrize(
    "m, n, k, storage, kernel",
    [
        (512, 16384, 2048, Q4, "linear_matrix"),
        (70, 2048, 8192, F16, "linear_matrix"),
        (17, 6144, 4096, Q6, "linear_matrix"),
        (17, 16384, 2048, Q4, "linear_matrix"),
        (17, 2048, 8192, Q4, "linear_matrix"),
        (64, 3072, 2048, Q4, "linear_gemm_int8"),  # a small matrix: only from 65 tokens on
        (9, 28672, 4096, Q4, "linear_matrix"),
        (8, 28672, 4096, Q4, "linear_gemv_batch"),
        (16, 4096, 4096, Q4, "linear_gemv_batch"),
        (16, 16384, 2048, Q4, "linear_gemv_batch"),  # gate_up and ffn_down of 1B
        (16, 2048, 8192, Q4, "linear_gemv_batch"),
        (16, 3072, 8192, Q4, "linear_matrix"),  # ffn_down of 3B
        (512, 16384, 2048, Storage.BF16, "linear_gemm_int8"),  # may be beyond f16
    ],
)
def test_matrix_units(m, n, k, storage, kernel):
    group = 16 if storage is Q6 else k if storage.two_bytes else 32
    given = Linear(m, n, k, group, storage)
    for matrix, memory in product(MATRICES, (49152, 32768)):
        units = replace(GPU, matrix=matrix, shared_bytes=memory)
        shape = replace(given, inputs=routes.block_inputs([given], units))
        assert (shape.inputs is Inputs.F16) == (kernel == "linear_matrix")
        route = select(routes.LINEAR, shape, units)
        assert route.kernel == kernel
        assert kernel != "linear_matrix" or routes.matrix_tile_bytes(route.consts) <= memory
        for lacking in (replace(units, matrix=""), replace(units, subgroup=64)):
            assert routes.block_inputs([given], lacking) is Inputs.INT8


@pytest.mark.parametrize(
    "m, n, k, splits",
    [
        (16, 28672, 4096, 1),  # 896 tiles of 32 rows
        (16, 4096, 14336, 7),  # 128: 896 workgroups run side by side, 1024 do not
        (9, 3072, 8192, 8),  # ffn_down of 3B
        (32, 4096, 14336, 4),  # 64 tiles of 64 rows
        (128, 4096, 14336, 4),  # 32 of 128 rows
    ],
)
def test_matrix_splits_fill_a_large_gpu(m, n, k, splits):
    units, shape = replace(GPU, matrix="16x16", shared_bytes=49152), Linear(m, n, k, 32, Q4, Inputs.F16)
    route = select(routes.LINEAR, shape, units)
    tokens, rows, z = route.grid(shape, route.consts, units, m, 0)
    assert (route.kernel, route.consts.get("GRID_SPLIT", 1), z) == ("linear_matrix", splits, splits)
    assert (tokens, rows) == (1, -(-n // route.consts["TILE_N"]))


@pytest.mark.parametrize(
    "m, n, k, splits",
    [
        (128, 2048, 2048, 4),  # attn_output of 1B: 32 tiles
        (128, 3072, 2048, 4),  # its qkv: 48
        (512, 512, 2048, 4),  # values of Q4_K_M: 32
        (512, 2048, 2048, 1),  # 128
        (384, 2048, 2048, 1),  # 96
        (128, 4224, 2048, 1),  # 66
        (64, 4096, 2048, 1),  # 64, but of 64 rows
        (70, 576, 576, 2),  # no more splits than 256 k
        (70, 320, 320, 1),
    ],
)
def test_few_tiles_are_split(m, n, k, splits):
    units = replace(GPU, matrix="16x16", shared_bytes=49152)
    route = select(routes.LINEAR, Linear(m, n, k, 32, Q4, Inputs.F16, epilogue=Epilogue.QKV), units)
    assert (route.kernel, route.consts.get("GRID_SPLIT", 1)) == ("linear_matrix", splits)


SKINNY_GPU = replace(GPU, matrix="16x16", shared_bytes=49152, invocations=1024, measured_barrier=True)


@pytest.mark.parametrize(
    "n, k, epilogue, teams, splits, grid",
    [
        (6144, 4096, Epilogue.QKV, 16, 1, (1, 132, 1)),  # 8B
        (4096, 4096, Epilogue.ADD, 16, 1, (1, 132, 1)),
        (28672, 4096, Epilogue.GLU_BLOCKS, 16, 1, (1, 132, 1)),
        (4096, 14336, Epilogue.ADD, 8, 7, (1, 37, 7)),
        (3072, 3072, Epilogue.ADD, 12, 1, (1, 132, 1)),  # 3B
        (16384, 2048, Epilogue.GLU_BLOCKS, 8, 1, (1, 264, 1)),  # 1B
        (2048, 8192, Epilogue.ADD, 8, 4, (1, 66, 4)),
    ],
)
def test_skinny(n, k, epilogue, teams, splits, grid):
    """As many workgroups as an H200 runs at the same time."""
    shape = Linear(16, n, k, 32, Q4, Inputs.F16, epilogue=epilogue, blocks=Inputs.F16, f16_scales=True)
    given = replace(shape, inputs=Inputs.F32, epilogue=Epilogue.STORE)
    assert routes.block_inputs([given], SKINNY_GPU) is Inputs.F16
    route = select(routes.LINEAR, shape, SKINNY_GPU)
    consts = shaders.constants(route.kernel) | dict(route.consts)
    assert (route.kernel, consts["TEAMS"], consts["GRID_SPLIT"]) == ("linear_skinny", teams, splits)
    assert route.grid(shape, consts, SKINNY_GPU, 16, 0) == grid


@pytest.mark.parametrize("k, teams, workgroups", [(4096, 16, 132), (3072, 12, 132), (2048, 8, 264)])
def test_skinny_output_head(k, teams, workgroups):
    """Q6_K, of Llama 8B, 3B and 1B: the norm before it writes f16 blocks."""
    head = Linear(16, 128256, k, 16, Q6, sub_scales=True)
    assert routes.block_inputs([head], SKINNY_GPU) is Inputs.F16
    shape = replace(head, inputs=Inputs.F16)
    route = select(routes.LINEAR, shape, SKINNY_GPU)
    consts = shaders.constants(route.kernel) | dict(route.consts)
    assert (route.kernel, consts["TEAMS"], consts["GRID_SPLIT"]) == ("linear_skinny", teams, 1)
    assert route.grid(shape, consts, SKINNY_GPU, 16, 0) == (1, workgroups, 1)
    others = [{"m": 8}, {"m": 17}, {"n": 28672}, {"n": 128258}, {"k": 8192}, {"sub_scales": False}, {"group": 32}]
    lacking = [{"matrix": "16x8"}, {"measured_barrier": False}, {"shared_bytes": 32768 - 16}]
    given = [(replace(head, **other), SKINNY_GPU) for other in others]
    for other, caps in [*given, *((head, replace(SKINNY_GPU, **less)) for less in lacking)]:
        assert routes.block_inputs([other], caps) is (Inputs.F16 if other.m == 17 else Inputs.INT8)
        assert select(routes.LINEAR, replace(other, inputs=Inputs.F16), caps).kernel != "linear_skinny"


def test_what_is_not_skinny():
    """There is a kernel for all of them."""
    shape = Linear(
        16, 28672, 4096, 32, Q4, Inputs.F16, epilogue=Epilogue.GLU_BLOCKS, blocks=Inputs.F16, f16_scales=True
    )
    others = [replace(shape, m=17), replace(shape, f16_scales=False), replace(shape, group=128)]
    others += [
        replace(shape, storage=Q8),
        replace(shape, k=4160),
        replace(shape, k=8192),
        replace(shape, blocks=Inputs.INT8),
    ]
    caps = [
        replace(SKINNY_GPU, **lacking)
        for lacking in ({"matrix": "16x8"}, {"shared_bytes": 32768}, {"invocations": 256})
    ]
    assert select(routes.LINEAR, shape, SKINNY_GPU).kernel == "linear_skinny"
    for other, units in [*((other, SKINNY_GPU) for other in others), *((shape, units) for units in caps)]:
        assert select(routes.LINEAR, other, units).kernel == "linear_matrix"
    head = replace(shape, n=128256, k=8192, epilogue=Epilogue.STORE)  # whose splits the memory plan does not know
    assert "GRID_SPLIT" not in select(routes.LINEAR, head, SKINNY_GPU).consts
    small = replace(shape, n=3072, k=2048, inputs=Inputs.F32, epilogue=Epilogue.STORE)
    for given in (
        small,
        replace(shape, m=8, inputs=Inputs.F32, epilogue=Epilogue.STORE),
        replace(small, n=4104, k=4096),
    ):
        assert routes.block_inputs([given], SKINNY_GPU) is Inputs.INT8


def test_block_scale():
    """At once only f16 scales of 32 weights each, without anything between them, and whole eights in a row."""
    eight = Layout(Q4, 768, 32, scale_bits=16)
    assert all(
        routes.block_scale(replace(eight, storage=storage)) == "block_scale_eight" for storage in (Q4, Storage.Q8)
    )
    others = ({"k": 576}, {"group": 16}, {"group": 128}, {"has_offset": True}, {"scale_bits": 32})
    assert {routes.block_scale(replace(eight, **other)) for other in others} == {"block_scale_one"}
    assert routes.block_scale(Layout(Storage.F16, 768, 768)) == "block_scale_one"  # which halves_f16 stands for


def test_block_scale_of_super_blocks():
    """Once in a super-block of five words."""
    q4_k, q6_k = Layout(Q4, 768, 32, has_offset=True, scale_bits=8), Layout(Q6, 768, 16, scale_bits=8)
    assert {routes.block_scale(layout) for layout in (q4_k, q6_k)} == {"block_scale_super"}
    q2_k, iq4_xs = replace(q4_k, group=16), replace(q4_k, has_offset=False)
    assert {routes.block_scale(layout) for layout in (q2_k, iq4_xs)} == {"block_scale_one"}


@pytest.mark.parametrize("blocks, columns", [(Inputs.F16, 32), (Inputs.INT8, 64)])
def test_tiles_of_gated_units(blocks, columns):
    """Half of an int8 block cannot be stored: ffn_down of Q4_K_M, for one, reads int8 where gate_up is on matrices."""
    units = replace(GPU, matrix="16x16", shared_bytes=49152)
    shape = Linear(16, 28672, 4096, 32, Q4, Inputs.F16, epilogue=routes.Epilogue.GLU_BLOCKS, blocks=blocks)
    assert select(routes.LINEAR, shape, units).consts["TILE_N"] == columns
    down = Linear(16, 4096, 14336, 16, Q6)
    assert routes.block_inputs([down], units) is Inputs.INT8


def test_f32_inputs_on_matrix_units():
    """In two f16 each, where many tokens pay for it and the results need no workgroup."""
    units = replace(GPU, matrix="16x16", shared_bytes=49152)
    many = Linear(512, 16384, 2048, 32, Q4)
    for memory in (49152, 32768):
        route = select(routes.LINEAR, many, replace(units, shared_bytes=memory))
        assert (route.kernel, route.consts["TERMS"]) == ("linear_matrix", 3)
        assert routes.matrix_tile_bytes(route.consts) <= memory
    down = [replace(many, n=n, k=k) for n, k in ((2048, 8192), (4096, 14336), (4096, 65536))]
    assert [select(routes.LINEAR, shape, units).consts["GRID_SPLIT"] for shape in down] == [2, 4, 8]  # for short sums
    assert "GRID_SPLIT" not in select(routes.LINEAR, replace(many, n=128256, k=8192), units).consts
    others = [replace(many, m=64), replace(many, k=2080), replace(many, storage=Storage.BF16, group=2048)]
    others += [replace(many, n=128), replace(many, m=128, n=2048)]  # few tiles
    for other in others:
        assert select(routes.LINEAR, other, units).kernel == "linear_gemm"
    assert select(routes.LINEAR, many, GPU).kernel == "linear_gemm"


@pytest.mark.parametrize(
    "m, n, k, epilogue, workgroup, lanes",
    [
        (4, 28672, 4096, Epilogue.GLU_BLOCKS, 128, 8),
        (8, 28672, 4096, Epilogue.GLU_BLOCKS, 128, 8),
        (8, 16384, 2048, Epilogue.GLU_BLOCKS, 256, 16),
        (4, 6144, 4096, Epilogue.QKV, 128, 32),
        (8, 6144, 4096, Epilogue.QKV, 256, 128),
        (4, 4096, 4096, Epilogue.ADD, 256, 64),
        (8, 4096, 14336, Epilogue.ADD, 256, 64),
        (8, 2048, 8192, Epilogue.ADD, 256, 128),
        (4, 128256, 4096, Epilogue.STORE, 256, 64),
    ],
)
def test_workgroups_of_a_few_rows(m, n, k, epilogue, workgroup, lanes):
    shape = Linear(m, n, k, 32, Q4, Inputs.INT8, epilogue=epilogue)
    consts = select(routes.LINEAR, shape, GPU).consts
    assert (consts["TOKENS"], consts["WORKGROUP"], consts["LANES"]) == (m, workgroup, lanes)


def test_results_in_int8_blocks_are_not_split():
    shape = Linear(64, 2048, 8192, 32, Q4, Inputs.INT8, epilogue=Epilogue.GLU_BLOCKS)
    assert select(routes.LINEAR, shape, GPU).grid(shape, {"TILE_N": 64, "TILE_M": 64}, GPU, 64, 0) == (32, 1, 1)


@EVERY_CAPS
@pytest.mark.parametrize("width", [1, 3, 4, 576, 577, 4096])
def test_norms_by_vec4_where_the_width_allows(caps, width):
    assert select(routes.NORM, RowWise(width), caps).kernel == ("rms_norm" if width % 4 else "rms_norm_vec4")


@EVERY_CAPS
def test_embedding(caps):
    assert select(routes.EMBED, Linear(1, 9, 64, 32, Q4), caps).kernel == "embed"
    assert select(routes.EMBED, Linear(1, 9, 33, 33, F16), caps).kernel == "embed_any"


# Attention


FAR = 8192  # a context bucket: for many rows there, attend_split is not the fastest


def attention_kernel(head_dim: int, m: int, caps: Caps, heads: int = 1, bucket: int = FAR, int8: bool = False) -> str:
    return select(routes.ATTEND, Attention(m, heads, 1, head_dim, bucket=bucket, int8=int8), caps).kernel


@pytest.mark.parametrize(
    "head_dim, without_subgroups, with_subgroups",
    [
        (6, "attend_any", "attend_any"),
        (48, "attend", "attend"),
        (64, "attend", "attend_tile"),
        (96, "attend", "attend_tile"),
        (128, "attend", "attend_tile"),
        (256, "attend", "attend_tile"),
        (260, "attend_any", "attend_any"),
    ],
)
def test_attention_of_many_rows(head_dim, without_subgroups, with_subgroups):
    """Without subgroups V is read along head_dim, 16 bytes at a time, where that can be done; with them, tiles."""
    assert attention_kernel(head_dim, 65, MINIMUM) == without_subgroups
    assert attention_kernel(head_dim, 65, GPU) == with_subgroups


def test_attention_of_few_rows_is_split():
    assert attention_kernel(128, 1, GPU) == attention_kernel(128, 64, GPU) == "attend_split"
    assert attention_kernel(128, 1, MINIMUM) == attention_kernel(96, 1, GPU) == "attend"  # it needs subgroups, and % 64
    assert attention_kernel(6, 1, GPU) == "attend_any"


@pytest.mark.parametrize(
    "m, bucket, kernel",
    [
        (8, 8192, "attend_split"),
        (16, 513, "attend_split"),
        (16, 1537, "attend_int8"),
        (32, 193, "attend_split"),
        (32, 513, "attend_int8"),
        (64, 65, "attend_split"),
        (128, 1, "attend_split"),
        (128, 65, "attend_int8"),
        (256, 1, "attend_int8"),
        (1024, 1, "attend_int8"),
    ],
)
def test_attention_in_int8_by_rows_and_context(m, bucket, kernel):
    assert attention_kernel(64, m, GPU, bucket=bucket, int8=True) == kernel


def test_attention_in_int8_needs_its_heads_and_8_lanes():
    kernels = [attention_kernel(d, 65, GPU, int8=True) for d in (32, 64, 96, 128, 256)]
    assert kernels == ["attend_tile", "attend_int8", "attend_tile", "attend_int8", "attend_tile"]
    assert attention_kernel(64, 65, replace(GPU, subgroup=4), int8=True) == "attend_tile"


@pytest.mark.parametrize("kv_heads", [1, 3, 8, 32])
def test_splits_of_attention_in_int8(kv_heads):
    """The same buffer holds them, whatever the rows; a long context of few rows has several, a prompt of many one."""
    for m, bucket in product((2, 16, 32, 64, 128, 256, 512, 1024), (1, 513, 1537, 8192)):
        shape = Attention(m, 4 * kv_heads, kv_heads, 64, bucket=bucket, int8=True)
        splits = routes.in_splits(shape, GPU).splits
        assert m * splits <= max(m, routes.MAX_SPLIT_ROWS) and (splits == 1 or m <= 256)
    assert routes.in_splits(Attention(32, 32, 8, 64, bucket=8192, int8=True), GPU).splits == 16


def test_plans_of_many_rows_in_int8_do_not_depend_on_the_context():
    prompt, turn = (Attention(m, 32, 8, 64, int8=True) for m in (512, 32))
    assert not routes.depends_on_context(prompt, GPU) and routes.depends_on_context(turn, GPU)


def test_plans_on_matrices_depend_on_the_context_where_it_is_split():
    caps = replace(GPU, shared_bytes=49152, matrix="16x16")
    shapes = (Attention(512, heads, 8, 128, half=True) for heads in (24, 32))
    assert [routes.depends_on_context(shape, caps) for shape in shapes] == [True, False]


@pytest.mark.parametrize("m", [1, 65])
def test_attention_of_many_heads_to_one_kv_head(m):
    """attend_split has a subgroup for each of 32 heads, attend_tile a row: more take a kernel without that limit."""
    assert attention_kernel(64, m, GPU, heads=32) in ("attend_split", "attend_tile")
    assert attention_kernel(64, m, GPU, heads=33) == "attend"


def test_tiles_of_attention_stay_in_a_subgroup():
    """Rows of a head of 128 are shared by eight lanes: subgroups of four cannot hold them."""
    assert attention_kernel(64, 65, replace(GPU, subgroup=4)) == "attend_tile"
    assert attention_kernel(128, 65, replace(GPU, subgroup=4)) == "attend"


def test_rows_of_many_sequences_share_no_keys():
    """However deep they are; rows of one sequence are a tile."""
    deep = Attention(64, 32, 8, 64, bucket=1537, int8=True)
    kernels = [select(routes.ATTEND, replace(deep, segments=count), GPU).kernel for count in (64, 33, 32, 1)]
    assert kernels == ["attend_split", "attend_split", "attend_int8", "attend_int8"]


def test_attend_split_fits_into_workgroup_memory():
    """To merge, 31 heads of 256 take 31,992 bytes, 32 heads 33,024."""
    assert [attention_kernel(256, 1, GPU, heads=heads) for heads in (31, 32)] == ["attend_split", "attend"]


def test_attend_tile_fits_into_workgroup_memory():
    small, large = (replace(GPU, shared_bytes=size) for size in (16384, 32768))
    assert attention_kernel(128, 65, small) == attention_kernel(256, 65, large) == "attend_tile"
    assert attention_kernel(256, 65, small) == "attend"
    assert attention_kernel(128, 65, small, int8=True) == "attend_tile"
    assert attention_kernel(128, 65, large, int8=True) == "attend_int8"  # 31744 bytes
    wide = select(routes.ATTEND, Attention(512, 32, 8, 128, int8=True), replace(GPU, shared_bytes=49152))
    assert wide.consts["WORKGROUP"] == 256


@pytest.mark.parametrize(
    "heads, head_dim, m, shared_bytes, workgroup",
    [
        (32, 128, 256, 49152, 128),
        (32, 128, 257, 49152, 256),
        (24, 128, 341, 49152, 128),
        (24, 128, 342, 49152, 256),
        (32, 64, 512, 49152, 128),
        (32, 128, 512, 32768, 128),
        (32, 128, 512, 16384, None),
    ],
)
def test_tiles_of_attention_on_matrices(heads, head_dim, m, shared_bytes, workgroup):
    caps = replace(GPU, shared_bytes=shared_bytes, matrix="16x16")
    route = select(routes.ATTEND, Attention(m, heads, 8, head_dim, half=True), caps)
    assert (route.consts["WORKGROUP"] if route.kernel == "attend_matrix" else None) == workgroup


@pytest.mark.parametrize(
    "heads, head_dim, m, bucket, splits",
    [
        (32, 64, 512, 8192, 1),  # 256 workgroups, two to a core
        (32, 128, 512, 8192, 1),  # 128, one to a core
        (24, 128, 512, 8192, 4),  # 96: in quarters all cores have three
        (24, 128, 512, 1537, 1),
        (24, 128, 512, 1, 1),
        (32, 64, 128, 8192, 4),
        (32, 128, 128, 8192, 2),
        (32, 64, 128, 1, 1),
        (24, 128, 2048, 8192, 1),
    ],
)
def test_splits_of_attention_on_matrices(heads, head_dim, m, bucket, splits):
    caps = replace(GPU, shared_bytes=49152, matrix="16x16")
    assert routes.in_splits(Attention(m, heads, 8, head_dim, bucket=bucket, half=True), caps).splits == splits


@pytest.mark.parametrize("m", [65, 100, 130])
@pytest.mark.parametrize("memory, most", [(128 << 20, 2048), (1 << 20, 512), (1 << 18, 128)])
def test_splits_of_attention_on_matrices_fit_into_memory(m, memory, most):
    """With one KV head there are few workgroups: as many splits as memory and the context allow."""
    caps = replace(GPU, shared_bytes=49152, matrix="16x16", binding_bytes=memory)
    assert routes.matrix_split_rows(4 * 128, caps) == most
    for bucket in (513, 8192):
        splits = routes.in_splits(Attention(m, 4, 1, 128, bucket=bucket, half=True), caps).splits
        limit = max(1, min(most // m, (bucket + m) // 128))
        assert splits <= limit and (splits > limit // 2 or bucket < 8192)


def test_scores_on_matrices_are_rounded_where_both_allow_it():
    allowed, measured = Attention(512, 32, 8, 64, half=True, half_scores=True), replace(GPU, half_sums=True)
    exact = replace(allowed, half_scores=False)
    shapes = [(allowed, measured), (allowed, GPU), (exact, measured)]
    assert [routes.half_scores(*pair) for pair in shapes] == [True, False, False]


@pytest.mark.parametrize("head_dim, subgroup, run", list(product((64, 128, 192, 256), (4, 8, 32, 64), (8, 16))))
def test_lanes_of_a_position_divide_head_and_subgroup(head_dim, subgroup, run):
    lanes = routes.position_lanes(head_dim, run, replace(GPU, subgroup=subgroup))["LANES_PER_POSITION"]
    assert head_dim % (run * lanes) == 0 and subgroup % lanes == 0 and lanes % 4 == 0


def test_attention_rotates_where_registers_are_left():
    """8 dimensions a lane: heads of 256 with an f16 cache and subgroups of 32. Heads up to 128 rotate anywhere."""

    def rotates(head_dim, run=8, subgroup=32):
        return routes.attention_can_rotate(head_dim, head_dim, run, replace(GPU, subgroup=subgroup))

    assert rotates(64) and rotates(128, run=16) and rotates(128, subgroup=8) and rotates(256)
    assert not (rotates(192) or rotates(256, run=16) or rotates(256, subgroup=16) or rotates(512))
    assert not routes.attention_can_rotate(64, 66, 8, GPU)


def test_small_workgroups_hold_the_heads_of_a_kv_head():
    small = routes.GridSize(256, 256)
    assert [routes.grid_sizes(1152, heads, GPU)[0] == small for heads in (1, 8, 9)] == [True, True, False]
    assert [routes.grid_sizes(dim, 4, GPU)[0] == small for dim in (576, 1535, 1536)] == [True, True, False]
    experts = [routes.grid_sizes(dim, 8, GPU, experts=True)[0] for dim in (2048, 3072, 4096)]
    assert [grid == small for grid in experts] == [True, True, False]
    large = routes.GridSize(128, 512)
    assert {routes.rows_grid(grid) for grid in experts} == {large}  # of several rows: one for a core
    dawn = replace(GPU, tint=True)
    assert [routes.grid_sizes(dim, 4, dawn)[0] == small for dim in (576, 3072, 4096)] == [True, True, False]


@pytest.mark.parametrize("kv_heads", [1, 3, 8, 32])
def test_splits_of_a_context(kv_heads):
    """More positions are never cut into fewer splits, nor into more than the buffers hold."""
    positions = (1, 2, 64, 100, 256, 385, 1000, 8192, 131072)
    splits = [routes.split_count(routes.context_bucket(n), kv_heads) for n in positions]
    assert splits == sorted(splits) and splits[-1] <= routes.MAX_SPLITS
    several = [routes.split_count(routes.context_bucket(n), kv_heads, 16) * 16 for n in (1, 100, 8192)]
    assert all(count <= max(16, routes.MAX_SPLITS) for count in several)  # the same buffer holds them


@pytest.mark.parametrize(
    "m, bucket, shares, subgroups",
    [(1, 65, 1, 4), (8, 1, 1, 2), (2, 65, 4, 8), (8, 65, 2, 8), (16, 193, 1, 8), (17, 193, 1, 4), (64, 513, 1, 8)],
)
def test_workgroups_and_subgroups_of_query_heads(m, bucket, shares, subgroups):
    """As many as for a long context, where several rows leave no core without a workgroup."""
    shape = Attention(m, 32, 8, 128, bucket=bucket, segments=m)
    assert routes.head_shares(shape) == shares and routes.subgroups_per_head(shape, GPU) == subgroups
    small = replace(GPU, invocations=256)  # 8 subgroups for the heads of a workgroup
    assert routes.subgroups_per_head(shape, small) == min(subgroups, 8 * shares // 4)


def test_shares_of_query_heads_divide_them():
    shapes = [Attention(4, heads, kv_heads, 64, bucket=65) for heads, kv_heads in ((7, 1), (6, 1), (24, 8), (8, 8))]
    assert [routes.head_shares(shape) for shape in shapes] == [1, 2, 1, 1]
    split = Attention(2, 32, 8, 64, bucket=513, splits=4)
    assert [routes.head_shares(replace(split, splits=splits)) for splits in (2, 4, 8)] == [4, 2, 1]


@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, grid, rows, consts",
    [
        (32, 8, 64, (128, 512), 1, (1, 4, 4)),
        (24, 8, 128, (128, 512), 1, (1, 4, 4)),
        (32, 4, 128, (128, 512), 1, (2, 4, 4)),  # Qwen 3 30B-A3B
        (4, 1, 256, (256, 256), 1, (4, 8, 4)),  # Gemma 3 1B
        (5, 1, 256, (256, 256), 1, (1, 1, 4)),  # 5 heads cannot be halved
        (32, 4, 128, (128, 512), 2, (1, 2, 8)),
        (24, 8, 128, (128, 512), 4, (3, 16, 8)),  # Llama 3.2 3B: without splits more workgroups share the heads
        (32, 8, 64, (128, 512), 8, (2, 8, 8)),
        (32, 4, 128, (256, 256), 8, (4, 4, 8)),
        (32, 8, 64, (128, 512), 16, (1, 4, 4)),
        (24, 8, 128, (128, 512), 16, (1, 2, 4)),  # more would not fit beside the inputs
        (8, 2, 192, (128, 512), 2, (1, 4, 4)),  # three runs a lane
    ],
)
def test_query_heads_of_a_fused_kernel(heads, kv_heads, head_dim, grid, rows, consts):
    """Enough subgroups of a head to look at a short split at once, if necessary by more workgroups."""
    found = routes.fused_head_consts(
        Attention(1, heads, kv_heads, head_dim), routes.GridSize(*grid), GPU, rows, staged=rows > 2
    )
    assert tuple(found[name] for name in ("HEAD_SHARES", "SUBGROUPS_PER_HEAD", "POSITIONS_IN_FLIGHT")) == consts


@pytest.mark.parametrize(
    "n, k, tint, lanes",
    [
        (6144, 4096, False, 64),  # qkv of 8B: three full turns, with 32 lanes one and a half
        (28672, 4096, False, 32),
        (5120, 2048, False, 32),  # qkv of 30B-A3B: a lane would have one block
        (2048, 8192, False, 64),  # down of 1B: 32 lanes give half of the subgroups nothing to do
        (576, 1536, False, 64),
        (1536, 1152, False, 32),  # qkv of Gemma 3 1B: 64 lanes would have 36 blocks
        (13824, 1152, False, 32),
        (13824, 1152, True, 16),
        (6144, 2560, True, 32),
    ],
)
def test_lanes_of_a_fused_row(n, k, tint, lanes):
    caps, grid = replace(GPU, tint=tint), routes.GridSize(256, 256) if k < 1536 or tint else routes.GridSize(128, 512)
    assert routes.fused_linear(Linear(1, n, k, 32, Q4, Inputs.INT8), grid, caps).consts["LANES"] == lanes


@pytest.mark.parametrize(
    "n, rows, shared", [(28672, 8, 64), (28672, 2, 0), (16384, 8, 0), (19456, 16, 48), (4096, 8, 0)]
)
def test_units_that_workgroups_share(n, rows, shared):
    shape = Linear(rows, n, 4096, 32, Q4, Inputs.INT8, Prologue.BLOCKS, Epilogue.GLU_BLOCKS)
    route = routes.fused_linear(shape, routes.GridSize(128, 512), GPU)
    assert route.consts.get("SHARED_UNITS", 0) == shared


def test_fused_rows_with_tint():
    """Up to 8; wide models have norm stages from two rows on, so that long contexts may be unfused; a lane of attention
    has one row of the step."""
    caps = replace(GPU, tint=True, measured_barrier=True)
    narrow, wide, few = Attention(1, 32, 8, 64), Attention(1, 32, 8, 128), Attention(1, 12, 2, 128)
    assert routes.fused_widths(2048, narrow, True, False, caps) == (2, 4, 8)
    assert routes.fused_widths(2048, narrow, True, True, caps) == (2, 4)
    assert routes.fused_widths(4096, wide, True, False, caps) == (2, 4, 8)
    assert routes.fused_widths(2048, Attention(1, 32, 1, 256), True, False, caps) == (2, 4)  # 4 positions at once
    stages = [routes.has_norm_stages(rows, dim, caps) for rows, dim in ((1, 4096), (2, 4096), (2, 2048), (4, 2048))]
    assert stages == [False, True, False, True] and not routes.has_norm_stages(2, 4096, GPU)
    assert routes.fuses_context(few, 4096, 2, 1, 8192, GPU) and not routes.fuses_context(few, 4096, 2, 1, 8192, caps)
    at_once = [routes.positions_at_once(wide, routes.GridSize(128, 512), caps, rows, True) for rows in (2, 4, 8)]
    assert at_once == [32, 32, 16]


def test_sums_that_leave_blocks():
    """Where most workgroups have a block, none has two, and pieces are large enough."""
    large = routes.GridSize(128, 512)
    found = [routes.sums_leave_blocks(dim, 8, large, 1024, GPU) for dim in (2048, 2080, 2560, 3072, 4096, 4128)]
    assert found == [False, True, True, True, True, False]
    assert [routes.sums_leave_blocks(4096, rows, large, 1024, GPU) for rows in (2, 4, 16)] == [False, True, False]
    assert [routes.sums_leave_blocks(4096, 4, large, piece, GPU) for piece in (128, 256)] == [False, True]


@pytest.mark.parametrize(
    "heads, kv_heads, head_dim, rows, segments, longest",
    [
        (32, 8, 64, 2, 1, 8192),  # in splits
        (32, 8, 64, 8, 1, 8192),
        (32, 8, 64, 16, 1, 513),  # of one sequence: rows could share what they read
        (32, 8, 64, 16, 2, 513),  # 15 of one and one of another
        (32, 8, 64, 16, 9, 8192),
        (32, 8, 128, 16, 16, 193),  # few subgroups for a head
        (32, 8, 128, 8, 8, 8192),
        (24, 8, 128, 8, 8, 8192),
        (12, 2, 64, 4, 4, 193),  # few workgroups
    ],
)
def test_contexts_of_a_fused_step(heads, kv_heads, head_dim, rows, segments, longest):
    shape = Attention(1, heads, kv_heads, head_dim), heads * head_dim, rows, segments
    buckets = [bucket for bucket, _, _ in routes.CONTEXT_BUCKETS]
    assert max(bucket for bucket in buckets if routes.fuses_context(*shape, bucket, GPU)) == longest


# Every shape has a route, and every route is sound


def shapes() -> Iterator[Linear]:
    """Linears of every storage, odd and even shapes, without prologue and workgroup epilogue."""
    sizes = ((1, 1), (7, 7), (30, 3), (576, 32), (4096, 16))
    for m, (k, group), storage in product((1, 2, 17, 513), sizes, (Q4, Q8, F16)):
        yield Linear(m, 65, k, group, storage)


@EVERY_CAPS
def test_every_shape_has_a_route(caps):
    for shape in shapes():
        assert routes.fits_any(routes.LINEAR, shape, caps) and routes.fits_any(routes.EMBED, shape, caps)
    for head_dim, m in product((2, 6, 1000), (1, 2, 513)):
        assert routes.fits_any(routes.ATTEND, Attention(m, 3, 1, head_dim), caps)
    assert all(routes.fits_any(routes.NORM, RowWise(width), caps) for width in (1, 3, 8191))


@EVERY_CAPS
def test_kernels_of_one_row_take_no_more(caps):
    """A GEMV of one row computes row 0 alone: no other shape may be routed to it."""
    single = {"linear_rows", "linear_gemv", "linear_gemv_word"}
    for shape in shapes():
        assert shape.m == 1 or linear_kernel(shape, caps) not in single


def test_a_workgroup_epilogue_gets_a_kernel_that_calls_it():
    swiglu, logits = Epilogue.GLU_BLOCKS, Epilogue.LOGITS
    f32, int8 = Inputs.F32, Inputs.INT8
    some = {(f32, 1, swiglu), (f32, 1, logits), (f32, 4, swiglu), (int8, 1, swiglu), (int8, 1, logits)}
    some |= {(int8, 4, swiglu), (int8, 70, swiglu)}  # the others have no kernel: the engine does not ask for them
    for inputs, m, epilogue in product((f32, int8), (1, 4, 70), (swiglu, logits)):
        shape = Linear(m, 192, 576, 32, Q4, inputs, epilogue=epilogue)
        fitting = [route for route in routes.LINEAR if route.fits(shape, GPU)]
        assert bool(fitting) == ((inputs, m, epilogue) in some)
        assert all(route.has_workgroup_epilogue for route in fitting)


def test_a_prologue_gets_a_kernel_that_runs_it():
    shape = Linear(1, 4096, 2048, 32, Q4, Inputs.INT8, Prologue.NORM)
    assert linear_kernel(shape, GPU) == linear_kernel(shape, MINIMUM) == "linear_gemv"


@pytest.mark.parametrize("caps", [GPU, CPU], ids=["gpu", "cpu"])
def test_no_grid_exceeds_the_limits(caps):
    """Vocabularies of four million rows, and long chunks."""
    for n, m in product((1, 63, 4097, 128256, 4_000_000), (1, 2, 64, 512)):
        shape = Linear(m, n, 4096, 32, Q4)
        route = select(routes.LINEAR, shape, caps)
        own = shaders.constants(route.kernel) | dict(route.consts)
        assert max(route.grid(shape, own, caps, m, 0)) <= 65535, (route.kernel, n, m)


@pytest.mark.parametrize("count", [1, 2, 65534, 65535, 65536, 131070, 131071, 10_000_000])
def test_folded_grids(count):
    x, y, z = fold(count, GPU)
    assert x <= 65535 and y <= 65535 and z == 1
    assert count <= x * y < count + x  # all of them, and less than one row of workgroups too many


TABLES = [
    name
    for name, value in vars(routes).items()
    if isinstance(value, tuple) and value and isinstance(value[0], routes.Route)
]


def test_all_tables_are_found():
    assert len(TABLES) == 14 and {"LINEAR", "ATTEND", "TEXTURE_LINEAR"} <= set(TABLES)


@pytest.mark.parametrize("table", TABLES)
def test_routes_name_real_kernels_and_constants(table):
    for route in getattr(routes, table):
        known = shaders.constants(route.kernel) | shaders.constants("epilogue_glu_blocks")
        assert set(route.consts) <= set(known), route.kernel
        assert route.needs


# The rest


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 32, 33, 100, 256, 300, 512])
def test_a_plan_holds_its_rows(rows):
    assert rows <= routes.plan_width(rows, 512) <= 512


def test_scalar_takes_the_last_routes():
    scalar = replace(GPU, scalar=True)
    assert linear_kernel(Linear(1, 64, 64, 32, Q4), scalar) == "linear_any"
    assert attention_kernel(64, 1, scalar) == "attend_any"
    assert not routes.suits_textures(64, 64, 64, 64, [], replace(CPU, scalar=True))


@pytest.mark.parametrize("subgroup, lanes", [(0, 8), (4, 4), (8, 8), (16, 16), (32, 8)])
def test_a_vector_is_a_subgroup(subgroup, lanes):
    assert routes.vector_lanes(replace(CPU, subgroup=subgroup)) == lanes


def test_the_tables_need_no_gpu():
    """They are read without a driver: importing them brings no wgpu."""
    code = "import sys, llamagpu.engine.routes; sys.exit('wgpu' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
