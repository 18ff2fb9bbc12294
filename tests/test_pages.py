"""The page pool of the KV cache: pages are shared by prefix, kept for later sequences, and never lost."""

import random

import pytest

from llamagpu.engine.pages import PAGE, ROOT, PagePool, Prefix


def ids(*runs: tuple[int, int]) -> list[int]:
    return [token for token, count in runs for _ in range(count)]


def fill(pool: PagePool, sequence: list[int]) -> list[int]:
    pages = pool.take(-(-len(sequence) // PAGE))
    assert pages is not None
    pool.record(pages, sequence)
    return pages


def test_a_released_sequence_is_found_again():
    pool, text = PagePool(8), ids((1, 2 * PAGE), (2, 10))
    pages = fill(pool, text)
    pool.release(pages)
    assert pool.available == 8
    assert pool.find([*text, 3]) == Prefix(tuple(pages), len(text))
    assert pool.find(text[: PAGE + 5]) == Prefix(tuple(pages[:2]), PAGE + 5)
    assert pool.find([9, *text]) == Prefix((), 0)


def test_a_page_in_the_middle_decides():
    pool = PagePool(8)
    fill(pool, ids((1, PAGE), (2, PAGE), (3, PAGE)))
    found = pool.find(ids((1, PAGE), (4, PAGE), (3, PAGE)))
    assert found.positions == PAGE and len(found.pages) == 1


def test_the_longest_of_several_unfinished_pages():
    pool = PagePool(8)
    fill(pool, [1, 2, 3])
    best = fill(pool, [1, 2, 4, 5])
    assert pool.find([1, 2, 4, 6]) == Prefix(tuple(best), 3)


def test_two_sequences_hold_one_page():
    pool, text = PagePool(4), ids((1, PAGE))
    pages = fill(pool, text)
    pool.hold(pages)
    pool.release(pages)
    assert pool.available == 3  # still held
    pool.release(pages)
    assert pool.available == 4


def test_the_least_recently_used_pages_go_first():
    pool = PagePool(4)
    old, new = ids((1, 2 * PAGE)), ids((2, 2 * PAGE))
    pool.release(fill(pool, old))
    pool.release(fill(pool, new))
    pool.take(1)
    assert pool.find(old).positions == PAGE and pool.find(new).positions == 2 * PAGE  # the end before the beginning
    pool.take(1)
    assert pool.find(old).positions == 0 and pool.find(new).positions == 2 * PAGE


def test_a_long_context_is_forgotten():
    """Of 131,072 positions, more pages than Python allows calls."""
    pool = PagePool(2048)
    pages = fill(pool, list(range(2048 * PAGE)))
    pool.release(pages)
    pool.forget(pages[1])
    assert len(pool.free) == 2047 and list(pool.kept) == pages[:1]
    assert pool.find(list(range(2048 * PAGE))) == Prefix((pages[0],), PAGE)


def test_held_pages_are_never_taken():
    pool = PagePool(2)
    held = fill(pool, ids((1, PAGE)))
    assert pool.take(2) is None
    assert pool.take(1) not in (None, held)
    assert pool.take(1) is None


def test_twins_are_recorded_once():
    pool, text = PagePool(8), ids((1, PAGE), (2, 5))
    first, second = fill(pool, text), fill(pool, text)
    assert pool.find(text) == Prefix(tuple(first), len(text))
    pool.release(second)
    assert pool.available == 6 and len(pool.kept) == 0  # nothing that cannot be found is kept


def test_a_page_that_grows_into_a_twin_is_forgotten():
    pool = PagePool(4)
    growing, other = fill(pool, [1, 2, 3]), fill(pool, [1, 2, 3, 5])
    pool.record(growing, [1, 2, 3, 5])
    assert pool.find([1, 2, 3, 5, 6]) == Prefix(tuple(other), 4)
    pool.release(growing)
    pool.release(other)
    assert pool.take(4) is not None and not pool.contents


def test_pages_that_no_sequence_got_are_free_again():
    pool = PagePool(5)
    held, kept = fill(pool, [1]), fill(pool, [2])
    pool.release(kept)
    pool.take(2)
    pool.recount(held)
    assert pool.available == 4 and list(pool.kept) == kept and len(set(pool.free)) == 3
    assert pool.find([2]) == Prefix(tuple(kept), 1)


def test_a_growing_page_is_recorded_again():
    pool, text = PagePool(4), [1, 2, 3]
    pages = fill(pool, text)
    text += ids((4, PAGE))
    pages += pool.take(1) or []
    pool.record(pages, text)
    assert pool.find(text) == Prefix(tuple(pages), len(text))
    assert pool.find([1, 2, 3, 5]) == Prefix(tuple(pages[:1]), 3)


@pytest.mark.parametrize("seed", range(40))
def test_no_page_is_lost(seed):
    """Sequences that share prefixes come, grow and go in random order; what is found is what was written."""
    rng = random.Random(seed)
    pool = PagePool(rng.randint(3, 40))
    written: dict[int, list[int]] = {}  # page -> ids, as a device would have them
    live: list[tuple[list[int], list[int]]] = []
    for _ in range(300):
        if rng.random() < 0.5 or not live:
            text = [rng.randint(0, 1) for _ in range(rng.randint(1, 3))] * rng.randint(1, 4 * PAGE)
            text = text[: rng.randint(1, 4 * PAGE)]
            prefix = pool.find(text)
            for number, page in enumerate(prefix.pages):
                own = text[number * PAGE : min((number + 1) * PAGE, prefix.positions)]
                assert written[page][: len(own)] == own
            whole = list(prefix.pages[: prefix.positions // PAGE])
            pool.hold(whole)
            new = pool.take(-(-len(text) // PAGE) - len(whole))
            if new is None:
                pool.release(whole)
                continue
            pages = whole + new
            for number, page in enumerate(pages):
                if page in new:
                    written[page] = text[number * PAGE : (number + 1) * PAGE]
            pool.record(pages, text)
            live.append((pages, text))
        else:
            pages, _ = live.pop(rng.randrange(len(live)))
            pool.release(pages)
        held = {page for pages, _ in live for page in pages}
        assert len(held) + pool.available == pool.count
        assert held.isdisjoint(pool.free) and held.isdisjoint(pool.kept)
        assert set(pool.free).isdisjoint(pool.kept)
    for pages, _ in live:
        pool.release(pages)
    assert pool.available == pool.count
    assert all(c.before == ROOT or c.before in pool.contents for c in pool.contents.values())
