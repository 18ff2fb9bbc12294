"""The short convolution against float64: several sequences in a step, the KV cache, every kind of result."""

from dataclasses import replace

import numpy as np
import pytest
from kernel_cases import GUARD, Steps, covers, per_row, run, segment
from reference import assert_close

from llamagpu.engine.options import KvType
from llamagpu.engine.routes import Inputs
from llamagpu.engine.synthetic import synthetic_config
from llamagpu.files.config import LayerKind, Rope
from llamagpu.verify.reference import F32, REQUANTISED, ROUNDED_F16, random, read_values, round_int8

POSITIONS, SLOTS = 140, 3
DTYPES = {KvType.F16: np.float16, KvType.F32: np.float32}
BOUNDS = {Inputs.F32: F32, Inputs.INT8: REQUANTISED, Inputs.F16: ROUNDED_F16}
CONV = LayerKind(rope=Rope.NONE, is_conv=True)
# Rows whose positions before are in the step, in the cache, in another page, and before the text
SEGMENTS = (segment(2, 64, 1), segment(0, 0, 8), segment(1, 62, 5))


@covers("short_conv")
@pytest.mark.parametrize(
    ("dim", "taps", "out"),
    [
        (96, 3, Inputs.F32),
        (96, 3, Inputs.INT8),
        (96, 3, Inputs.F16),
        (96, 1, Inputs.F32),
        (36, 4, Inputs.F32),
        (60, 70, Inputs.F32),  # more positions than a page has
    ],
)
@pytest.mark.parametrize("kv_type", [KvType.F16, KvType.F32], ids=lambda kv_type: f"kv_{kv_type}")
def test_short_conv(any_gpu, kv_type, dim, taps, out):
    """b * x goes to the cell of its row and nowhere else, and is read there by the rows after it."""
    gpu, rows = any_gpu, sum(len(part.tokens) for part in SEGMENTS)
    config = replace(synthetic_config("tiny"), dim=dim, head_dim=dim // 6, conv_taps=taps)
    heads, head_dim, dtype = config.cache_heads(CONV), config.head_dim, DTYPES[kv_type]
    rng, step = random("short_conv"), Steps(gpu, POSITIONS, SLOTS)
    x = rng.standard_normal((rows, 3, dim)).astype(np.float32)
    weights = rng.standard_normal((taps, dim)).astype(np.float32)
    before = rng.standard_normal((SLOTS, 2, heads, POSITIONS, head_dim)).astype(dtype)
    step.write(*SEGMENTS)
    earlier = [segment(part.slot, 0, part.position) for part in SEGMENTS]
    halves = [step.paged(before[:, half], earlier, GUARD) for half in range(2)]  # [heads, cells, head_dim]
    on_device = [gpu.upload(half, "cache") for half in halves]
    y = gpu.zeros(4 * rows * dim, "y")
    bound = gpu.upload(x, "x"), gpu.upload(weights, "w"), tuple(on_device), y
    run(gpu, [step.ops.short_conv(config, CONV, *bound, kv_type, rows, out)], rows)

    gated, want = x[:, 0].astype(np.float64) * x[:, 2], np.zeros((rows, dim))
    stored = gated.astype(np.float32).astype(dtype).astype(np.float64)
    at = per_row(SEGMENTS)
    for row, (slot, position) in enumerate(at):
        total = gated[row] * weights[-1]
        for back in range(1, min(taps, position + 1)):
            here, cell = (slot, position - back), step.table.cells(slot, np.array(position - back))
            seen = stored[at.index(here)] if here in at else np.concatenate([half[:, cell] for half in halves]).ravel()
            total += seen.astype(np.float64) * weights[-1 - back]
        want[row] = total * x[row, 1]
    if out is Inputs.F32:
        got = gpu.read(y, np.float32, rows * dim).reshape(rows, dim)
    else:
        got, want = read_values(gpu, y, rows, dim, out), round_int8(want) if out is Inputs.INT8 else want
    # a product near the middle of two f16 may be rounded to the other one
    least = (0.0, 0.0) if kv_type is KvType.F32 else (1e-8, 1e-3)
    assert_close(got, want, *map(max, BOUNDS[out], least))

    for row, (slot, position) in enumerate(at):
        cell = int(step.table.cells(slot, np.array(position)))
        for half, own in zip(halves, stored[row].reshape(2, heads, head_dim), strict=True):
            half[:, cell] = own
    for buffer, half in zip(on_device, halves, strict=True):
        assert_close(gpu.read(buffer, dtype, half.size).reshape(half.shape), half, *map(max, F32, least))
