"""Sampling kernels: argmax and greedy, sample against the host's sampler, log_prob against float64."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from kernel_cases import GUARD, SLOTS, Steps, covers, run, segment, upload
from reference import assert_close

from llamagpu.engine.device_sampler import NO_TOKEN, SETTING_WORDS, DeviceSampler
from llamagpu.engine.ops import Ops, argmax_candidates
from llamagpu.engine.sampler import Sampling, candidates, host_sampler, penalise
from llamagpu.engine.step_inputs import Segment
from llamagpu.files.storage import Storage
from llamagpu.verify.reference import COPIED, Array, Weight, matrix_of, ops_at, random, step_buffer, step_rows

UNTOUCHED = 9  # in rings


def largest_of_64(logits: Array) -> Array:
    """The results of argmax: (bits, index) of the largest of every 64 logits."""
    runs = enumerate(np.split(logits.astype(np.float32), range(64, logits.size, 64)))
    return np.array([(run.max().view(np.uint32), 64 * i + run.argmax()) for i, run in runs], np.uint32)


# greedy


@dataclass(frozen=True)
class Greedy:
    token: int  # of the next step
    row: list[int]  # of the next step: slot, position, token, cell
    ring: list[int]
    header: list[int]  # rows, segments, capacity, pages


def greedy_on(gpu, logits: Array, times: int = 1, rows: int = 1) -> Greedy:
    """argmax and greedy, `times` in one submission; the first row is at position 7."""
    vocab, make, count = logits.size, ops_at(gpu, rows, 7, 99), argmax_candidates(logits.size)
    found, values = gpu.zeros(count * 8, "candidates"), gpu.upload(logits.astype(np.float32), "logits")
    ring = gpu.upload(np.full(8, UNTOUCHED, np.uint32), "ring")
    step, consts = make.step, {"CANDIDATES": count, "RING": 4, "RING_WORDS": 8}
    greedy = make.sample("greedy", consts, {"candidates": found, "ring": ring}, None)
    run(gpu, [make.argmax(values, found, vocab), greedy] * times)
    row = step_rows(gpu, step, 1)[0].tolist()
    return Greedy(row[2], row, gpu.read(ring, np.uint32, 8).tolist(), gpu.read(step, np.uint32, 4).tolist())


@covers("argmax", "greedy")
@pytest.mark.parametrize("vocab", [1, 63, 1024, 1025, 128256])
def test_greedy_takes_the_largest(any_gpu, vocab):
    rng = random(f"logits {vocab}")
    for best in {0, vocab // 2, vocab - 1, vocab // 3}:
        logits = rng.standard_normal(vocab)
        logits[best] = 9.0
        assert greedy_on(any_gpu, logits).token == best
        assert greedy_on(any_gpu, logits - 1000).token == best


# neighbours, two runs of 64, two workgroups, and 256 runs away from each other, where one invocation of greedy compares
EQUALS = [(5, 6), (63, 64), (65, 1), (0, 1024), (1023, 1024), (70_000, 3000, 3001), (19_884, 3500)]


@pytest.mark.parametrize("indices", EQUALS)
def test_greedy_takes_the_first_of_equals(any_gpu, indices):
    logits = np.full(70_001, -1.0)
    logits[list(indices)] = 2.5
    assert greedy_on(any_gpu, logits).token == min(indices)


def test_greedy_of_equal_logits_is_zero(any_gpu):
    assert greedy_on(any_gpu, np.zeros(3000)).token == 0


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_greedy_ignores_what_is_not_a_number(any_gpu, bad):
    logits = np.full(3000, bad)
    assert greedy_on(any_gpu, logits).token == 0  # an id that exists
    logits[2100] = -50.0
    assert greedy_on(any_gpu, logits).token == 2100


def test_greedy_writes_the_row_of_the_next_step(any_gpu):
    after = greedy_on(any_gpu, -(np.arange(20.0)[::-1] ** 2), times=6, rows=5)
    assert after.row == [0, 11 + 6, 19, 11 + 6]  # after the last of the prompt's five, then one by one
    assert after.ring == [19, 19, 19, 19, *[UNTOUCHED] * 4]  # six tokens in a ring of four
    assert after.header == [1, 1, 99, 2]


NEXT = (Weight(Storage.Q4, 71, 64), Weight(Storage.Q8, 71, 2112), Weight(Storage.F16, 71, 64))
TWO = [segment(2, 7, 1), segment(0, 30, 1)]  # of three sequences


@pytest.mark.parametrize("segments", [[segment(0, 0, 1)], TWO], ids=["one segment", "two segments"])
@pytest.mark.parametrize("weight", NEXT, ids=lambda weight: weight.name)
def test_greedy_of_each_segment(any_gpu, weight, segments):
    """Each has its token in its slot's ring, its embedding in its row of x, and its row in the next step."""
    gpu, k, count = any_gpu, weight.k, len(segments)
    shard, w = upload(gpu, weight)
    found = np.array([[(0, 5), (0, 70), (0, 3), (0, 33)], [(0, 1), (0, 8), (0, 70), (0, 40)]], np.uint32)
    logits = np.array([[-3.0, 2.0, 2.0, 1.0], [-1e3, -4.0, -2.0, -5.0]], np.float32)
    found[..., 0] = logits.view(np.uint32)
    tokens = [3, 70][:count]  # the first of the two largest
    x = gpu.upload(np.full((count + 1) * k, GUARD, np.float32), "x")
    ring = gpu.upload(np.full((SLOTS, 8), UNTOUCHED, np.uint32), "ring")
    step = Steps(gpu, 99, SLOTS)
    step.write(*segments)
    bindings = {"candidates": gpu.upload(found, "candidates"), "ring": ring, "x": x}
    consts = {"CANDIDATES": 4, "RING": 4, "RING_WORDS": 8}
    run(gpu, [step.ops.sample("greedy", consts, bindings, matrix_of(shard), count)])
    want = np.full((SLOTS, 8), UNTOUCHED)
    for seg, token in zip(segments, tokens, strict=True):
        want[seg.slot, last_position(seg) % 4] = token
    assert (gpu.read(ring, np.uint32, SLOTS * 8).reshape(SLOTS, 8) == want).all()
    rows = [next_row(step, seg, 1, token) for seg, token in zip(segments, tokens, strict=True)]
    assert step_rows(gpu, step.buffer, count).tolist() == rows
    assert gpu.read(step.buffer, np.uint32, 4).tolist() == [count, count, step.table.capacity, 2]
    got = gpu.read(x, np.float32, (count + 1) * k).reshape(count + 1, k)
    assert_close(got[:count], w[tokens], *COPIED)
    assert (got[count:] == GUARD).all()


# sample


def random_number(seed: int, position: int) -> float:
    """The number in 0..1 that a seed gives for a position: two rounds of PCG."""

    def pcg(h: int) -> int:
        h = (h * 747796405 + 2891336453) & 0xFFFFFFFF
        h = (((h >> ((h >> 28) + 4)) ^ h) * 277803737) & 0xFFFFFFFF
        return (h >> 22) ^ h

    return (pcg(pcg(seed ^ ((position * 2654435761) & 0xFFFFFFFF))) >> 8) / (1 << 24)


@dataclass(frozen=True)
class Sampled:
    tokens: Array  # [segments, count]
    recent: Array  # [segments, window]: what the penalty looks at next
    logits: Array  # after the penalty
    other_slots: Array  # of the rings


def sample_on(
    gpu,
    logits: Array,
    samplings: Sequence[Sampling],
    segments: Sequence[Segment],
    count: int = 1,
    recent: Sequence[int] = (),
    oldest: int = 0,
) -> Sampled:
    """`count` tokens of each segment in one submission, all from these logits [segments, vocab]."""
    segment_count, vocab = logits.shape
    window, best = len(recent), np.stack([largest_of_64(row) for row in logits])
    sampler, step = DeviceSampler(gpu, SLOTS), Steps(gpu, 99 + count, SLOTS)
    rings = np.full((SLOTS, count + window), UNTOUCHED, np.uint32)
    for seg, sampling in zip(segments, samplings, strict=True):
        sampler.configure(seg.slot, sampling, (), 0)
        gpu.write(sampler.settings, np.array([oldest], np.uint32), offset=4 * (SETTING_WORDS * (seg.slot + 1) - 1))
        rings[seg.slot, count:] = recent
    kept, values, found = (gpu.upload(data, "data") for data in (logits, logits, best))
    ring = gpu.upload(rings, "ring")
    step.write(*segments)
    vec4s = -(-logits.size // 4)
    renew = [  # the penalty changes the logits: in a model, the next step computes new ones
        gpu.dispatch("copy", (), {"VEC4S": vec4s}, {"x": kept, "y": values}, (1, 1, 1)),
        gpu.dispatch("argmax", (), {"VOCAB": vocab}, {"logits": values, "candidates": found}, (best.shape[1], 1, 1)),
    ]
    consts = {"CANDIDATES": best.shape[1], "RING": count, "RING_WORDS": count + window, "VOCAB": vocab}
    bindings = {"candidates": found, "ring": ring, "logits": values, "sampling": sampler.settings}
    sample = step.ops.sample("sample", consts, bindings, None, segment_count)
    run(gpu, [*renew * (bool(recent) and count > 1), sample] * count)
    rings, slots = gpu.read(ring, np.uint32, rings.size).reshape(rings.shape), [seg.slot for seg in segments]
    changed = gpu.read(values, np.float32, logits.size).reshape(logits.shape)
    rows = step_rows(gpu, step.buffer, segment_count).tolist()
    others = np.delete(rings, slots, axis=0)
    tokens = [np.roll(rings[seg.slot, :count], -(last_position(seg) % count)) for seg in segments]
    assert rows == [next_row(step, seg, count, own[-1]) for seg, own in zip(segments, tokens, strict=True)]
    return Sampled(np.array(tokens), rings[slots, count:], changed, others)


def last_position(seg: Segment) -> int:
    return seg.position + len(seg.tokens) - 1


def next_row(step: Steps, seg: Segment, sampled: int, token: int) -> list[int]:
    """Slot, position, token and cell after `sampled` tokens."""
    position = last_position(seg) + sampled
    return [seg.slot, position, token, int(step.table.cells(seg.slot, np.array(position)))]


SAMPLINGS = [
    Sampling(1.0, 64, 1.0, 0.0),
    Sampling(0.8, 40, 0.95, 0.05),
    Sampling(1.5, 64, 0.5, 0.0),
    Sampling(1.0, 7, 1.0, 0.2),
    Sampling(0.3, 1, 1.0, 0.0),
]


def check_tokens(tokens: Array, logits: Array, sampling: Sampling, first: int) -> None:
    """Each token is the one that its random number selects among those that the host would keep."""
    order, shares = candidates(logits.astype(np.float64), sampling)
    sums = np.cumsum(shares)
    for i, token in enumerate(tokens):
        number = random_number(sampling.seed, first + i)
        if np.abs(sums[:-1] - number).min(initial=1.0) > 1e-5:  # f32 may decide a tie otherwise
            assert token == order[np.searchsorted(sums, number, side="right")], f"token {i}"


@covers("sample")
@pytest.mark.parametrize("s", SAMPLINGS, ids=lambda s: f"t{s.temperature} k{s.top_k} p{s.top_p} m{s.min_p}")
@pytest.mark.parametrize("vocab", [5, 700, 9001])
def test_sample_as_the_host_does(any_gpu, vocab, s):
    """64 tokens of one submission."""
    s, position = replace(s, seed=1234), 10
    logits = (3 * random(f"sample {vocab}").standard_normal((1, vocab))).astype(np.float32)
    after = sample_on(any_gpu, logits, [s], [segment(1, position, 1)], 64)
    check_tokens(after.tokens[0], logits[0], s, position + 1)
    assert (after.other_slots == UNTOUCHED).all()


@pytest.mark.parametrize("vocab", [296, 9001])
def test_sample_where_many_logits_are_equal(any_gpu, vocab):
    """More equal logits, and more runs with equal largest logits, than the kernel keeps: the best stays among them."""
    logits, s = np.zeros((1, vocab), np.float32), replace(SAMPLINGS[1], seed=7)
    equal = [sample_on(any_gpu, logits, [s], [segment(1, 10, 1)], 16).tokens.tolist() for _ in range(2)]
    assert equal[0] == equal[1] and max(equal[0][0]) < 128  # the first ones, so that a seed gives the same text
    for best in (0, vocab // 2, vocab - 1):
        logits[:] = 0
        logits[0, best] = 60
        assert (sample_on(any_gpu, logits, [s], [segment(1, 10, 1)], 16).tokens == best).all()


def test_sample_of_each_segment(any_gpu):
    """Two sequences with different parameters and logits."""
    logits = (3 * random("segments").standard_normal((2, 9001))).astype(np.float32)
    samplings = [replace(SAMPLINGS[3], seed=1), replace(SAMPLINGS[1], seed=2)]
    after = sample_on(any_gpu, logits, samplings, TWO, 16)
    for part, sampling, tokens, row in zip(TWO, samplings, after.tokens, logits, strict=True):
        check_tokens(tokens, row, sampling, part.position + 1)
    assert (after.other_slots == UNTOUCHED).all()


@pytest.mark.parametrize("penalty", [1.5, 0.5])
def test_sample_penalises_recent_tokens(any_gpu, penalty):
    """Top-k 1 of penalised logits: each token of the window once, whatever its sign; others not at all.

    The other segment of the step has no penalty.
    """
    logits = (3 * random("penalty").standard_normal((2, 700))).astype(np.float32)
    recent = np.array([*logits[1].argsort()[::-1][[0, 1, 1, 5, 0, 300, 699]], NO_TOKEN], np.uint32)
    want = logits.astype(np.float64)
    for t in set(recent.tolist()) - {NO_TOKEN}:
        want[1, t] = want[1, t] / penalty if want[1, t] > 0 else want[1, t] * penalty
    samplings = [Sampling(1.0, 1, 1.0, 0.0, seed=7), Sampling(1.0, 1, 1.0, 0.0, penalty, len(recent), seed=7)]
    segments = [segment(0, 3, 1), segment(2, 0, 1)]
    after = sample_on(any_gpu, logits, samplings, segments, recent=recent.tolist(), oldest=3)
    assert_close(after.logits, want, *COPIED)
    assert after.tokens.tolist() == [[want[0].argmax()], [want[1].argmax()]]
    window = recent.copy()
    window[3] = want[1].argmax()  # takes the place of the oldest
    assert (after.recent == [recent, window]).all()
    assert (after.other_slots == UNTOUCHED).all()


# One filter each, then all of them
FILTERS = {
    "none": Sampling(1.0, 64, 1.0, 0.0),
    "temperature": Sampling(0.6, 64, 1.0, 0.0),
    "top-k": Sampling(1.0, 4, 1.0, 0.0),
    "top-p": Sampling(1.0, 64, 0.5, 0.0),
    "min-p": Sampling(1.0, 64, 1.0, 0.1),
    "penalty": Sampling(1.0, 64, 1.0, 0.0, 1.5, 16),
    "all": Sampling(0.8, 40, 0.8, 0.1, 1.2, 64),
}


@pytest.mark.parametrize("sampler", ["device", "host"])
@pytest.mark.parametrize("name", FILTERS)
def test_both_samplers_have_one_distribution(gpu, name, sampler):
    """3000 tokens: how often each came against its share.

    With a penalty, against the sum of its shares given what had come before each token.
    """
    s, count = replace(FILTERS[name], seed=5), 3000
    logits = (2 * random("shares").standard_normal(300)).astype(np.float32)
    recent = logits.argsort()[::-1][: s.repeat_last_n].tolist() if s.repeat_penalty != 1.0 else []

    def sample(s: Sampling, count: int) -> list[int]:
        if sampler == "device":
            after = sample_on(gpu, logits[None], [s], [segment(0, 0, 1)], count, recent)
            return after.tokens[0].tolist()
        sample_one = host_sampler(s, recent)
        return [sample_one(logits) for _ in range(count)]

    sampled = sample(s, count)
    assert sampled[:50] == sample(s, 50) != sample(replace(s, seed=6), 50)
    shares, text = np.zeros((count if recent else 1, 300)), recent + sampled
    for i, row in enumerate(shares):
        order, kept = candidates(penalise(logits.astype(np.float64), text[i : i + len(recent)], s), s)
        row[order] = kept
    shares = np.broadcast_to(shares, (count, 300))
    found, mean, variance = np.bincount(sampled, minlength=300), shares.sum(0), (shares * (1 - shares)).sum(0)
    assert not found[mean == 0].any()
    rare = mean < 20  # counted together
    off = np.append((found - mean)[~rare], (found - mean)[rare].sum())
    variance = np.append(variance[~rare], max(variance[rare].sum(), 1.0))
    # standard deviations: chance takes one of these 350 comparisons beyond 4.5 with one seed in 400
    assert np.abs(off / np.sqrt(variance)).max() < 4.5


@covers("log_prob")
@pytest.mark.parametrize("vocab", [1, 100, 1025, 49152])
def test_log_prob(any_gpu, vocab):
    gpu, rng = any_gpu, random("log_prob")
    logits = rng.standard_normal((3, vocab)) * [[1.0], [10.0], [0.1]] + [[0.0], [-300.0], [1000.0]]
    logits = logits.astype(np.float32)
    targets = rng.integers(0, vocab, 3).astype(np.uint32)
    targets[0], targets[1] = logits[0].argmax(), vocab - 1
    out, make = gpu.upload(np.full(4, GUARD, np.float32), "out"), Ops(gpu, step_buffer(gpu, 3))
    run(gpu, [make.log_prob(gpu.upload(logits, "logits"), gpu.upload(targets, "targets"), out, vocab)], 3)
    wide = logits.astype(np.float64)
    top = wide.max(1)
    want = wide[range(3), targets] - top - np.log(np.exp(wide - top[:, None]).sum(1))
    got = gpu.read(out, np.float32, 4)
    # a difference of logits: f32 keeps 6e-5 of 1000, and log(sum) is good to 1e-6
    assert np.abs(got[:3] - want).max() < 1e-4
    assert got[3] == GUARD
