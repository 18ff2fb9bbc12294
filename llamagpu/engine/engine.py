"""The engine: a model, its KV cache and a recorder. It runs sequences of token ids and knows no text."""

import logging
import time
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Items
from dataclasses import replace
from itertools import product
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from llamagpu.engine import device_sampler, fused_check, routes
from llamagpu.engine.decode import decode
from llamagpu.engine.fused_decode import can_fuse, timed_out, weights_fit
from llamagpu.engine.kv_cache import BufferKvCache, KvCache, TextureKvCache
from llamagpu.engine.model import BufferModel, Model
from llamagpu.engine.options import Backend, Precision, Settings
from llamagpu.engine.pages import PAGE
from llamagpu.engine.sampler import Sampling
from llamagpu.engine.sequence import Sequence
from llamagpu.engine.step_inputs import MAX_ROWS, Segment
from llamagpu.engine.step_size import TRIAL_ROWS, StepSize
from llamagpu.engine.texture_model import TextureModel
from llamagpu.engine.weights import Weights
from llamagpu.errors import DoesNotFit
from llamagpu.files.config import ModelConfig
from llamagpu.gpu.device import Gpu, first_line
from llamagpu.gpu.recorder import Plan, Recorder, Step
from llamagpu.gpu.webgpu import GPUError

LOGIT_BYTES = 64 << 20  # most bytes of logits when every row has them
MAX_DECODED_AGAIN = 64  # tokens that are recomputed one at a time
Progress = Callable[[int, int], None]
T = TypeVar("T")
log = logging.getLogger("llamagpu")


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
        fitting = routes.max_chunk(config.widest, gpu.caps)
        settings = replace(settings, chunk=min(settings.chunk, settings.context * settings.slots, MAX_ROWS, fitting))
        self.gpu, self.config, self.weights, self.settings = gpu, config, weights, settings
        self.freq_factors, self.freed = freq_factors, False
        self.recorder = Recorder(gpu)
        self.step_size = StepSize(settings.chunk, timed=gpu.info["adapter_type"] != "CPU")
        self.tokens_per_submit = 1  # tokens that took SUBMIT_S in the last generation
        self.unchecked: set[Sequence] = set()  # sequences with positions that no check has covered
        self.cache = self._build_cache()
        self.model = self._build_model(self.cache)
        if probe and isinstance(self.model, BufferModel) and self.model.fused_decode:
            self.model.write_step([Segment(0, 0, [0])])
            right = self.model.fused_decode.probe(self.recorder)
            if not right or (gpu.caps.compares_fused and not fused_check.agrees(self, self.model)):
                self.model.unfuse()

    def _build_cache(self) -> KvCache:
        gpu, config, weights, settings = self.gpu, self.config, self.weights, self.settings
        freq_factors = self.freq_factors
        if settings.backend is Backend.TEXTURES:
            return TextureKvCache(gpu, config, settings, freq_factors)
        fused = can_fuse(config, gpu.caps, settings.precision is Precision.FAST, settings.kv_type)
        fused = fused and weights_fit(weights, gpu.caps)
        return BufferKvCache(gpu, config, settings, freq_factors, fused)

    def _build_model(self, cache: KvCache) -> Model:
        if isinstance(cache, TextureKvCache):
            return TextureModel(self.gpu, self.config, self.weights, cache, self.settings)
        assert isinstance(cache, BufferKvCache)
        return BufferModel(self.gpu, self.config, self.weights, cache, self.settings)

    def warm_up(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Compile all kernels now, not when a step first needs them.

        Plan the steps of decode, and one of each width, whose bindings other plans share.

        It ends early when `stop` says so, or the driver refuses a kernel, which then is for the step that needs it.
        """
        try:
            for dispatch in self.model.step_kernels():
                if stop():
                    return
                _ = dispatch.pipeline  # compiles it
        except GPUError as error:
            log.warning("a kernel was not compiled: %s", first_line(error))
            return
        model, counts = self.model, self.model.segment_counts
        decode = [(rows, depth, not model.embeds_next, rows) for rows, depth in product(counts, model.depths)]
        mixed = [(rows, 0, True, min(rows, n)) for rows, n in product(model.widths, {counts[0], counts[-1]})]
        for rows, depth, embed, segments in decode + mixed:
            if stop():
                return
            _ = model.plan(rows, depth, embed, segments).handles

    def free(self) -> None:
        """Free model and cache; the caller owns the weights."""
        self.freed = True
        self.recorder.drain()  # what is recorded uses the buffers
        self.model.free()
        self.gpu.free(*self.cache.resources())

    # Pages of sequences

    def begin(self, sequence: Sequence, ids: Items[int]) -> int:
        """Start the sequence anew with what pages of the KV cache hold of `ids`; return how many that are."""
        self._settle(sequence)
        return self.cache.begin(sequence, ids)

    def end(self, sequence: Sequence) -> None:
        """Give the pages of the sequence back; a later one that begins with the same ids finds them."""
        self._settle(sequence)
        self.cache.end(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Give the pages of the sequence back; nobody finds what they hold."""
        sequence.truncate(0)
        self.unchecked.discard(sequence)
        self.cache.end(sequence)

    def _settle(self, sequence: Sequence) -> None:
        """What others may find is right."""
        if sequence.checked < len(sequence):
            self.unchecked.add(sequence)
            self.check()

    def reserve(self, sequence: Sequence, tokens: int) -> None:
        """Reserve pages for `tokens` more. More than the context holds is refused."""
        wanted, context = len(sequence) + tokens, self.settings.context
        if wanted > context:
            raise DoesNotFit(
                f"the context holds {context} tokens: {len(sequence)} are in it and {tokens} more were given",
                "use a larger -c, or a shorter prompt",
            )
        self._reserve(sequence, wanted)

    def reserve_ahead(self, sequence: Sequence, positions: int) -> None:
        """Reserve pages for so many positions and the next one, whose cell sampling looks up."""
        self._reserve(sequence, min(positions + 1, self.settings.context))

    def _reserve(self, sequence: Sequence, positions: int) -> None:
        if not self.cache.reserve(sequence, positions):
            pool = self.cache.pool
            raise DoesNotFit(
                f"{positions} positions need {-(-positions // PAGE)} pages of the KV cache: it has {pool.count}, "
                f"{pool.available} of them free",
                "use a larger -c or --kv-memory, or end other sequences",
            )

    # Prefill

    def prefill(self, sequence: Sequence, ids: Items[int], progress: Progress | None = None) -> None:
        """Append ids to the sequence and compute the logits of the last one."""
        self.reserve(sequence, len(ids))
        if progress:
            progress(0, len(ids))
        for start, piece in self.pieces(sequence, ids):
            self.run(self.model.plan(len(piece), len(sequence)), sequence, piece)
            if progress:
                self.gpu.wait_idle()  # so that the progress is accurate and Ctrl-C acts between steps
                progress(start + len(piece), len(ids))

    def pieces(self, sequence: Sequence, ids: Items[int], most: int | None = None) -> Iterator[tuple[int, Items[int]]]:
        """Pieces of ids, at most `most` each, with their first index. Each must be run before the next is taken.

        They are as long as the time that a step may take allows.
        """
        most, start, size = most or self.model.chunk, 0, self.step_size
        if size.needs_trial and min(most, len(ids)) > TRIAL_ROWS:
            size.after_trial(self._trial_seconds(sequence, ids[:most]))
        while start < len(ids):
            piece = ids[start : start + min(most, size.rows)]
            compiled, began = self.gpu.compile_seconds, time.perf_counter()
            yield start, piece
            start += len(piece)
            if start < len(ids) and size.timed:
                self.gpu.wait_idle()
                compiling = self.gpu.compile_seconds - compiled
                size.after_step(len(piece), time.perf_counter() - began - compiling)

    def _trial_seconds(self, sequence: Sequence, ids: Items[int]) -> float:
        """The time of a short step of the plan that `ids` will run, which overwrites what it leaves.

        It runs twice: the first time is the driver's.
        """
        position = len(sequence)
        plan = self.model.plan(len(ids), position)
        for _ in range(2):
            self.model.write_step([Segment(sequence.slot, position, ids[:TRIAL_ROWS])])
            self.recorder.submit([Step(plan, TRIAL_ROWS, position)])
            began = time.perf_counter()
            self.gpu.wait_idle()
        return time.perf_counter() - began

    def run(self, plan: Plan, sequence: Sequence, ids: Items[int]) -> None:
        """One step of a plan over at most a chunk of ids."""
        position = len(sequence)
        self.model.write_step([Segment(sequence.slot, position, ids)])
        self.recorder.submit_in_pieces(Step(plan, len(ids), position))
        sequence.ids += ids
        self.unchecked.add(sequence)

    def read_logits(self) -> NDArray[np.float32]:
        """The logits [vocab] of the last row."""
        self.check()
        return self.gpu.read(self.model.logits, np.float32, self.config.vocab)

    def segment_logits(self, segment: int) -> NDArray[np.float32]:
        """The logits [vocab] of the last row of a segment of the last step."""
        vocab = self.config.vocab
        return self.gpu.read(self.model.logits, np.float32, vocab, 4 * segment * vocab)

    def log_probs(self, sequence: Sequence, ids: Items[int]) -> NDArray[np.float32]:
        """Append ids. Return, for each but the last, the log probability of the id after it."""
        return self._checked(sequence, lambda: self._log_probs(sequence, ids))

    def _log_probs(self, sequence: Sequence, ids: Items[int]) -> NDArray[np.float32]:
        self.reserve(sequence, len(ids))
        rows = self.score_rows
        scores = []
        for start, piece in self.pieces(sequence, ids, rows):
            targets = np.array([*ids[start + 1 : start + len(piece) + 1], 0][: len(piece)], np.uint32)
            self.gpu.write(self.model.targets, targets)
            self.run(self.model.score_plan(rows), sequence, piece)
            scores.append(self.gpu.read(self.model.scores, np.float32, len(piece)))
        return np.concatenate(scores)[: len(ids) - 1]

    def mean_hidden(self, sequence: Sequence, ids: Items[int]) -> NDArray[np.float64]:
        """Append ids. Return the mean [dim] of their hidden states after the last norm."""
        return self._checked(sequence, lambda: self._hidden(sequence, ids))[0]

    def last_hidden(self, sequence: Sequence, ids: Items[int]) -> NDArray[np.float64]:
        """Append ids. Return the hidden state [dim] of the last one after the last norm."""
        return self._checked(sequence, lambda: self._hidden(sequence, ids))[1]

    def _hidden(self, sequence: Sequence, ids: Items[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        self.reserve(sequence, len(ids))
        total = np.zeros(self.config.dim)
        for _, piece in self.pieces(sequence, ids):
            position = len(sequence)
            self.run(self.model.plan(len(piece), position), sequence, piece)
            self.recorder.submit([Step(self.model.hidden_plan(len(piece), position), len(piece))])
            hidden = self.model.read_hidden(len(piece))
            total += hidden.sum(axis=0, dtype=np.float64)
        return total / len(ids), hidden[-1].astype(np.float64)

    @property
    def score_rows(self) -> int:
        """Rows of one step of `log_probs`: their logits fit LOGIT_BYTES, whatever the chunk."""
        return max(1, min(self.model.chunk, LOGIT_BYTES // (4 * self.config.vocab)))

    # Checks: numbers are right, or they are computed again

    def check(self) -> bool:
        """Whether the results since the last check are right.

        If a grid barrier timed out, fused steps of several rows end for good, and if there were none, fused decode; if
        subgroups are not of the size that was probed, the kernels without subgroups are used for good. Then everything
        since the last check is computed again.
        """
        right = True
        while self._changed_kernels():
            right = False
            for sequence in list(self.unchecked):
                self._recompute(sequence)
        for sequence in self.unchecked:
            sequence.checked = len(sequence)
        self.unchecked.clear()
        return right

    def _changed_kernels(self) -> bool:
        """Whether kernels have computed wrong numbers, and others take their place."""
        if self.barrier_timed_out() and isinstance(self.model, BufferModel):
            several = self.model.unfuse_rows()
            if not several:
                self.model.unfuse()
            what = "steps of several rows go" if several else "decode goes"
            log.warning(
                "workgroups that wait for each other did not run at the same time: %s on unfused, more slowly", what
            )
            return True
        if self.subgroups_differ():
            self._without_subgroups()
            log.info("subgroups are not of the size that was probed: kernels without them are used")
            return True
        return False

    def barrier_timed_out(self) -> bool:
        return self.model.barrier is not None and timed_out(self.gpu, self.model.barrier)

    def subgroups_differ(self) -> bool:
        """Whether a kernel has found subgroups of another size than it was made for."""
        if self.gpu.unproven:
            self.recorder.drain()
            self.gpu.prove_subgroups()
        return self.model.lanes != self.gpu.caps.subgroup

    def _without_subgroups(self) -> None:
        """Build model and KV cache anew: the cache may hold numbers that are none, which spoil what they touch."""
        self.unchecked |= self.cache.sequences
        self.model.free()
        self.gpu.free(*self.cache.resources())
        self.cache = self._build_cache()
        self.model = self._build_model(self.cache)
        for sequence in self.unchecked:
            sequence.pages, sequence.checked = [], 0

    def _recompute(self, sequence: Sequence) -> None:
        """Everything after the checked tokens; at least the last one, for its logits. A few as decode computes them."""
        first = max(0, min(sequence.checked, len(sequence) - 1))
        ids = sequence.ids[first:]
        sequence.truncate(first)
        self.cache.clear(sequence, first)
        rows = 1 if len(ids) <= MAX_DECODED_AGAIN else self.model.chunk
        for start in range(0, len(ids), rows):
            self.prefill(sequence, ids[start : start + rows])

    def _checked(self, sequence: Sequence, compute: Callable[[], T]) -> T:
        """What `compute` returns, computed again where the check fails."""
        self.check()
        length = len(sequence)
        found = compute()
        if self.check():
            return found
        sequence.truncate(length)
        return compute()

    # Decode

    def greedy(self, sequence: Sequence, most: int | None = None) -> Iterator[int]:
        """Continue the sequence with the likeliest tokens, at most `most`, until the context is full."""
        return self._decode(sequence, most, greedy=True)

    def sample(
        self, sequence: Sequence, sampling: Sampling, prompt: Items[int], most: int | None = None
    ) -> Iterator[int]:
        """Continue the sequence with tokens sampled on the device; `samples_on_device` must hold."""
        begun = len(sequence)
        seeded = sampling.seeded()  # the same after a repair

        def configure() -> None:
            text = [*prompt, *sequence.ids[begun:]]
            self.model.sampler.configure(sequence.slot, seeded, text, len(sequence))

        return self._decode(sequence, most, configure=configure)

    def _decode(
        self,
        sequence: Sequence,
        most: int | None,
        greedy: bool = False,
        configure: Callable[[], None] | None = None,
    ) -> Generator[int, None, None]:
        """The decode loop, again after each repair. A repaired text goes on as if nothing had been."""
        end = None if most is None else len(sequence) + most
        while True:
            if configure:
                configure()
            left = None if end is None else end - len(sequence)
            if (yield from decode(self, sequence, greedy, left)):
                return
            self.unchecked.add(sequence)
            self.check()

    def samples_on_device(self, sampling: Sampling, logprobs: int | None = None, masked: bool = False) -> bool:
        """Whether the device can sample with these parameters, return so many log probabilities and apply masks."""
        if sampling.greedy and logprobs is None and not masked:
            return True
        return self.model.samples_on_device and device_sampler.samples_on_device(sampling, logprobs)

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
