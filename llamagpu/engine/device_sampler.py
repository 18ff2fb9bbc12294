"""Sampling on the device: parameters of each sequence, and rings of sampled tokens that the host reads back."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llamagpu.engine.ops import Consts, HeadBuffers, Ops
from llamagpu.engine.sampler import Sampling, Scores
from llamagpu.engine.step_inputs import MAX_SEGMENTS
from llamagpu.engine.weights import Matrix
from llamagpu.gpu.buffers import AnyBuffer, Bindable, Buffer, BufferRange
from llamagpu.gpu.device import Dispatch, Gpu
from llamagpu.gpu.shaders import constants
from llamagpu.gpu.webgpu import BufferUsage

RING = 64  # sampled tokens that the device keeps: more than all submissions in flight produce
RING_WORDS = 2 * RING  # of one sequence: sampled tokens, then the bits of their logits
SETTING_WORDS = 12  # struct Sampling
BARRIER_WORDS = 4  # arrivals, timed_out, spin_limit, unused
NO_TOKEN = 0xFFFFFFFF
LOWEST = np.float32(-3.4e38)  # the bias of a token that must not come
MAX_BIASES, MAX_RECENT = (constants("sample")[name] for name in ("MAX_BIASES", "MAX_RECENT"))
CHANGE_WORDS = MAX_RECENT + 2 * MAX_BIASES + MAX_BIASES + MAX_RECENT  # of one sequence
MAX_LOGPROBS = constants("top_logprobs")["MAX_LOGPROBS"]
SCORE_WORDS = 2 + 2 * MAX_LOGPROBS  # of one token: largest logit, log of the sum, (id, logit) of the best


@dataclass(frozen=True, slots=True)
class Candidates:
    """What the output head leaves for each segment: `count` candidates, each the largest of `rows` logits."""

    vocab: int
    count: int
    rows: int

    @property
    def consts(self) -> Consts:
        return {"VOCAB": self.vocab, "CANDIDATES": self.count, "CANDIDATE_ROWS": self.rows}


class DeviceSampler:
    """The buffers of the sampling kernels, for `slots` sequences. Positions say where a token goes in them."""

    def __init__(self, gpu: Gpu, slots: int, vocab: int) -> None:
        self.gpu, self.slots, self.vocab = gpu, slots, vocab
        # [slots, RING_WORDS], then what comes back with the tokens: the barrier of fused decode and [slots] checks;
        # then [slots, CHANGE_WORDS]: recent tokens by position % last_n, (token, bias), logits before the changes
        self.first_check = slots * RING_WORDS + BARRIER_WORDS
        self.first_change = self.first_check + slots
        self.ring: Buffer = gpu.zeros((self.first_change + slots * CHANGE_WORDS) * 4, "ring")
        self.settings: Buffer = gpu.zeros(MAX_SEGMENTS * SETTING_WORDS * 4, "sampling", BufferUsage.UNIFORM)
        self.mask_words = -(-vocab // 32)
        self.masks: Buffer = gpu.zeros(slots * self.mask_words * 4, "masks")  # [slots, vocab / 32]: bit set = allowed
        self.scores: Buffer = gpu.zeros(slots * RING * SCORE_WORDS * 4, "scores")  # [slots, RING, SCORE_WORDS]
        self.barrier = BufferRange(self.ring, slots * RING_WORDS * 4, BARRIER_WORDS * 4)

    @property
    def buffers(self) -> list[Buffer]:
        return [self.ring, self.settings, self.masks, self.scores]

    def results(self, logprobs: bool = False) -> list[AnyBuffer]:
        """What the host reads back: sampled tokens, the barrier and checks, then log probabilities."""
        tokens = BufferRange(self.ring, 0, 4 * self.first_change)
        return [tokens, self.scores] if logprobs else [tokens]

    def clear_barrier(self) -> None:
        self.gpu.write(self.barrier, np.zeros(BARRIER_WORDS, np.uint32))

    @property
    def timed_out_word(self) -> int:
        """Index of the word of `results` that tells whether a grid barrier has timed out."""
        return self.slots * RING_WORDS + 1

    def token(self, words: NDArray[np.uint32], slot: int, position: int) -> tuple[int, float]:
        """The token that was sampled for a position, and its logit; NaN if there was none to sample.

        `words` are those of `results`.
        """
        at = slot * RING_WORDS + position % RING
        return int(words[at]), floats(words[at + RING : at + RING + 1])[0]

    def tokens(
        self, words: NDArray[np.uint32], slots: Items[int], positions: Items[int], count: int
    ) -> tuple[list[list[int]], list[bool]]:
        """`count` tokens of each slot from its position on, and whether they all have a logit that is a number."""
        rings = words[: self.slots * RING_WORDS].reshape(self.slots, 2, RING)
        places = (np.array(positions)[:, None] + np.arange(count)) % RING
        found = rings[np.array(slots)[:, None], :, places]  # [slots, count, 2]
        finite = np.isfinite(np.ascontiguousarray(found[..., 1]).view(np.float32))
        return found[..., 0].tolist(), [all(row) for row in finite.tolist()]

    def logits_finite(self, words: NDArray[np.uint32], slot: int) -> bool:
        """Whether the logits were numbers, where they were checked."""
        return not words[self.first_check + slot]

    def token_scores(self, words: NDArray[np.uint32], slot: int, position: int, count: int) -> Scores:
        """The log probabilities of the `count` likeliest tokens and of the sampled one."""
        at = self.first_change + (slot * RING + position % RING) * SCORE_WORDS
        top, log_sum = floats(words[at : at + 2])
        best = words[at + 2 : at + 2 + 2 * min(count, self.vocab)]
        logits = [self.token(words, slot, position)[1], *floats(best[1::2])]
        logprob, *others = (logit - top - log_sum for logit in logits)
        return Scores(logprob, best[::2].tolist(), others)

    def configure(
        self,
        slot: int,
        sampling: Sampling,
        text: Items[int],
        position: int | None = None,
        masked: bool = False,
        logprobs: int | None = None,
    ) -> None:
        """Set the parameters of a sequence that begins to decode after `text`.

        `position` is that of the next token, if it is not the length of the text. With `masked`, `write_mask` sets the
        tokens that may come; `logprobs` is how many log probabilities `top_logprobs` writes. It has to have a seed.
        """
        s, position = sampling, len(text) if position is None else position
        last_n = s.repeat_last_n if s.penalises else 0
        cold = s.temperature <= 0  # take the likeliest token after bias and penalties
        temperature = 1.0 if cold else min(max(s.temperature, 1e-30), 1e30)  # as f32 not 0, nor infinite
        values = [temperature, s.top_p, s.min_p, s.repeat_penalty, s.presence_penalty, s.frequency_penalty]
        integers = [1 if cold else min(s.top_k, NO_TOKEN), s.seed_word, last_n, len(s.logit_bias), masked]
        integers.append(0 if logprobs is None else logprobs + 1)
        words = np.concatenate([np.array(values, np.float32).view(np.uint32), np.array(integers, np.uint32)])
        self.gpu.write(self.settings, words, offset=slot * SETTING_WORDS * 4)
        if last_n:
            recent = np.full(last_n, NO_TOKEN, np.uint32)
            tail = np.array(text[-last_n:], np.uint32)
            recent[np.arange(position - tail.size, position) % last_n] = tail
            self.gpu.write(self.ring, recent, offset=4 * (self.first_change + slot * CHANGE_WORDS))
        if s.logit_bias:
            biases = np.zeros((len(s.logit_bias), 2), np.uint32)
            biases[:, 0] = list(s.logit_bias)
            added = np.array(list(s.logit_bias.values()), np.float32)
            biases[:, 1] = np.maximum(added, LOWEST).view(np.uint32)
            offset = 4 * (self.first_change + slot * CHANGE_WORDS + MAX_RECENT)
            self.gpu.write(self.ring, biases, offset=offset)

    def write_mask(self, slot: int, mask: NDArray[np.int32]) -> None:
        """The tokens that may come next: [vocab / 32] words, the lowest bit first, as llguidance writes them."""
        self.gpu.write(self.masks, mask[: self.mask_words], offset=4 * slot * self.mask_words)

    def dispatches(
        self,
        ops: Ops,
        kind: "SampleKind",
        head: HeadBuffers,
        found: Candidates,
        table: Matrix | None,
        x: Bindable | None,
    ) -> list[Dispatch]:
        """The next token of the first `head.segments` segments.

        The last kernel copies the embedding of the token from `table` to x, if it can read the table.
        """
        rings: Consts = {"RING": RING, "RING_WORDS": RING_WORDS}
        both: dict[str, Bindable] = {"logits": head.logits, "candidates": head.candidates, "sampling": self.settings}
        dispatches = []
        if kind.checked:
            checked: dict[str, Bindable] = {"ring": self.ring, "logits": head.logits}
            dispatches.append(ops.check_logits({"VOCAB": found.vocab, "CHECKS": self.first_check}, checked, head))
        if kind.logprobs:
            dispatches.append(ops.top_logprobs(found.consts | {"RING": RING}, both | {"scores": self.scores}, head))
        if kind.masked:
            dispatches.append(ops.mask_logits(found.consts, both | {"mask": self.masks}, head))
        own: dict[str, Bindable] = {"ring": self.ring} | ({} if x is None else {"x": x})
        if kind.greedy:
            consts = rings | {"CANDIDATES": found.count}
            if ops.gpu.caps.cpu:
                consts["WORKGROUP"] = 16  # barriers cost more there than loop iterations: 30 us instead of 150
            last = ops.sample("greedy", consts, own | {"candidates": head.candidates}, table, head.segments)
        else:
            consts = rings | found.consts | {"CHANGES": self.first_change}
            last = ops.sample("sample", consts, own | both, table, head.segments)
        return [*dispatches, last]


@dataclass(frozen=True, slots=True)
class SampleKind:
    """What the rows of a step need, all of them together."""

    greedy: bool  # no row has a temperature, bias or penalty
    masked: bool = False  # a row has a mask
    logprobs: bool = False  # a row wants log probabilities
    checked: bool = False  # the logits of a row may be no numbers


def floats(words: NDArray[np.uint32]) -> list[float]:
    values: list[float] = words.astype(np.uint32).view(np.float32).tolist()
    return values


def samples_on_device(sampling: Sampling, logprobs: int | None) -> bool:
    """Whether the kernels can apply these parameters, and return so many log probabilities."""
    window = sampling.repeat_last_n if sampling.penalises else 0
    return window <= MAX_RECENT and (logprobs or 0) <= MAX_LOGPROBS
