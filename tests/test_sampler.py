"""Sampling on the host: each filter against the same rule written out plainly, sampled shares against exact ones."""

import numpy as np
import pytest

from llamagpu.engine.grammar import allowed_tokens
from llamagpu.engine.sampler import (
    SORTED,
    HostSampler,
    Sampling,
    add_bias,
    candidates,
    penalise,
    random_number,
    sample,
)
from llamagpu.errors import NumericCheckFailed

NO_FILTERS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # the model's own distribution


def random_logits(seed: int, vocab: int = 300) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, vocab)


def shares_of(logits: dict[int, float]) -> dict[int, float]:
    total = sum(np.exp(list(logits.values())))
    return {i: np.exp(v) / total for i, v in logits.items()}


def expected(logits: np.ndarray, s: Sampling) -> dict[int, float]:
    """llama.cpp's chain, token by token: top-k, top-p, min-p, then the temperature of the remaining tokens."""
    left = dict(sorted(enumerate(logits), key=lambda item: -item[1]))
    if s.top_k:
        left = dict(list(left.items())[: s.top_k])
    shares, kept, reached = shares_of(left), {}, 0.0
    for i, share in shares.items():
        if not kept or (reached < s.top_p and share >= s.min_p * max(shares.values())):
            kept[i] = left[i]
        reached += share
    return shares_of({i: v / s.temperature for i, v in kept.items()})


SETTINGS = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1000},
    {"top_p": 0.0},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 1.7, "top_k": 12, "top_p": 0.8, "min_p": 0.1},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_candidates(setting, seed):
    sampling, logits = Sampling(**NO_FILTERS | setting), random_logits(seed)
    want = expected(logits, sampling)
    order, shares = candidates(logits, sampling)
    if len(want) >= SORTED and not 0 < sampling.top_k <= SORTED:
        want = dict(sorted(want.items()))
    assert order.tolist() == list(want)  # likeliest first, or by id where there are many
    np.testing.assert_allclose(shares, list(want.values()), rtol=1e-9)


def test_equal_logits_go_by_id():
    order, _ = candidates(np.array([1.0, 5, 5, 5, 0]), Sampling(**NO_FILTERS | {"top_k": 4}))
    assert order.tolist() == [1, 2, 3, 0]


@pytest.mark.parametrize("setting", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"temperature": 0.5}], ids=str)
def test_sampled_shares(setting):
    sampling, logits = Sampling(**NO_FILTERS | setting), random_logits(1, 12)
    count = 5000
    numbers = (random_number(3, position) for position in range(count))
    sampled = np.bincount([sample(logits, sampling, number) for number in numbers], minlength=12) / count
    want = np.zeros(12)
    for i, share in expected(logits, sampling).items():
        want[i] = share
    assert (sampled[want == 0] == 0).all()
    # five standard deviations: one of these 60 comparisons fails by chance in 30,000 different seeds
    assert (np.abs(sampled - want) <= 5 * np.sqrt(want * (1 - want) / count)).all()


def test_temperature_0_takes_the_likeliest():
    logits = random_logits(2)
    sampling = Sampling(temperature=0)
    assert sampling.greedy
    assert HostSampler(sampling, [])(logits) == logits.argmax()


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_penalty(penalty):
    logits, recent = np.array([2.0, -2.0, 1.0, -1.0, 0.5]), [0, 1, 1, 4]
    got = penalise(logits.copy(), recent, Sampling(repeat_penalty=penalty))
    want = [2 / penalty, -2 * penalty, 1.0, -1.0, 0.5 / penalty]  # each token once, however often it was said
    np.testing.assert_allclose(got, want)


def test_presence_and_frequency():
    logits, recent = np.array([2.0, -2.0, 1.0, -1.0]), [0, 1, 1, 1]
    got = penalise(logits.copy(), recent, Sampling(presence_penalty=0.5, frequency_penalty=0.25))
    np.testing.assert_allclose(got, [2 - 0.75, -2 - 1.25, 1, -1])
    # after the repetition penalty, as in llama.cpp
    got = penalise(logits.copy(), recent, Sampling(repeat_penalty=2.0, presence_penalty=-1, frequency_penalty=0.5))
    np.testing.assert_allclose(got, [1 + 1 - 0.5, -4 + 1 - 1.5, 1, -1])
    assert (penalise(logits.copy(), recent, Sampling(presence_penalty=2, repeat_last_n=0)) == logits).all()


def test_bias_comes_before_penalties():
    sampling = Sampling(temperature=0, repeat_penalty=2.0, logit_bias={0: 4, 2: False, 3: -np.inf})
    assert not sampling.greedy and sampling.logit_bias == {0: 4.0, 2: -np.inf, 3: -np.inf}
    np.testing.assert_allclose(add_bias(np.array([-1.0, 1, 9, 9]), sampling), [3, 1, -np.inf, -np.inf])
    assert HostSampler(sampling, [])(np.array([-1.0, 1, 9, 9])) == 0
    assert HostSampler(sampling, [0, 0, 1])(np.array([-1.0, 2, 9, 9])) == 0  # 3 / 2 against 2 / 2


def test_mask():
    bits = np.array([0b1010, 1], np.int32)
    assert np.flatnonzero(allowed_tokens(bits, 40)).tolist() == [1, 3, 32]
    logits = random_logits(3, 40)
    logits[:3], logits[3] = 50, 40
    sample_next = HostSampler(Sampling(temperature=0), [])
    assert sample_next(logits, bits) == 1 and sample_next(logits, np.array([8, 1], np.int32)) == 3


def test_penalty_looks_back_as_far_as_it_is_told():
    logits = np.array([3.0, 2.9, 2.8, 2.7])
    sample_next = HostSampler(Sampling(temperature=0, repeat_penalty=2.0, repeat_last_n=2), [3, 0])
    # 0 is in the last two: 1 is next; then 0 and 1 are, so 2; then 1 and 2, so 0 may come again
    assert [sample_next(logits) for _ in range(3)] == [1, 2, 0]
    unlimited = HostSampler(Sampling(temperature=0, repeat_penalty=2.0, repeat_last_n=0), [0, 1, 2])
    assert unlimited(logits) == 0  # nothing is looked back at


def test_logits_stay_as_they_are():
    logits = random_logits(4)
    before = logits.copy()
    HostSampler(Sampling(repeat_penalty=1.5, seed=1), [1, 2, 3])(logits)
    assert (logits == before).all()


def test_seeds():
    def sampled(seed: int | None) -> list[int]:
        sample_next = HostSampler(Sampling(**NO_FILTERS, seed=seed), [])
        return [sample_next(random_logits(i)) for i in range(30)]

    assert sampled(7) == sampled(7)
    assert sampled(7) != sampled(8)
    assert sampled(None) != sampled(None)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_that_are_no_numbers(bad, temperature):
    logits = random_logits(5)
    logits[17] = bad
    with pytest.raises(NumericCheckFailed):
        HostSampler(Sampling(temperature=temperature, repeat_penalty=1.1), [])(logits)
