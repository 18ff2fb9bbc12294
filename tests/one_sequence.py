"""An engine with one sequence, for tests that follow a single text."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from reference import Reference

from llamagpu import Llama
from llamagpu.engine.engine import Engine
from llamagpu.engine.load import load_source, open_source
from llamagpu.engine.model import Model
from llamagpu.engine.options import Backend, KvType, Precision, Settings
from llamagpu.engine.pages import PAGE, ROOT
from llamagpu.engine.sampler import Sampling
from llamagpu.engine.sequence import Sequence as TokenSequence
from llamagpu.files.gguf_file import GgufFile
from llamagpu.gpu.device import Gpu


@dataclass
class OneSequence:
    engine: Engine
    sequence: TokenSequence = field(default_factory=TokenSequence)

    @property
    def model(self) -> Model:
        return self.engine.model

    @property
    def ids(self) -> list[int]:
        return self.sequence.ids

    def clear(self) -> None:
        self.sequence.truncate(0)

    def prefill(self, ids: Sequence[int], progress: Any = None) -> None:
        self.engine.prefill(self.sequence, ids, progress)

    def logits_after(self, ids: Sequence[int]) -> NDArray[np.float32]:
        self.prefill(ids)
        return self.engine.read_logits()

    def greedy(self, most: int | None = None) -> Iterator[int]:
        return self.engine.greedy(self.sequence, most)

    def sample(self, sampling: Sampling, prompt: Sequence[int], most: int | None = None) -> Iterator[int]:
        return self.engine.sample(self.sequence, sampling, prompt, most)

    def sample_on_host(self, sample: Callable[[NDArray[np.floating]], int] | None = None) -> Iterator[int]:
        """By default the likeliest token."""
        return self.engine.sample_on_host(self.sequence, sample or (lambda logits: int(logits.argmax())))

    def log_probs(self, ids: Sequence[int]) -> NDArray[np.float32]:
        return self.engine.log_probs(self.sequence, ids)


def load_one(
    gpu: Gpu,
    path: Path,
    *,
    context: int = 64,
    capacity: int | None = None,
    chunk: int = 18,
    kv_type: KvType = KvType.F32,
    precision: Precision = Precision.HIGH,
    backend: Backend = Backend.BUFFERS,
    slots: int = 1,
) -> OneSequence:
    """A model file with exactly these settings, whatever the adapter would prefer.

    In f32, GEMM has the linears of 18 rows; GEMV, with up to 16, takes five times as long to compile.
    """
    capacity = capacity or slots * -(-context // PAGE) * PAGE
    settings = Settings(precision, kv_type, backend, chunk, context, capacity, slots)
    source = open_source(path)
    weights = load_source(source, settings, gpu)
    return OneSequence(Engine(gpu, source.config, weights, settings, source.freq_factors(context)))


def forget(llama: Llama) -> None:
    """As if it had read nothing yet."""
    pool = llama.loaded.engine.cache.pool
    with llama.scheduler.alone(0):
        for page in [page for _, page in pool.following.get(ROOT, ())]:
            pool.forget(page)


def reserve(engine: Engine, slot: int, positions: int) -> TokenSequence:
    """A sequence in a slot, with pages for so many positions."""
    sequence = TokenSequence(slot)
    assert engine.cache.reserve(sequence, positions)
    return sequence


def reference_of(run: OneSequence, path: Path) -> Reference:
    """A reference that rounds what the engine rounds."""
    model, kv_type = run.model, run.engine.settings.kv_type
    return Reference(GgufFile(path), kv_type=kv_type, int8_decode=model.int8_decode, int8_prefill=model.int8_prefill)


def token_ids(count: int, seed: int = 0) -> list[int]:
    """Random ids of the tiny models' vocabulary."""
    return np.random.default_rng(seed).integers(0, 288, count).tolist()
