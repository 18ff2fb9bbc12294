"""Kernels of the texture backend against float64, and the texture layout of weights."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from kernel_cases import GUARD, SLOTS, Steps, attended, covers, per_row, run, same_first_page, segment
from reference import assert_close

from llamagpu.engine import ops, routes
from llamagpu.engine.kv_cache import TEXTURE_ROWS
from llamagpu.engine.ops import Ops, Output, PrologueSpec
from llamagpu.engine.options import KvType
from llamagpu.engine.page_table import PageTable
from llamagpu.engine.routes import Attention, Epilogue, Prologue
from llamagpu.engine.step_inputs import Segment, StepInputs
from llamagpu.engine.synthetic import synthetic_config
from llamagpu.files.architectures import QkNorm
from llamagpu.files.config import LayerKind, Rope
from llamagpu.files.storage import Storage, dequantize
from llamagpu.files.texture_layout import to_texture
from llamagpu.verify.reference import F32, Weight, only, random, rms_norm, silu, step_buffer, swiglu
from llamagpu.verify.textures import cache_rows, read_rows, texture_matrix, upload_rows

STORAGES = {  # storage, group, has_offset
    "q4": (Storage.Q4, 32, False),
    "q4 offset": (Storage.Q4, 32, True),
    "q4/64": (Storage.Q4, 64, False),
    "q4/16": (Storage.Q4, 16, True),
    "q8": (Storage.Q8, 32, False),
    "q8 offset": (Storage.Q8, 32, True),
    "q8/16": (Storage.Q8, 16, False),
    "f16": (Storage.F16, 0, False),
    "bf16": (Storage.BF16, 0, False),
}
TWO_STORAGES = (Weight(Storage.Q4, 24, 64, has_offset=True), Weight(Storage.Q8, 48, 64, 16))


def weight_of(name: str, n: int, k: int) -> Weight:
    storage, group, has_offset = STORAGES[name]
    return Weight(storage, n, k, group, has_offset)


def upload_weights(gpu, *weights: Weight, bias=None) -> tuple:
    """A matrix in textures, each weight a shard of it; and as [n, k] float64."""
    packed = [weight.packed() for weight in weights]
    return texture_matrix(gpu, *packed, bias=bias), np.concatenate([dequantize(matrix) for matrix in packed])


def guarded_texture(gpu, rows: int, width: int):
    return upload_rows(gpu, np.full((rows, width), GUARD))


@pytest.mark.parametrize("name", STORAGES)
def test_textures_hold_the_same_weights(name):
    """Read back by the description of the layout, in float64."""
    packed = weight_of(name, 13, 192).packed()
    texels, group = to_texture(packed), packed.layout.group
    assert texels.dtype == np.uint32 and texels.shape[::2] == (2, 4)
    if packed.scales is None:
        rows = texels.view(np.float32).reshape(2, -1, 8, 8).swapaxes(1, 2).reshape(16, -1)
        assert np.array_equal(rows[:13, :192], dequantize(packed))
        return
    groups = texels.reshape(2, 192 // group, -1, 8)  # [8 rows, group, word, row]
    words, scales = groups[:, :, :-2], groups[:, :, -2:].view(np.float32).astype(np.float64)
    bits = packed.layout.storage.bits
    integers = words[:, :, :, None, :] >> np.arange(0, 32, bits, dtype=np.uint32)[:, None] & (2**bits - 1)
    integers = integers.reshape(2, 192 // group, group, 8)  # [8 rows, group, k, row]
    rows = (integers * scales[:, :, :1] + scales[:, :, 1:]).transpose(0, 3, 1, 2).reshape(16, 192)
    assert_close(rows[:13], dequantize(packed), 1e-13, 1e-6, name)


@covers("linear_texture", "linear_texture_gemv")
@pytest.mark.parametrize("m", [1, 2, 3, 7, 8, 9, 33, 70])
@pytest.mark.parametrize("n, k", [(40, 64), (1003, 192)], ids=["40x64", "1003x192"])
@pytest.mark.parametrize("name", STORAGES)
def test_linear(gpu, name, n, k, m):
    matrix, w = upload_weights(gpu, weight_of(name, n, k))
    x = random(f"x {m}").standard_normal((m, k)).astype(np.float32)
    y = gpu.upload(np.full(m * n + 8, GUARD, np.float32), "y")
    output, make = Output(Epilogue.TEXTURE_TO_BUFFER, {"y": y}, {"WIDTH": n}), Ops(gpu, step_buffer(gpu, m))
    run(gpu, make.linear(upload_rows(gpu, x), matrix, m, output, table=routes.TEXTURE_LINEAR), m)
    got = gpu.read(y, np.float32, m * n + 8)
    assert (got[m * n :] == GUARD).all()
    assert_close(got[: m * n].reshape(m, n), x @ w.T, *F32, name)


@pytest.mark.parametrize("route", routes.TEXTURE_LINEAR, ids=lambda r: f"{r.kernel} {r.needs}")
def test_every_row_of_the_linear_table(any_gpu, route):
    """Each route, also where the table selects another one; k that is no multiple of the stride."""
    gpu, m = any_gpu, 1 if route.kernel == "linear_texture_gemv" else 6
    for weight in (Weight(Storage.Q4, 24, 96, has_offset=True), Weight(Storage.F16, 24, 44)):
        matrix, w = upload_weights(gpu, weight)
        x, y = random("x").standard_normal((m, weight.k)).astype(np.float32), gpu.zeros(m * 24 * 4, "y")
        output, make = Output(Epilogue.TEXTURE_TO_BUFFER, {"y": y}, {"WIDTH": 24}), Ops(gpu, step_buffer(gpu, m))
        run(gpu, make.linear(upload_rows(gpu, x), matrix, m, output, table=only(route)), m)
        assert_close(gpu.read(y, np.float32, m * 24).reshape(m, 24), x @ w.T, *F32, weight.name)


@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("epilogue", [Epilogue.TEXTURE_STORE, Epilogue.TEXTURE_ADD, Epilogue.TEXTURE_SWIGLU])
def test_epilogues_into_textures(gpu, epilogue, m):
    """Two shards of different storage and a bias; nothing is written beyond the rows."""
    rng = random(f"epilogue {m}")
    bias = rng.standard_normal(72).astype(np.float32)
    matrix, w = upload_weights(gpu, *TWO_STORAGES, bias=bias)
    x, base = rng.standard_normal((m, 64)).astype(np.float32), rng.standard_normal((m, 72)).astype(np.float32)
    y, add = guarded_texture(gpu, m + 4, 72), epilogue is Epilogue.TEXTURE_ADD
    output = Output(epilogue, {"y": y} | ({"base": upload_rows(gpu, base)} if add else {}), {"BIAS": True})
    make = Ops(gpu, step_buffer(gpu, m))
    run(gpu, make.linear(upload_rows(gpu, x), matrix, m, output, table=routes.TEXTURE_LINEAR), m)
    want = x @ w.T + bias
    if add:
        want = want + base
    if epilogue is Epilogue.TEXTURE_SWIGLU:
        want = swiglu(want)
    got = read_rows(gpu, y)
    assert_close(got[:m, : want.shape[1]], want, *F32, epilogue)
    assert (got[m:] == GUARD).all()


QKV_STEPS = [
    [segment(1, 0, 1)],
    [segment(2, 35, 5)],
    [segment(2, 3, 1), segment(0, 39, 1), segment(1, 14, 4)],
]


@pytest.mark.parametrize("segments", QKV_STEPS, ids=["one row", "five rows", "three sequences"])
def test_epilogue_qkv(gpu, segments):
    """q is rotated and stored. k, rotated, and v go to the slot and position of their row, and nowhere else.

    The cache texture has 16 rows: later positions are in further columns.
    """
    c = replace(synthetic_config("tiny"), heads=4, kv_heads=2, head_dim=16, rope_dims=8)
    capacity, texture_rows, rows_at = 40, 16, per_row(segments)
    m, rng = len(rows_at), random("qkv")
    weights = Weight(Storage.Q4, 24, 64, has_offset=True), Weight(Storage.Q8, 104, 64, 16)  # cut inside a head
    bias = rng.standard_normal(128).astype(np.float32)
    matrix, w = upload_weights(gpu, *weights, bias=bias)
    x = rng.standard_normal((m, 64)).astype(np.float32)
    angle = rng.uniform(0, 6, (capacity, 4))
    rope = np.stack([np.cos(angle), np.sin(angle)], axis=2).astype(np.float32)
    step = Steps(gpu, capacity, SLOTS)
    step.write(*segments)
    empty = np.full((2, step.table.capacity, 16), GUARD)
    blank = cache_rows(empty, empty, texture_rows)
    q, cache = guarded_texture(gpu, m + 4, 64), upload_rows(gpu, blank)
    consts = ops.head_consts(c) | {"ROPE_DIMS": c.rope_dims, "BIAS": True, "TEXTURE_ROWS": texture_rows}
    bindings = {"y": q, "cache": cache, "rope": gpu.upload(rope, "rope")}
    plan = step.ops.linear(
        upload_rows(gpu, x), matrix, m, Output(Epilogue.TEXTURE_QKV, bindings, consts), table=routes.TEXTURE_LINEAR
    )
    run(gpu, plan, m)
    rows = (x @ w.T + bias).reshape(m, 8, 16)
    cos, sin = np.moveaxis(rope[[position for _, position in rows_at], None].astype(np.float64), 3, 0)
    a, b = rows[:, :6, 0:8:2].copy(), rows[:, :6, 1:8:2].copy()
    rows[:, :6, 0:8:2], rows[:, :6, 1:8:2] = a * cos - b * sin, a * sin + b * cos
    got = read_rows(gpu, q)
    assert_close(got[:m].reshape(m, 4, 16), rows[:, :4], *F32, "q")
    assert (got[m:] == GUARD).all()
    keys, values = empty.copy(), empty.copy()
    for (slot, position), row in zip(rows_at, rows, strict=True):
        cell = step.table.cells(slot, np.array(position))
        keys[:, cell], values[:, cell] = row[4:6], row[6:]
    want, found = cache_rows(keys, values, texture_rows), read_rows(gpu, cache)
    assert_close(found, want, *F32, "keys and values")
    assert (found[want == blank] == blank[want == blank]).all(), "wrote outside its positions"


@pytest.mark.parametrize("k", [64, 576])
def test_linear_with_norm_prologue(any_gpu, k):
    gpu, rng = any_gpu, random(f"norm {k}")
    matrix, w = upload_weights(gpu, Weight(Storage.Q4, 40, k, has_offset=True))
    x, weight = rng.standard_normal((2, 1, k)).astype(np.float32)
    y = gpu.zeros(160, "y")
    output, make = Output(Epilogue.TEXTURE_TO_BUFFER, {"y": y}, {"WIDTH": 40}), Ops(gpu, step_buffer(gpu, 1))
    prologue = PrologueSpec(Prologue.NORM, {"norm": upload_rows(gpu, weight)}, {"NORM": True, "EPS": 0.5})
    table = routes.TEXTURE_LINEAR
    run(gpu, make.linear(upload_rows(gpu, x), matrix, 1, output, prologue=prologue, table=table))
    assert_close(gpu.read(y, np.float32, 40), (rms_norm(x, weight, 0.5) @ w.T)[0], *F32)


NORM_STEPS = {
    "all rows": ([segment(0, 0, 3)], False),
    "last row": ([segment(0, 0, 3)], True),
    "last rows": ([segment(2, 5, 2), segment(0, 0, 1)], True),
}


@covers("rms_norm_texture")
@pytest.mark.parametrize("name", NORM_STEPS)
def test_rms_norm(any_gpu, name):
    gpu, rng = any_gpu, random("norm")
    segments, last_rows = NORM_STEPS[name]
    x, weight = rng.standard_normal((3, 76)).astype(np.float32), rng.standard_normal((1, 76)).astype(np.float32)
    y, step = guarded_texture(gpu, 4, 76), Steps(gpu)
    step.write(*segments)
    on_device = upload_rows(gpu, x), upload_rows(gpu, weight)
    rows = len(segments) if last_rows else 3
    dispatch = Ops(gpu, step.buffer).rms_norm(*on_device, y, 76, 1e-5, rows, last_rows, routes.TEXTURE_NORM)
    run(gpu, [dispatch], 3)
    ends = np.cumsum([len(seg.tokens) for seg in segments])
    want = rms_norm(x[ends - 1] if last_rows else x, weight, 1e-5)
    got = read_rows(gpu, y)
    assert_close(got[: len(want)], want, *F32, name)
    assert (got[len(want) :] == GUARD).all()


ATTEND_STEPS = {
    "1 at 0": [segment(1, 0, 1)],
    "1 at 37": [segment(2, 37, 1)],
    "1 at 100": [segment(1, 100, 1)],
    "5 at 0": [segment(2, 0, 5)],
    "5 at 30": [segment(1, 30, 5)],
    "three sequences": [segment(2, 0, 5), segment(0, 97, 3), segment(1, 30, 1)],
    "a shared page": [segment(2, 80, 2), segment(0, 97, 3), segment(1, 64, 1)],
    "a row of each": [segment(2, 0, 1), segment(0, 101, 1), segment(1, 30, 1)],
    "a row of each, a shared page": [segment(1, 66, 1), segment(2, 103, 1)],
}


@covers("attend_texture", "attend_texture_decode", "attend_texture_scores", "attend_texture_values")
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("name", ATTEND_STEPS)
@pytest.mark.parametrize("heads", [(6, 2, 64), (2, 2, 8), (4, 1, 128), (3, 3, 40)], ids="{0[0]}/{0[1]}x{0[2]}".format)
def test_attention(gpu, heads, name, window):
    """A cache texture of 64 rows: every page has columns of its own."""
    segments, (count, kv_heads, d) = ATTEND_STEPS[name], heads
    rng, texture_rows, capacity, m = random(name), 64, 104, len(per_row(segments))
    q = rng.standard_normal((m, count, d)).astype(np.float32)
    k, v = map(same_first_page, rng.standard_normal((2, SLOTS, kv_heads, capacity, d)).astype(np.float32))
    step = Steps(gpu, capacity, SLOTS)
    step.write(*segments)
    written = step.paged(k, segments), step.paged(v, segments, unseen=np.nan)  # unseen: large scores, no numbers
    cache = upload_rows(gpu, cache_rows(*written, texture_rows))
    y, scores = (
        guarded_texture(gpu, m + 1, count * d),
        gpu.texture(texture_rows, (capacity // 64 + 1) * count, "scores"),
    )
    shape = Attention(m, *heads, window, d**-0.5, segments=len(segments))
    textures = upload_rows(gpu, q.reshape(m, -1)), cache, scores, y
    run(gpu, step.ops.attend_textures(shape, *textures, {"TEXTURE_ROWS": texture_rows}), m, segments[0].position)
    got = read_rows(gpu, y)
    assert_close(got[:m].reshape(q.shape), attended(q, k, v, segments, window), *F32, f"{heads}, {name}")
    assert (got[m:] == GUARD).all()


@pytest.mark.parametrize("d", [8, 64, 128])
def test_attention_over_the_longest_context(gpu, d):
    """llvmpipe ends loops after 65535 iterations, without an error.

    All scores are equal, so that the result is the mean of the values.
    """
    most, texture_rows = routes.max_positions(d, replace(gpu.caps, cpu=True), textures=True), 8192
    values = np.arange(65600, dtype=np.float32) / 65600
    cache = upload_rows(gpu, cache_rows(np.zeros((1, 65600, d)), np.tile(values[None, :, None], d), texture_rows))
    q, scores = upload_rows(gpu, np.zeros((2, d))), gpu.texture(texture_rows, 3, "scores")
    step, table = StepInputs(gpu), PageTable(gpu, 2, len(values), len(values))
    for slot in (0, 1):
        table.assign(slot, range(table.pages))
    for positions, (m, count) in product((most, len(values)), ((2, 1), (1, 1), (2, 2))):
        y, rows = gpu.texture(d // 4, 2, "y"), m // count  # of each sequence
        segments = [segment(slot, positions - rows, rows) for slot in range(count)]
        step.write(segments, table)
        shape, make = Attention(m, 1, 1, d, segments=count), Ops(gpu, step.buffer, table.buffer)
        run(gpu, make.attend_textures(shape, q, cache, scores, y), m, positions - rows)
        got = read_rows(gpu, y)[:m]
        if gpu.caps.cpu and rows == 2 and positions > most and np.isnan(got).any(axis=1).all():
            continue  # it stopped early, and that shows
        want = np.array([[values[: at + 1].mean(dtype=np.float64)] * d for _, at in per_row(segments)])
        assert_close(got, want, 1e-8, 1e-4, f"{m} rows of {count} sequences, {positions} positions")
    gpu.free(cache)


@covers("embed_texture")
def test_embedding_of_every_storage(gpu):
    ids = [0, 44, 7, 23, 24, 30]
    step = Steps(gpu)
    step.write(Segment(0, 0, ids))
    make = Ops(gpu, step.buffer)
    for name in STORAGES:
        matrix, w = upload_weights(gpu, weight_of(name, 24, 64), weight_of(name, 21, 64))
        y = gpu.texture(16, len(ids), "y")
        run(gpu, make.embed(matrix, y, len(ids), routes.TEXTURE_EMBED), len(ids))
        assert_close(read_rows(gpu, y), w[ids], 1e-13, 1e-6, name)


@covers("silu_mul_texture")
def test_silu_mul(gpu):
    gate, up = random("silu").standard_normal((2, 5, 76)).astype(np.float32) * 3
    y, make = guarded_texture(gpu, 6, 76), Ops(gpu, step_buffer(gpu, 5))
    run(gpu, [make.texture_silu_mul(upload_rows(gpu, gate), upload_rows(gpu, up), y, 76, 5)], 5)
    got = read_rows(gpu, y)
    assert_close(got[:5], silu(gate) * up, *F32)
    assert (got[5] == GUARD).all()


@covers("scale_texture")
def test_scale(gpu):
    x = random("scale").standard_normal((5, 76)).astype(np.float32)
    y, make = guarded_texture(gpu, 6, 76), Ops(gpu, step_buffer(gpu, 5))
    run(gpu, [make.texture_scale(upload_rows(gpu, x), y, 76, 0.22, 5)], 5)
    got = read_rows(gpu, y)
    assert_close(got[:5], x * np.float64(0.22), *F32)
    assert (got[5] == GUARD).all()


@covers("conv_inputs_texture", "short_conv_texture")
@pytest.mark.parametrize(("width", "taps", "positions"), [(76, 3, 140), (36, 70, 140), (76, 3, 5000)])
def test_short_conv(gpu, width, taps, positions):
    """The same results and inputs as short_conv gives on buffers, for rows of several sequences and pages."""
    segments = [segment(2, 64, 1), segment(0, 0, 4), segment(1, 62, 5)]
    config = replace(synthetic_config("tiny"), dim=width, head_dim=2, conv_taps=taps)
    kind, rng, m, half = LayerKind(rope=Rope.NONE, is_conv=True), random("short_conv"), 10, width // 4
    x, weights = (rng.standard_normal(shape).astype(np.float32) for shape in ((m, 3 * width), (taps, width)))
    step = Steps(gpu, positions, SLOTS)
    step.write(*segments)
    cells = step.table.capacity
    rows = min(cells, TEXTURE_ROWS)
    places = [int(step.table.cells(slot, np.array(position))) for slot, position in per_row(segments)]
    assert positions < 5000 or min(places) < TEXTURE_ROWS <= max(places)
    before = rng.standard_normal((2, half, cells, 2)).astype(np.float32)
    k, v, y = *(gpu.upload(each, "cache") for each in before), gpu.zeros(4 * m * width, "y")
    bound = gpu.upload(x, "x"), gpu.upload(weights, "w"), (k, v), y
    run(gpu, [step.ops.short_conv(config, kind, *bound, KvType.F32, m)], m)
    cache, out = upload_rows(gpu, cache_rows(*before, rows)), guarded_texture(gpu, m + 1, width)
    bound = upload_rows(gpu, x), upload_rows(gpu, weights.reshape(1, -1)), cache, out
    run(gpu, step.ops.texture_short_conv(*bound, width, taps, m), m)
    got = read_rows(gpu, out)
    assert_close(got[:m], gpu.read(y, np.float32, m * width).reshape(m, width), *F32)
    assert (got[m] == GUARD).all()
    keys, values = (gpu.read(buffer, np.float32, half * cells * 2).reshape(half, cells, 2) for buffer in (k, v))
    assert_close(read_rows(gpu, cache), cache_rows(keys, values, rows), *F32, "inputs")


@covers("rotate_texture")
@pytest.mark.parametrize("qk_norm", list(QkNorm))
def test_rotate(gpu, qk_norm):
    """The same queries, keys and values as rotate gives on buffers."""
    segments = [segment(2, 30, 1), segment(1, 15, 2)]
    c = replace(synthetic_config("tiny"), heads=3, kv_heads=2, head_dim=16, rope_dims=8, qk_norm=qk_norm)
    c, capacity, m, rng = replace(c, temperature=0.1, rope_orig_context=16), 40, 3, random("rotate")
    x = rng.standard_normal((m, 7 * 16)).astype(np.float32) * 3
    weights = rng.uniform(0.5, 1.5, sum(c.qk_norm_widths) or 4).astype(np.float32)
    rope = gpu.upload(rng.standard_normal((capacity, 4, 2)).astype(np.float32), "rope")
    step = Steps(gpu, capacity, SLOTS)
    step.write(*segments)
    cells, kind = step.table.capacity, LayerKind()
    q, k, v = (gpu.zeros(4 * size, "out") for size in (m * 48, *[2 * cells * 16] * 2))
    norm = None if qk_norm is QkNorm.NONE else gpu.upload(weights, "norm")
    buffers = ops.QkvBuffers(q, k, v, rope)
    run(gpu, [step.ops.rotate(c, kind, gpu.upload(x, "x"), norm, buffers, KvType.F32, m)], m)
    y, cache = gpu.texture(12, m, "q"), upload_rows(gpu, np.zeros((cells, 2 * 2 * 16)))
    bindings = {"y": y, "cache": cache, "rope": rope, "x": upload_rows(gpu, x), "w": upload_rows(gpu, weights[None])}
    run(gpu, [step.ops.rotate_texture(c, kind, bindings, m)], m)
    assert_close(read_rows(gpu, y), gpu.read(q, np.float32, m * 48).reshape(m, 48), *F32, "q")
    keys, values = (gpu.read(buffer, np.float32, 2 * cells * 16).reshape(2, cells, 16) for buffer in (k, v))
    assert_close(read_rows(gpu, cache), cache_rows(keys, values, cells), *F32, "keys and values")
