"""Sampling kernels: argmax and greedy, the others against the host's sampler, log_prob against float64."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from kernel_cases import GUARD, SLOTS, Steps, covers, run, segment, upload
from reference import assert_close

from llamagpu.engine.device_sampler import (
    CHANGE_WORDS,
    LOWEST,
    NO_TOKEN,
    RING,
    RING_WORDS,
    Candidates,
    DeviceSampler,
    SampleKind,
)
from llamagpu.engine.grammar import allowed_tokens
from llamagpu.engine.ops import HeadBuffers, Ops, argmax_candidates
from llamagpu.engine.sampler import (
    SORTED,
    Sampling,
    Scores,
    add_bias,
    best,
    candidates,
    log_softmax,
    penalise,
    random_number,
    sample,
)
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
    ring = gpu.upload(np.full(9, UNTOUCHED, np.uint32), "ring")
    step, consts = make.step, {"CANDIDATES": count, "RING": 4, "RING_WORDS": 9}
    greedy = make.sample("greedy", consts, {"candidates": found, "ring": ring}, None)
    run(gpu, [make.argmax(values, found, vocab), greedy] * times)
    row = step_rows(gpu, step, 1)[0].tolist()
    return Greedy(row[2], row, gpu.read(ring, np.uint32, 9).tolist(), gpu.read(step, np.uint32, 4).tolist())


@covers("argmax", "greedy")
@pytest.mark.parametrize("vocab", [1, 63, 1024, 1025, 128256])
def test_greedy_takes_the_largest(any_gpu, vocab):
    rng = random(f"logits {vocab}")
    for largest in {0, vocab // 2, vocab - 1, vocab // 3}:
        logits = rng.standard_normal(vocab)
        logits[largest] = 9.0
        assert greedy_on(any_gpu, logits).token == largest
        assert greedy_on(any_gpu, logits - 1000).token == largest


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
    after = greedy_on(any_gpu, 0.0 - np.arange(20.0)[::-1] ** 2, times=6, rows=5)
    assert after.row == [0, 11 + 6, 19, 11 + 6]  # after the last of the prompt's five, then one by one
    assert after.ring == [19, 19, 19, 19, *np.zeros(4, int), UNTOUCHED]  # six tokens in a ring of four; logits of 0
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
    ring = gpu.upload(np.full((SLOTS, 9), UNTOUCHED, np.uint32), "ring")
    step = Steps(gpu, 99, SLOTS)
    step.write(*segments)
    bindings = {"candidates": gpu.upload(found, "candidates"), "ring": ring, "x": x}
    consts = {"CANDIDATES": 4, "RING": 4, "RING_WORDS": 9}
    run(gpu, [step.ops.sample("greedy", consts, bindings, matrix_of(shard), count)])
    want = np.full((SLOTS, 9), UNTOUCHED, np.uint32)
    for seg, token, values in zip(segments, tokens, logits, strict=False):
        at = (seg.position + 1) % 4
        want[seg.slot, [at, 4 + at]] = token, values.max().view(np.uint32)
    assert (gpu.read(ring, np.uint32, SLOTS * 9).reshape(SLOTS, 9) == want).all()
    rows = [row_of(step, seg, 1, token) for seg, token in zip(segments, tokens, strict=True)]
    assert step_rows(gpu, step.buffer, count).tolist() == rows
    assert gpu.read(step.buffer, np.uint32, 4).tolist() == [count, count, step.table.capacity, 2]
    got = gpu.read(x, np.float32, (count + 1) * k).reshape(count + 1, k)
    assert_close(got[:count], w[tokens], *COPIED)
    assert (got[count:] == GUARD).all()


def row_of(step: Steps, seg: Segment, sampled: int, token: int) -> list[int]:
    """Slot, position, token and cell of the next step's row after `sampled` tokens."""
    position = seg.position + len(seg.tokens) - 1 + sampled
    return [seg.slot, position, token, int(step.table.cells(seg.slot, np.array(position)))]


# sample


SAMPLE = SampleKind(greedy=False)
MIXED = [segment(2, 40, 1), segment(0, 7, 5), segment(1, 3, 2)]  # a sequence that decodes, two prompts


@dataclass(frozen=True)
class Sampled:
    tokens: Array  # [segments, count]
    raw: Array  # [segments, count]: their logits before mask, bias and penalties
    logits: Array  # after mask, bias and penalties
    scores: list[list[Scores]]  # [segments, count]
    changes: Array  # [slots, CHANGE_WORDS]
    untouched: bool  # whether the rings of other slots are


def sample_on(
    gpu,
    logits: Array,
    samplings: Sequence[Sampling],
    segments: Sequence[Segment],
    count: int = 1,
    text: Sequence[int] = (),
    kind: SampleKind = SAMPLE,
    masks: Sequence[Array | None] = (),
    logprobs: Sequence[int | None] = (),
    candidate_rows: int = 64,
) -> Sampled:
    """`count` tokens of each sampling in one submission, all from these logits [segments, vocab]."""
    vocab, sampled, runs = logits.shape[1], len(samplings), -(-logits.shape[1] // candidate_rows)
    sampler, step = DeviceSampler(gpu, SLOTS, vocab), Steps(gpu, 99 + count, SLOTS)
    gpu.write(sampler.ring, np.full(SLOTS * RING_WORDS, UNTOUCHED, np.uint32))
    masks, logprobs = [*masks, *[None] * sampled], [*logprobs, *[None] * sampled]
    for seg, sampling, mask, top in zip(segments, samplings, masks, logprobs, strict=False):
        position = seg.position + len(seg.tokens)
        sampler.configure(seg.slot, sampling, text, position, mask is not None, top)
        if mask is not None:
            sampler.write_mask(seg.slot, mask)
    step.write(*segments)
    kept, values = gpu.upload(logits, "kept"), gpu.upload(logits, "logits")
    head = HeadBuffers(values, gpu.zeros(len(logits) * runs * 8, "candidates"), step.buffer, sampled)
    consts = {"VOCAB": vocab, "CANDIDATE_ROWS": candidate_rows}
    renew = [  # sampling changes the logits: in a model, the next step computes new ones
        gpu.dispatch("copy", (), {"VEC4S": -(-logits.size // 4)}, {"x": kept, "y": values}, (1, 1, 1)),
        gpu.dispatch("argmax", (), consts, {"logits": values, "candidates": head.candidates}, (runs, len(logits), 1)),
    ]
    sampling_plan = sampler.dispatches(step.ops, kind, head, Candidates(vocab, runs, candidate_rows), None, None)
    results = []
    for first in range(0, count, RING):
        run(gpu, [*renew, *sampling_plan] * min(count - first, RING))
        words = [gpu.read(buffer, np.uint32, buffer.size // 4) for buffer in (sampler.ring, sampler.scores)]
        results.append(np.append(words[0][: sampler.first_change], words[1]))
    firsts = [(seg.slot, seg.position + len(seg.tokens), i) for i, seg in enumerate(segments[:sampled])]
    found = [[sampler.token(results[i // RING], slot, first + i) for i in range(count)] for slot, first, _ in firsts]
    if count <= RING:
        slots, positions, _ = zip(*firsts, strict=True)
        together, finite = sampler.tokens(results[0], slots, positions, count)
        assert together == [[token for token, _ in row] for row in found]
        assert finite == [bool(np.isfinite([logit for _, logit in row]).all()) for row in found]
    tokens, raw = np.moveaxis(np.array(found), 2, 0)
    scored = [
        [sampler.token_scores(results[j // RING], slot, first + j, top) for j in range(count)]
        for (slot, first, _), top in zip(firsts, logprobs, strict=False)
        if top is not None
    ]
    rings = words[0][: SLOTS * RING_WORDS].reshape(SLOTS, -1)
    # the next step has a row for each sampled segment, and nothing else
    rows = [row_of(step, seg, count, int(own[-1])) for seg, own in zip(segments, tokens, strict=False)]
    assert step_rows(gpu, step.buffer, sampled).tolist() == rows
    header = gpu.read(step.buffer, np.uint32, 4).tolist()
    assert header == [sampled, sampled, step.table.capacity, step.table.pages]
    return Sampled(
        tokens.astype(int),
        raw,
        gpu.read(values, np.float32, logits.size).reshape(logits.shape),
        scored,
        words[0][sampler.first_change :][: SLOTS * CHANGE_WORDS].reshape(SLOTS, CHANGE_WORDS),
        bool((np.delete(rings, [slot for slot, _, _ in firsts], axis=0) == UNTOUCHED).all()),
    )


def packed(mask: Array) -> Array:
    """bool [vocab] as a grammar's bits."""
    return np.packbits(np.pad(mask, (0, -mask.size % 32)), bitorder="little").view(np.int32)


def changed(logits: Array, s: Sampling, text: Sequence[int], mask: Array | None = None) -> Array:
    """The logits that the host samples from; NaN counts as the smallest."""
    wide = np.where(np.isnan(logits), -np.inf, logits.astype(np.float64))
    if mask is not None:
        wide[~allowed_tokens(mask, wide.size)] = -np.inf
    return penalise(add_bias(wide, s), list(text)[-s.repeat_last_n :] if s.repeat_last_n else [], s)


def check_token(token: int, wide: Array, s: Sampling, position: int) -> None:
    """It is the one that the host samples, unless f32 may decide otherwise."""
    if s.temperature <= 0:
        assert wide[token] > wide.max() - 1e-5 * max(1, abs(wide.max()))
        return
    number = random_number(s.seed, position)
    order, shares = candidates(wide, s)
    sums = np.cumsum(shares)
    if np.abs(sums[:-1] - number).min(initial=1.0) > 1e-5:
        assert token == sample(wide, s, number), (token, s, position)
    else:
        assert token in order


SAMPLINGS = [
    Sampling(1.0, 64, 1.0, 0.0),
    Sampling(0.8, 40, 0.95, 0.05),
    Sampling(1.5, 64, 0.5, 0.0),
    Sampling(1.0, 7, 1.0, 0.2),
    Sampling(0.3, 1, 1.0, 0.0),
    Sampling(1.2, 256, 0.99, 0.0),
    Sampling(1.0, 0, 1.0, 0.0),
    Sampling(2.0, 0, 0.7, 0.0),
    Sampling(2.0, 0, 0.995, 0.0),
    Sampling(1.5, 0, 1.0, 0.001),
    Sampling(1.5, 0, 0.999, 0.0001),
    Sampling(1.5, 1000, 1.0, 0.0),  # more than are sorted, but not all
    Sampling(2.0, 2000, 0.95, 0.0),
    Sampling(1.0, 257, 0.9, 0.0),
    Sampling(2.0, 700, 0.99, 0.001),
]


@covers("sample")
@pytest.mark.parametrize("s", SAMPLINGS, ids=lambda s: f"t{s.temperature} k{s.top_k} p{s.top_p} m{s.min_p}")
@pytest.mark.parametrize("vocab", [5, 3001])
def test_sample_as_the_host_does(any_gpu, vocab, s):
    """Tokens of one submission."""
    s, position, count = replace(s, seed=1234), 10, 20
    logits = (3 * random(f"sample {vocab}").standard_normal((1, vocab))).astype(np.float32)
    after = sample_on(any_gpu, logits, [s], [segment(1, position, 1)], count)
    for i, token in enumerate(after.tokens[0]):
        check_token(token, logits[0].astype(np.float64), s, position + 1 + i)
    assert (after.raw[0] == logits[0, after.tokens[0]]).all()
    assert after.untouched


def random_logits(rng: np.random.Generator, vocab: int) -> Array:
    """Of any spread; some with many equal values, infinities, no numbers or huge ones."""
    logits = rng.choice([0.1, 1, 3, 10]) * rng.standard_normal(vocab)
    if rng.random() < 0.4:
        logits = np.round(logits)
    for value in (-np.inf, np.nan, -3e37, 0.0, -0.0):
        if rng.random() < 0.2:
            logits[rng.random(vocab) < rng.choice([0.01, 0.5, 0.95])] = value
    if rng.random() < 0.1:
        logits[rng.integers(vocab)] = 1e37
    logits[rng.integers(vocab)] = rng.choice([0.5, 5.0])  # a number at least
    return logits.astype(np.float32)


def random_sampling(rng: np.random.Generator, vocab: int) -> Sampling:
    def some(value: float, chance: float, none: float) -> float:
        return value if rng.random() < chance else none

    biases = rng.choice(vocab, min(vocab - 1, int(some(rng.integers(1, 40), 0.4, 0))), replace=False)
    values = np.where(rng.random(biases.size) < 0.3, -np.inf, rng.uniform(-100, 100, biases.size) / 20)
    return Sampling(
        temperature=some(rng.choice([0.2, 1.0, 1.7]), 0.9, 0.0),
        top_k=int(rng.choice([0, 1, 5, 40, SORTED, SORTED + 1, 600, vocab - 1, vocab, vocab + 1])),
        top_p=some(rng.choice([0.0, 0.3, 0.9, 0.99]), 0.6, 1.0),
        min_p=some(rng.choice([0.001, 0.1, 1.0]), 0.4, 0.0),
        repeat_penalty=some(rng.choice([0.7, 1.3]), 0.4, 1.0),
        repeat_last_n=int(rng.choice([0, 3, 16, 64, 1024])),
        seed=int(rng.integers(1 << 32)),
        presence_penalty=some(rng.uniform(-2, 2), 0.3, 0.0),
        frequency_penalty=some(rng.uniform(-2, 2), 0.3, 0.0),
        logit_bias=dict(zip(biases.tolist(), values.tolist(), strict=True)),
    )


@covers("check_logits")
@pytest.mark.parametrize("vocab", [1, 300, 3001])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers(gpu, vocab, wrong):
    """Each in a segment of its own; before masks, whose logits count as well."""
    for at in {0, vocab // 2, vocab - 1}:
        logits = np.full((3, vocab), 3.4e38, np.float32)
        logits[1, at] = wrong
        sampler, step = DeviceSampler(gpu, SLOTS, vocab), Steps(gpu, 50, SLOTS)
        gpu.write(sampler.ring, np.full(sampler.first_change, UNTOUCHED, np.uint32))
        step.write(*MIXED)
        head = HeadBuffers(gpu.upload(logits, "logits"), gpu.zeros(8 * 3 * vocab, "candidates"), step.buffer, 3)
        kind = SampleKind(greedy=True, masked=True, checked=True)
        run(gpu, sampler.dispatches(step.ops, kind, head, Candidates(vocab, vocab, 1), None, None))
        words = gpu.read(sampler.ring, np.uint32, sampler.first_change)
        assert [sampler.logits_finite(words, seg.slot) for seg in MIXED] == [True, False, True]


@covers("mask_logits")
@pytest.mark.parametrize("vocab", [2, 131, 3001])
def test_any_parameters_of_several_sequences(gpu, vocab):
    """Of each row, the token, its logit and the log probabilities are what the host has; alone they are the same."""
    rng = random(f"any {vocab}")
    for case in range(10):
        logits = np.stack([random_logits(rng, vocab) for _ in MIXED])
        samplings = [random_sampling(rng, vocab) for _ in MIXED]
        masks = [packed(rng.random(vocab) < 0.6) if rng.random() < 0.4 else None for _ in MIXED]
        tops = [int(rng.integers(0, 21)) if rng.random() < 0.5 else None for _ in MIXED]
        text = rng.integers(0, vocab, rng.integers(0, 90)).tolist()
        kind = SampleKind(False, any(m is not None for m in masks), any(t is not None for t in tops))
        after = sample_on(gpu, logits, samplings, MIXED, 1, text, kind, masks, tops, candidate_rows=[64, 24][case % 2])
        scores = dict(zip([i for i, top in enumerate(tops) if top is not None], after.scores, strict=True))
        for i, (seg, s, mask, top) in enumerate(zip(MIXED, samplings, masks, tops, strict=True)):
            position, token = seg.position + len(seg.tokens), after.tokens[i, 0]
            wide = changed(logits[i], s, text, mask)
            if wide.max() == -np.inf:
                assert math.isnan(after.raw[i, 0])
                continue
            assert after.raw[i, 0] == logits[i, token]
            check_token(token, wide, s, position)
            if top is not None:
                check_scores(scores[i][0], logits[i], token, top)
        one = int(rng.integers(3))
        alone = sample_on(gpu, logits[one:][:1], samplings[one:][:1], [MIXED[one]], 1, text, kind, masks[one:][:1])
        assert alone.tokens[0] == after.tokens[one]


def check_scores(scores: Scores, logits: Array, token: int, top: int) -> None:
    numbers = np.where(np.isnan(logits), -np.inf, logits).astype(np.float64)
    logs, ids = log_softmax(numbers), best(numbers, min(top, logits.size)) if top else np.zeros(0, int)
    assert scores.ids == ids.tolist()
    for got, want in zip((scores.logprob, *scores.logprobs), logs[[token, *ids]], strict=True):
        assert got == pytest.approx(want, rel=1e-6, abs=1e-5) or (want == -np.inf and not math.isfinite(got))


@covers("top_logprobs")
@pytest.mark.parametrize("vocab", [3, 5000])
@pytest.mark.parametrize("greedy", [True, False])
def test_top_logprobs(any_gpu, vocab, greedy):
    """Of five tokens in one submission, before bias and penalty; the other segment asks for none."""
    logits = (3 * random("top logprobs").standard_normal((2, vocab))).astype(np.float32)
    logits[1, :] = np.round(logits[1])  # many are equal
    s = Sampling(
        0.0 if greedy else 1.0, seed=3, presence_penalty=2.0 * (not greedy), logit_bias={} if greedy else {1: 5}
    )
    after = sample_on(any_gpu, logits, [s, s], TWO, 5, kind=SampleKind(greedy, logprobs=True), logprobs=[None, 20])
    assert len(after.scores) == 1 and (after.raw[1] == logits[1, after.tokens[1]]).all()
    for token, scores in zip(after.tokens[1], after.scores[0], strict=True):
        check_scores(scores, logits[1], token, 20)


def test_only_the_first_segments_are_sampled(any_gpu):
    """A prompt that is not finished comes last: it has no row in the next step, and nothing of it changes."""
    logits = (3 * random("unfinished").standard_normal((3, 700))).astype(np.float32)
    samplings = [replace(SAMPLINGS[i], seed=i) for i in range(2)]
    for greedy in (False, True):
        after = sample_on(any_gpu, logits, samplings, MIXED, 1, kind=SampleKind(greedy))
        assert after.untouched
        if greedy:
            assert (after.tokens[:, 0] == logits[:2].argmax(1)).all()


@pytest.mark.parametrize("vocab", [296, 70_000])
def test_sample_where_many_logits_are_equal(any_gpu, vocab):
    """More equal logits, and more runs with equal largest logits, than are kept: the lowest ids are."""
    logits, s = np.zeros((1, vocab), np.float32), replace(SAMPLINGS[1], seed=7, min_p=0.0)
    after = sample_on(any_gpu, logits, [s], [segment(1, 10, 1)], 8)
    for i, token in enumerate(after.tokens[0]):
        check_token(token, logits[0], s, 11 + i)
    for largest in (0, vocab // 2, vocab - 1):
        logits[:] = 0
        logits[0, largest] = 60
        assert (sample_on(any_gpu, logits, [s], [segment(1, 10, 1)], 2).tokens == largest).all()


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("top_k", [0, 40])
def test_sample_of_what_is_not_a_number(any_gpu, bad, top_k):
    logits, s = np.full((1, 3001), bad, np.float32), replace(SAMPLINGS[0], top_k=top_k, seed=1)
    after = sample_on(any_gpu, logits, [s], [segment(0, 0, 1)])
    assert after.tokens[0, 0] < 3001 and math.isnan(after.raw[0, 0])
    logits[0, 2100] = -50.0
    assert sample_on(any_gpu, logits, [s], [segment(0, 0, 1)]).tokens[0, 0] == 2100


@pytest.mark.parametrize("penalty", [1.5, 0.5])
def test_sample_changes_the_logits_of_its_row_only(any_gpu, penalty):
    """Bias and penalties, each token once; the window moves on. The other segment of the step has none."""
    logits = (3 * random("penalty").standard_normal((2, 700))).astype(np.float32)
    text = logits[1].argsort()[::-1][[0, 1, 1, 5, 0, 300, 699]].tolist()
    order = logits[1].argsort()[::-1]
    s = Sampling(1.0, 1, 1.0, 0.0, penalty, 8, 7, 0.5, 0.25, {int(order[0]): -1.0, int(order[9]): 2.5})
    segments = [segment(0, 3, 1), segment(2, 19, 1)]
    after = sample_on(any_gpu, logits, [replace(SAMPLINGS[4], seed=7), s], segments, text=text)
    want = np.stack([logits[0].astype(np.float64), changed(logits[1], s, text)])
    assert_close(after.logits, want, *COPIED)
    assert after.tokens.tolist() == [[want[0].argmax()], [want[1].argmax()]]
    window = np.roll([NO_TOKEN, *text], 20)  # by position % 8; the oldest one is position 12
    window[20 % 8] = want[1].argmax()
    assert (after.changes[2, :8] == window).all()
    assert after.untouched


def test_mask_leaves_other_rows_alone(any_gpu):
    logits = (3 * random("masks").standard_normal((2, 700))).astype(np.float32)
    mask = random("mask").random(700) < 0.01
    mask[logits[1].argmax()] = False
    for greedy in (True, False):
        samplings = [Sampling(0.0 if greedy else 1.0, seed=5, min_p=0)] * 2
        kind = SampleKind(greedy, masked=True)
        after = sample_on(any_gpu, logits, samplings, TWO, kind=kind, masks=[None, packed(mask)])
        assert (after.logits[0] == logits[0]).all() and mask[after.tokens[1, 0]]
        assert (after.logits[1] == np.where(mask, logits[1], LOWEST)).all()
        if greedy:
            assert after.tokens.ravel().tolist() == [logits[0].argmax(), np.where(mask, logits[1], -99).argmax()]


# One filter each, then all of them
FILTERS = {
    "none": Sampling(1.0, 0, 1.0, 0.0),
    "temperature": Sampling(0.6, 64, 1.0, 0.0),
    "top-k": Sampling(1.0, 4, 1.0, 0.0),
    "top-p": Sampling(1.0, 64, 0.5, 0.0),
    "min-p": Sampling(1.0, 64, 1.0, 0.1),
    "penalty": Sampling(1.0, 64, 1.0, 0.0, 1.5, 16),
    "presence": Sampling(1.0, 0, 1.0, 0.0, presence_penalty=1.5),
    "frequency": Sampling(0.0, frequency_penalty=0.3, repeat_last_n=100),
    "all": Sampling(0.8, 40, 0.8, 0.1, 1.2, 64, None, 0.2, 0.1, {3: 2.0, 7: -math.inf}),
}


@pytest.mark.parametrize("name", FILTERS)
def test_sample_follows_its_own_tokens(gpu, name):
    """More tokens than the ring holds: each as the host would sample it after those before it."""
    s, count = replace(FILTERS[name], seed=5), RING + 36
    logits = (2 * random("shares").standard_normal(300)).astype(np.float32)
    text = random("text").integers(0, 300, 70).tolist()
    after = sample_on(gpu, logits[None], [s], [segment(0, len(text) - 1, 1)], count, text)
    for i, token in enumerate(after.tokens[0].tolist()):
        check_token(token, changed(logits, s, text), s, len(text))
        assert after.raw[0, i] == logits[token]
        text.append(token)
    other = sample_on(gpu, logits[None], [replace(s, seed=6)], [segment(0, 69, 1)], count, text[:70])
    assert (other.tokens != after.tokens).any() == (s.temperature > 0)


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
