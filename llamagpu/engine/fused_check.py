"""Compares fused with unfused decode before it is used on a GPU where nobody has measured it.

The barrier litmus test shows that workgroups run together and see each other's stores, in a light kernel. This one runs
the model's own layers.
"""

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llamagpu.engine.model import BufferModel
from llamagpu.engine.options import KvType
from llamagpu.engine.step_inputs import Segment
from llamagpu.errors import LlamaGpuError
from llamagpu.files.atomic import atomic_write
from llamagpu.files.cache import cache_dir
from llamagpu.gpu.device import Gpu
from llamagpu.gpu.recorder import Step

if TYPE_CHECKING:
    from llamagpu.engine.engine import Engine

FIRST_POSITIONS = 4  # whose keys and values in all layers are compared
# Largest difference, relative to the largest number. Measured: 3e-3 with int8 activations, which may round to the next
# integer, 5e-4 with an f16 cache, 1e-6 else.
MAX_DIFFERENCE = 0.03


def agrees(engine: "Engine", model: BufferModel) -> bool:
    """Whether fused decode of this model on this adapter gives the numbers of unfused decode; remembered on disk."""
    path = verdict_path(engine.gpu, model)
    with suppress(OSError):
        return path.read_text() == "right"
    right = differences(engine, model) <= MAX_DIFFERENCE
    with suppress(OSError, LlamaGpuError):  # a cache that cannot be written is not an error
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(b"right" if right else b"wrong")
    return right


def verdict_path(gpu: Gpu, model: BufferModel) -> Path:
    """By adapter, driver and the fused kernels, which depend on the model's shapes."""
    sources = [dispatch.source for dispatch in model.plan(1).dispatches]
    key = "|".join(map(str, (gpu.info["device"], gpu.info["backend_type"], gpu.info["description"], *sources)))
    return cache_dir() / "fused" / hashlib.blake2b(key.encode(), digest_size=8).hexdigest()


def differences(engine: "Engine", model: BufferModel) -> float:
    """The largest relative difference of a number; infinite if a barrier timed out or a number is none."""
    fused = numbers(engine)
    timed_out = engine.barrier_timed_out()
    with model.unfused():
        unfused = numbers(engine)
    pairs = zip(fused, unfused, strict=True)
    found = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)
    return np.inf if timed_out or np.isnan(found) else found


def numbers(engine: "Engine") -> list[NDArray[np.float32]]:
    """Logits of tokens at the first positions and at the last ones, then keys and values of the first."""
    cache, capacity = engine.cache, engine.cache.capacity
    found = []
    for position in sorted({*range(min(FIRST_POSITIONS, capacity)), capacity // 2, capacity - 1}):
        engine.model.write_step([Segment(0, position, [position % engine.config.vocab])])
        engine.recorder.submit([Step(engine.model.plan(1, position), 1, position)])
        found.append(engine.gpu.read(engine.model.logits, np.float32, engine.config.vocab))
    dtype = np.float16 if cache.kv_type is KvType.F16 else np.float32
    rows = cache.read(0, min(FIRST_POSITIONS, capacity))
    return found + [row.view(dtype).astype(np.float32) for row in rows]
