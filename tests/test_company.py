"""A request gets the tokens it gets alone, whoever shares its steps, and leaves nothing behind."""

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from gguf_builder import tiny_llama
from numpy.typing import NDArray
from test_architectures import MODELS

from llamagpu import Sampling
from llamagpu.engine.engine import Engine
from llamagpu.engine.grammar import allowed_tokens
from llamagpu.engine.load import load_model
from llamagpu.engine.options import Backend, EngineOptions, KvType, Precision
from llamagpu.engine.sampler import HostSampler, add_bias, penalise, random_number, sample
from llamagpu.engine.scheduler import Request, Scheduler
from llamagpu.engine.sequence import Sequence

GREEDY = Sampling(temperature=0)
SAMPLINGS = (
    GREEDY,
    Sampling(temperature=0.9, seed=3),
    Sampling(temperature=2, seed=4, top_p=0.8, repeat_penalty=1.3),
    Sampling(temperature=1, seed=5, top_k=0),
    Sampling(temperature=2, seed=6, top_k=270, top_p=0.98, min_p=0.001),  # more than are sorted
    Sampling(temperature=0, presence_penalty=0.5, frequency_penalty=0.3, repeat_last_n=20),
    Sampling(temperature=1, seed=7, logit_bias={5: 3.0, 9: False, 40: -2.0}, frequency_penalty=0.2),
    Sampling(temperature=1, seed=8, presence_penalty=1.0, repeat_last_n=2000),  # on the host
)
NOISE = 1e-4  # of a logit: steps of other numbers of rows take other kernels, which add in another order


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


class Thirds:
    """A grammar: the remainder of a token divided by 3 counts up."""

    stopped = False

    def __init__(self, accepted: int = 0) -> None:
        self.accepted = accepted

    def mask(self) -> NDArray[np.int32]:
        return np.packbits(np.arange(288) % 3 == self.accepted % 3, bitorder="little").view(np.int32)

    def accept(self, token: int) -> None:
        assert token % 3 == self.accepted % 3
        self.accepted += 1


@dataclass(frozen=True)
class Wanted:
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    masked: bool = False
    logprobs: int | None = None

    def request(self, engine: Engine, on_host: bool = False) -> Request:
        on_device = not on_host and engine.samples_on_device(self.sampling, self.logprobs, self.masked)
        return Request(
            list(self.prompt),
            self.sampling,
            self.max_tokens,
            sample=None if on_device else HostSampler(self.sampling, self.prompt),
            matcher=Thirds() if self.masked else None,  # type: ignore[arg-type]
            logprobs=self.logprobs,
        )


def wanted(rng: random.Random, prefixes: list[list[int]]) -> Wanted:
    prompt = (*rng.choice(prefixes), *(rng.randrange(3, 288) for _ in range(rng.choice([1, 2, 7, 30, 70]))))
    masked, logprobs = rng.random() < 0.1, rng.choice([None, None, 3])
    return Wanted(prompt, rng.choice(SAMPLINGS), rng.choice([1, 2, 5, 17, 40]), masked, logprobs)


def finish(scheduler: Scheduler, request: Request) -> list[int]:
    while scheduler.next_token(request) is not None:
        pass
    return request.new


def run(scheduler: Scheduler, request: Request) -> list[int]:
    scheduler.submit(request)
    return finish(scheduler, request)


def check_empty(scheduler: Scheduler) -> None:
    """No slot and no page is held by anybody."""
    pool, settings = scheduler.engine.cache.pool, scheduler.engine.settings
    scheduler.step()  # drops those that were cancelled
    assert not scheduler.running and not scheduler.waiting and not (scheduler.flight and scheduler.flight.pending)
    assert sorted(scheduler.slots) == list(range(settings.slots))
    assert pool.available == pool.count and not any(pool.holders)


@dataclass
class Alone:
    """What requests get alone, computed once."""

    scheduler: Scheduler
    known: dict[Wanted, list[int]] = field(default_factory=dict)
    close_calls: int = 0

    def tokens(self, w: Wanted) -> list[int]:
        if w not in self.known:
            self.known[w] = run(self.scheduler, w.request(self.scheduler.engine))
        return self.known[w]

    def check(self, w: Wanted, got: list[int], whole: bool = True) -> None:
        """These are its tokens, or its first ones. They may differ from where the numbers leave it open."""
        want = self.tokens(w) if whole else self.tokens(w)[: len(got)]
        if got == want:
            return
        first = next(i for i in range(len(want)) if got[i : i + 1] != want[i : i + 1])
        assert len(got) == len(want) and got[first] in self.possible(w, want[:first]), (w, got, want)
        self.close_calls += 1

    def possible(self, w: Wanted, before: list[int]) -> set[int]:
        """The next tokens that logits within NOISE of the computed ones give."""
        engine, rng = self.scheduler.engine, np.random.default_rng(0)
        known = [*w.prompt, *before]
        with self.scheduler.alone(len(known)) as sequence:
            logits = logits_after(engine, sequence, known)
        recent = known[max(0, len(known) - w.sampling.repeat_last_n) :]
        logits = penalise(add_bias(logits.astype(np.float64), w.sampling), recent, w.sampling)
        if w.masked:
            logits[~allowed_tokens(Thirds(len(before)).mask(), len(logits))] = -np.inf
        number = random_number(w.sampling.seed or 0, len(known))
        noise = rng.uniform(-NOISE, NOISE, (200, len(logits)))
        return {sample(logits + each, w.sampling, number) for each in noise}


def logits_after(engine: Engine, sequence: Sequence, ids: list[int]) -> NDArray[np.float32]:
    engine.prefill(sequence, ids)
    return engine.read_logits()


@pytest.mark.parametrize("backend", [None, Backend.BUFFERS], ids=["default", "buffers"])
def test_alone_or_in_company(path, gpu, backend):
    """Every request, with all the others beside it, gets what it gets alone."""
    rng = random.Random(1)
    requests = [wanted(rng, [[1]]) for _ in range(6 if backend else 20)]
    alone = Alone(Scheduler(load(path, gpu, backend, parallel=1).engine))
    for parallel in (3,) if backend else (1, 7, 32):
        scheduler = Scheduler(load(path, gpu, backend, parallel, positions=16 * 256).engine)
        made = [w.request(scheduler.engine) for w in requests]
        for request in made:
            scheduler.submit(request)
        for request in rng.sample(made, len(made)):
            finish(scheduler, request)
        for w, request in zip(requests, made, strict=True):
            alone.check(w, request.new)
        check_empty(scheduler)


def count_pauses(scheduler: Scheduler, done: Counter[str]) -> None:
    pause = scheduler._pause

    def counted(request: Request) -> None:
        done["paused"] += 1
        pause(request)

    scheduler._pause = counted  # type: ignore[method-assign]


def test_paused_and_resumed(path, gpu):
    """Four texts of three pages each, in a pool of five pages."""
    requests = [Wanted((1, 5 + i, *range(20, 29)), sampling, 130) for i, sampling in enumerate(SAMPLINGS)]
    alone = Alone(Scheduler(load(path, gpu, parallel=1).engine))
    scheduler, done = Scheduler(load(path, gpu, parallel=4, positions=320).engine), Counter[str]()
    count_pauses(scheduler, done)
    made = [w.request(scheduler.engine) for w in requests]
    for request in made:
        scheduler.submit(request)
    for w, request in zip(requests, made, strict=True):
        alone.check(w, finish(scheduler, request))
    assert done["paused"] >= 3
    check_empty(scheduler)


def churn(scheduler: Scheduler, alone: Alone, rng: random.Random, count: int) -> Counter[str]:
    """`count` requests with common prefixes come, are read, wait, are paused, are cancelled."""
    prefixes = [[1], *([1, *(rng.randrange(3, 288) for _ in range(n))] for n in (20, 64, 130))]
    live: list[tuple[Wanted, Request]] = []
    done: Counter[str] = Counter()
    scheduler.begins_early = len(scheduler.slots) % 2 == 1  # as on a GPU
    count_pauses(scheduler, done)
    while done["finished"] + done["cancelled"] < count:
        action = rng.random()
        if action < 0.15 and len(live) < 40:
            w = wanted(rng, prefixes)
            live.append((w, w.request(scheduler.engine)))
            scheduler.submit(live[-1][1])
        elif action < 0.17 and live:
            w, request = live.pop(rng.randrange(len(live)))
            scheduler.cancel(request)
            alone.check(w, request.new, whole=False)
            done["cancelled"] += 1
        elif live:
            w, request = rng.choice(live)
            if scheduler.next_token(request) is None:
                alone.check(w, request.new)
                live.remove((w, request))
                done["finished"] += 1
                done["shared a prefix"] += request.cached > 0
    for _, request in live:
        scheduler.cancel(request)
    check_empty(scheduler)
    return done


@pytest.mark.parametrize(("parallel", "positions"), [(2, 320), (5, 448), (9, 1024)])
def test_random_arrivals_and_departures(path, gpu, parallel, positions):
    """In pools that are too small for all."""
    alone = Alone(Scheduler(load(path, gpu, parallel=1).engine))
    scheduler = Scheduler(load(path, gpu, parallel=parallel, positions=positions).engine)
    done = churn(scheduler, alone, random.Random(parallel), 50)
    assert done["finished"] > 20 and done["cancelled"] and done["shared a prefix"] and alone.close_calls <= 2


def test_random_arrivals_with_short_convolutions(tmp_path, gpu):
    """The inputs of convolutions are in pages too: shared, copied, paused, cut and written over as keys and values."""
    path = MODELS["lfm2"].write(tmp_path / "m.gguf")
    alone = Alone(Scheduler(load(path, gpu, parallel=1).engine))
    scheduler = Scheduler(load(path, gpu, parallel=5, positions=384).engine)
    done = churn(scheduler, alone, random.Random(5), 20)
    assert done["finished"] > 8 and done["cancelled"] and done["paused"] and done["shared a prefix"]
    assert alone.close_calls <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "widths", "pools", "count"),
    [(None, (1, 2, 3, 7, 16, 32), (256, 320, 448, 1024), 150), (Backend.BUFFERS, (3, 16), (320, 1024), 60)],
    ids=["default", "buffers"],
)
def test_thousands_of_arrivals_and_departures(path, gpu, backend, widths, pools, count):
    rng, done = random.Random(0), Counter[str]()
    alone = Alone(Scheduler(load(path, gpu, backend, parallel=1).engine))
    for parallel in widths:
        for positions in pools:
            scheduler = Scheduler(load(path, gpu, backend, parallel, positions, rng.choice([8, 32, 256])).engine)
            done += churn(scheduler, alone, rng, count)
            print(parallel, positions, dict(done), "close calls", alone.close_calls, flush=True)
    total = count * len(widths) * len(pools)
    assert done["finished"] > total // 2 and done["paused"] and alone.close_calls <= total // 200
