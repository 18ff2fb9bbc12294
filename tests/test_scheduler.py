"""The scheduler: what shares, waits, is paused, refused and ends. That company changes no text: test_company.py."""

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf_builder import overflowing_llama, tiny_llama
from test_company import GREEDY, Alone, Wanted, check_empty, finish, load, run

from llamagpu import Grammar, Llama, Sampling
from llamagpu.engine import scheduler as scheduling
from llamagpu.engine.fair_lock import FairLock
from llamagpu.engine.load import load_model
from llamagpu.engine.options import Backend, EngineOptions
from llamagpu.engine.sampler import HostSampler
from llamagpu.engine.scheduler import Flight, Request, Scheduler, State
from llamagpu.engine.sequence import Sequence
from llamagpu.errors import (
    BadArgument,
    DoesNotFit,
    GrammarFailed,
    LlamaGpuError,
    NumericCheckFailed,
    Overloaded,
    WrongState,
)

NAN_ID = 77


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


def test_a_common_prefix_is_computed_once(path, gpu):
    scheduler = Scheduler(load(path, gpu).engine)
    system = [1, *range(3, 140)]
    requests = [Request([*system, 200 + i], GREEDY, 3) for i in range(6)]
    for request in requests:
        scheduler.submit(request)
    for request in requests:
        finish(scheduler, request)
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


def test_a_short_prompt_does_not_wait_for_a_long_one(path, gpu):
    """Half of a step is left to prompts that end in it; the long one has the rest, and goes on in every step."""
    scheduler = Scheduler(load(path, gpu, chunk=64).engine)
    long, short = Request([1, *range(3, 250)], GREEDY, 1), [Request([1, i, i + 1], GREEDY, 1) for i in (60, 70, 80)]
    called = []
    scheduler.while_computing = lambda: called.append(len(long.sequence))
    scheduler.submit(long)
    scheduler.step()
    for request in short:
        scheduler.submit(request)
    scheduler.step()
    assert [len(request.new) for request in short] == [1] * 3 and len(long.sequence) == 64 + 64 - 9
    crowd = [Request([1, *range(90 + i, 110 + i)], GREEDY, 1) for i in range(5)]
    for request in crowd:
        scheduler.submit(request)
    scheduler.step()
    assert [len(request.new) for request in crowd] == [1, 0, 0, 0, 0] and len(long.sequence) == 128 - 9 + 64 - 21
    while not long.done:
        scheduler.step()
    assert called[:3] == [64, 64 + 64 - 9, 128 - 9 + 64 - 21]  # those who have tokens get them in each of these steps
    for request in crowd:
        finish(scheduler, request)
    check_empty(scheduler)


@pytest.mark.parametrize("backend", Backend)
def test_a_prompt_of_the_whole_context(path, gpu, backend):
    """Its keys and values are wanted, no token; there is no cell for another."""
    scheduler = Scheduler(load(path, gpu, backend, parallel=2, positions=256, chunk=256).engine)
    prompt = [1, *range(3, 258)]
    assert run(scheduler, Request(prompt, GREEDY, 0)) == []
    again = Request(prompt, GREEDY, 0)
    run(scheduler, again)
    assert again.cached == 255
    check_empty(scheduler)


def test_steps_run_ahead_while_somebody_waits_for_pages(path, gpu):
    scheduler = Scheduler(load(path, gpu, parallel=2, positions=256).engine)
    runs, waits = Request([1, *range(3, 100)], GREEDY, 60), Request([1, 2, *range(3, 200)], GREEDY, 1)
    scheduler.submit(runs)
    while not scheduler.flight:
        scheduler.step()
    scheduler.submit(waits)
    flight = scheduler.flight
    for _ in range(3):
        scheduler.step()
        assert scheduler.flight is flight and flight.pending and waits.state is State.WAITING
    assert finish(scheduler, runs) and finish(scheduler, waits)
    check_empty(scheduler)


def test_no_more_decode_than_a_step_has_rows(path, gpu):
    """Also when a paused request comes back after another's prompt has taken its row."""
    scheduler = Scheduler(load(path, gpu, parallel=4, positions=256, chunk=2).engine)
    first, second, third, fourth = (Request([1, 5 + i], GREEDY, 100) for i in range(4))
    for request in (first, second, third, fourth):
        scheduler.submit(request)
    while not (third.new and first.new) and not first.done:
        scheduler.step()
    scheduler.cancel(fourth)
    for _ in range(5):
        scheduler.step()
        assert sum(request.state is State.DECODE for request in scheduler.running) <= 2
    for request in (first, second, third):
        scheduler.cancel(request)
    check_empty(scheduler)


def test_paused_in_the_middle_of_a_prompt(path, gpu):
    """Room for somebody's own sequence is made of the pages of a prompt that is not whole yet, or has not begun."""
    w = Wanted((1, *range(3, 203)), GREEDY, 20)
    alone = Alone(Scheduler(load(path, gpu, parallel=1).engine))
    for steps in (0, 1, 3):
        scheduler = Scheduler(load(path, gpu, parallel=2, positions=256).engine)
        request = w.request(scheduler.engine)
        scheduler.submit(request)
        scheduler._admit()
        for _ in range(steps):
            scheduler.step()
        with scheduler.alone(256) as sequence:
            assert not scheduler.running
            scheduler.engine.prefill(sequence, [5] * 200)
        alone.check(w, finish(scheduler, request))
        check_empty(scheduler)


# What ends alone, and what ends all


@pytest.fixture(scope="module")
def nan_path(tmp_path_factory) -> Path:
    return overflowing_llama(tmp_path_factory.mktemp("nan") / "nan.gguf", NAN_ID)


@pytest.mark.parametrize("backend", Backend)
def test_numbers_that_are_none_end_one_request(nan_path, gpu, backend):
    """Nor do they stay in the pages, which the next request gets: 0 * NaN is no 0."""
    beginning = tuple(range(3, 70))
    good = [Wanted((1, *beginning[:i]), GREEDY, 12) for i in (1, 9, 67)]
    alone = Alone(Scheduler(load(nan_path, gpu, backend, parallel=1).engine))
    scheduler = Scheduler(load(nan_path, gpu, backend, parallel=4, positions=448).engine)
    for _ in range(2):
        made = [w.request(scheduler.engine) for w in good]
        bad = Request([1, *beginning, NAN_ID, *range(100, 180)], GREEDY, 12)
        for request in (made[0], bad, *made[1:]):
            scheduler.submit(request)
        with pytest.raises(NumericCheckFailed, match="not a number"):
            scheduler.next_token(bad)
        cache = scheduler.engine.cache
        pieces = cache.read(Sequence(pages=list(range(cache.pool.count))), cache.capacity)
        assert all(np.isfinite(piece.view(np.float32)).all() for piece in pieces)
        for w, request in zip(good, made, strict=True):
            alone.check(w, finish(scheduler, request))
        long = Wanted((1, *range(200, 280), *range(100, 250)), GREEDY, 12)
        alone.check(long, run(scheduler, long.request(scheduler.engine)))
        check_empty(scheduler)


@pytest.mark.parametrize("first", [True, False])
def test_an_interrupt_disturbs_no_other(path, gpu, first):
    """Ctrl-C between the rows of a step and their tokens."""
    alone = Alone(Scheduler(load(path, gpu, parallel=1).engine))
    scheduler = Scheduler(load(path, gpu).engine)

    class Interrupted(HostSampler):
        def __call__(self, logits: np.ndarray, mask: np.ndarray | None = None) -> int:
            if self.position == 4:
                raise KeyboardInterrupt
            return super().__call__(logits, mask)

    wanted = [Wanted((1, *range(3, 5 + i)), GREEDY, 20) for i in range(3)]
    others = [w.request(scheduler.engine) for w in wanted]
    stopped = Request([1, 2], GREEDY, 20, sample=Interrupted(GREEDY, [1, 2]))
    for request in (stopped, *others) if first else (*others, stopped):
        scheduler.submit(request)
    with pytest.raises(KeyboardInterrupt):
        finish(scheduler, stopped)
    assert not stopped.done
    scheduler.cancel(stopped)
    for w, request in zip(wanted, others, strict=True):
        alone.check(w, finish(scheduler, request))
    check_empty(scheduler)


def test_what_a_callback_raises_ends_its_request(path, gpu):
    scheduler = Scheduler(load(path, gpu).engine)

    def fail(*_: object) -> int:
        raise ZeroDivisionError

    bad = [Request([1, 2, 4], GREEDY, 8, sample=fail), Request([1, 2, 5], GREEDY, 8, progress=fail)]
    good = Request([1, 2, 3], GREEDY, 8)
    for request in (*bad, good):
        scheduler.submit(request)
    assert len(finish(scheduler, good)) == 8
    for request in bad:
        with pytest.raises(ZeroDivisionError):
            scheduler.next_token(request)
    check_empty(scheduler)


def test_a_cancelled_request_ends_for_its_reader_too(path, gpu):
    scheduler = Scheduler(load(path, gpu).engine)
    request = Request([1, 2], GREEDY, 100)
    scheduler.submit(request)
    scheduler.next_token(request)
    scheduler.cancel(request)
    assert len(finish(scheduler, request)) < 100
    check_empty(scheduler)


def test_a_cancelled_request_gives_its_slot_back_while_others_run(path, gpu):
    """With the steps under way, though nobody waits for it."""
    scheduler = Scheduler(load(path, gpu, parallel=8, positions=4096).engine)
    requests = [Request([1, 5 + i], GREEDY, 100) for i in range(8)]
    for request in requests:
        scheduler.submit(request)
    while not scheduler.flight:
        scheduler.step()
    scheduler.cancel(requests[2])
    scheduler.step()
    assert scheduler.slots == [requests[2].sequence.slot] and not requests[2].sequence.pages
    for request in requests:
        finish(scheduler, request)
    assert [len(request.new) for request in requests if request is not requests[2]] == [100] * 7
    check_empty(scheduler)


def test_what_cannot_fit_is_refused_at_once(path, gpu):
    scheduler = Scheduler(load(path, gpu).engine)
    with pytest.raises(DoesNotFit, match="300 prompt tokens"):
        scheduler.submit(Request([5] * 300, GREEDY, 1))


def test_a_request_that_can_never_begin_fails(path, gpu):
    """Where a fault has lost a slot: it does not wait for ever."""
    scheduler = Scheduler(load(path, gpu, parallel=1).engine)
    scheduler.slots.clear()
    scheduler.submit(Request([1, 2], GREEDY, 1))
    with pytest.raises(LlamaGpuError, match="the next one finds no slot or no pages"):
        scheduler.step()


def test_a_step_has_a_row_for_each_of_many_sequences(path, gpu):
    """More than the rows of a step on a software adapter."""
    loaded = load_model(path, EngineOptions(context=64, parallel=40, kv_positions=40 * 64), gpu=gpu)
    assert loaded.settings.slots == 40 and loaded.settings.chunk >= 80
    loaded.engine.free()


def test_threads_take_turns():
    """In the order in which they ask. Whoever has the lock may take it again, but not before those who wait."""
    lock, order = FairLock(), []

    def work(name: int) -> None:
        with lock:
            order.append(name)

    with lock, lock:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for i, thread in enumerate(threads):
            thread.start()
            while len(lock._waiting) <= i:
                time.sleep(0.001)
    with lock:
        order.append(4)
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4]


def test_an_interrupt_while_it_waits_for_its_turn():
    lock, taken, done = FairLock(), threading.Event(), threading.Event()

    def work() -> None:
        with lock:
            taken.set()
            while not lock._waiting:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)
            done.wait()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # in a background job it is ignored
    thread = threading.Thread(target=work)
    thread.start()
    taken.wait()
    try:
        with pytest.raises(KeyboardInterrupt), lock:
            pass
    finally:
        signal.signal(signal.SIGINT, before)
        done.set()
    thread.join()
    with lock:
        assert not lock._waiting


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
    check_empty(scheduler)
    assert all(request.state is State.DONE for request in requests[:2])


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


def test_submitted_generations(path, gpu):
    """n of one prompt, which is computed once, with seeds that follow each other; any of them may be closed."""
    with Llama(path, device=gpu, precision="high", kv_type="f32", parallel=3) as llama:
        prompt = [1, *range(3, 140)]
        how = [Sampling(temperature=1.5, seed=7 + i) for i in range(4)]
        want = [llama.complete(prompt, max_tokens=9, sampling=sampling, logprobs=1) for sampling in how]
        forgotten = [2, *range(100, 240)]
        runs = llama.submit(prompt, n=4, max_tokens=9, sampling=how[0], logprobs=1)
        other = llama.submit(forgotten, n=2, max_tokens=2, ignore_eos=True)
        next(runs[2])
        runs[2].close()
        with pytest.raises(WrongState, match="it was closed"):
            next(runs[2])
        assert [runs[i].result().ids for i in (3, 0, 1)] == [want[i].ids for i in (3, 0, 1)]
        assert len(runs[0].logprobs) == len(runs[0].ids) > 1
        assert sorted(run.result().usage.cached_tokens for run in other) == [0, 128]
        check_empty(llama.scheduler)


def test_a_ctrl_c_between_a_sample_and_its_token(path, gpu, monkeypatch):
    """The host samples it again, for a request that another caller runs."""
    with Llama(path, device=gpu, parallel=2) as llama:
        how = Sampling(seed=3, temperature=1.0, repeat_penalty=1.3)
        want = llama.complete([1, 2, 3], max_tokens=12, logprobs=25, sampling=how).ids
        real, calls = scheduling.score, []

        def score(*arguments):
            calls.append(1)
            if len(calls) == 5:
                raise KeyboardInterrupt
            return real(*arguments)

        monkeypatch.setattr(scheduling, "score", score)
        [run] = llama.submit([1, 2, 3], max_tokens=12, logprobs=25, sampling=how)
        with pytest.raises(KeyboardInterrupt):
            llama.complete([5, 6], max_tokens=30, sampling=GREEDY)
        assert len(calls) == 5 and run.result().ids == want


def test_timings_are_those_of_the_tokens(path, gpu):
    """Whenever the caller takes them."""
    with Llama(path, device=gpu, parallel=2) as llama:
        first, second = llama.submit([1, 2, 3], n=2, max_tokens=20, sampling=GREEDY)
        first.result()
        time.sleep(0.5)
        late = second.result().timings
        assert late.tokens == 20 and late.first_token_s < first.timings.first_token_s + 0.5
        assert 0.1 < first.timings.decode_s / late.decode_s < 10


def test_a_batch_waits_where_the_queue_is_full(path, gpu):
    with Llama(path, device=gpu, parallel=2) as llama:
        llama.scheduler.max_waiting = 3
        answers = llama.generate_batch([[1, 5], [1, 6]], n=8, max_tokens=2, sampling=GREEDY)
        assert len(answers) == 16 and len({answer.ids for answer in answers}) == 2
        check_empty(llama.scheduler)


@pytest.mark.parametrize("prompts", ["Hello", b"Hello", {"a": 1}, None, 5])
def test_a_batch_is_a_list(path, gpu, prompts):
    with Llama(path, device=gpu) as llama, pytest.raises(BadArgument, match="prompts is"):
        llama.generate_batch(prompts)


def test_prompts_of_every_kind(path, gpu, tmp_path):
    template = {"tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    path = tiny_llama(tmp_path / "chat.gguf", metadata=template)
    with Llama(path, device=gpu) as llama:
        messages = [{"role": "user", "content": "a b"}]
        prompts = [messages, "a b", llama.encode("a b")]
        got = llama.generate_batch(prompts, n=2, max_tokens=5, sampling=GREEDY)
        assert {answer.ids for answer in got} == {llama.chat(messages, max_tokens=5, sampling=GREEDY).ids}
        assert len(got) == 6
        for wrong in (["a"], [messages], 5, [{"role": "user"}]):
            with pytest.raises(BadArgument):
                llama.submit(wrong)
        with pytest.raises(BadArgument, match="n is 0"):
            llama.submit("a", n=0)


def test_a_batch_longer_than_the_queue(path, gpu, monkeypatch):
    monkeypatch.setattr(scheduling, "MAX_WAITING", 6)
    monkeypatch.setattr("llamagpu.llama.BATCH_QUEUE", 4)
    with Llama(path, device=gpu, parallel=2) as llama:
        answers = llama.generate_batch(([1, 5 + i] for i in range(20)), max_tokens=2, sampling=GREEDY)
        assert [answer.ids[0] for answer in answers] == [
            llama.complete([1, 5 + i], max_tokens=1, sampling=GREEDY).ids[0] for i in range(20)
        ]
        with pytest.raises(Overloaded, match="6 requests are waiting"):
            llama.submit("a", n=20)
        check_empty(llama.scheduler)


def test_grammars_in_company(path, gpu):
    """The one that cannot go on ends alone; so does the text of one that matches."""
    with Llama(path, device=gpu, precision="high", kv_type="f32", parallel=4) as llama:
        want = llama.complete([1, 5], max_tokens=40, sampling=GREEDY).ids
        [plain] = llama.submit([1, 5], max_tokens=40, sampling=GREEDY)
        [stuck] = llama.submit("a", grammar=Grammar.lark('start: "a" start'), sampling=GREEDY)
        [matching] = llama.submit("a", grammar=Grammar.regex("(yes|no), really"))
        with pytest.raises(GrammarFailed, match="cannot go on"):
            stuck.result()
        assert matching.result().text in ("yes, really", "no, really")
        assert plain.result().ids == want
        check_empty(llama.scheduler)


def test_penalties_logprobs_and_stops_in_company(path, gpu):
    """What the device and the host sample, alone and beside others."""
    options = [
        {"sampling": replace(GREEDY, repeat_penalty=1.5, repeat_last_n=300)},
        {"sampling": replace(GREEDY, repeat_penalty=1.5, repeat_last_n=3000), "logprobs": 30},
        {"sampling": Sampling(seed=5, temperature=1.5, top_k=0), "logprobs": 3},
        {"sampling": GREEDY, "stop": "e"},
        {"sampling": Sampling(seed=6), "logprobs": 0},
    ]
    with Llama(path, device=gpu, precision="high", kv_type="f32", parallel=4) as llama:
        want = [llama.complete("a b c", max_tokens=15, **each) for each in options]
        runs = [llama.submit("a b c", max_tokens=15, **each)[0] for each in options]
        for expected, got in zip(want, [run.result() for run in runs], strict=True):
            assert (got.ids, got.text, got.finish_reason) == (expected.ids, expected.text, expected.finish_reason)
            assert [p.id for p in got.logprobs] == [p.id for p in expected.logprobs]
        check_empty(llama.scheduler)


def test_a_prompt_cache_file_in_a_full_cache(path, gpu, tmp_path):
    """Generations make room for it, and go on."""
    with Llama(path, device=gpu, precision="high", kv_type="f32", parallel=2, context=256) as llama:
        prompts = [[1, *range(3, 100)], [1, *range(100, 200)]]
        want = [llama.complete(prompt, max_tokens=20, sampling=GREEDY).ids for prompt in prompts]
        saved = [1, *range(50, 250)]
        list(llama.generate(saved, max_tokens=0))
        llama.save_prompt(tmp_path / "prompt")
        runs = [llama.submit(prompt, max_tokens=20, sampling=GREEDY)[0] for prompt in prompts]
        for generation in runs:
            next(generation)
        assert llama.load_prompt(tmp_path / "prompt") == len(saved)
        assert [generation.result().ids for generation in runs] == want
        llama.load_prompt(tmp_path / "prompt")
        assert llama.complete(saved, max_tokens=1).usage.cached_tokens == len(saved) - 1


def early(engine) -> Scheduler:
    """One that begins flights behind prompts, as on a GPU."""
    scheduler = Scheduler(engine)
    scheduler.begins_early = True
    return scheduler


def step(scheduler, *requests) -> list[int]:
    """Submit them and run a step; how many submissions were behind it when the host had seen no token of it."""
    seen = []
    scheduler.while_computing = lambda: seen.append(len(scheduler.flight.pending) if scheduler.flight else 0)
    for request in requests:
        scheduler.submit(request)
    scheduler.step()
    scheduler.while_computing = lambda: None
    return seen


@pytest.mark.parametrize("backend", Backend)
def test_decode_begins_behind_the_prompts(path, gpu, backend):
    """Before the host knows their first tokens, one of which is a text's last."""
    scheduler = early(load(path, gpu, backend, parallel=4, positions=1024).engine)
    lengths = (9, 1, 20)
    texts = [run(scheduler, Request([1, 5 + i], GREEDY, most)) for i, most in enumerate(lengths)]
    requests = [Request([1, 5 + i], GREEDY, most) for i, most in enumerate(lengths)]
    assert step(scheduler, *requests) == [2] and [len(r.new) for r in requests] == [1, 1, 1]
    assert requests[1].done and scheduler.flight.ended == [requests[1]]
    assert [finish(scheduler, request) for request in requests] == texts
    check_empty(scheduler)


def test_a_software_adapter_waits_for_the_prompts(path, gpu):
    scheduler = Scheduler(load(path, gpu).engine)
    assert step(scheduler, Request([1, 2, 3], GREEDY, 5)) == [0 if gpu.software else 2]


def test_nothing_begins_early_for_a_single_token(path, gpu):
    scheduler = early(load(path, gpu).engine)
    assert step(scheduler, Request([1, 2, 3], GREEDY, 1), Request([1, 2, 4], GREEDY, 1)) == [0]
    assert not scheduler.running and not scheduler.flight
    check_empty(scheduler)


def test_nothing_is_held_when_all_texts_end_with_their_first_token(path, gpu):
    scheduler = early(load(path, gpu).engine)
    slots = len(scheduler.slots)
    request = Request([1, 2, 3], GREEDY, 9, is_end=lambda id: True)
    assert step(scheduler, request)[0] == 2 and request.done
    assert not scheduler.flight and len(scheduler.slots) == slots and not any(scheduler.engine.cache.pool.holders)


def test_a_flight_begins_in_the_middle_of_a_page_and_at_its_end(path, gpu):
    """The sampling of the step before it looks up the cell of each sequence's next position."""
    scheduler = early(load(path, gpu, parallel=2, positions=1024, chunk=16).engine)
    for length in range(46, 62):
        prompts = [1, *range(3, 2 + length)], [1, *range(100, 190), length]  # the second one in 7 steps
        texts = [run(scheduler, Request(prompt, GREEDY, 24, cache_prompt=False)) for prompt in prompts]
        talker, joins = (Request(prompt, GREEDY, 24, cache_prompt=False) for prompt in prompts)
        scheduler.submit(talker)
        scheduler.next_token(talker)
        scheduler.submit(joins)
        while not joins.new:
            seen = step(scheduler)
        assert seen == [2] and scheduler.flight
        assert [finish(scheduler, talker), finish(scheduler, joins)] == texts, length
    check_empty(scheduler)


@pytest.mark.parametrize("why", ["progress", "only the prompt", "somebody joins"])
def test_who_does_not_begin_early(path, gpu, why):
    scheduler = early(load(path, gpu).engine)
    prompt = [1, *range(3, 100)]
    requests = [Request(prompt, GREEDY, 0 if why == "only the prompt" else 5)]
    if why == "progress":
        requests[0].progress = lambda done, total: None
    if why == "somebody joins":  # when the first one's pages can be shared
        requests.append(Request([*prompt, 5], GREEDY, 5))
    assert step(scheduler, *requests) == [0] and not scheduler.flight
    for request in requests:
        finish(scheduler, request)
    check_empty(scheduler)


def test_a_flight_behind_wrong_numbers_is_dropped(path, gpu, monkeypatch):
    scheduler = early(load(path, gpu).engine)
    text = run(scheduler, Request([1, 2, 3], GREEDY, 8))
    differs = iter([True])
    monkeypatch.setattr(scheduler.engine, "subgroups_differ", lambda: next(differs, False))
    request = Request([1, 2, 3], GREEDY, 8, cache_prompt=False)
    assert step(scheduler, request) == [2] and not scheduler.flight and not request.new
    assert finish(scheduler, request) == text
    check_empty(scheduler)


@pytest.mark.parametrize("begins_early", [False, True])
def test_prompts_in_a_kv_cache_that_was_built_anew(path, gpu, begins_early):
    """Kernels found other subgroups than they were made for: model and cache are new, and nobody has pages."""
    prompts = [[1, *range(3, 73)], [1, *range(80, 150)], [1, 2, 3]]
    alone = Scheduler(load(path, gpu).engine)
    texts = [run(alone, Request(prompt, GREEDY, 8)) for prompt in prompts]
    scheduler = Scheduler(load(path, gpu).engine)
    scheduler.begins_early = begins_early
    scheduler.engine.model.lanes = 999
    requests = [Request(prompt, GREEDY, 8) for prompt in prompts]
    step(scheduler, *requests)
    assert scheduler.engine.model.lanes != 999 and not any(request.new for request in requests)
    assert [finish(scheduler, request) for request in requests] == texts
    check_empty(scheduler)


def test_interrupted_before_the_first_token(path, gpu, monkeypatch):
    """The state says that it decodes, and there is no token that it could go on from."""
    scheduler = early(load(path, gpu).engine)
    sampling = replace(GREEDY, repeat_penalty=1.3)
    text = run(scheduler, Request([1, 2, 3], sampling, 8, logprobs=2))

    def interrupt(request, words):
        raise KeyboardInterrupt

    request = Request([1, 2, 3], sampling, 8, logprobs=2)
    monkeypatch.setattr(scheduler, "_take", interrupt)
    with pytest.raises(KeyboardInterrupt):
        step(scheduler, request)
    monkeypatch.undo()
    assert request.state is State.PROMPT and finish(scheduler, request) == text and len(request.scores) == 8
    check_empty(scheduler)


@pytest.mark.parametrize("logprobs", [None, 2])  # whose tokens are taken together, or each by itself
def test_interrupted_between_the_last_token_and_the_end(path, gpu, monkeypatch, logprobs):
    scheduler = Scheduler(load(path, gpu).engine)
    text = run(scheduler, Request([1, 2, 3], GREEDY, 30))
    last = text[9]
    end = text.index(last) + 1
    request = Request([1, 2, 3], GREEDY, 30, is_end=lambda id: id == last, logprobs=logprobs)
    interrupts, finish_request = iter([KeyboardInterrupt]), scheduler._finish

    def interrupted(request, error=None):
        for signal_ in interrupts:
            raise signal_
        finish_request(request, error)

    monkeypatch.setattr(scheduler, "_finish", interrupted)
    scheduler.submit(request)
    with pytest.raises(KeyboardInterrupt):
        finish(scheduler, request)
    assert finish(scheduler, request) == text[:end] and request.done
    check_empty(scheduler)


def test_a_cache_smaller_than_the_context(path, gpu):
    """A text ends where the cache does, and steps ahead go no further."""
    options = EngineOptions(context=256, kv_positions=128, parallel=2)
    scheduler = early(load_model(path, options, gpu=gpu).engine)
    assert len(run(scheduler, Request([1, 2, 3], GREEDY))) == 128 - 3 + 1
    check_empty(scheduler)


def test_rows_of_ended_requests_stay_in_pages_of_their_own(path, gpu, monkeypatch):
    """Of a wide flight some end; nobody else's text changes, and a new one waits until the flight lands: when one of
    those who are left goes away."""
    monkeypatch.setattr(scheduling, "JOIN_S", 1e9)
    monkeypatch.setattr(Flight, "narrow", False)
    scheduler = Scheduler(load(path, gpu, parallel=10, positions=4096).engine)
    lengths = [3, 60, 5, 90, 4, 70, 2, 80]
    texts = [run(scheduler, Request([1, 5 + i], GREEDY, most)) for i, most in enumerate(lengths)]
    requests = [Request([1, 5 + i], GREEDY, most) for i, most in enumerate(lengths)]
    for request in requests:
        scheduler.submit(request)
    while not scheduler.flight:
        scheduler.step()
    late, flight = Request([1, 77], GREEDY, 5), scheduler.flight
    scheduler.submit(late)
    while len(requests[1].new) < 50:
        scheduler.step()
    assert scheduler.flight is flight and len(flight.ended) == 4 and late.state is State.WAITING
    scheduler.cancel(requests[5])
    scheduler.step()
    assert scheduler.flight is not flight and not flight.ended
    scheduler.step()
    assert late.state is not State.WAITING
    assert finish(scheduler, requests[3]) == texts[3] and finish(scheduler, late)
    assert [r.new for r in requests[:5]] == texts[:5] and requests[7].new == texts[7]
    check_empty(scheduler)


def test_steps_ahead_end_where_half_of_the_requests_do(path, gpu, monkeypatch):
    """Five of eight end after their sixth token: no step after that one has their rows."""
    scheduler = Scheduler(load(path, gpu, parallel=8, positions=4096).engine)
    scheduler.engine.tokens_per_submit = 8
    submit, steps = scheduler.engine.recorder.submit, []

    def counting(given, *results, **options):
        steps.extend(step.rows for step in given[::2])  # each is followed by its sampling
        return submit(given, *results, **options)

    monkeypatch.setattr(scheduler.engine.recorder, "submit", counting)
    requests = [Request([1, 5 + i], GREEDY, 6 if i < 5 else 30) for i in range(8)]
    for request in requests:
        scheduler.submit(request)
    while scheduler.running or scheduler.waiting:
        scheduler.step()
    assert [len(request.new) for request in requests] == [6] * 5 + [30] * 3
    assert steps == [16] + [8] * 5 + [3] * 24
    check_empty(scheduler)


def test_new_requests_join_together(path, gpu, monkeypatch):
    """One waits while eight decode, also where no step runs ahead; half as many as run join at once."""
    monkeypatch.setattr(scheduling, "JOIN_S", 1e9)
    scheduler = Scheduler(load(path, gpu, parallel=16, positions=4096).engine)
    host = Request([1, 4], GREEDY, 20, sample=HostSampler(GREEDY, [1, 4]))
    late = [Request([1, 50 + i], GREEDY, 2) for i in range(4)]
    for request in (host, *(Request([1, 5 + i], GREEDY, 60) for i in range(7))):
        scheduler.submit(request)
    scheduler.step()
    for request in late[:3]:
        scheduler.submit(request)
    scheduler.step()
    assert not scheduler.flight and {r.state for r in late[:3]} == {State.WAITING}
    scheduler.submit(late[3])
    scheduler.step()
    assert [len(r.new) for r in late] == [1] * 4
    while scheduler.running or scheduler.waiting:
        scheduler.step()
    check_empty(scheduler)


@pytest.mark.parametrize("where", ["_leave", "_receive"])
def test_interrupted_while_a_flight_lands(path, gpu, monkeypatch, where):
    """Those that ended in it give slots and pages back all the same."""
    scheduler = Scheduler(load(path, gpu, parallel=8).engine)
    requests = [Request([1, 10 + i], GREEDY, 6 if i < 3 else 60) for i in range(8)]
    for request in requests:
        scheduler.submit(request)
    while not (scheduler.flight and len(scheduler.flight.ended) == 3):
        scheduler.step()
    real, calls = getattr(scheduler, where), []

    def interrupted(what):
        calls.append(what)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(what)

    monkeypatch.setattr(scheduler, where, interrupted)
    monkeypatch.setattr(scheduling, "JOIN_S", 0.0)
    scheduler.submit(Request([1, 99], GREEDY, 2))
    with pytest.raises(KeyboardInterrupt):
        while True:
            scheduler.step()
    for request in requests:
        finish(scheduler, request)
    while scheduler.running or scheduler.waiting:
        scheduler.step()
    check_empty(scheduler)


def test_rows_for_nobody_take_no_prefix(path, gpu, monkeypatch):
    monkeypatch.setattr(Flight, "narrow", False)
    scheduler = Scheduler(load(path, gpu, parallel=4, positions=10 * 64).engine)
    kept = [1, *range(3, 195)]
    run(scheduler, Request(kept, GREEDY, 1))
    ends, stays = Request([1, 282], GREEDY, 3), Request([1, 280], GREEDY, 240)
    for request in (stays, ends):
        scheduler.submit(request)
    assert len(finish(scheduler, stays)) == 240
    again = Request([*kept, 5], GREEDY, 1)
    run(scheduler, again)
    assert again.cached == 193
    check_empty(scheduler)
