"""Selects the precision of a model, and checks the adapter's packed int8 dot products."""

from typing import Any

import numpy as np

from llamagpu.engine import ops
from llamagpu.engine.ops import Ops
from llamagpu.engine.options import Backend, Precision
from llamagpu.engine.routes import Inputs
from llamagpu.engine.step_inputs import Segment, StepInputs
from llamagpu.engine.weights import WeightTarget, upload_matrix
from llamagpu.errors import NumericCheckFailed
from llamagpu.files.storage import Layout, PackedMatrix, Storage, dequantize
from llamagpu.gpu.adapters import identity
from llamagpu.gpu.device import Gpu
from llamagpu.gpu.recorder import Plan, Recorder, Step

# PCI ids of NVIDIA, AMD and Intel, where dot4I8Packed is one instruction. Apple's GPUs lose by it.
PACKED_DOT_VENDORS = (0x10DE, 0x1002, 0x8086)
NMSE_BOUND = 5e-4  # int8 activations are at about 7e-5; a wrong sign or order of bytes is near 1
N, K = 64, 256

_errors: dict[tuple[Any, ...], float] = {}  # by adapter: it does not change while the process runs


def resolve_precision(gpu: Gpu, wanted: Precision | None) -> Precision:
    """`wanted`, or FAST where the hardware has packed dot products and computes them correctly, else HIGH."""
    packed = not gpu.caps.cpu and not gpu.caps.scalar and gpu.info["vendor_id"] in PACKED_DOT_VENDORS
    if wanted is Precision.HIGH or (wanted is None and not packed):
        return Precision.HIGH
    adapter = (gpu.info["vendor_id"], gpu.info["device_id"], identity(gpu.info))
    if adapter not in _errors:
        _errors[adapter] = int8_error(gpu)
    right = _errors[adapter] < NMSE_BOUND  # False for NaN
    if wanted is Precision.FAST and not right:
        raise NumericCheckFailed(
            f"int8 products on {gpu.name} are wrong (error {_errors[adapter]:.1e})", "use --precision high"
        )
    return Precision.FAST if right else Precision.HIGH


def int8_error(gpu: Gpu) -> float:
    """A small q4 linear with int8 activations against float64: mean squared error over mean square."""
    random = np.random.default_rng(0)
    words = random.integers(0, 256, (N, K // 2), np.uint8)
    scales = random.uniform(0.5, 1.5, (N, K // 32, 1)).astype(np.float16)
    x = random.standard_normal(K).astype(np.float32)
    packed = PackedMatrix(Layout(Storage.Q4, K, 32, scale_bits=16), words, scales)
    target = WeightTarget.of(Backend.BUFFERS, Precision.HIGH, gpu.caps)
    matrix = upload_matrix(gpu, [packed], "self-check", target)
    inputs, blocks, y = gpu.upload(x, "x"), gpu.zeros(K // 32 * 48, "blocks"), gpu.zeros(N * 4, "y")
    step = StepInputs(gpu)
    step.write([Segment(0, 0, [0])])
    make = Ops(gpu, step.buffer)
    dispatches = [
        make.quantise(inputs, blocks, K, 1),
        *make.linear(blocks, matrix, 1, ops.store(y, matrix), Inputs.INT8),
    ]
    Recorder(gpu).submit([Step(Plan(dispatches))])
    got = gpu.read(y, np.float32, N).astype(np.float64)
    want = dequantize(packed) @ x.astype(np.float64)
    own = [buffer for shard in matrix.shards for buffer in shard.bindings.values()]
    gpu.free(inputs, blocks, y, step.buffer, *own)
    return float(((got - want) ** 2).sum() / (want**2).sum())
