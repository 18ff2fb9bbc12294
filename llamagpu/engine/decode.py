"""The decode loop: the device samples tokens and feeds them back; the host reads them a few submissions later."""

import time
from collections import deque
from collections.abc import Generator
from contextlib import suppress
from typing import TYPE_CHECKING

from llamagpu.engine.sequence import Sequence
from llamagpu.engine.step_inputs import Segment
from llamagpu.errors import DeviceLost
from llamagpu.gpu.recorder import Pending, Plan, Step

if TYPE_CHECKING:
    from llamagpu.engine.engine import Engine

MAX_TOKENS_PER_SUBMIT = 8
SUBMISSIONS_IN_FLIGHT = 3  # one runs, one is queued, one is being submitted
SUBMIT_S = 0.015  # longest time of a submission: text should appear within 50 ms


def decode(engine: "Engine", sequence: Sequence, greedy: bool, most: int | None = None) -> Generator[int, None, bool]:
    """Continue the sequence with at most `most` tokens, until the context is full. Return whether all went well.

    It ends early where a grid barrier timed out or a kernel found other subgroups than it was made for: the tokens of
    that submission are dropped, and Engine.check repairs the rest.
    While the consumer reads the tokens of one submission, the next ones run or are queued. When the consumer stops,
    tokens that it has not read are dropped: the sequence holds the yielded tokens except the last one.
    """
    model, recorder = engine.model, engine.recorder
    sampler, sample, results = model.sampler, model.sample_plan(greedy), model.sampler.results()
    engine.reserve_ahead(sequence, len(sequence))
    # the first token is sampled from the present logits, those of the last row
    model.write_step([Segment(sequence.slot, len(sequence) - 1, sequence.ids[-1:])])
    pending: deque[tuple[Pending, int]] = deque()
    pending.append((recorder.submit([Step(sample)], *results), 1))
    ahead = len(sequence)  # positions that are filled or being filled
    end = engine.settings.context if most is None else min(engine.settings.context, ahead + most - 1)
    begun = ahead  # the position of the first token
    sampled, size, step_s, last = 0, engine.tokens_per_submit, 0.0, time.perf_counter()
    try:
        while True:
            while len(pending) < SUBMISSIONS_IN_FLIGHT and (count := min(size, end - ahead)):
                engine.reserve_ahead(sequence, ahead + count)
                steps = decode_steps(engine, ahead, count, sample)
                pending.append((recorder.submit(steps, *results, ahead=True), count))
                ahead += count
            if not pending:
                sequence.truncate(ahead)  # the last token was sampled, but no step has processed it
                return True
            result, count = pending.popleft()
            words = result.wait()
            if words[sampler.timed_out_word] or engine.subgroups_differ():
                return False
            sequence.checked = len(sequence)
            now = time.perf_counter()
            if sampled:  # the first token waited for the prompt
                # the slower of two submissions counts: one of them may have waited for the host
                step_s, before = (now - last) / count, step_s
                size = max(1, min(2 * size, MAX_TOKENS_PER_SUBMIT, int(SUBMIT_S / max(step_s, before))))
                engine.tokens_per_submit = size
            last = now
            for i in range(sampled, sampled + count):
                token, _ = sampler.token(words, sequence.slot, begun + i)
                yield token
                sequence.ids.append(token)
            sampled += count
    finally:
        recorder.drain()
        for result, _ in pending:
            with suppress(DeviceLost):  # or closed, or the process ends: nobody reads this result
                result.wait()


def decode_steps(engine: "Engine", position: int, count: int, sample: Plan) -> list[Step]:
    """`count` decode steps from `position` on, each feeding the next on the device."""
    model = engine.model
    embed = not model.embeds_next
    return [
        step
        for p in range(position, position + count)
        for step in (Step(model.plan(1, p, embed), 1, p), Step(sample, 1, p))
    ]
