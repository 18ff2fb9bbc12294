"""Compares fused with unfused decode before it is used on an adapter where nobody has measured it.

The barrier litmus test shows that workgroups run together and see each other's stores, in a light kernel. This one runs
the model's own layers.
"""

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llamagpu.engine.kv_cache import BufferKvCache
from llamagpu.engine.model import BufferModel
from llamagpu.engine.options import Precision
from llamagpu.engine.sequence import Sequence
from llamagpu.engine.step_inputs import Segment
from llamagpu.errors import LlamaGpuError
from llamagpu.files.atomic import atomic_write
from llamagpu.files.cache import cache_dir
from llamagpu.gpu.adapters import identity
from llamagpu.gpu.device import Gpu
from llamagpu.gpu.recorder import Step

if TYPE_CHECKING:
    from llamagpu.engine.engine import Engine

FIRST_POSITIONS = 4  # whose keys and values in all layers are compared
# Largest NMSE of logits, or of a head's keys or values. Measured over 28 layers of SmolLM2: 1.4e-3 with int8
# activations, which may round to the next integer, and 1e-7 in f32. Four wrong values in a head of 64 give 6e-2.
MAX_NMSE = {Precision.FAST: 2e-2, Precision.HIGH: 1e-4}


def agrees(engine: "Engine", model: BufferModel) -> bool:
    """Whether fused decode of this model on this adapter gives the numbers of unfused decode; remembered on disk."""
    path = verdict_path(engine.gpu, model)
    with suppress(OSError):
        return path.read_text() == "right"
    right = largest_nmse(engine, model) <= MAX_NMSE[model.precision]
    with suppress(OSError, LlamaGpuError):  # a cache that cannot be written is not an error
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(b"right" if right else b"wrong")
    return right


def verdict_path(gpu: Gpu, model: BufferModel) -> Path:
    """By adapter, driver and the fused kernels, which depend on the model's shapes."""
    sources = [dispatch.source for dispatch in model.plan(1).dispatches]
    key = "|".join((identity(gpu.info), *sources))
    return cache_dir() / "fused" / hashlib.blake2b(key.encode(), digest_size=8).hexdigest()


def largest_nmse(engine: "Engine", model: BufferModel) -> float:
    """Of fused against unfused decode; infinite if a barrier timed out or a number is none."""
    fused = numbers(engine)
    timed_out = engine.barrier_timed_out()
    with model.unfused():
        unfused = numbers(engine)
    found = max(float(np.square(a - b).sum() / np.square(b).sum()) for a, b in zip(fused, unfused, strict=True))
    return found if not timed_out and np.isfinite(found) else np.inf


def numbers(engine: "Engine") -> list[NDArray[np.float32]]:
    """Logits of tokens at the first positions and at the last ones, then keys and values of the first."""
    cache, positions, sequence, found = engine.cache, engine.cache.positions, Sequence(), []
    assert isinstance(cache, BufferKvCache)
    cache.reserve(sequence, positions)
    for position in sorted({*range(min(FIRST_POSITIONS, positions)), positions // 2, positions - 1}):
        engine.model.write_step([Segment(0, position, [position % engine.config.vocab])])
        engine.recorder.submit([Step(engine.model.plan(1, position), 1, position)])
        found.append(engine.gpu.read(engine.model.logits, np.float32, engine.config.vocab))
    found += cache.read_values(sequence, min(FIRST_POSITIONS, positions))
    cache.end(sequence)
    return found
