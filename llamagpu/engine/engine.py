"""The engine: a model, its KV cache and a recorder. It runs sequences of token ids and knows no text."""

from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llamagpu.engine import device_sampler
from llamagpu.engine.decode import BARRIER_TIMED_OUT, REMEDY_UNFUSED, decode
from llamagpu.engine.fused_decode import can_fuse, timed_out, weights_fit
from llamagpu.engine.kv_cache import BufferKvCache, KvCache, TextureKvCache
from llamagpu.engine.model import BufferModel, Model
from llamagpu.engine.options import Backend, Precision, Settings
from llamagpu.engine.sampler import Sampling
from llamagpu.engine.sequence import Sequence
from llamagpu.engine.step_inputs import MAX_ROWS, Segment
from llamagpu.engine.texture_model import TextureModel
from llamagpu.engine.weights import Weights
from llamagpu.errors import DeviceLost, DoesNotFit
from llamagpu.files.config import ModelConfig
from llamagpu.gpu.device import Gpu
from llamagpu.gpu.recorder import Plan, Recorder, Step

LOGIT_BYTES = 64 << 20  # most bytes of logits when every row has them
Progress = Callable[[int, int], None]


class Engine:
    """Prefill and decode of sequences. `probe=False` leaves fused decode unprobed, for a memory plan."""

    def __init__(
        self,
        gpu: Gpu,
        config: ModelConfig,
        weights: Weights,
        settings: Settings,
        freq_factors: NDArray[np.floating] | None = None,
        probe: bool = True,
    ) -> None:
        settings = replace(settings, chunk=min(settings.chunk, settings.context, MAX_ROWS))
        self.gpu, self.config, self.weights, self.settings = gpu, config, weights, settings
        self.freq_factors, self.freed = freq_factors, False
        self.recorder = Recorder(gpu)
        self.tokens_per_submit = 1  # tokens that took SUBMIT_S in the last generation
        self.cache, self.model = self._build(freq_factors)
        if probe and isinstance(self.model, BufferModel) and self.model.fused_decode:
            self.model.write_step([Segment(0, 0, [0])])
            if not self.model.fused_decode.probe(self.recorder):
                self.model.unfuse()

    def _build(self, freq_factors: NDArray[np.floating] | None) -> tuple[KvCache, Model]:
        gpu, config, weights, settings = self.gpu, self.config, self.weights, self.settings
        if settings.backend is Backend.TEXTURES:
            textures = TextureKvCache(gpu, config, settings, freq_factors)
            return textures, TextureModel(gpu, config, weights, textures, settings)
        fused = can_fuse(config, gpu.caps, settings.precision is Precision.FAST) and weights_fit(weights)
        cache = BufferKvCache(gpu, config, settings, freq_factors, fused)
        return cache, BufferModel(gpu, config, weights, cache, settings)

    def free(self) -> None:
        """Free model and cache; the caller owns the weights."""
        self.freed = True
        self.model.free()
        self.gpu.free(*self.cache.resources(), self.cache.rope)

    # Prefill

    def reserve(self, sequence: Sequence, tokens: int) -> None:
        """Reserve positions for `tokens` more. More than the context holds is refused."""
        wanted, context = len(sequence) + tokens, self.settings.context
        if wanted > context:
            raise DoesNotFit(
                f"the context holds {context} tokens: {len(sequence)} are in it and {tokens} more were given",
                "use a larger -c, or a shorter prompt",
            )
        self.cache.reserve(wanted)

    def prefill(self, sequence: Sequence, ids: Items[int], progress: Progress | None = None) -> None:
        """Append ids to the sequence and compute the logits of the last one."""
        self.reserve(sequence, len(ids))
        chunk = self.model.chunk
        for start in range(0, len(ids), chunk):
            piece = ids[start : start + chunk]
            self.run(self.model.plan(len(piece), len(sequence)), sequence, piece)
            if progress:
                # wait, so that the progress is accurate and Ctrl-C acts between chunks
                self.gpu.read(self.model.step.buffer, np.uint32, 1)
                progress(start + len(piece), len(ids))

    def run(self, plan: Plan, sequence: Sequence, ids: Items[int]) -> None:
        """One step of a plan over at most a chunk of ids."""
        position = len(sequence)
        self.model.write_step([Segment(sequence.slot, position, ids)])
        self.recorder.submit([Step(plan, len(ids), position)])
        sequence.ids += ids

    def read_logits(self) -> NDArray[np.float32]:
        """The logits [vocab] of the last row."""
        self.check_barrier()
        return self.gpu.read(self.model.logits, np.float32, self.config.vocab)

    def check_barrier(self) -> None:
        """Raise if a grid barrier has timed out: the results of fused decode are wrong then."""
        if self.model.barrier and timed_out(self.gpu, self.model.barrier):
            raise DeviceLost(BARRIER_TIMED_OUT, REMEDY_UNFUSED)

    def log_probs(self, sequence: Sequence, ids: Items[int]) -> NDArray[np.float32]:
        """Append ids. Return, for each but the last, the log probability of the id after it."""
        self.reserve(sequence, len(ids))
        rows = self.score_rows
        scores = []
        for start in range(0, len(ids), rows):
            piece = ids[start : start + rows]
            targets = np.array([*ids[start + 1 : start + rows + 1], 0][: len(piece)], np.uint32)
            self.gpu.write(self.model.targets, targets)
            self.run(self.model.score_plan(rows), sequence, piece)
            scores.append(self.gpu.read(self.model.scores, np.float32, len(piece)))
        self.check_barrier()
        return np.concatenate(scores)[: len(ids) - 1]

    def mean_hidden(self, sequence: Sequence, ids: Items[int]) -> NDArray[np.float64]:
        """Append ids. Return the mean [dim] of their hidden states after the last norm."""
        self.reserve(sequence, len(ids))
        total = np.zeros(self.config.dim)
        for start in range(0, len(ids), self.model.chunk):
            piece = ids[start : start + self.model.chunk]
            self.run(self.model.plan(len(piece), len(sequence)), sequence, piece)
            self.recorder.submit([Step(self.model.hidden_plan(len(piece)), len(piece))])
            total += self.model.read_hidden(len(piece)).sum(axis=0, dtype=np.float64)
        self.check_barrier()
        return total / len(ids)

    @property
    def score_rows(self) -> int:
        """Rows of one step of `log_probs`: their logits fit LOGIT_BYTES, whatever the chunk."""
        return max(1, min(self.model.chunk, LOGIT_BYTES // (4 * self.config.vocab)))

    # Decode

    def greedy(self, sequence: Sequence, most: int | None = None) -> Iterator[int]:
        """Continue the sequence with the likeliest tokens, at most `most`, until the context is full."""
        return decode(self, sequence, greedy=True, most=most)

    def sample(
        self, sequence: Sequence, sampling: Sampling, prompt: Items[int], most: int | None = None
    ) -> Iterator[int]:
        """Continue the sequence with tokens sampled on the device; `samples_on_device` must hold."""
        self.model.sampler.configure(sequence.slot, sampling, prompt)
        return decode(self, sequence, greedy=False, most=most)

    def samples_on_device(self, sampling: Sampling) -> bool:
        top_k = 1 if sampling.temperature <= 0 else sampling.top_k
        return device_sampler.samples_on_device(sampling) and self.model.samples_on_device(top_k)

    def sample_on_host(
        self, sequence: Sequence, sample: Callable[[NDArray[np.float32]], int]
    ) -> Generator[int, None, None]:
        """Continue the sequence with tokens that `sample` takes from the logits, until the context is full."""
        while True:
            token = sample(self.read_logits())
            yield token
            if len(sequence) == self.settings.context:
                return
            self.prefill(sequence, [token])
