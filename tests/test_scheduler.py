"""Continuous batching: a request gets the tokens it gets alone, whoever shares its steps, and leaves nothing behind."""

import random
import threading
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from gguf_builder import tiny_llama

from llamagpu import Llama, Sampling
from llamagpu.engine import scheduler as scheduling
from llamagpu.engine.load import load_model
from llamagpu.engine.options import Backend, EngineOptions, KvType, Precision
from llamagpu.engine.sampler import host_sampler
from llamagpu.engine.scheduler import Request, Scheduler, State
from llamagpu.errors import DoesNotFit, NumericCheckFailed, Overloaded

GREEDY = Sampling(temperature=0)
SAMPLINGS = (
    GREEDY,
    Sampling(temperature=0.9, seed=3),
    Sampling(temperature=2, seed=4, top_p=0.8, repeat_penalty=1.3),
    Sampling(temperature=1, seed=5, top_k=0),  # on the host
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


def load(path, gpu, backend=None, parallel=8, positions=1024, chunk=32):
    options = EngineOptions(
        context=256,
        chunk=chunk,
        precision=Precision.HIGH,
        kv_type=KvType.F32,
        backend=backend,
        parallel=parallel,
        kv_positions=positions,
    )
    return load_model(path, options, gpu=gpu)


@dataclass
class Wanted:
    prompt: list[int]
    sampling: Sampling
    most: int

    def request(self, engine) -> Request:
        on_device = self.sampling.greedy or engine.samples_on_device(self.sampling)
        sample = None if on_device else host_sampler(self.sampling, self.prompt)
        return Request(self.prompt, self.sampling, self.most, sample=sample)


def wanted(rng: random.Random, prefixes: list[list[int]]) -> Wanted:
    prompt = [*rng.choice(prefixes), *(rng.randrange(3, 288) for _ in range(rng.choice([1, 2, 7, 30, 70])))]
    return Wanted(prompt, rng.choice(SAMPLINGS), rng.choice([1, 2, 5, 17, 40]))


def run(scheduler: Scheduler, request: Request) -> list[int]:
    scheduler.submit(request)
    while scheduler.next_token(request) is not None:
        pass
    return request.new


def check_empty(scheduler: Scheduler) -> None:
    """No slot and no page is held by anybody."""
    pool, settings = scheduler.engine.cache.pool, scheduler.engine.settings
    assert not scheduler.running and not scheduler.waiting and not (scheduler.flight and scheduler.flight.pending)
    assert sorted(scheduler.slots) == list(range(settings.slots))
    assert pool.available == pool.count and not any(pool.holders)


@dataclass
class Alone:
    """What requests get alone, computed once."""

    scheduler: Scheduler
    known: dict[tuple[object, ...], list[int]] = field(default_factory=dict)

    def tokens(self, w: Wanted) -> list[int]:
        key = (tuple(w.prompt), w.sampling, w.most)
        if key not in self.known:
            self.known[key] = run(self.scheduler, w.request(self.scheduler.engine))
        return self.known[key]


@pytest.mark.parametrize("backend", [None, Backend.BUFFERS], ids=["default", "buffers"])
def test_alone_or_in_company(path, gpu, backend):
    """Every request, with all the others beside it, gets what it gets alone."""
    rng = random.Random(1)
    requests = [wanted(rng, [[1]]) for _ in range(6 if backend else 20)]
    alone = Alone(Scheduler(load(path, gpu, backend, parallel=1).engine))
    for parallel in (3,) if backend else (1, 3, 7, 16):
        scheduler = Scheduler(load(path, gpu, backend, parallel, positions=16 * 256).engine)
        made = [w.request(scheduler.engine) for w in requests]
        for request in made:
            scheduler.submit(request)
        for request in rng.sample(made, len(made)):
            while scheduler.next_token(request) is not None:
                pass
        assert [request.new for request in made] == [alone.tokens(w) for w in requests]
        check_empty(scheduler)


@pytest.mark.parametrize("seed", range(4))
def test_random_arrivals_and_departures(path, gpu, seed):
    """Requests with common prefixes come, are read, wait, are cancelled, in pools that are too small for all."""
    rng = random.Random(seed)
    prefixes = [[1], *([1, *(rng.randrange(3, 288) for _ in range(n))] for n in (20, 64, 130))]
    alone = Alone(Scheduler(load(path, gpu, parallel=1).engine))
    parallel, positions = rng.choice([2, 5, 9]), rng.choice([320, 448, 1024])
    scheduler = Scheduler(load(path, gpu, parallel=parallel, positions=positions).engine)
    live: list[tuple[Wanted, Request]] = []
    finished = 0
    while finished < 60:
        action = rng.random()
        if action < 0.15 and len(live) < 12:
            w = wanted(rng, prefixes)
            live.append((w, w.request(scheduler.engine)))
            scheduler.submit(live[-1][1])
        elif action < 0.18 and live:
            w, request = live.pop(rng.randrange(len(live)))
            scheduler.cancel(request)
            assert alone.tokens(w)[: len(request.new)] == request.new
        elif live:
            w, request = rng.choice(live)
            if scheduler.next_token(request) is None:
                assert request.new == alone.tokens(w)
                live.remove((w, request))
                finished += 1
    for _, request in live:
        scheduler.cancel(request)
    scheduler.step()
    check_empty(scheduler)


def test_a_common_prefix_is_computed_once(path, gpu):
    scheduler = Scheduler(load(path, gpu).engine)
    system = [1, *range(3, 140)]
    requests = [Request([*system, 200 + i], GREEDY, 3) for i in range(6)]
    for request in requests:
        scheduler.submit(request)
    for request in requests:
        while scheduler.next_token(request) is not None:
            pass
    assert sorted(request.cached for request in requests)[1:] == [128] * 5  # all but the first find the whole pages
    check_empty(scheduler)


def test_the_next_turn_finds_the_last(path, gpu):
    scheduler = Scheduler(load(path, gpu).engine)
    first = Request([1, 2, 3, 4, 5], GREEDY, 10)
    run(scheduler, first)
    second = Request([*first.computed, 9], GREEDY, 2)
    run(scheduler, second)
    assert second.cached == len(first.computed)


def test_a_long_prompt_does_not_stall_the_others(path, gpu):
    """With a decoding request, a step takes no more prompt rows than STALL_S allows."""
    scheduler = Scheduler(load(path, gpu, chunk=256).engine)
    talker = Request([1, 2], GREEDY, 100)
    scheduler.submit(talker)
    scheduler.next_token(talker)
    scheduler.row_s = scheduling.STALL_S / 40
    scheduler._measure = lambda rows, seconds: None
    reader = Request([1, *range(3, 203)], GREEDY, 1)
    scheduler.submit(reader)
    steps = 0
    while not reader.new:
        before = len(reader.sequence)
        assert scheduler.next_token(talker) is not None
        assert len(reader.sequence) - before <= 40
        steps += 1
    assert steps >= 5


def test_a_request_that_fails_ends_alone(path, gpu):
    scheduler = Scheduler(load(path, gpu).engine)

    def fail(logits: np.ndarray) -> int:
        raise NumericCheckFailed("no number", "")

    good, bad = Request([1, 2, 3], GREEDY, 8), Request([1, 2, 4], GREEDY, 8, sample=fail)
    scheduler.submit(good)
    scheduler.submit(bad)
    with pytest.raises(NumericCheckFailed):
        scheduler.next_token(bad)
    while scheduler.next_token(good) is not None:
        pass
    assert len(good.new) == 8 and good.error is None
    check_empty(scheduler)


def test_what_cannot_fit_is_refused_at_once(path, gpu):
    scheduler = Scheduler(load(path, gpu).engine)
    with pytest.raises(DoesNotFit, match="300 prompt tokens"):
        scheduler.submit(Request([5] * 300, GREEDY, 1))


def test_the_queue_is_bounded(path, gpu, monkeypatch):
    monkeypatch.setattr(scheduling, "MAX_WAITING", 2)
    scheduler = Scheduler(load(path, gpu).engine)
    requests = [Request([1, 2], GREEDY, 2) for _ in range(3)]
    for request in requests[:2]:
        scheduler.submit(request)
    with pytest.raises(Overloaded):
        scheduler.submit(requests[2])
    for request in requests[:2]:
        scheduler.cancel(request)
    assert all(request.state is State.DONE for request in requests[:2])
    check_empty(scheduler)


# Through the Python API


def test_generations_of_several_threads(path, gpu):
    with Llama(path, device=gpu, precision="high", kv_type="f32", parallel=4) as llama:
        want = [llama.complete([1, 5 + i], max_tokens=20, sampling=GREEDY).ids for i in range(6)]
        got: list[tuple[int, ...]] = [()] * 6

        def work(i: int) -> None:
            got[i] = llama.complete([1, 5 + i], max_tokens=20, sampling=GREEDY).ids

        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == want


def test_two_live_generations(path, gpu):
    """They simply both work, in any order."""
    with Llama(path, device=gpu, precision="high", kv_type="f32", parallel=2) as llama:
        texts = [llama.complete([1, 5 + i], max_tokens=12, sampling=GREEDY).ids for i in range(3)]
        runs = [llama.generate([1, 5 + i], max_tokens=12, sampling=GREEDY) for i in range(3)]
        for _ in range(4):
            next(runs[0])
            next(runs[1])
        runs.reverse()
        assert [run.result().ids for run in runs] == texts[::-1]


def test_a_batch_is_the_texts_one_by_one(path, gpu):
    with Llama(path, device=gpu, precision="high", kv_type="f32", parallel=3) as llama:
        prompts = [[1, 5 + i] for i in range(7)]
        options = {"max_tokens": 9, "sampling": replace(GREEDY, seed=1)}
        want = [llama.complete(prompt, **options) for prompt in prompts]
        got = llama.generate_batch(prompts, **options)
        assert [c.ids for c in got] == [c.ids for c in want] and {c.finish_reason for c in got} == {"length"}
        check_empty(llama.scheduler)


def test_a_dropped_generation_gives_its_pages_back(path, gpu):
    with Llama(path, device=gpu, precision="high", kv_type="f32", parallel=2) as llama:
        for i in range(5):
            next(llama.generate([1, 5 + i], sampling=GREEDY))
        llama.complete([1, 2], max_tokens=2)
        check_empty(llama.scheduler)
