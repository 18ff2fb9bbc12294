"""Every row of a step has sampling parameters of its own: the device applies them, and the host does the same."""

from dataclasses import replace

import numpy as np
import pytest
from gguf_builder import tiny_llama
from test_company import SAMPLINGS, Alone, Thirds, Wanted, check_empty, finish, load

from llamagpu.engine.options import Backend
from llamagpu.engine.scheduler import Request, Scheduler
from llamagpu.errors import GrammarFailed, NumericCheckFailed

OPTIONS = [Wanted((1, 7, 70, 7), sampling, 20, logprobs=4) for sampling in SAMPLINGS[:-1]]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


def run(scheduler: Scheduler, *requests: Request) -> list[int]:
    """The tokens of the last request, together with the others."""
    for request in requests:
        scheduler.submit(request)
    return [finish(scheduler, request) for request in requests][-1]


def check_scores(got: Request, want: Request) -> None:
    """The log probabilities of each new token and of the likeliest."""
    assert len(got.scores) == len(got.new)
    for one, other in zip(got.scores, want.scores, strict=True):
        assert len(one.ids) == got.logprobs
        np.testing.assert_allclose([one.logprob, *one.logprobs], [other.logprob, *other.logprobs], atol=1e-4)


@pytest.mark.parametrize("backend", [None, Backend.BUFFERS], ids=["default", "buffers"])
def test_device_and_host_sample_the_same(path, gpu, backend):
    """Tokens and log probabilities, with and without a grammar, all of them together."""
    scheduler = Scheduler(load(path, gpu, backend, 1 if backend else 16, 16 * 256).engine)
    requests = [OPTIONS[4], OPTIONS[6]] if backend else OPTIONS
    requests = [*requests, *(replace(w, masked=True) for w in requests)]
    on_device = [w.request(scheduler.engine) for w in requests]
    on_host = [w.request(scheduler.engine, on_host=True) for w in requests]
    run(scheduler, *on_device, *on_host)
    alone = Alone(scheduler, {w: one.new for w, one in zip(requests, on_device, strict=True)})
    for w, one, other in zip(requests, on_device, on_host, strict=True):
        assert one.sample is None and len(one.new) == 20
        alone.check(w, other.new)
        if one.new == other.new:
            check_scores(one, other)
    assert alone.close_calls <= 1
    check_empty(scheduler)


@pytest.mark.parametrize("masked", [False, True], ids=["no grammar", "grammar"])
def test_no_row_goes_through_the_host(path, gpu, masked, monkeypatch):
    """The host reads no logits; without a grammar it submits steps ahead."""
    scheduler, seen, steps = Scheduler(load(path, gpu).engine), [], []
    read, step = scheduler.engine.segment_logits, scheduler._mixed_step
    monkeypatch.setattr(scheduler.engine, "segment_logits", lambda i: seen.append(i) or read(i))
    monkeypatch.setattr(scheduler, "_mixed_step", lambda: steps.append(step()))
    requests = [w.request(scheduler.engine) for w in (*OPTIONS[:4], replace(OPTIONS[4], masked=masked))]
    run(scheduler, *requests)
    assert not seen and (len(steps) >= 20 if masked else len(steps) < 5)


def test_dropped_steps_are_not_penalised(path, gpu):
    """What was submitted ahead is dropped again and again: the device forgets these tokens."""
    scheduler, w = Scheduler(load(path, gpu).engine), replace(OPTIONS[5], max_tokens=40)
    want, request = run(scheduler, w.request(scheduler.engine)), w.request(scheduler.engine)
    scheduler.submit(request)
    while scheduler.next_token(request) is not None:
        if request.taken == len(request.new):
            scheduler._abandon()
    assert request.new == want


@pytest.mark.parametrize("mask", [np.zeros(9, np.int32), GrammarFailed("the grammar cannot go on", "")], ids=type)
def test_a_grammar_that_fails_ends_its_request_alone(path, gpu, mask):
    class Stuck(Thirds):
        def mask(self) -> np.ndarray:
            if self.accepted < 3:
                return super().mask()
            if isinstance(mask, Exception):
                raise mask
            return mask

    scheduler = Scheduler(load(path, gpu).engine)
    good, bad = OPTIONS[1].request(scheduler.engine), replace(OPTIONS[1], masked=True).request(scheduler.engine)
    bad.matcher = Stuck()
    with pytest.raises(NumericCheckFailed if isinstance(mask, np.ndarray) else GrammarFailed):
        run(scheduler, good, bad)
    assert len(bad.new) == 3 and len(good.new) == 20 and good.error is None
    check_empty(scheduler)
