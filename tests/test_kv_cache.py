"""Several sequences in the pages of one KV cache: they share prefixes, and each gives the text that it gives alone."""

import random
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from gguf_builder import tiny_llama
from one_sequence import OneSequence, load_one, reference_of, token_ids
from reference import assert_close
from test_model import F32

from llamagpu.engine.engine import Engine
from llamagpu.engine.options import Backend
from llamagpu.engine.pages import PAGE
from llamagpu.engine.sequence import Sequence
from llamagpu.errors import DoesNotFit
from llamagpu.gpu.shaders import constants

CONTEXT = 256


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", context=CONTEXT)


@pytest.fixture(params=list(Backend))
def run(request, gpu, path) -> OneSequence:
    return load_one(gpu, path, context=CONTEXT, chunk=64, slots=2, backend=request.param)


def last_logits(run: OneSequence, path: Path, ids: list[int]) -> np.ndarray:
    return reference_of(run, path).forward(ids)[-1]


def test_kernels_have_pages_of_the_same_size():
    assert (
        constants("pages")["PAGE"]
        == constants("kv_q8_0")["PAGE"]
        == constants("quantise_kv")["KV_TILE"]
        == constants("attend_int8")["KV_TILE"]
        == PAGE
    )
    assert constants("attend")["WORKGROUP"] == constants("attend_strided")["WORKGROUP"] == PAGE
    assert PAGE % constants("attend_tile")["KV_TILE"] == 0


def text(engine: Engine, sequence: Sequence, ids: list[int], count: int) -> list[int]:
    engine.prefill(sequence, ids)
    return list(islice(engine.greedy(sequence, count), count))


@pytest.mark.parametrize("slots", [(0, 1), (0, 0)], ids=["two slots", "one slot"])
def test_sequences_take_turns(run, slots):
    """Prompts and tokens of two sequences in turn, over the ends of pages."""
    engine, prompts = run.engine, (token_ids(120, seed=1), token_ids(60, seed=2))
    want = []
    for prompt in prompts:
        sequence = Sequence()
        want.append(text(engine, sequence, prompt, 24))
        engine.discard(sequence)
    sequences, found = [Sequence(slot) for slot in slots], [[], []]
    for _ in range(3):
        for sequence, prompt, ids in zip(sequences, prompts, found, strict=True):
            ids += text(engine, sequence, ids[-1:] or prompt, 8)
    assert found == want


def test_a_full_page_is_shared(run, path):
    """While the first sequence goes on. A page that it still writes to is copied."""
    engine, cache = run.engine, run.engine.cache
    first, second, ids = Sequence(0), Sequence(1), token_ids(150)
    assert engine.begin(first, ids) == 0
    engine.prefill(first, ids)
    engine.check()
    cache.record(first)
    other = [*ids[:140], *token_ids(20, seed=1)]
    assert engine.begin(second, other) == 128 and second.pages == first.pages[:2]
    cache.record(first, rests=True)
    assert engine.begin(second, other) == 140 and second.pages[:2] == first.pages[:2] != second.pages[2:]
    engine.prefill(second, other[140:])
    assert_close(engine.read_logits(), last_logits(run, path, other), *F32, "the second")
    engine.prefill(first, [5])
    assert_close(engine.read_logits(), last_logits(run, path, [*ids, 5]), *F32, "the first")


def test_a_shared_page_is_written_by_nobody(run, path):
    """A sequence that is cut short inside a shared page goes on in a copy."""
    engine, ids = run.engine, token_ids(130)
    first, second = Sequence(0), Sequence(1)
    engine.prefill(first, ids)
    engine.check()
    engine.cache.record(first)
    assert engine.begin(second, ids) == 128
    first.truncate(100)
    engine.prefill(first, [7])
    assert first.pages[0] == second.pages[0] and first.pages[1] != second.pages[1]
    assert_close(engine.read_logits(), last_logits(run, path, [*ids[:100], 7]), *F32, "cut short")
    engine.prefill(second, ids[128:])
    assert_close(engine.read_logits(), last_logits(run, path, ids), *F32, "the other")


def test_an_ended_sequence_is_found(run, path):
    """Whole, in part, and by a sequence that diverges in the midst of a page, while there are free pages; few positions
    of a page are not copied."""
    engine, ids, more = run.engine, token_ids(90), token_ids(30, seed=1)
    sequence = Sequence()
    for prompt, found in (
        (ids, 0), (ids, 89), ([*ids[:75], *more], 75), (ids, 89), ([*ids[:10], *more], 10), ([*ids, *more], 90),
        ([*ids[:68], *more], 64),
    ):  # fmt: skip
        assert engine.begin(sequence, prompt) == found
        engine.prefill(sequence, prompt[found:])
        assert_close(engine.read_logits(), last_logits(run, path, prompt), *F32, f"{len(prompt)} after {found}")
    engine.end(sequence)
    assert engine.cache.pool.available == engine.cache.pool.count and not engine.cache.sequences


def test_a_full_pool_refuses_and_loses_nothing(gpu, path):
    run = load_one(gpu, path, context=CONTEXT, chunk=64, slots=2, capacity=4 * PAGE)
    engine, cache, ids = run.engine, run.engine.cache, token_ids(140)
    first, second = Sequence(0), Sequence(1)
    engine.prefill(first, ids)
    assert cache.reserve(second, PAGE) and not cache.reserve(second, PAGE + 1)
    assert len(second.pages) == 1 and len(first.pages) == 3
    with pytest.raises(DoesNotFit, match="128 positions need 2 pages of the KV cache: it has 4, 0 of them free"):
        engine.prefill(second, token_ids(128))
    engine.prefill(second, ids[:50])
    engine.prefill(first, [3])
    assert_close(engine.read_logits(), last_logits(run, path, [*ids, 3]), *F32, "the first goes on")
    engine.end(first)
    assert cache.reserve(second, 4 * PAGE)  # kept pages are given up
    engine.prefill(second, ids[50:])
    assert_close(engine.read_logits(), last_logits(run, path, ids), *F32, "the second goes on")


@pytest.mark.parametrize("seed", range(30))
def test_pages_hold_what_sequences_are_told(gpu, path, monkeypatch, seed):
    """Random sequences with common beginnings begin, go on, are cut short and end, in few pages."""
    rng = random.Random(seed)
    cache = shared_cache(gpu, path).cache
    cells = np.full(cache.capacity, -1)

    def copy(source: int, target: int) -> None:
        cells[target * PAGE : (target + 1) * PAGE] = cells[source * PAGE : (source + 1) * PAGE]

    monkeypatch.setattr(cache, "copy_page", copy)
    sequences = [Sequence(slot) for slot in range(3)]
    texts = [[rng.randint(0, 1) for _ in range(CONTEXT)] for _ in range(2)]
    for _ in range(200):
        sequence, deed = rng.choice(sequences), rng.random()
        if deed < 0.3:
            text = [*rng.choice(texts)[: rng.randint(1, CONTEXT - 1)], rng.randint(0, 1)]
            assert cache.begin(sequence, text) < len(text)
        elif deed < 0.7:
            count = min(rng.randint(1, 90), CONTEXT - len(sequence))
            new = rng.choice(texts)[len(sequence) : len(sequence) + count]
            if not cache.reserve(sequence, len(sequence) + count):
                continue
            positions = np.arange(len(sequence), len(sequence) + count)
            cells[cache.table.cells(sequence.slot, positions)] = new
            sequence.ids += new
            sequence.checked = rng.choice([sequence.checked, len(sequence)])
        elif deed < 0.8:
            sequence.truncate(rng.randint(0, len(sequence)))
        elif deed < 0.9:
            cache.record(sequence, rests=rng.random() < 0.5)
        else:
            cache.end(sequence)
        for each in sequences:
            pages = np.array(each.pages, int)
            held = cells.reshape(-1, PAGE)[pages].reshape(-1)[: len(each)]
            assert held.tolist() == each.ids, "a sequence reads what it wrote"
    for sequence in sequences:
        cache.end(sequence)
    assert cache.pool.available == cache.pool.count


def shared_cache(gpu, path) -> Engine:
    return load_one(gpu, path, context=CONTEXT, slots=3, capacity=7 * PAGE).engine
