"""Sampling on the device: parameters for each sequence, and rings of sampled tokens that the host reads back."""

from collections.abc import Sequence as Items

import numpy as np
import wgpu

from llamagpu.engine.ops import Consts, HeadBuffers, Ops
from llamagpu.engine.sampler import Sampling
from llamagpu.engine.step_inputs import MAX_SEGMENTS
from llamagpu.engine.weights import Matrix
from llamagpu.gpu.buffers import Bindable, Buffer, BufferRange
from llamagpu.gpu.device import Dispatch, Gpu

RING = 64  # sampled tokens that the device keeps: more than all submissions in flight produce
MAX_RECENT = 256  # longest window of the repetition penalty on the device
RING_WORDS = RING + MAX_RECENT  # of one sequence: sampled tokens, then the recent ones
SETTING_WORDS = 8  # struct Sampling
BARRIER_WORDS = 4  # arrivals, timed_out, spin_limit, unused
NO_TOKEN = 0xFFFFFFFF


class DeviceSampler:
    """The buffers of the kernels `greedy` and `sample`, for `slots` sequences."""

    def __init__(self, gpu: Gpu, slots: int) -> None:
        self.gpu, self.slots = gpu, slots
        # [slots, RING_WORDS], then the grid barrier of fused decode, so that its state comes back with the tokens
        self.ring: Buffer = gpu.zeros((slots * RING_WORDS + BARRIER_WORDS) * 4, "ring")
        self.settings: Buffer = gpu.zeros(MAX_SEGMENTS * SETTING_WORDS * 4, "sampling", wgpu.BufferUsage.UNIFORM)
        self.barrier = BufferRange(self.ring, slots * RING_WORDS * 4, BARRIER_WORDS * 4)

    def clear_barrier(self) -> None:
        self.gpu.write(self.barrier, np.zeros(BARRIER_WORDS, np.uint32))

    @property
    def ring_words(self) -> int:
        """Words from one sequence's ring to the next."""
        return RING_WORDS

    @property
    def timed_out_word(self) -> int:
        """Index of the word of `ring` that tells whether a grid barrier has timed out."""
        return self.slots * RING_WORDS + 1

    def configure(self, slot: int, sampling: Sampling, prompt: Items[int], position: int) -> None:
        """Set the parameters of a sequence that begins to decode after `prompt`, from the logits of `position`."""
        s = sampling
        seed = np.random.default_rng().integers(1 << 32) if s.seed is None else s.seed
        last_n = s.repeat_last_n if s.repeat_penalty != 1.0 else 0
        cold = s.temperature <= 0  # take the likeliest token after the penalty
        floats = np.array([1.0 if cold else s.temperature, s.top_p, s.min_p, s.repeat_penalty], np.float32)
        integers = np.array(
            [1 if cold else s.top_k, int(seed) & 0xFFFFFFFF, last_n, -position % max(last_n, 1)], np.uint32
        )
        words = np.concatenate([floats.view(np.uint32), integers])
        self.gpu.write(self.settings, words, offset=slot * SETTING_WORDS * 4)
        if last_n:
            recent = [NO_TOKEN] * last_n + list(prompt)
            self.gpu.write(self.ring, np.array(recent[-last_n:], np.uint32), offset=4 * (slot * RING_WORDS + RING))

    def dispatch(
        self,
        ops: Ops,
        greedy: bool,
        head: HeadBuffers,
        vocab: int,
        candidates: int,
        candidate_rows: int,
        table: Matrix | None,
        x: Bindable | None,
    ) -> Dispatch:
        """Each of the `candidates` of a segment is the largest of `candidate_rows` logits.

        The kernel copies the embedding of the token from `table` to x, if it can read the table.
        """
        consts: Consts = {"CANDIDATES": candidates, "RING": RING, "RING_WORDS": RING_WORDS}
        bindings: dict[str, Bindable] = {"candidates": head.candidates, "ring": self.ring}
        if x is not None:
            bindings["x"] = x
        if greedy:
            if ops.gpu.caps.cpu:
                consts["WORKGROUP"] = 16  # barriers cost more there than loop iterations: 30 us instead of 150
            return ops.sample("greedy", consts, bindings, table, head.segments)
        consts |= {"VOCAB": vocab, "CANDIDATE_ROWS": candidate_rows}
        bindings |= {"logits": head.logits, "sampling": self.settings}
        return ops.sample("sample", consts, bindings, table, head.segments)


def samples_on_device(sampling: Sampling) -> bool:
    """Whether the kernel can apply these parameters. Model.samples_on_device checks top_k."""
    return sampling.repeat_penalty == 1.0 or sampling.repeat_last_n <= MAX_RECENT
