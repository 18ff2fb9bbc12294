"""Pages of the KV cache: who holds which, which are free, and which hold a prefix that a later sequence may begin with.

A page holds PAGE positions of one sequence, in all layers. Pages are shared by reference: a full page never changes, so
that any sequence with the same ids up to its end may read it. A page that nobody holds keeps its contents until its
place is needed; the least recently used go first.
"""

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

PAGE = 64  # positions: whole tiles of every attention kernel
ROOT = -1  # stands for the page before the first
Ids = tuple[int, ...]


@dataclass(slots=True)
class Contents:
    """What a page that can be found again holds."""

    before: int  # the page of the positions before these, or ROOT
    ids: Ids  # of its positions; fewer than PAGE: the page is not full


@dataclass(frozen=True, slots=True)
class Prefix:
    """Pages that hold the first `positions` ids of a sequence. The last may be a page that has more in it than that, or
    that another sequence is still writing to: then the new holder needs a copy of its own."""

    pages: tuple[int, ...]
    positions: int


class PagePool:
    """`count` pages. Every page is free, held (one or more sequences refer to it), or kept for a later sequence."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = list(range(count - 1, -1, -1))
        self.holders = [0] * count
        self.contents: dict[int, Contents] = {}  # of pages that can be found
        # page before -> (ids, page) in the order of the ids: the longest common beginning is a neighbour's
        self.following: dict[int, list[tuple[Ids, int]]] = {}
        self.kept: OrderedDict[int, None] = OrderedDict()  # found, but held by nobody: the oldest first

    @property
    def available(self) -> int:
        """Pages that nobody holds."""
        return len(self.free) + len(self.kept)

    def take(self, count: int) -> list[int] | None:
        """`count` pages to write to, or None if there are not so many that nobody holds."""
        if count > self.available:
            return None
        while len(self.free) < count:
            self.forget(next(iter(self.kept)))
        taken = [self.free.pop() for _ in range(count)]
        for page in taken:
            self.holders[page] = 1
        return taken

    def hold(self, pages: Items[int]) -> None:
        """One more sequence refers to these pages."""
        for page in pages:
            self.kept.pop(page, None)
            self.holders[page] += 1

    def release(self, pages: Items[int]) -> None:
        """A sequence no longer refers to these pages, in the order of their positions."""
        for page in reversed(pages):  # later positions are given up first: they are of no use without the earlier ones
            self.holders[page] -= 1
            if self.holders[page]:
                continue
            if page in self.contents:
                self.kept[page] = None
            else:
                self.free.append(page)

    def recount(self, held: Iterable[int]) -> None:
        """The pages that sequences refer to, each as often as it is held, and no others: a Ctrl-C may have come
        between a page and its sequence."""
        counts = Counter(held)
        self.holders = [counts[page] for page in range(self.count)]
        unheld = [page for page in range(self.count) if not counts[page]]
        order = [*self.kept, *(page for page in unheld if page not in self.kept)]
        self.kept = OrderedDict.fromkeys(page for page in order if not counts[page] and page in self.contents)
        self.free = [page for page in reversed(unheld) if page not in self.contents]

    def forget_all(self, held: Iterable[int]) -> None:
        """Nothing can be found any more: a Ctrl-C may have come in the midst of any change."""
        self.contents, self.following, self.kept = {}, {}, OrderedDict()
        self.recount(held)

    def record(self, pages: Items[int], ids: Items[int], first: int = 0) -> None:
        """Let later sequences find these pages, which hold `ids`, from page number `first` on.

        Where another page with the same contents can be found already, that one stays.
        """
        for number in range(first, -(-len(ids) // PAGE)):
            before = pages[number - 1] if number else ROOT
            if before != ROOT and before not in self.contents:
                return  # its twin can be found, and what follows the twin
            own, page = tuple(ids[number * PAGE : (number + 1) * PAGE]), pages[number]
            siblings = self.following.setdefault(before, [])
            at = bisect_left(siblings, (own,))
            if at < len(siblings) and siblings[at][0] == own and siblings[at][1] != page:
                if page in self.contents:
                    self.forget(page)
                return
            if page in self.contents:  # with fewer ids
                siblings.remove((self.contents[page].ids, page))
            self.contents[page] = Contents(before, own)
            insort(siblings, (own, page))

    def forget(self, page: int) -> None:
        """A page can no longer be found, nor can what follows it. Pages that nobody holds are free then."""
        contents = self.contents[page]
        siblings = self.following[contents.before]
        del siblings[bisect_left(siblings, (contents.ids,))]
        if not siblings:
            del self.following[contents.before]
        forgotten = [page]
        for gone in forgotten:  # no recursion: a long context is thousands of pages, one after another
            forgotten += (next for _, next in self.following.pop(gone, ()))
            del self.contents[gone]
            if gone in self.kept:
                del self.kept[gone]
                self.free.append(gone)

    def find(self, ids: Items[int]) -> Prefix:
        """The longest prefix of `ids` that pages hold."""
        pages: list[int] = []
        before, position = ROOT, 0
        while True:
            rest, siblings = tuple(ids[position : position + PAGE]), self.following.get(before, [])
            at = bisect_left(siblings, (rest,))
            near = ((common(own, rest), page) for own, page in siblings[max(0, at - 1) : at + 1])
            length, last = max(near, default=(0, ROOT))
            if not length:
                break
            pages.append(last)
            position += length
            if length < PAGE:
                break
            before = last
        return Prefix(tuple(pages), position)


def common(a: Items[int], b: Items[int]) -> int:
    """How many leading ids are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
