"""Continuous batching: many requests share the steps of one engine.

A step takes a row of every sequence that decodes, and prompt rows within a budget of time, so that nobody's tokens wait
for somebody's long prompt. Requests join and leave between steps. While the same ones only decode and the device can
sample for all of them, steps are submitted ahead, each feeding the next on the device: a flight. It may begin behind a
step that ends prompts, before the host knows their first tokens. Rows of requests that end in it are computed for
nobody, until it lands.

A scheduler belongs to the thread that holds its lock: whoever waits for a token runs steps, for everybody.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from llamagpu.engine.decode import MAX_TOKENS_PER_SUBMIT, SUBMISSIONS_IN_FLIGHT, SUBMIT_S
from llamagpu.engine.device_sampler import DeviceSampler
from llamagpu.engine.engine import Engine, Progress
from llamagpu.engine.fair_lock import FairLock
from llamagpu.engine.grammar import Matcher
from llamagpu.engine.pages import PAGE
from llamagpu.engine.sampler import HostSampler, Sampling, Scores, not_finite, score
from llamagpu.engine.sequence import Sequence
from llamagpu.engine.step_inputs import MAX_SEGMENTS, Segment
from llamagpu.errors import DeviceLost, DoesNotFit, LlamaGpuError, NumericCheckFailed, Overloaded, WrongState
from llamagpu.gpu.buffers import AnyBuffer
from llamagpu.gpu.device import check_process, map_device_lost
from llamagpu.gpu.recorder import Pending, Plan, Step

# How long MIN_JOINED or more requests decode undisturbed before new ones join, unless those are half as many: the
# prompts of several are computed together. With 64 requests of 65 tokens one ends in every step, and there would be no
# steps ahead.
JOIN_S = 0.03
MIN_JOINED = 8
STALL_S = 0.08  # how long prompt rows may keep decoding sequences waiting
MIN_PROMPT_ROWS = 32  # of a step with decoding rows, however slow the device
MAX_WAITING = 1024  # requests in the queue, unless told otherwise

GREEDY = Sampling(temperature=0)


class State(Enum):
    WAITING = auto()
    PROMPT = auto()  # its prompt is being computed
    DECODE = auto()
    PAUSED = auto()  # its pages were needed: keys and values are in the host's memory
    DONE = auto()


@dataclass(eq=False, slots=True)
class Request:
    """One text to continue. `new` grows; `state` is DONE at the end, and `error` says why, if not as wished."""

    prompt: list[int]
    sampling: Sampling
    max_tokens: int | None = None  # new ones; None: until the context is full
    is_end: Callable[[int], bool] = field(default=lambda id: False)
    sample: HostSampler | None = None  # samples on the host, where the device cannot
    progress: Progress | None = None
    matcher: Matcher | None = None  # says before each token which ones may come, so that none is sampled ahead
    logprobs: int | None = None  # of how many of the likeliest tokens; None: not of the new ones either
    cache_prompt: bool = True  # whether pages that hold its beginning are used
    new: list[int] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)  # of the new tokens, with `logprobs`
    matched: int | None = None  # new tokens after which the grammar allows no more
    state: State = State.WAITING
    error: BaseException | None = None
    cancelled: bool = False
    cached: int = 0  # prompt tokens that were in the KV cache
    sequence: Sequence = field(default_factory=Sequence)
    taken: int = 0  # new tokens that the consumer has seen
    first_at: float = 0.0  # when the first new token came, by time.perf_counter; 0: none has
    latest_at: float = 0.0
    saved: list[NDArray[np.uint8]] | None = None  # keys and values of a paused one, of `computed` ids
    paused_at: int = 0  # how many ids those are
    configured: DeviceSampler | None = None  # that has its parameters and, for penalties, its recent tokens
    mask: NDArray[np.int32] | None = None  # what the grammar allows next

    def __post_init__(self) -> None:
        self.sampling = self.sampling.seeded()

    def note_time(self) -> None:
        """New tokens have come. Called before they are there for other threads to see."""
        now = time.perf_counter()
        self.first_at = self.first_at or now
        self.latest_at = now

    @property
    def steps_alone(self) -> bool:
        """Whether the host must see each token before the next is sampled."""
        return self.sample is not None or self.matcher is not None

    @property
    def plain(self) -> bool:
        """Whether nothing but its tokens comes from the device."""
        return self.sample is None and self.matcher is None and self.logprobs is None

    @property
    def masked(self) -> bool:
        """Whether the device applies its grammar's masks."""
        return self.matcher is not None and self.sample is None

    @property
    def scored(self) -> bool:
        """Whether the device returns its log probabilities."""
        return self.logprobs is not None and self.sample is None

    @property
    def on_device(self) -> Sampling:
        """What the device samples; where the host samples, a kernel that leaves the logits as they are."""
        return GREEDY if self.sample else self.sampling

    @property
    def last(self) -> int:
        """The token that is sampled, but whose keys and values are not computed."""
        return self.new[-1]

    @property
    def done(self) -> bool:
        return self.state is State.DONE

    @property
    def computed(self) -> list[int]:
        """The ids whose keys and values were computed."""
        return [*self.prompt, *self.new[:-1]]

    def left(self, context: int) -> int:
        """How many more tokens it may get."""
        by_context = context + 1 - len(self.prompt) - len(self.new)
        return by_context if self.max_tokens is None else min(by_context, self.max_tokens - len(self.new))


@dataclass(slots=True)
class Flight:
    """Decode steps that are submitted and not read back."""

    requests: list[Request]
    positions: list[int]  # of each request's next row
    pending: deque[tuple[Pending, int]] = field(default_factory=deque)  # and how many steps
    first: bool = True  # the host has written the tokens of the first step
    unread: int = 0  # tokens of the step before it that nobody has read
    most: int = 1  # steps of the next submission; twice as many each time, so that the device begins at once
    ended: list[Request] = field(default_factory=list)  # whose rows go on for nobody, in pages of their own
    lands: bool = False  # one of them failed, or its client has left: its slot and pages are given back soon

    @property
    def narrow(self) -> bool:
        """Whether too few of its rows are still for somebody."""
        return 2 * len(self.ended) >= len(self.requests)


class Scheduler:
    """Requests on one engine. All public methods may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.lock = FairLock()
        self.closed: BaseException | None = None  # why it takes no more requests
        self.max_waiting = MAX_WAITING
        self.prompts_first = False  # nobody decodes while prompts are read, as a benchmark may want it
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # the oldest first; each has a slot
        self.most = min(engine.settings.slots, MAX_SEGMENTS)  # requests that run together
        self.slots = list(range(self.most - 1, -1, -1))  # free ones
        self.flight: Flight | None = None
        # whether a flight may begin behind prompts; a software adapter takes no more work before the step has ended
        self.begins_early = not engine.gpu.software
        self.row_s = 0.0  # seconds for a prompt row, as measured last
        self.prompts_at = 0.0  # when the last prompt rows were computed
        self.while_computing: Callable[[], None] = lambda: None  # called while the device computes a step
        self.busy = False  # with a step or what is done alone: functions that are called in it may not begin another

    # Requests

    def submit(self, request: Request) -> None:
        """Queue a request. One that can never fit, or that finds the queue full, is refused."""
        needed, holds = len(request.prompt) + (request.max_tokens != 0), self.engine.cache.positions
        if needed > holds:
            cause = f"{len(request.prompt)} prompt tokens need a context of {needed}; there is room for {holds}"
            raise DoesNotFit(cause, "use a shorter prompt, or a larger -c or --kv-memory")
        with self.lock:
            if self.closed:
                raise self.closed
            if len(self.waiting) >= self.max_waiting:
                self._drop_cancelled()
            if len(self.waiting) >= self.max_waiting:
                raise Overloaded(f"{len(self.waiting)} requests are waiting", "try again later")
            self.waiting.append(request)

    def next_token(self, request: Request) -> int | None:
        """The next new token of a request, None at its end. Runs steps, for all requests, until it is there."""
        while True:
            if request.taken < len(request.new):
                request.taken += 1
                return request.new[request.taken - 1]
            if request.done:
                if request.error:
                    raise request.error
                return None
            check_process()
            with self.lock:
                if request.taken == len(request.new) and not request.done:
                    self.step()

    def cancel(self, request: Request) -> None:
        """End a request. Its pages are given back when no step that may use them is under way."""
        request.cancelled = True

    @contextmanager
    def alone(self, positions: int) -> Iterator[Sequence]:
        """A sequence of the caller's own, with room for so many positions. All requests wait until it ends."""
        with self.lock:
            self.check_idle()
            try:
                self.busy = True
                self._drop_cancelled()
                self._land()
                while self.running and (not self.slots or not self.engine.cache.has_room(positions)):
                    self._pause(self.running[-1])
                sequence = Sequence(self.slots.pop())
                try:
                    yield sequence
                finally:
                    self.engine.end(sequence)
                    self.slots.append(sequence.slot)
            finally:
                self.busy = False

    def check_idle(self) -> None:
        """Refuse to begin a step in a function that another one calls."""
        if self.busy and self.lock.held:
            cause = "a progress function uses the model whose progress it is told"
            raise WrongState(cause, "use it when the call has returned")

    def close(self, reason: BaseException) -> None:
        """End all requests, and take no more."""
        with self.lock:
            self.closed = reason
            self._abandon()
            for request in [*self.running, *self.waiting]:
                self._finish(request, reason)

    # Steps

    def step(self) -> None:
        """Run what is due: tokens for those who decode, or a piece of a prompt."""
        self.check_idle()
        try:
            self.busy = True
            with map_device_lost():
                self._step()
        except BaseException as error:
            if not isinstance(error, Exception):
                self._recover()
            self._abandon()
            self._rewind()
            if isinstance(error, DeviceLost):
                for request in [*self.running, *self.waiting]:
                    self._finish(request, error)
            raise
        finally:
            self.busy = False

    def _step(self) -> None:
        self._drop_cancelled()
        self._admit()
        if not self.running:
            idle = self.flight is None
            self._land()
            if self.waiting and idle:  # nothing would ever change that
                cause = "no request runs, and the next one finds no slot or no pages"
                raise LlamaGpuError(cause, "load the model again; this is a fault of llamagpu")
            return
        if self._steady():
            self._decode_ahead()
        else:
            self._land()
            self._mixed_step()

    def _recover(self) -> None:
        """After a Ctrl-C, which may come in the midst of any change: who runs has a slot and pages, nobody else."""
        self.running = [r for r in self.running if r.state not in (State.DONE, State.PAUSED)]
        self.waiting = deque(r for r in self.waiting if r not in self.running and r.state is not State.DONE)
        self.engine.unchecked.intersection_update(request.sequence for request in self.running)
        taken = {request.sequence.slot for request in self.running}
        self.slots = [slot for slot in range(self.most - 1, -1, -1) if slot not in taken]
        self.engine.cache.recover([request.sequence for request in self.running])

    def _rewind(self) -> None:
        """A Ctrl-C may have come between the rows of a step and their tokens: these rows are computed again. Or between
        a grammar's step and its token, or a text's last token and its end."""
        for request in list(self.running):
            request.configured = None  # the device may count tokens that nobody got
            del request.scores[len(request.new) :]
            if request.state is State.DECODE and not request.new:
                request.state = State.PROMPT
            sure = len(request.prompt) - 1 if request.state is State.PROMPT else len(request.computed)
            request.sequence.truncate(sure)
            with self._ends_alone(request):
                if request.sample:
                    request.sample.restart(request.new)
                if request.matcher:
                    request.matcher.restart(request.new)
                    request.matched = len(request.new) if request.matcher.stopped else None
                if request.new and self._is_complete(request):
                    self._finish(request)

    def _steady(self) -> bool:
        """Whether all running requests decode, need no host between steps, and are in flight, if any are."""
        steady = all(r.state is State.DECODE and not r.steps_alone for r in self.running)
        if self.flight is None or not steady:
            return steady
        return not self.flight.lands and not self.flight.narrow and set(self.running).issubset(self.flight.requests)

    def _drop_cancelled(self) -> None:
        for request in [*self.running, *self.waiting]:
            if request.cancelled and request.state is not State.DONE:
                self._finish(request)

    def _finish(self, request: Request, error: BaseException | None = None) -> None:
        request.state, request.error, request.saved = State.DONE, error, None
        if request in self.running:
            self.running.remove(request)
            if self.flight and request in self.flight.requests:
                self.flight.ended.append(request)  # steps ahead still write to its pages
                self.flight.lands |= error is not None or request.cancelled
            else:
                self._leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def _leave(self, request: Request) -> None:
        """Give slot and pages back, once; pages that hold a prefix can be found again."""
        request.configured = None
        self.engine.unchecked.discard(request.sequence)
        self.engine.cache.end(request.sequence)
        if request.sequence.slot not in self.slots:
            self.slots.append(request.sequence.slot)

    # Who runs

    def _admit(self) -> None:
        if not self.waiting or self._paced():
            return
        if self.flight and self.flight.ended:
            self._land()  # the slots of those that ended are free
        while self.waiting and self.slots and self._start(request := self.waiting[0]):
            self.running.append(request)
            self.waiting.remove(request)
            request.saved = None
            if request.state is State.PROMPT:
                self._report(request)

    def _paced(self) -> bool:
        """Whether new requests wait for others to join with them."""
        return time.perf_counter() - self.prompts_at < JOIN_S and self._few_wait()

    def _few_wait(self) -> bool:
        """Whether those who wait are few beside many that run."""
        rows, ended = (len(self.flight.requests), len(self.flight.ended)) if self.flight else (len(self.running), 0)
        many = 2 * min(len(self.waiting), len(self.slots) + ended) >= rows - ended
        return not many and rows >= MIN_JOINED

    def _start(self, request: Request) -> bool:
        """Give a request a slot and pages for its prompt. False if it has to wait."""
        cache, sequence = self.engine.cache, request.sequence
        positions = self._beyond(max(request.paused_at, len(request.prompt)))
        begins = request.prompt if request.cache_prompt and request.saved is None else []
        if self.running and not cache.has_room(positions, begins):
            return False  # a full cache is no reason to land
        self._land()
        sequence.slot = self.slots[-1]
        if request.saved is not None:
            if not cache.reserve(sequence, positions):
                cache.end(sequence)
                return False
            cache.write(sequence, request.paused_at, byte_reader(request.saved))
            sequence.ids, sequence.checked = request.computed[: request.paused_at], request.paused_at
            request.state = State.DECODE if request.new else State.PROMPT
        else:
            if request.cache_prompt and self._will_share(request.prompt):
                return False
            request.cached = cache.begin(sequence, begins)
            if not cache.reserve(sequence, positions):
                cache.end(sequence)
                return False
            request.state = State.PROMPT
        self.slots.pop()
        return True

    def _beyond(self, positions: int) -> int:
        """These positions and the next one, whose cell sampling looks up."""
        return min(positions + 1, self.engine.cache.positions)

    def _will_share(self, prompt: list[int]) -> bool:
        """Whether a prompt that is being computed begins like this one: its pages can be shared soon."""
        found = self.engine.cache.pool.find(prompt[:-1]).positions
        shared = prompt[: (found // PAGE + 1) * PAGE]  # with one page more
        computing = (r.prompt for r in self.running if r.state is State.PROMPT)
        return len(shared) < len(prompt) and any(other[: len(shared)] == shared for other in computing)

    def _make_room(self, request: Request, positions: int) -> bool:
        """Pages for so many positions of a decoding request; the youngest others are paused for it."""
        cache = self.engine.cache
        while not cache.reserve(request.sequence, positions):
            younger = [r for r in self.running if r.state is State.DECODE and r is not request]
            if not younger or self.running.index(younger[-1]) < self.running.index(request):
                return False
            self._pause(younger[-1])
        return True

    def _pause(self, request: Request) -> None:
        request.paused_at = len(request.sequence)
        request.saved = list(self.engine.cache.read(request.sequence, request.paused_at)) if request.paused_at else None
        self.waiting.appendleft(request)
        request.state = State.PAUSED
        self.running.remove(request)
        self._leave(request)

    # One step that waits: prompts, tokens that the host samples or whose grammar it follows

    def _mixed_step(self) -> None:
        held = self.prompts_first and any(r.state is State.PROMPT for r in self.running)
        decoding = [] if held else self._rows_with_room()
        prompts = self._prompt_pieces(len(decoding))
        requests = [*decoding, *(request for request, _ in prompts)]
        if not requests:
            return
        segments = [Segment(r.sequence.slot, len(r.sequence), [r.last]) for r in decoding]
        segments += [Segment(r.sequence.slot, len(r.sequence), piece) for r, piece in prompts]
        unfinished = bool(prompts) and segments[-1].position + len(segments[-1].tokens) < len(requests[-1].prompt)
        sampled = requests[:-1] if unfinished else requests  # only the last prompt can be unfinished
        early = bool(prompts) and not unfinished and self._may_begin_early(requests)
        began, compiled = time.perf_counter(), self.engine.gpu.compile_seconds
        pending = self._run(segments, sampled)
        for request, segment in zip(requests, segments, strict=True):
            request.sequence.ids += segment.tokens
            self.engine.unchecked.add(request.sequence)
        if early:
            self._begin_early(requests)
        self.while_computing()
        if pending is None:
            for request, _ in prompts:
                self._report(request)
            return
        words = pending.wait()
        if prompts:
            self.prompts_at = time.perf_counter()
        if words[self.engine.model.sampler.timed_out_word] or self.engine.subgroups_differ():
            self._abandon()
            self._repair(requests, segments)
            return
        if self.flight:
            self.flight.unread = 0
        compiling = self.engine.gpu.compile_seconds - compiled
        self._measure(sum(len(piece) for _, piece in prompts), time.perf_counter() - began - compiling)
        for request, _ in prompts:
            self._report(request)
        self._extend([r for r in sampled if r.plain and r.state is State.DECODE], words, 1)
        for i, request in enumerate(sampled):
            if request.state is State.PROMPT or (not request.plain and not request.done):
                self._deliver(request, i, words)
        if not self.running:
            self._land()

    def _rows_with_room(self) -> list[Request]:
        """The decoding requests, each with a page for its next position; those without are paused or end."""
        for request in [r for r in self.running if r.state is State.DECODE]:
            if request.state is State.DECODE and not self._make_room(request, len(request.sequence) + 1):
                if len(self.running) == 1:
                    self._finish(request)  # alone, and no page is left: the context is full
                else:
                    self._pause(request)
        return [r for r in self.running if r.state is State.DECODE]

    def _prompt_pieces(self, decoding: int) -> list[tuple[Request, list[int]]]:
        """The next rows of prompts, the oldest first, as many as the budget allows beside `decoding` rows.

        One that does not end in this step comes last, and leaves half of the rows to younger ones that do: nobody waits
        for all of somebody's long prompt.
        """
        budget = min(self.engine.step_size.rows, self.engine.model.chunk - decoding)
        if decoding and self.row_s:
            budget = min(budget, max(MIN_PROMPT_ROWS, int(STALL_S / self.row_s)))
        found: list[tuple[Request, list[int]]] = []
        long: Request | None = None
        kept = 0  # rows for it
        for request in self.running:
            if request.state is not State.PROMPT:
                continue
            left = len(request.prompt) - len(request.sequence)
            if left <= budget - kept:
                found.append((request, request.prompt[-left:]))
                budget -= left
            elif long is None and budget:
                long, kept = request, (budget + 1) // 2
        if long:
            done = len(long.sequence)
            found.append((long, long.prompt[done : done + budget]))
        return found

    def _run(self, segments: list[Segment], sampled: list[Request]) -> Pending | None:
        """Submit a step, and the sampling of its first segments, those of `sampled`."""
        model, submit = self.engine.model, self.engine.recorder.submit
        rows, position = sum(len(s.tokens) for s in segments), max(s.position for s in segments)
        model.write_step(segments)
        steps = [Step(model.plan(rows, position, segments=len(segments)), rows, position)]
        if not sampled:
            submit(steps)
            return None
        self._configure(sampled)
        if any(r.matcher for r in sampled):
            submit(steps)  # the device computes the logits while the host makes the masks
            steps = []
            self._write_masks(sampled)
        checked = any(r.state is State.PROMPT for r in sampled)
        steps.append(Step(self._sample_plan(sampled, len(segments), checked), rows, position))
        return submit(steps, *self._results(sampled))

    def _write_masks(self, requests: list[Request]) -> None:
        for r in requests:
            if r.matcher:
                try:
                    r.mask, r.error = r.matcher.mask(), None
                except Exception as error:  # it ends alone, after this step
                    r.error = error
                if r.masked and r.mask is not None:
                    self.engine.model.sampler.write_mask(r.sequence.slot, r.mask)

    def _sample_plan(self, requests: list[Request], segments: int, checked: bool = False) -> Plan:
        return self.engine.model.sample_plan(
            all(r.on_device.greedy for r in requests),
            segments,
            masked=any(r.masked for r in requests),
            logprobs=any(r.scored for r in requests),
            sampled=len(requests),
            checked=checked,
        )

    def _results(self, requests: list[Request]) -> list[AnyBuffer]:
        return self.engine.model.sampler.results(any(r.scored for r in requests))

    def _measure(self, rows: int, seconds: float) -> None:
        if rows:
            self.row_s = seconds / rows if not self.row_s else 0.5 * (self.row_s + seconds / rows)

    def _report(self, request: Request) -> None:
        if request.progress:
            self.engine.gpu.wait_idle()
            with self._ends_alone(request):
                request.progress(len(request.sequence) - request.cached, len(request.prompt) - request.cached)

    def _deliver(self, request: Request, segment: int, words: NDArray[np.uint32]) -> None:
        """The token of a row that a step has computed."""
        request.sequence.checked = len(request.sequence)
        first = request.state is State.PROMPT
        logits = self.engine.segment_logits(segment) if request.sample else None
        with self._ends_alone(request):
            if request.error:
                raise request.error
            if first:
                if not self.engine.model.sampler.logits_finite(words, request.sequence.slot):
                    raise not_finite()
                self.engine.cache.record(request.sequence)
            request.state = State.DECODE
            if request.max_tokens == 0:  # only the prompt was wanted
                self._finish(request)
            elif request.sample and logits is not None:
                token = request.sample(logits, request.mask)
                if request.logprobs is not None:
                    request.scores.append(score(logits, token, request.logprobs))
                self._append(request, token)
            else:
                self._take(request, words)

    @contextmanager
    def _ends_alone(self, request: Request) -> Iterator[None]:
        """What goes wrong with one request, in its own functions or with its numbers, ends that one."""
        try:
            yield
        except Exception as error:
            if isinstance(error, NumericCheckFailed):  # nobody may find its numbers, or read them behind his own
                self.engine.recorder.drain()  # steps ahead still write some
                good = len(request.prompt) if request.new else request.cached  # others may share what is good
                request.sequence.truncate(good)
                self.engine.cache.clear(request.sequence, good)
            self._finish(request, error)

    def _extend(self, requests: list[Request], words: NDArray[np.uint32], count: int) -> None:
        """`count` tokens that the device has sampled for each, from the position after its sequence on."""
        if not requests:
            return
        slots, positions = [r.sequence.slot for r in requests], [len(r.sequence) for r in requests]
        found = self.engine.model.sampler.tokens(words, slots, positions, count)
        for request, tokens, finite in zip(requests, *found, strict=True):
            with self._ends_alone(request):
                if request.plain and finite:
                    self._append_all(request, tokens)
                else:
                    self._take_each(request, words, count)

    def _append_all(self, request: Request, tokens: list[int]) -> None:
        left = request.left(self.engine.settings.context)
        end = next((i for i, token in enumerate(tokens, 1) if request.is_end(token)), left)
        kept = tokens[: min(left, end)]
        request.sequence.ids += kept[:-1]  # first: after a Ctrl-C here they are cut to the new tokens
        request.note_time()
        request.new += kept
        request.sequence.checked = len(request.sequence)
        if min(left, end) <= len(tokens):
            self._finish(request)

    def _take_each(self, request: Request, words: NDArray[np.uint32], count: int) -> None:
        for i in range(count):
            if request.done:
                return
            if i:
                request.sequence.ids.append(request.last)
            request.sequence.checked = len(request.sequence)
            self._take(request, words)

    def _take(self, request: Request, words: NDArray[np.uint32]) -> None:
        """The token that the device has sampled for the position after the sequence."""
        sampler, slot, position = self.engine.model.sampler, request.sequence.slot, len(request.sequence)
        token, logit = sampler.token(words, slot, position)
        if not math.isfinite(logit):
            limited = request.matcher or request.sampling.logit_bias
            raise NumericCheckFailed(
                "no token can be sampled: every logit is NaN or not allowed, or one is infinite",
                ("grammar and logit bias may leave none: allow more; or " if limited else "")
                + "the file may be damaged: fetch it again; or try --precision high",
            )
        if request.logprobs is not None:
            request.scores.append(sampler.token_scores(words, slot, position, request.logprobs))
        self._append(request, token)

    def _append(self, request: Request, token: int) -> None:
        if request.matcher:
            request.matcher.accept(token)
            if request.matcher.stopped:
                request.matched = len(request.new) + 1
        request.note_time()
        request.new.append(token)
        if self._is_complete(request):
            self._finish(request)

    def _is_complete(self, request: Request) -> bool:
        """Whether its last token ends the text."""
        return bool(request.matched) or request.is_end(request.last) or request.left(self.engine.settings.context) <= 0

    # Steps ahead: nothing but decode, sampled on the device

    def _may_begin_early(self, requests: list[Request]) -> bool:
        """Whether decode steps can follow the next step, which ends the prompts of these requests, at once: nobody else
        runs or is about to join, the host is needed for none, and each has a page for the token after the next."""
        joins = self.waiting and self.slots and not self._few_wait()
        waits = any(r.steps_alone or r.progress or r.max_tokens == 0 for r in requests)
        if not self.begins_early or joins or waits or len(requests) < len(self.running):
            return False
        decoding = (r for r in requests if r.state is State.DECODE)  # prompts have it
        return all(self.engine.cache.reserve(r.sequence, self._beyond(len(r.sequence) + 1)) for r in decoding)

    def _begin_early(self, requests: list[Request]) -> None:
        """Decode steps behind the step that was just submitted, whose sampling writes their first rows."""
        flight = Flight(list(requests), [len(r.sequence) for r in requests], first=False, unread=1)
        while len(flight.pending) < SUBMISSIONS_IN_FLIGHT - 1 and (count := self._ahead(flight)):
            self.flight = flight
            self._submit_ahead(flight, count)

    def _decode_ahead(self) -> None:
        flight = self.flight
        if flight is None:
            ready = self._rows_with_room()
            if ready != self.running or not ready:
                return
            flight = self.flight = Flight(list(ready), [len(r.sequence) for r in ready])
            self.engine.model.write_step([Segment(r.sequence.slot, len(r.sequence), [r.last]) for r in ready])
            self._configure(ready)
        while len(flight.pending) < SUBMISSIONS_IN_FLIGHT and (count := self._ahead(flight)):
            self._submit_ahead(flight, count)
        if not flight.pending:
            self._land()
            if self._rows_with_room() == self.running:  # else some were paused
                self._mixed_step()
            return
        self._receive(flight)
        if not self.running:
            self._land()

    def _configure(self, requests: list[Request]) -> None:
        """Tell the sampling kernels what each wants, once: they keep account of the tokens that they sample."""
        sampler = self.engine.model.sampler
        for r in requests:
            if r.configured is not sampler:
                logprobs = r.logprobs if r.scored else None
                sampler.configure(r.sequence.slot, r.on_device, [*r.prompt, *r.new], masked=r.masked, logprobs=logprobs)
                r.configured = sampler

    def _ahead(self, flight: Flight) -> int:
        """How many more steps may be submitted: pages and the context must hold them, somebody must want them."""
        submitted = flight.unread + sum(count for _, count in flight.pending)
        context = self.engine.settings.context
        lefts = sorted(r.left(context) for r in self.running)
        until_narrow = (len(flight.requests) - 1) // 2 - len(flight.ended)  # how many may end before the last step
        wanted = lefts[max(0, until_narrow)] - submitted if lefts else 0
        fitting = min(self.engine.cache.positions - position for position in flight.positions)
        count = min(self.engine.tokens_per_submit, flight.most, wanted, fitting)
        if count <= 0:
            return 0
        # and one position more: sampling looks up the cell of the next token
        ends = [self._beyond(position + count) for position in flight.positions]
        pairs = list(zip(flight.requests, ends, strict=True))
        missing = sum(max(0, -(-end // PAGE) - len(r.sequence.pages)) for r, end in pairs)
        if flight.ended and missing > len(self.engine.cache.pool.free):
            return 0  # rows for nobody take no prefix from others
        return count if all(self.engine.cache.reserve(r.sequence, end) for r, end in pairs) else 0

    def _submit_ahead(self, flight: Flight, count: int) -> None:
        engine, model, rows = self.engine, self.engine.model, len(flight.requests)
        sample, results = self._sample_plan(flight.requests, rows), self._results(flight.requests)
        position, steps = max(flight.positions), []
        for p in range(position, position + count):
            embed = flight.first or not model.embeds_next
            flight.first = False
            steps += [Step(model.plan(rows, p, embed, rows), rows, p), Step(sample, rows, p)]
        ahead = flight.most > 2  # at first the device waits for the submission
        flight.pending.append((engine.recorder.submit(steps, *results, ahead=ahead), count))
        flight.positions = [p + count for p in flight.positions]
        flight.most *= 2

    def _receive(self, flight: Flight) -> None:
        """The tokens of the oldest submission in flight."""
        engine, began = self.engine, time.perf_counter()
        self.while_computing()
        result, count = flight.pending.popleft()
        words = result.wait()
        if words[engine.model.sampler.timed_out_word] or engine.subgroups_differ():
            requests = flight.requests
            self._abandon()
            self._repair(requests, [])
            return
        step_s = (time.perf_counter() - began) / count
        engine.tokens_per_submit = max(
            1, min(2 * engine.tokens_per_submit, MAX_TOKENS_PER_SUBMIT, int(SUBMIT_S / max(step_s, 1e-6)))
        )
        decoding = [r for r in flight.requests if r.state is State.DECODE]  # the tokens of others are nobody's
        for request in decoding:
            request.sequence.ids.append(request.last)
        self._extend(decoding, words, count)

    def _land(self) -> None:
        """Receive everything in flight."""
        while self.flight and self.flight.pending:
            self._receive(self.flight)
        while self.flight and self.flight.ended:  # a Ctrl-C leaves the others where _abandon finds them
            self._leave(self.flight.ended[-1])
            self.flight.ended.pop()
        self.flight = None

    def _abandon(self) -> None:
        """Drop what is in flight. The requests go on from the tokens that they have."""
        flight, self.flight = self.flight, None
        if flight is None:
            self.engine.recorder.drain()  # a step that waits: a Ctrl-C may have come before it was submitted
            return
        for request in flight.requests:
            request.configured = None  # the device counts tokens that are dropped
        try:
            self.engine.recorder.drain()
            for result, _ in flight.pending:
                with suppress(DeviceLost):
                    result.wait()
        finally:
            for request in flight.ended:
                self._leave(request)

    def _repair(self, requests: list[Request], segments: list[Segment]) -> None:
        """A kernel gave wrong numbers: they are computed again, with kernels that do not."""
        for request in requests:
            request.configured = None
        for request, segment in zip(requests, segments, strict=False):  # the step counts for nothing
            request.sequence.truncate(len(request.sequence) - len(segment.tokens))
        self.engine.unchecked.update(r.sequence for r in requests if r.state is not State.DONE)
        self.engine.check()
        for request in [r for r in self.running if r.state is State.PROMPT]:  # in a new KV cache they have no pages
            if not self.engine.cache.reserve(request.sequence, self._beyond(len(request.prompt))):
                self._pause(request)


def byte_reader(pieces: Iterable[NDArray[np.uint8]]) -> Callable[[int], NDArray[np.uint8]]:
    """A function that reads the next n bytes of the pieces."""
    left = np.concatenate([piece.reshape(-1).view(np.uint8) for piece in pieces])

    def read(count: int) -> NDArray[np.uint8]:
        nonlocal left
        found, left = left[:count], left[count:]
        return found

    return read
