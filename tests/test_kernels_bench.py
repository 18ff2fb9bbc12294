"""Kernels of benchmarks and probes: fill_random, copy, peak, barrier_litmus; and fill."""

import numpy as np
import pytest
from kernel_cases import covers, run

from llamagpu.engine import synthetic
from llamagpu.gpu import shaders
from llamagpu.gpu.recorder import Recorder
from llamagpu.verify.reference import random


@covers("fill_random")
def test_fill_random(gpu):
    """Weights for benchmarks: words that differ, their bytes spread evenly over all values; or one word everywhere."""
    recorder, words, same = Recorder(gpu), gpu.zeros(300_000, "words"), gpu.zeros(4000, "same")
    synthetic.fill_buffer(gpu, recorder, words, 0)
    synthetic.fill_buffer(gpu, recorder, same, 1234)
    found = gpu.read(words, np.uint32, 75_000)
    assert len(np.unique(found)) > 74_990
    assert np.abs(np.bincount(found.view(np.uint8), minlength=256) - 300_000 / 256).max() < 200  # 6 sigma
    assert (gpu.read(same, np.uint32, 1000) == 1234).all()


@covers("fill")
@pytest.mark.parametrize("sizes", [(16, 8, 4), (0, 300, 500), (700, 8, 4)])
def test_fill(any_gpu, sizes):
    """Of x the first vec4s stay, and what follows the sizes everywhere."""
    words = [np.arange(4 * 800, dtype=np.uint32) for _ in sizes]
    buffers = [any_gpu.upload(data, "words") for data in words]
    names = dict(zip(("X_VEC4S", "Y_VEC4S", "Z_VEC4S"), sizes, strict=True))
    bound = dict(zip("xyz", buffers, strict=True))
    run(any_gpu, [any_gpu.dispatch("fill", (), names | {"FIRST": 2}, bound, (2, 1, 1))])
    for size, first, data in zip(sizes, (2, 0, 0), words, strict=True):
        data[4 * first : 4 * size] = shaders.constants("late_stores")["NOT_STORED"]
    assert [any_gpu.read(each, np.uint32, 3200).tolist() for each in buffers] == [data.tolist() for data in words]


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
