"""Kernels of benchmarks and probes: fill_random, copy, peak, barrier_litmus; and fill."""

import numpy as np
import pytest
from kernel_cases import covers, run

from llamagpu.engine import synthetic
from llamagpu.engine.weights import MatrixShard
from llamagpu.files.storage import Layout, PackedMatrix, Storage, dequantize
from llamagpu.gpu import shaders
from llamagpu.gpu.recorder import Recorder
from llamagpu.verify.reference import random


@covers("fill_random")
def test_fill_random(gpu):
    """Weights for benchmarks: words that differ, their bytes spread evenly over all values; or some of their bits."""
    recorder, words = Recorder(gpu), gpu.zeros(300_000, "words")
    same, signs = gpu.zeros(4000, "same"), gpu.zeros(4000, "signs")
    synthetic.fill_buffer(gpu, recorder, words)
    synthetic.fill_buffer(gpu, recorder, same, 0, 1234)
    synthetic.fill_buffer(gpu, recorder, signs, 0x80000000, 1234)
    found = gpu.read(words, np.uint32, 75_000)
    assert len(np.unique(found)) > 74_990
    assert np.abs(np.bincount(found.view(np.uint8), minlength=256) - 300_000 / 256).max() < 200  # 6 sigma
    assert (gpu.read(same, np.uint32, 1000) == 1234).all()
    values, counts = np.unique(gpu.read(signs, np.uint32, 1000), return_counts=True)
    assert values.tolist() == [1234, 0x80000000 | 1234] and counts.min() > 400


@pytest.mark.parametrize(
    "storage, group, scale_bits, offset",
    [
        *((Storage.Q4, 32, bits, offset) for bits in (16, 32) for offset in (False, True)),
        (Storage.Q4, 32, 8, True),
        *((storage, 16, 8, False) for storage in (Storage.Q6, Storage.Q8)),
        (Storage.Q8, 32, 16, False),
        *((storage, 512, 0, False) for storage in (Storage.F16, Storage.BF16)),
    ],
)
def test_random_weights_have_no_mean(gpu, storage, group, scale_bits, offset):
    """Otherwise all dimensions of a random model have the same value after a layer or two."""
    n, layout = 512, Layout(storage, 512, group, offset, scale_bits)
    scales = gpu.zeros(n * layout.scale_row_bytes, "scales") if scale_bits else None
    shard = MatrixShard(0, n, layout, gpu.zeros(n * layout.row_bytes, "words"), scales)
    synthetic.fill_shard(gpu, Recorder(gpu), shard)
    words, packed = gpu.read(shard.words, np.uint8, n * layout.row_bytes).reshape(n, -1), None
    words = words.view({"f16": np.float16, "bf16": np.uint16, "q8": np.int8}.get(storage, np.uint8))
    if scales is not None:
        dtype = {8: np.uint8, 16: np.float16, 32: np.float32}[scale_bits]
        packed = gpu.read(scales, dtype, n * layout.scale_row_bytes // np.dtype(dtype).itemsize)
        packed = packed.reshape(n, 2 if scale_bits == 8 else 512 // group, -1)
    weights = dequantize(PackedMatrix(layout, words, packed))
    assert 0.03 < weights.std() < 0.08 and abs(weights.mean()) < 0.05 * weights.std()


@covers("fill")
@pytest.mark.parametrize("sizes", [(16, 8), (0, 300), (700, 8)])
def test_fill(any_gpu, sizes):
    """Of x and its copies the first vec4s stay, and what follows the sizes everywhere."""
    words = [np.arange(4 * 800, dtype=np.uint32) for _ in range(4)]
    buffers = [any_gpu.upload(data, "words") for data in words]
    names = dict(zip(("X_VEC4S", "Y_VEC4S"), sizes, strict=True))
    bound = dict(zip(("x", "y", "x_copies", "y_copies"), buffers, strict=True))
    run(any_gpu, [any_gpu.dispatch("fill", (), names | {"FIRST": 2}, bound, (2, 1, 1))])
    for size, first, data in zip(2 * sizes, (2, 0, 2, 0), words, strict=True):
        data[4 * first : 4 * size] = shaders.constants("late_stores")["NOT_STORED"]
    assert [any_gpu.read(each, np.uint32, 3200).tolist() for each in buffers] == [data.tolist() for data in words]


def test_what_is_not_stored_is_no_number_and_no_int8_block():
    word = shaders.constants("late_stores")["NOT_STORED"]
    assert word == shaders.constants("fill")["NOT_STORED"] and np.isnan(np.uint32(word).view(np.float32))
    assert -128 in np.array([word], np.uint32).view(np.int8)


@covers("copy")
def test_copy(gpu):
    x = random("copy").integers(0, 1 << 32, 4 * 1001, np.uint32)
    y = gpu.upload(np.full(4 * 1002, 99, np.uint32), "y")
    run(gpu, [gpu.dispatch("copy", (), {"VEC4S": 1001}, {"x": gpu.upload(x, "x"), "y": y}, (3, 1, 1))])
    assert (gpu.read(y, np.uint32, 4 * 1002) == [*x, 99, 99, 99, 99]).all()


@covers("peak")
@pytest.mark.parametrize("int8", [False, True], ids=["f32", "int8"])
def test_peak(gpu, int8):
    """The loop runs every iteration: the sums are those of the same loop in numpy."""
    word, iterations = 0x01FF0203, 7
    x = np.array([0.5, 1.0, 0.0, 0.0], np.float32)
    x.view(np.uint32)[2] = word
    if int8:
        weights, sums = np.array([word], np.uint32).view(np.int8).astype(int), list(range(1, 9))
        for _ in range(iterations):
            sums = [s + int(np.array([s], np.int32).view(np.int8).astype(int) @ weights) for s in sums]
        want = float(np.bitwise_xor.reduce(np.array(sums, np.int32)) & 0xFFFF)
    else:
        numbers = np.array([1.0, 1.5, 0.5, -1.0, -0.5, 3.0, 4.0, 2.5])
        for _ in range(iterations):
            numbers = numbers * 0.5 + 1.0
        want = 4 * numbers.sum()
    y = gpu.zeros(512 * 4, "y")
    bindings = {"x": gpu.upload(x, "x"), "y": y}
    run(gpu, [gpu.dispatch("peak", (), {"ITERATIONS": iterations, "INT8": int8}, bindings, (2, 1, 1))])
    assert np.allclose(gpu.read(y, np.float32, 512), want, rtol=1e-6)


@covers("barrier_litmus")
def test_barrier_litmus_unfused(gpu):
    """One layer; the tests of fused decode run it with grid barriers."""
    n, shift = (shaders.constants("barrier_litmus")[name] for name in ("N", "SHIFT"))
    start = random("litmus").integers(1 << 31, size=n, dtype=np.uint32)
    y = gpu.zeros(8 * n, "y")
    gpu.write(y, start)
    run(gpu, [gpu.dispatch("barrier_litmus", (), {}, {"y": y}, (n // 256, 1, 1))])
    assert np.array_equal(gpu.read(y, np.uint32, n, offset=4 * n), np.roll(start, -shift) + 1)
