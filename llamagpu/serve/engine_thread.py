"""The thread that owns the GPU. It loads the model, runs the scheduler's steps and hands tokens to the event loop.

Nothing else touches the GPU. What the event loop wants done, it posts; what comes of it arrives there once a step, for
all generations together.
"""

import asyncio
import gc
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import NamedTuple, TypeVar

from llamagpu.errors import DeviceLost, WrongState
from llamagpu.llama import Generation, Llama
from llamagpu.results import Timings, Token, Usage
from llamagpu.serve.errors import ApiError
from llamagpu.serve.metrics import Metrics

log = logging.getLogger("llamagpu.serve")
# A token costs the event loop 17 to 33 us (64 streams, two cores), in which no other thread runs Python: with many
# streams the tokens of some steps go together, so that the engine's thread has more than half of the time.
EVENT_S = 0.0001
SWITCH_S = 0.0005  # how long a thread may keep others from running Python; 5 ms are two steps
T = TypeVar("T")


class Job:
    """A generation. The engine thread has it until its end; the event loop sees its tokens as they arrive."""

    def __init__(self, run: Generation, ready: asyncio.Event) -> None:
        self.run: Generation | None = run  # the engine thread's
        self.prompt_tokens = len(run.prompt_ids)
        self.created = time.perf_counter()
        self.latest = 0.0  # when the last tokens came
        self.ready = ready
        self.tokens: deque[Token] = deque()  # that have arrived and are not taken
        self.finish_reason = ""  # set at the end, as Generation has it
        self.stopped_by = ""  # the stop string
        self.error: BaseException | None = None
        self.usage = Usage(self.prompt_tokens, 0, 0)
        self.timings = Timings()

    @property
    def ended(self) -> bool:
        """Whether all has arrived, without an error."""
        return bool(self.finish_reason)


class Update(NamedTuple):
    """What a step has brought for a job."""

    job: Job
    tokens: list[Token]
    usage: Usage
    timings: Timings
    finish_reason: str = ""
    stopped_by: str = ""
    error: BaseException | None = None


def arrive(updates: list[Update]) -> None:
    """In the event loop: the jobs get what a step has brought."""
    for job, tokens, usage, timings, reason, stopped_by, error in updates:
        job.tokens += tokens
        job.usage, job.timings, job.error = usage, timings, error
        job.finish_reason, job.stopped_by = reason, stopped_by
        job.ready.set()


class Jobs(list[Job]):
    """The generations of one request."""

    def __init__(self, runs: Sequence[Generation], timeout_s: float) -> None:
        self.ready = asyncio.Event()
        self.timeout_s, self.deadline = timeout_s, time.perf_counter() + timeout_s
        self.timer: asyncio.TimerHandle | None = None
        super().__init__(Job(run, self.ready) for run in runs)

    async def updates(self, silence_s: float | None = None) -> AsyncIterator[list[tuple[int, list[Token]]]]:
        """What has arrived, as (number of the job, tokens), until all have ended; the last has a job's end, too.

        With `silence_s`, an empty list after so many seconds without a token.
        """
        open_jobs, latest = set(range(len(self))), time.perf_counter()
        try:
            while open_jobs:
                self._wake_at(self.deadline if silence_s is None else min(self.deadline, latest + silence_s))
                await self.ready.wait()  # wait_for would make a task for every event
                self.ready.clear()
                now, found = time.perf_counter(), self._arrived(open_jobs)
                if now > self.deadline:
                    raise ApiError(504, f"the request took more than {self.timeout_s:g} s", code="timeout")
                if found or (silence_s is not None and now >= latest + silence_s):
                    latest = now
                    yield found
        finally:
            if self.timer:
                self.timer.cancel()

    def _arrived(self, open_jobs: set[int]) -> list[tuple[int, list[Token]]]:
        """What has come for each; those that have ended are open no more. An error is raised after what came before."""
        found = []
        for i in sorted(open_jobs):
            job = self[i]
            if job.tokens or job.ended:
                found.append((i, list(job.tokens)))
                job.tokens.clear()
            if job.ended:
                open_jobs.discard(i)
        if error := next((self[i].error for i in open_jobs if self[i].error), None):
            if not found:
                raise error
            self.ready.set()  # for the next turn
        return found

    def _wake_at(self, when: float) -> None:
        """One timer for many events: where they have moved the time on, it finds nothing to do and is set again."""
        if self.timer is None:
            self.timer = asyncio.get_running_loop().call_later(max(0.0, when - time.perf_counter()), self._wake)

    def _wake(self) -> None:
        self.timer = None
        self.ready.set()


class EngineThread:
    """`load` opens the model, in the thread, where `on_ready` is called then. `on_end` is called in the event loop when
    the thread has failed. With `warm_up` all kernels are compiled first."""

    def __init__(
        self,
        load: Callable[[], Llama],
        metrics: Metrics,
        queue: int,
        on_end: Callable[[], None] = lambda: None,
        on_ready: Callable[[], None] = lambda: None,
        warm_up: bool = False,
    ) -> None:
        self.load, self.metrics, self.queue, self.on_end, self.on_ready = load, metrics, queue, on_end, on_ready
        self.warm_up = warm_up
        self.llama: Llama | None = None  # None while it loads
        self.error: BaseException | None = None  # why it does not run any more
        self.reserved = 0  # generations of requests under way
        self.mean_s = 1.0  # that a generation takes, about
        self._condition = threading.Condition()
        self._posted: deque[Callable[[], None]] = deque()
        self._calls: deque[Callable[[], None]] = deque()  # the engine thread's
        self._jobs: list[Job] = []  # the engine thread's
        self._handed_over = 0.0  # when, the last time
        self._stopping = self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # In the event loop

    def start(self) -> None:
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def end(self) -> None:
        """End the thread after the step that runs. The generations that it has end with an error."""
        self._stopping = True
        with suppress(ApiError):  # it has ended
            self._post(lambda: None)

    async def stop(self) -> None:
        self.end()
        await asyncio.to_thread(self._thread.join)
        sys.setswitchinterval(self._switch_s)

    def need_ready(self) -> Llama:
        if self.error is not None:
            raise ended()
        if self.llama is None:
            raise ApiError(503, "the model is being loaded", code="loading", retry_after=1)
        return self.llama

    @contextmanager
    def admitted(self, count: int) -> Iterator[None]:
        """A place for the generations of a request. Refused if too many are under way."""
        slots = self.need_ready().loaded.settings.slots
        if count > slots + self.queue:
            limit = f"this server takes {slots + self.queue} at once"
            raise ApiError(400, f"the request asks for {count} generations; {limit}", param="n")
        if self.reserved + count > slots + self.queue:
            waiting = max(0, self.reserved - slots)
            seconds = min(60.0, max(1.0, self.mean_s * waiting / slots))
            message = f"{waiting} generations are waiting; try again later"
            raise ApiError(429, message, code="queue_full", retry_after=seconds)
        self.reserved += count
        try:
            yield
        finally:
            self.reserved -= count

    @asynccontextmanager
    async def running(self, runs: Sequence[Generation], timeout_s: float) -> AsyncIterator[Jobs]:
        """Run generations. Those that have not ended at the end of the block are cancelled."""
        jobs = Jobs(runs, timeout_s)
        self._post(lambda: self._begin(jobs))
        try:
            yield jobs
        finally:
            if not all(job.ended or job.error for job in jobs):
                with suppress(ApiError):  # the engine has ended, and the jobs with it
                    self._post(lambda: self._cancel(jobs))

    async def call(self, function: Callable[[], T]) -> T:
        """Run a function in the engine thread, between two steps. Of many calls, one has its turn before each step."""
        result: asyncio.Future[T] = self._loop.create_future()

        def finish(value: T | None, error: BaseException | None) -> None:
            if result.done():  # its request was cancelled
                return
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(value)  # type: ignore[arg-type]

        def work() -> None:
            if result.cancelled():
                return
            try:
                self._to_loop(finish, function(), None)
            except Exception as error:
                self._to_loop(finish, None, error)
                if isinstance(error, DeviceLost):
                    raise  # the engine ends with it

        self._post(lambda: self._calls.append(work))
        return await result

    def _post(self, command: Callable[[], None]) -> None:
        with self._condition:
            if self._closed:
                raise ended()
            self._posted.append(command)
            self._condition.notify()

    # In the engine thread

    def _run(self) -> None:
        try:
            llama = self.load()
            llama.scheduler.max_waiting = llama.loaded.settings.slots + self.queue  # what `admitted` lets in
            llama.scheduler.while_computing = self._hand_over_in_time
            try:
                if self.warm_up:
                    llama.warm_up(lambda: self._stopping)
                gc.collect()
                gc.freeze()  # a collection of all that is loaded can keep every stream waiting for 50 ms
                self.llama = llama
                if not self._stopping:
                    self.on_ready()
                self._work()
            except BaseException as error:
                self._drain(error)
                raise
            finally:
                gc.unfreeze()
                stopping = WrongState("the server is shutting down", "try again later")
                self._end_all(stopping)  # closing waits for steps under way
                llama.close()
                self._drain(stopping)
        except BaseException as error:
            self.error = error
            self._drain(error)
            self._to_loop(self.on_end)

    def _work(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        finally:
            self._hand_over()

    def _turn(self) -> None:
        with self._condition:
            while not (self._posted or self._calls or self._has_work()):
                self._condition.wait()
            posted = list(self._posted)
            self._posted.clear()
        for command in posted:
            command()
        if self._calls:
            self._hand_over()
            self._calls.popleft()()
        if self._has_work():
            assert self.llama is not None
            began, state = time.perf_counter(), "decode_ahead" if self.llama.scheduler.flight else "mixed_step"
            self._step()
            self._spent(state, began)
            if not self.llama.scheduler.running:  # the device computes nothing
                self._hand_over()

    def _spent(self, state: str, began: float) -> None:
        self.metrics.engine_seconds[state] += time.perf_counter() - began

    def _has_work(self) -> bool:
        """Whether a step is due: also one that only gives back what cancelled requests hold."""
        assert self.llama is not None
        return bool(self._jobs or self.llama.scheduler.running or self.llama.scheduler.waiting)

    def _step(self) -> None:
        assert self.llama is not None
        try:
            with self.llama.scheduler.lock:
                self.llama.scheduler.step()
        except DeviceLost:
            raise
        except Exception as error:  # nobody knows whose it is: all that run end with it
            log.exception("a step has failed")
            self._hand_over()
            for job in list(self._jobs):
                assert job.run is not None
                job.run.close()
                self._end(job, error)

    def _begin(self, jobs: Jobs) -> None:
        for job in jobs:
            assert job.run is not None
            self._jobs.append(job)
            try:
                job.run.begin()
            except Exception as error:
                self._end(job, error)

    def _cancel(self, jobs: Jobs) -> None:
        for job in jobs:
            if job.run is not None:
                self.metrics.cancelled += 1
                job.run.close()
                self._end(job, WrongState("the request was cancelled"))

    def _hand_over_in_time(self) -> None:
        """While the device computes: give the event loop what steps have brought, unless more can go with it."""
        assert self.llama is not None
        began = time.perf_counter()
        if began - self._handed_over >= EVENT_S * len(self.llama.scheduler.running):
            self._hand_over()
            self._spent("hand_over", began)

    def _hand_over(self) -> None:
        """Give the event loop what the steps have brought."""
        self._handed_over = time.perf_counter()
        updates = [update for job in self._jobs if (update := self._take(job))]
        for update in updates:
            if update.finish_reason or update.error:
                self._forget(update.job)
        if updates:
            self._to_loop(arrive, updates)

    def _take(self, job: Job) -> Update | None:
        run = job.run
        assert run is not None
        tokens: list[Token] = []
        error = None
        try:
            tokens = run.take()
            if run.ready and not run.finish_reason:
                next(run, None)  # its end
        except Exception as raised:
            error = raised
        if not tokens and not run.finish_reason and error is None:
            return None
        self._time(job, len(tokens))
        return Update(job, tokens, run.usage, run.timings, run.finish_reason, run.stopped_by, error)

    def _end(self, job: Job, error: BaseException) -> None:
        assert job.run is not None
        update = Update(job, [], job.run.usage, job.run.timings, error=error)
        self._forget(job)
        self._to_loop(arrive, [update])

    def _forget(self, job: Job) -> None:
        run, job.run = job.run, None
        assert run is not None
        self._jobs.remove(job)
        self.metrics.prompt_tokens += len(run.prompt_ids)
        self.metrics.cached_tokens += run.timings.cached_tokens
        self.mean_s += 0.1 * (time.perf_counter() - job.created - self.mean_s)

    def _time(self, job: Job, tokens: int) -> None:
        now = time.perf_counter()
        if tokens:
            self.metrics.generated_tokens += tokens
            if job.latest:
                self.metrics.inter_token_seconds.add((now - job.latest) / tokens, tokens)
            else:
                self.metrics.first_token_seconds.add(now - job.created)
            job.latest = now

    def _drain(self, error: BaseException) -> None:
        """End whatever is there, and whatever was posted meanwhile."""
        self._end_all(error)
        with self._condition:
            self._closed = True
            posted = list(self._posted)
            self._posted.clear()
        for command in posted:
            command()
        while self._calls:
            self._calls.popleft()()

    def _end_all(self, error: BaseException) -> None:
        for job in list(self._jobs):
            self._end(job, error)

    def _to_loop(self, function: Callable[..., None], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(function, *args)


def ended() -> ApiError:
    return ApiError(503, "the engine has ended", code="unavailable")
