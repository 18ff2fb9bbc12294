"""Repacked weights against gguf's own dequantisation, bit for bit; row operations against plain numpy."""

import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from package_data import default_model

from llamagpu.errors import BadFile, Unsupported
from llamagpu.files import repack as rp
from llamagpu.files.gguf_file import BLOCKS, GgufFile, RawTensor
from llamagpu.files.storage import (
    Storage,
    concat,
    dequantize,
    expand_scales,
    fits_q6,
    from_q6,
    interleave,
    rope_rows,
    slice_rows,
    take_rows,
    to_q6,
)

# where the f16 numbers (scale, offset or minimum) of a block stand
F16_OFFSETS = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0],
    "IQ3_S": [0], "IQ3_XXS": [0], "IQ2_S": [0], "IQ2_XS": [0], "IQ2_XXS": [0], "IQ1_S": [0], "IQ1_M": [],
    "TQ1_0": [52], "TQ2_0": [64], "MXFP4": [],
}  # fmt: skip
QUANTS = list(F16_OFFSETS)
FLOATS = ["F16", "BF16", "F32"]
CORNER_F16_OFFSETS = np.array([0.0, -0.0, 1.0, -1.0, 6e-8, -6e-8, 6.1e-5, 0.1, 65504.0, -65504.0], np.float16)


def test_every_type_has_a_case():
    assert set(QUANTS) == set(rp.FORMATS)
    assert set(QUANTS + FLOATS) == set(BLOCKS) == {*rp.FORMATS, *rp.FLOATS}


def set_f16(ggml_type, blocks, values):
    """values [b, 2]: the scale and, where the type has one, the offset or minimum of each block."""
    for column, at in enumerate(F16_OFFSETS[ggml_type]):
        f16s = np.ascontiguousarray(values[:, column], np.float16)
        blocks[:, at : at + 2] = f16s.view(np.uint8).reshape(-1, 2)
    if ggml_type == "IQ1_M":  # a nibble in each of the last four words
        bits = np.ascontiguousarray(values[:, 0], np.float16).view(np.uint16)[:, None]
        words = blocks[:, 48:].copy().view(np.uint16) & 0x0FFF
        words |= (bits >> np.array([0, 4, 8, 12], np.uint16) & 15) << 12
        blocks[:, 48:] = words.view(np.uint8)
    return blocks


def random_blocks(ggml_type, count, seed=0):
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, BLOCKS[ggml_type][1]), np.uint8)
    return set_f16(ggml_type, blocks, rng.normal(size=(count, 2)))


def corner_blocks(ggml_type):
    """All bytes alike for each of 256 values; one byte 0xFF among 0x00 and the reverse, for each byte."""
    size = BLOCKS[ggml_type][1]
    constant = np.repeat(np.arange(256, dtype=np.uint8)[:, None], size, axis=1)
    single = np.eye(size, dtype=np.uint8) * 255
    patterns = np.concatenate([constant, single, ~single])
    blocks = np.tile(patterns, (len(CORNER_F16_OFFSETS), 1))
    scale = np.repeat(CORNER_F16_OFFSETS, len(patterns))
    return set_f16(ggml_type, blocks, np.stack([scale, np.roll(scale, 3 * len(patterns) + 1)], axis=1))


def tensor_of(ggml_type, blocks, n):
    """A tensor as in a mapped file: read-only, and here also at an odd address."""
    memory = np.empty(blocks.size + 1, np.uint8)
    data = memory[1:]
    data[:] = blocks.reshape(-1)
    data.flags.writeable = False
    return RawTensor("blk.0.attn_q.weight", ggml_type, (n, len(blocks) // n * BLOCKS[ggml_type][0]), data)


def float_tensor(ggml_type, values):
    values = np.asarray(values, np.float32)
    if ggml_type == "BF16":
        raw = (values.view(np.uint32) >> 16).astype(np.uint16)
    else:
        with np.errstate(all="ignore"):
            raw = values.astype(np.float16 if ggml_type == "F16" else np.float32)
    return RawTensor("blk.0.ffn_up.weight", ggml_type, values.shape, raw.reshape(-1).view(np.uint8))


def expected(tensor):
    want = gguf_dequantize(np.array(tensor.data), GGMLQuantizationType[tensor.ggml_type])
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


@pytest.mark.parametrize("ggml_type", QUANTS)
@pytest.mark.parametrize(("n", "per_row"), [(1, 1), (7, 1), (1, 3), (5, 4), (33, 2)])
def test_random_blocks_are_exact(ggml_type, n, per_row):
    tensor = tensor_of(ggml_type, random_blocks(ggml_type, n * per_row, seed=n), n)
    packed = rp.repack(tensor)
    assert_same_bits(dequantize(packed), expected(tensor))


@pytest.mark.parametrize("ggml_type", QUANTS)
def test_corner_blocks_are_exact(ggml_type):
    tensor = tensor_of(ggml_type, corner_blocks(ggml_type), 2)
    assert_same_bits(dequantize(rp.repack(tensor)), expected(tensor))


@pytest.mark.parametrize("ggml_type", QUANTS)
def test_layout_is_as_documented(ggml_type):
    packed = rp.repack(tensor_of(ggml_type, random_blocks(ggml_type, 6), 3))
    k, layout = 2 * BLOCKS[ggml_type][0], packed.layout
    assert layout == rp.layout_of(ggml_type, k) and packed.n == 3
    q4 = layout.storage is Storage.Q4
    assert packed.words.shape == (3, k // 2 if q4 else k) and packed.words.dtype == (np.uint8 if q4 else np.int8)
    if layout.scale_bits == 8:
        size = 4 + 256 // layout.group * layout.scale_width
        assert packed.scales.shape == (3, k // 256, size) and size % 4 == 0  # a kernel reads whole words
        assert packed.scales.dtype == np.uint8
    else:
        assert packed.scales.shape == (3, k // layout.group, layout.scale_width)
        assert packed.scales.dtype == {16: np.float16, 32: np.float32}[layout.scale_bits]
    assert expand_scales(packed).shape == (3, k // layout.group, layout.scale_width)
    assert packed.words.flags.c_contiguous and packed.scales.flags.c_contiguous


def test_nibble_order_by_hand():
    block = np.zeros((1, 18), np.uint8)
    block[0, :2] = np.array([2.0], np.float16).view(np.uint8)
    block[0, 2:4] = 0xA1, 0xB2  # weights 0, 16 = 1, 10; weights 1, 17 = 2, 11
    packed = rp.repack(tensor_of("Q4_0", block, 1))
    assert packed.words[0].tolist() == [0x21] + [0] * 7 + [0xBA] + [0] * 7
    assert packed.scales.tolist() == [[[2.0]]]
    assert dequantize(packed)[0, [0, 1, 2, 16, 17]].tolist() == [-14.0, -12.0, -16.0, 4.0, 6.0]


@pytest.mark.parametrize("ggml_type", QUANTS + FLOATS)
def test_batches_and_threads_change_nothing(ggml_type, monkeypatch):
    if ggml_type in FLOATS:
        tensor = float_tensor(ggml_type, np.random.default_rng(1).normal(size=(37, 33)))
    else:
        tensor = tensor_of(ggml_type, random_blocks(ggml_type, 37 * 3), 37)
    want = rp.repack(tensor)
    monkeypatch.setattr(rp, "BATCH_BYTES", 700)
    for threads in (0, 1, 3):
        assert_same(rp.repack(tensor, threads), want)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("ggml_type", QUANTS)
def test_bad_scales_are_refused(ggml_type, bad, threads, monkeypatch):
    monkeypatch.setattr(rp, "BATCH_BYTES", 700)
    for at in F16_OFFSETS[ggml_type]:
        for fill in (0, 255):
            blocks = random_blocks(ggml_type, 60)
            for block in (41, 58):
                blocks[block] = fill  # factors of 0 must not hide it
                set_f16(ggml_type, blocks[block : block + 1], np.ones((1, 2)))
                blocks[block, at : at + 2] = np.array([bad], np.float16).view(np.uint8)
            with pytest.raises(BadFile, match=r"blk\.0\.attn_q\.weight.*damaged.*block 41 ") as error:
                rp.repack(tensor_of(ggml_type, blocks, 4), threads)
            assert error.value.remedy


@pytest.mark.parametrize("ggml_type", ["NVFP4", "type 37"])
def test_unknown_types_are_named(ggml_type):
    tensor = RawTensor("blk.1.ffn_down.weight", ggml_type, (4, 256), np.zeros(0, np.uint8))
    for call in (rp.repack, rp.to_f32):
        with pytest.raises(Unsupported, match=rf"blk\.1\.ffn_down\.weight.*{ggml_type}") as error:
            call(tensor)
        assert all(name in error.value.remedy for name in QUANTS + FLOATS)


def test_every_finite_f16_is_kept():
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    values = values[np.isfinite(values)].astype(np.float32).reshape(2, -1)
    tensor = float_tensor("F16", values)
    assert_same_bits(dequantize(rp.repack(tensor)), expected(tensor))


def test_f32_rounds_to_f16():
    rng = np.random.default_rng(2)
    values = rng.normal(size=(5, 64)) * 10.0 ** rng.integers(-12, 4, (5, 64))
    values[0, :6] = 65280, -65280, 1e-30, -1e-30, 0.0, -0.0
    tensor = float_tensor("F32", values)
    packed = rp.repack(tensor)
    assert (packed.layout.storage, packed.layout.group, packed.scales) == (Storage.F16, 64, None)
    assert_same_bits(dequantize(packed), expected(tensor).astype(np.float16).astype(np.float32))
    largest = [[65504.0, -65504.0]]
    assert dequantize(rp.repack(float_tensor("F32", largest))).tolist() == largest


def test_bf16_is_exact_beyond_f16():
    rng = np.random.default_rng(2)
    tensor = float_tensor("BF16", rng.normal(size=(5, 64)) * 10.0 ** rng.integers(-37, 38, (5, 64)))
    packed = rp.repack(tensor)
    assert (packed.layout.storage, packed.layout.group, packed.scales) == (Storage.BF16, 64, None)
    assert_same_bits(dequantize(packed), expected(tensor))


@pytest.mark.parametrize("ggml_type", FLOATS)
def test_odd_rows_end_in_a_zero(ggml_type):
    tensor = float_tensor(ggml_type, np.random.default_rng(3).normal(size=(3, 5)))
    packed = rp.repack(tensor)
    assert packed.words.shape == (3, 6) and not packed.words[:, 5].any()
    exact = expected(tensor)
    assert_same_bits(dequantize(packed), exact if ggml_type == "BF16" else exact.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("ggml_type", FLOATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_floats_are_refused(ggml_type, bad):
    values = np.ones((3, 8))
    values[1, 2:4] = bad
    for call in (rp.repack, rp.to_f32):
        with pytest.raises(BadFile, match=r"blk\.0\.ffn_up\.weight.*damaged.*value 10 "):
            call(float_tensor(ggml_type, values))


@pytest.mark.parametrize("large", [65505.0, -1e30])
def test_f32_beyond_f16_is_refused_as_weights_only(large):
    tensor = float_tensor("F32", [[1.0, large]])
    with pytest.raises(Unsupported, match=r"blk\.0\.ffn_up\.weight.*65504") as error:
        rp.repack(tensor)
    assert "Q8_0" in error.value.remedy
    assert_same_bits(rp.to_f32(tensor), expected(tensor))


@pytest.mark.parametrize("ggml_type", QUANTS + FLOATS)
def test_vectors_keep_f32_and_shape(ggml_type):
    if ggml_type in FLOATS:
        tensor = float_tensor(ggml_type, np.random.default_rng(4).normal(size=77))
    else:
        tensor = replace(tensor_of(ggml_type, random_blocks(ggml_type, 3), 1), shape=(3 * BLOCKS[ggml_type][0],))
    got = rp.to_f32(tensor)
    assert got.dtype == np.float32 and got.flags.writeable
    assert_same_bits(got, expected(tensor))


@pytest.mark.parametrize("ggml_type", QUANTS + FLOATS)
def test_bytes_are_known_beforehand(ggml_type):
    for k in (7, 8) if ggml_type in FLOATS else (256, 768):
        if ggml_type in FLOATS:
            tensor = float_tensor(ggml_type, np.ones((3, k)))
        else:
            tensor = tensor_of(ggml_type, random_blocks(ggml_type, 3 * k // BLOCKS[ggml_type][0]), 3)
        packed = rp.repack(tensor)
        scale_bytes = 0 if packed.scales is None else packed.scales.nbytes
        layout = rp.layout_of(ggml_type, k)
        assert (layout.row_bytes, layout.scale_row_bytes) == (packed.words.nbytes // 3, scale_bytes // 3)
        assert rp.packed_bytes(ggml_type, 3, k) == packed.words.nbytes + scale_bytes


def matrix(ggml_type, n, seed):
    return rp.repack(tensor_of(ggml_type, random_blocks(ggml_type, 2 * n, seed), n))


def f16_matrix(n, k, seed):
    return rp.repack(float_tensor("F16", np.random.default_rng(seed).normal(size=(n, k))))


@pytest.mark.parametrize("packed", [matrix("Q4_1", 6, 5), matrix("Q6_K", 6, 6), f16_matrix(6, 5, 7)])
def test_take_and_slice_rows(packed):
    rows, full = np.array([4, 0, 0, 5]), dequantize(packed)
    for got, want in [(take_rows(packed, rows), full[rows]), (slice_rows(packed, 2, 5), full[2:5])]:
        assert got.n == len(want) == len(got.words)
        assert np.array_equal(dequantize(got), want)
    assert np.shares_memory(slice_rows(packed, 2, 5).words, packed.words)


def test_concat_merges_only_equal_neighbours():
    matrices = [
        matrix("Q4_K", 3, 1), matrix("Q4_K", 1, 2),  # one matrix
        matrix("Q6_K", 2, 3), matrix("Q3_K", 2, 4),  # another storage
        matrix("IQ4_XS", 2, 5),  # another group than Q6_K
        matrix("Q4_1", 2, 6), matrix("Q4_0", 2, 7),  # with offsets, without
        f16_matrix(2, 6, 8), f16_matrix(3, 6, 9), f16_matrix(3, 5, 9),  # the last has another k
        matrix("Q8_0", 2, 10), matrix("Q5_0", 2, 11), matrix("IQ4_NL", 1, 12),  # one layout for all
    ]  # fmt: skip
    merged = concat(matrices)
    assert [packed.n for packed in merged] == [4, 2, 2, 2, 2, 2, 5, 3, 5]
    got = np.concatenate([dequantize(packed).ravel() for packed in merged])
    assert np.array_equal(got, np.concatenate([dequantize(packed).ravel() for packed in matrices]))
    symmetric = matrices[6]
    layout = replace(symmetric.layout, scale_bits=32)
    f32_scales = replace(symmetric, layout=layout, scales=symmetric.scales.astype(np.float32))
    assert len(concat([symmetric, f32_scales])) == 2
    assert concat([]) == []


@pytest.mark.parametrize("ggml_type", ["Q4_0", "Q4_K", "Q6_K", "F16"])
def test_interleave(ggml_type):
    a, b = (f16_matrix(5, 7, s) if ggml_type == "F16" else matrix(ggml_type, 5, s) for s in (1, 2))
    got = interleave(a, b)
    want = np.empty((10, a.k))
    want[::2], want[1::2] = dequantize(a), dequantize(b)
    assert got.n == 10 and np.array_equal(dequantize(got), want)


def test_six_bits_and_back():
    packed = matrix("Q6_K", 6, 5)
    six = to_q6(packed)
    assert fits_q6(packed.layout) and six.layout.storage is Storage.Q6
    assert six.words.nbytes == 6 * six.layout.row_bytes == packed.words.nbytes * 3 // 4
    assert np.array_equal(dequantize(six), dequantize(packed))
    assert_same(from_q6(six), packed)
    assert [name for name, block in rp.FORMATS.items() if fits_q6(block.layout(256))] == ["Q6_K"]


@pytest.mark.parametrize(("heads", "head_dim", "rope_dims"), [(1, 4, 4), (3, 8, 8), (2, 10, 6), (2, 6, 0)])
def test_rope_rows_make_pairs_neighbours(heads, head_dim, rope_dims):
    want = []
    for head in range(heads):
        for i in range(rope_dims // 2):
            want += [head * head_dim + i, head * head_dim + i + rope_dims // 2]
        want += [head * head_dim + i for i in range(rope_dims, head_dim)]
    assert rope_rows(heads, head_dim, rope_dims).tolist() == want


def test_a_real_file():
    tensors = [t for name, t in GgufFile(default_model()).tensors.items() if name.startswith(("blk.29.", "token_embd"))]
    assert {tensor.ggml_type for tensor in tensors} == {"Q4_1", "Q8_0", "F32"}
    for tensor in tensors:
        if tensor.ggml_type == "F32":
            assert_same_bits(rp.to_f32(tensor), expected(tensor))
        else:
            assert_same_bits(dequantize(rp.repack(tensor)), expected(tensor))


@pytest.mark.parametrize("ggml_type", QUANTS + FLOATS)
def test_memory_stays_near_the_result(ggml_type):
    n, k = 4096, 8192  # 16 MiB of nibbles or more: any whole-tensor temporary breaks the bound
    weights, size = BLOCKS[ggml_type]
    tensor = RawTensor("w", ggml_type, (n, k), np.zeros(n * k // weights * size, np.uint8))
    tracemalloc.start()
    rp.repack(tensor)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - rp.packed_bytes(ggml_type, n, k) < 9 << 20


@pytest.mark.parametrize("ggml_type", QUANTS + FLOATS)
def test_speed(ggml_type):
    n, k = 1024, 4096
    weights, _ = BLOCKS[ggml_type]
    if ggml_type in FLOATS:
        tensor = float_tensor(ggml_type, np.random.default_rng(0).normal(size=(n, k)))
    else:
        tensor = tensor_of(ggml_type, random_blocks(ggml_type, n * k // weights), n)
    best = 0.0
    for _ in range(5):
        start = time.process_time()
        rp.repack(tensor)
        best = max(best, tensor.data.size / 1e6 / max(time.process_time() - start, 1e-9))
    print(f"{ggml_type}: {best:.0f} MB/s of the file on one core")
    # 400 is the aim; the floor only catches a fall by an order of magnitude. Types of fewer bits than Q4_0 take as long
    # for a weight: TQ1_0 has 69 on an idle core and 38 beside a busy one.
    bits = 8 * tensor.data.size / (n * k)
    assert best > 50 * min(1, bits / 4.5)
