"""Waits until runs take the same time: they drift while clocks rise and while a driver optimises fresh kernels."""

from collections.abc import Callable
from collections.abc import Sequence as Items
from statistics import median
from typing import TypeVar

import numpy as np

T = TypeVar("T")

LIMIT_S = 10.0  # longest wait for one case
BLOCK_S = 0.3  # of runs that are compared with those before: two blocks are what a GPU takes to raise its clocks
BLOCK_RUNS = 3  # at least; fewer where they take longer than LONG_BLOCK_S
LONG_BLOCK_S = 1.25
DRIFT = 0.03  # smaller changes are noise
FRESH_COMPILE_S = 0.2  # kernels from a driver's cache take less: 0.04 s for a model on an H200, fresh ones 1 s
FRESH_S = 2.0  # least wait after kernels were compiled: a driver may optimise them without a trend before


def drifts(before: Items[float], after: Items[float]) -> bool:
    """Whether nearly every run after is faster, or slower, than those before, and the median by more than DRIFT."""
    x, y = np.asarray(before)[:, None], np.asarray(after)
    change, faster = median(after) / median(before) - 1, float(((y < x) + 0.5 * (y == x)).mean())
    return abs(change) > DRIFT and not 0.15 < faster < 0.85


class Settling:
    """The wait of one case. `settled` is None if nobody looked."""

    def __init__(self, least_s: float = 0.0, limit_s: float = LIMIT_S) -> None:
        self.least_s, self.limit_s = least_s, limit_s
        self.settled: bool | None = None
        self.seconds = 0.0
        self.last: list[float] = []  # block of runs

    def compiled(self, seconds: float) -> None:
        """The first run has compiled for so long: fresh kernels have a least wait."""
        self.least_s = FRESH_S if seconds > FRESH_COMPILE_S else 0.0

    def wait(self, run: Callable[[], float]) -> None:
        """Run, which returns its seconds, until two blocks of runs in succession do not drift, or the limit is over."""
        self.last = self._block(run)
        while True:
            before, self.last = self.last, self._block(run)
            self.settled = self.seconds >= self.least_s and not drifts(before, self.last)
            if self.settled or self.over:
                return

    def accept(self, times: Items[float]) -> bool:
        """Whether these repetitions count: they do not drift, or there is no time for others."""
        half = len(times) // 2
        if not drifts(self.last, times) and (half < 2 or not drifts(times[:half], times[half:])):
            return True
        self.settled = False
        self.seconds += sum(times)
        return self.over

    def repeat(self, run: Callable[[], float], repeat: Callable[[], T], times: Callable[[T], Items[float]]) -> T:
        """What `repeat` finds, after more runs and once more where its times do not count."""
        found = repeat()
        while self.settled is not None and not self.accept(times(found)):
            self.wait(run)
            found = repeat()
        return found

    @property
    def over(self) -> bool:
        return self.seconds >= self.limit_s

    def _block(self, run: Callable[[], float]) -> list[float]:
        times: list[float] = []
        while (total := sum(times)) < BLOCK_S or (len(times) < BLOCK_RUNS and total < LONG_BLOCK_S):
            times.append(run())
        self.seconds += total
        return times
