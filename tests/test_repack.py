"""Repacked weights against gguf's own dequantisation, bit for bit; row operations against plain numpy."""

import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from conftest import shared_data
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize

from llamagpu.errors import BadFile, Unsupported
from llamagpu.files import repack as rp
from llamagpu.files.gguf_file import BLOCKS, GgufFile, RawTensor

# where the f16 numbers (scale, offset or minimum) of a block stand
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0],
}  # fmt: skip
QUANTS = list(HALVES)
FLOATS = ["F16", "BF16", "F32"]
CORNER_HALVES = np.array([0.0, -0.0, 1.0, -1.0, 6e-8, -6e-8, 6.1e-5, 0.1, 65504.0, -65504.0], np.float16)


def test_every_type_has_a_case():
    assert set(QUANTS) == set(rp.FORMATS)
    assert set(QUANTS + FLOATS) == set(BLOCKS) == {*rp.FORMATS, *rp.FLOATS}


def set_halves(kind, blocks, values):
    """values [b, 2]: the scale and, where the type has one, the offset or minimum of each block."""
    for column, at in enumerate(HALVES[kind]):
        half = np.ascontiguousarray(values[:, column], np.float16)
        blocks[:, at : at + 2] = half.view(np.uint8).reshape(-1, 2)
    return blocks


def random_blocks(kind, count, seed=0):
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, BLOCKS[kind][1]), np.uint8)
    return set_halves(kind, blocks, rng.normal(size=(count, 2)))


def corner_blocks(kind):
    """All bytes alike for each of 256 values; one byte 0xFF among 0x00 and the reverse, for each byte."""
    size = BLOCKS[kind][1]
    alike = np.repeat(np.arange(256, dtype=np.uint8)[:, None], size, axis=1)
    one = np.eye(size, dtype=np.uint8) * 255
    patterns = np.concatenate([alike, one, ~one])
    blocks = np.tile(patterns, (len(CORNER_HALVES), 1))
    scale = np.repeat(CORNER_HALVES, len(patterns))
    return set_halves(kind, blocks, np.stack([scale, np.roll(scale, 3 * len(patterns) + 1)], axis=1))


def tensor_of(kind, blocks, n):
    """As it lies in a mapped file: read-only, and here at an odd address as well."""
    room = np.empty(blocks.size + 1, np.uint8)
    data = room[1:]
    data[:] = blocks.reshape(-1)
    data.flags.writeable = False
    return RawTensor("blk.0.attn_q.weight", kind, (n, len(blocks) // n * BLOCKS[kind][0]), data)


def float_tensor(kind, values):
    values = np.asarray(values, np.float32)
    if kind == "BF16":
        raw = (values.view(np.uint32) >> 16).astype(np.uint16)
    else:
        with np.errstate(all="ignore"):
            raw = values.astype(np.float16 if kind == "F16" else np.float32)
    return RawTensor("blk.0.ffn_up.weight", kind, values.shape, raw.reshape(-1).view(np.uint8))


def expected(tensor):
    want = gguf_dequantize(np.array(tensor.data), GGMLQuantizationType[tensor.kind])
    return want.astype(np.float32).reshape(tensor.shape)


def assert_same_bits(got, want):
    """Also tells -0 from 0; got may be f64, which must hold f32 values exactly."""
    narrow = got.astype(np.float32)
    assert np.array_equal(narrow.astype(got.dtype), got)
    wrong = np.argwhere(narrow.view(np.uint32) != want.view(np.uint32))
    assert narrow.shape == want.shape and not len(wrong), f"first of {len(wrong)} differences at {wrong[0]}"


def assert_same(a, b):
    assert replace(a, words=b.words, scales=b.scales) == b
    assert a.words.dtype == b.words.dtype and np.array_equal(a.words.view(np.uint8), b.words.view(np.uint8))
    if a.scales is None or b.scales is None:
        assert a.scales is b.scales
    else:
        assert a.scales.dtype == b.scales.dtype
        assert np.array_equal(a.scales.view(np.uint8), b.scales.view(np.uint8))


@pytest.mark.parametrize("kind", QUANTS)
@pytest.mark.parametrize(("n", "per_row"), [(1, 1), (7, 1), (1, 3), (5, 4), (33, 2)])
def test_random_blocks_are_exact(kind, n, per_row):
    tensor = tensor_of(kind, random_blocks(kind, n * per_row, seed=n), n)
    packed = rp.repack(tensor)
    assert_same_bits(rp.dequantize(packed), expected(tensor))


@pytest.mark.parametrize("kind", QUANTS)
def test_corner_blocks_are_exact(kind):
    tensor = tensor_of(kind, corner_blocks(kind), 2)
    assert_same_bits(rp.dequantize(rp.repack(tensor)), expected(tensor))


@pytest.mark.parametrize("kind", QUANTS)
def test_layout_is_as_documented(kind):
    fmt = rp.FORMATS[kind]
    packed = rp.repack(tensor_of(kind, random_blocks(kind, 6), 3))
    k = 2 * BLOCKS[kind][0]
    assert (packed.form, packed.n, packed.k, packed.group) == (fmt.form, 3, k, fmt.group)
    assert packed.words.shape == ((3, k // 2) if fmt.form == "q4" else (3, k))
    assert packed.words.dtype == (np.uint8 if fmt.form == "q4" else np.int8)
    if kind.endswith(("_K", "_XS")):
        records = 4 + 256 // fmt.group * fmt.width
        assert packed.scales.shape == (3, k // 256, records) and records % 4 == 0  # a kernel reads whole words
        assert packed.scales.dtype == (np.uint8 if packed.pair else np.int8)
    else:
        assert packed.scales.shape == (3, k // 32, fmt.width) and packed.scales.dtype == np.float16
    plain = rp.plain_scales(packed)
    assert plain.shape == (3, k // fmt.group, fmt.width) and packed.pair == (fmt.width == 2)
    assert packed.words.flags.c_contiguous and packed.scales.flags.c_contiguous


def test_nibble_order_by_hand():
    block = np.zeros((1, 18), np.uint8)
    block[0, :2] = np.array([2.0], np.float16).view(np.uint8)
    block[0, 2:4] = 0xA1, 0xB2  # weights 0, 16 = 1, 10; weights 1, 17 = 2, 11
    packed = rp.repack(tensor_of("Q4_0", block, 1))
    assert packed.words[0].tolist() == [0x21] + [0] * 7 + [0xBA] + [0] * 7
    assert packed.scales.tolist() == [[[2.0]]]
    assert rp.dequantize(packed)[0, [0, 1, 2, 16, 17]].tolist() == [-14.0, -12.0, -16.0, 4.0, 6.0]


@pytest.mark.parametrize("kind", QUANTS + FLOATS)
def test_steps_and_threads_change_nothing(kind, monkeypatch):
    if kind in FLOATS:
        tensor = float_tensor(kind, np.random.default_rng(1).normal(size=(37, 33)))
    else:
        tensor = tensor_of(kind, random_blocks(kind, 37 * 3), 37)
    whole = rp.repack(tensor)
    monkeypatch.setattr(rp, "STEP_BYTES", 700)
    for threads in (0, 1, 3):
        assert_same(rp.repack(tensor, threads), whole)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", QUANTS)
def test_bad_scales_are_refused(kind, bad, threads, monkeypatch):
    monkeypatch.setattr(rp, "STEP_BYTES", 700)
    for at in HALVES[kind]:
        for fill in (0, 255):
            blocks = random_blocks(kind, 60)
            for block in (41, 58):
                blocks[block] = fill  # factors of 0 must not hide it
                set_halves(kind, blocks[block : block + 1], np.ones((1, 2)))
                blocks[block, at : at + 2] = np.array([bad], np.float16).view(np.uint8)
            with pytest.raises(BadFile, match=r"blk\.0\.attn_q\.weight.*damaged.*block 41 ") as error:
                rp.repack(tensor_of(kind, blocks, 4), threads)
            assert error.value.remedy


@pytest.mark.parametrize("kind", ["IQ2_XXS", "type 37"])
def test_unknown_types_are_named(kind):
    tensor = RawTensor("blk.1.ffn_down.weight", kind, (4, 256), np.zeros(0, np.uint8))
    for call in (rp.repack, rp.small):
        with pytest.raises(Unsupported, match=rf"blk\.1\.ffn_down\.weight.*{kind}") as error:
            call(tensor)
        assert all(name in error.value.remedy for name in QUANTS + FLOATS)


def test_every_finite_f16_is_kept():
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    values = values[np.isfinite(values)].astype(np.float32).reshape(2, -1)
    tensor = float_tensor("F16", values)
    assert_same_bits(rp.dequantize(rp.repack(tensor)), expected(tensor))


@pytest.mark.parametrize("kind", ["BF16", "F32"])
def test_floats_round_to_f16(kind):
    rng = np.random.default_rng(2)
    values = rng.normal(size=(5, 64)) * 10.0 ** rng.integers(-12, 4, (5, 64))
    values[0, :6] = 65280, -65280, 1e-30, -1e-30, 0.0, -0.0
    tensor = float_tensor(kind, values)
    packed = rp.repack(tensor)
    assert (packed.form, packed.group, packed.scales) == ("f16", 64, None)
    assert_same_bits(rp.dequantize(packed), expected(tensor).astype(np.float16).astype(np.float32))
    largest = [[65504.0, -65504.0]]
    assert rp.dequantize(rp.repack(float_tensor("F32", largest))).tolist() == largest


@pytest.mark.parametrize("kind", FLOATS)
def test_odd_rows_end_in_a_zero(kind):
    tensor = float_tensor(kind, np.random.default_rng(3).normal(size=(3, 5)))
    packed = rp.repack(tensor)
    assert packed.words.shape == (3, 6) and not packed.words[:, 5].any()
    assert_same_bits(rp.dequantize(packed), expected(tensor).astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_floats_are_refused(kind, bad):
    values = np.ones((3, 8))
    values[1, 2:4] = bad
    for call in (rp.repack, rp.small):
        with pytest.raises(BadFile, match=r"blk\.0\.ffn_up\.weight.*damaged.*value 10 "):
            call(float_tensor(kind, values))


@pytest.mark.parametrize(("kind", "large"), [("F32", 65505.0), ("F32", -1e30), ("BF16", 65536.0)])
def test_floats_beyond_f16_are_refused_as_weights_only(kind, large):
    tensor = float_tensor(kind, [[1.0, large]])
    with pytest.raises(Unsupported, match=r"blk\.0\.ffn_up\.weight.*65504") as error:
        rp.repack(tensor)
    assert "Q8_0" in error.value.remedy
    assert_same_bits(rp.small(tensor), expected(tensor))


@pytest.mark.parametrize("kind", QUANTS + FLOATS)
def test_small_keeps_f32_and_shape(kind):
    if kind in FLOATS:
        tensor = float_tensor(kind, np.random.default_rng(4).normal(size=77))
    else:
        tensor = replace(tensor_of(kind, random_blocks(kind, 3), 1), shape=(3 * BLOCKS[kind][0],))
    got = rp.small(tensor)
    assert got.dtype == np.float32 and got.flags.writeable
    assert_same_bits(got, expected(tensor))


@pytest.mark.parametrize("kind", QUANTS + FLOATS)
def test_bytes_are_known_beforehand(kind):
    for k in (7, 8) if kind in FLOATS else (256, 768):
        if kind in FLOATS:
            tensor = float_tensor(kind, np.ones((3, k)))
        else:
            tensor = tensor_of(kind, random_blocks(kind, 3 * k // BLOCKS[kind][0]), 3)
        packed = rp.repack(tensor)
        scale_bytes = 0 if packed.scales is None else packed.scales.nbytes
        assert rp.row_bytes(kind, k) == (packed.words.nbytes // 3, scale_bytes // 3)
        assert rp.packed_bytes(kind, 3, k) == packed.words.nbytes + scale_bytes


def matrix(kind, n, seed):
    return rp.repack(tensor_of(kind, random_blocks(kind, 2 * n, seed), n))


def f16_matrix(n, k, seed):
    return rp.repack(float_tensor("F16", np.random.default_rng(seed).normal(size=(n, k))))


@pytest.mark.parametrize("packed", [matrix("Q4_1", 6, 5), matrix("Q6_K", 6, 6), f16_matrix(6, 5, 7)])
def test_take_and_slice_rows(packed):
    rows, full = np.array([4, 0, 0, 5]), rp.dequantize(packed)
    for got, want in [(rp.take_rows(packed, rows), full[rows]), (rp.slice_rows(packed, 2, 5), full[2:5])]:
        assert got.n == len(want) == len(got.words)
        assert np.array_equal(rp.dequantize(got), want)
    assert np.shares_memory(rp.slice_rows(packed, 2, 5).words, packed.words)


def test_concat_merges_only_equal_neighbours():
    parts = [
        matrix("Q4_K", 3, 1), matrix("Q4_K", 1, 2),  # one matrix
        matrix("Q6_K", 2, 3), matrix("Q3_K", 2, 4),  # another form
        matrix("IQ4_XS", 2, 5),  # another group than Q6_K
        matrix("Q4_1", 2, 6), matrix("Q4_0", 2, 7),  # a pair, a single scale
        f16_matrix(2, 6, 8), f16_matrix(3, 6, 9), f16_matrix(3, 5, 9),  # the last has another k
        matrix("Q8_0", 2, 10), matrix("Q5_0", 2, 11), matrix("IQ4_NL", 1, 12),  # one layout for all
    ]  # fmt: skip
    merged = rp.concat(parts)
    assert [part.n for part in merged] == [4, 2, 2, 2, 2, 2, 5, 3, 5]
    got = np.concatenate([rp.dequantize(part).ravel() for part in merged])
    assert np.array_equal(got, np.concatenate([rp.dequantize(part).ravel() for part in parts]))
    f32_scales = replace(parts[6], scales=parts[6].scales.astype(np.float32))
    assert len(rp.concat([parts[6], f32_scales])) == 2
    assert rp.concat([]) == []


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "F16"])
def test_interleave(kind):
    a, b = (f16_matrix(5, 7, s) if kind == "F16" else matrix(kind, 5, s) for s in (1, 2))
    got = rp.interleave(a, b)
    want = np.empty((10, a.k))
    want[::2], want[1::2] = rp.dequantize(a), rp.dequantize(b)
    assert got.n == 10 and np.array_equal(rp.dequantize(got), want)
    assert rp.interleave(a, rp.slice_rows(b, 0, 4)) is None
    assert rp.interleave(a, matrix("Q5_K", 5, 3)) is None


@pytest.mark.parametrize(("heads", "head_dim", "rope_dims"), [(1, 4, 4), (3, 8, 8), (2, 10, 6), (2, 6, 0)])
def test_rope_rows_make_pairs_neighbours(heads, head_dim, rope_dims):
    want = []
    for head in range(heads):
        for i in range(rope_dims // 2):
            want += [head * head_dim + i, head * head_dim + i + rope_dims // 2]
        want += [head * head_dim + i for i in range(rope_dims, head_dim)]
    assert rp.rope_rows(heads, head_dim, rope_dims).tolist() == want


def test_a_real_file():
    file = GgufFile(shared_data("tiny/stories15M-q4_0.gguf"))
    assert {"Q4_0", "F32"} <= {tensor.kind for tensor in file.tensors.values()}
    for tensor in file.tensors.values():
        if tensor.kind == "F32":
            assert_same_bits(rp.small(tensor), expected(tensor))
        else:
            assert_same_bits(rp.dequantize(rp.repack(tensor)), expected(tensor))


@pytest.mark.parametrize("kind", QUANTS + FLOATS)
def test_memory_stays_near_the_result(kind):
    n, k = 4096, 8192  # 16 MiB of nibbles or more: any whole-tensor temporary breaks the bound
    weights, size = BLOCKS[kind]
    tensor = RawTensor("w", kind, (n, k), np.zeros(n * k // weights * size, np.uint8))
    tracemalloc.start()
    rp.repack(tensor)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - rp.packed_bytes(kind, n, k) < 9 << 20


@pytest.mark.parametrize("kind", QUANTS + FLOATS)
def test_speed(kind):
    n, k = 1024, 4096
    weights, _ = BLOCKS[kind]
    if kind in FLOATS:
        tensor = float_tensor(kind, np.random.default_rng(0).normal(size=(n, k)))
    else:
        tensor = tensor_of(kind, random_blocks(kind, n * k // weights), n)
    best = 0.0
    for _ in range(5):
        start = time.process_time()
        rp.repack(tensor)
        best = max(best, tensor.data.size / 1e6 / max(time.process_time() - start, 1e-9))
    print(f"{kind}: {best:.0f} MB/s of the file on one core")
    assert best > 50  # 400 is the aim; the floor only catches a fall by an order of magnitude
