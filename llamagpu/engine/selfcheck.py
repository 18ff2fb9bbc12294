"""Precision "fast" rests on packed int8 dot products: does this adapter have them, and are its sums right?"""

from typing import Any

import numpy as np
import wgpu

from llamagpu.engine import ops
from llamagpu.engine.weights import upload_matrix
from llamagpu.errors import NumericCheckFailed
from llamagpu.files.repack import Packed, dequantize
from llamagpu.gpu.device import Gpu
from llamagpu.gpu.recorder import Plan, Recorder

# PCI ids of NVIDIA, AMD and Intel, where dot4I8Packed is one instruction. Apple's GPUs lose by it.
PACKED_DOT_VENDORS = (0x10DE, 0x1002, 0x8086)
NMSE_BOUND = 5e-4  # int8 activations are at about 7e-5; a wrong sign or order of bytes is near 1
N, K = 64, 256

_errors: dict[tuple[Any, ...], float] = {}  # by adapter: it does not change while the process runs


def use_fast(gpu: Gpu, precision: str | None) -> bool:
    """Of "fast", "high" and None: None is fast where the hardware has the means and computes rightly."""
    packed = not gpu.caps.cpu and not gpu.caps.scalar and gpu.info["vendor_id"] in PACKED_DOT_VENDORS
    if precision == "high" or (precision is None and not packed):
        return False
    adapter = (gpu.info["vendor_id"], gpu.info["device_id"], gpu.info["device"], gpu.info["backend_type"])
    if adapter not in _errors:
        _errors[adapter] = int8_error(gpu)
    right = _errors[adapter] < NMSE_BOUND  # False for NaN
    if precision == "fast" and not right:
        raise NumericCheckFailed(
            f"int8 products on {gpu.info['device']} are wrong (error {_errors[adapter]:.1e})",
            "use --precision high",
        )
    return right


def int8_error(gpu: Gpu) -> float:
    """A small q4 linear with int8 activations against float64: mean squared error over mean square."""
    random = np.random.default_rng(0)
    words = random.integers(0, 256, (N, K // 2), np.uint8)
    scales = random.uniform(0.5, 1.5, (N, K // 32, 1)).astype(np.float16)
    x = random.standard_normal(K).astype(np.float32)
    packed = Packed("q4", N, K, 32, words, scales)
    matrix = upload_matrix(gpu, [packed], "self-check")
    plain, records, y = gpu.upload(x, "x"), gpu.zeros(K // 32 * 48, "records"), gpu.zeros(N * 4, "y")
    step = gpu.upload(np.array([0, 1, 0, 0], np.uint32), "step", wgpu.BufferUsage.UNIFORM)
    work = [
        ops.to_i8(gpu, plain, records, K, 1, step),
        *ops.linear(gpu, records, matrix, 1, ops.store(y, matrix), step, "i8"),
    ]
    Recorder(gpu).submit([(Plan(work), 1, 0)])
    got = gpu.read(y, np.float32, N).astype(np.float64)
    want = dequantize(packed).astype(np.float64) @ x.astype(np.float64)
    gpu.free(plain, records, y, step, *(buffer for part in matrix.parts for buffer in part.buffers.values()))
    return float(((got - want) ** 2).sum() / (want**2).sum())
