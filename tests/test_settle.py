"""The wait for steady times, with runs of known length: no clock is read."""

from collections.abc import Iterator
from itertools import chain, cycle, repeat

import pytest

from llamagpu.gpu.settle import BLOCK_RUNS, LIMIT_S, Settling, drifts

NOISE = (1.0, 1.06, 0.97, 1.02, 0.95, 1.04, 0.99)


def waited(times: Iterator[float], least_s: float = 0.0) -> tuple[Settling, list[float]]:
    """A wait over these runs, and those that it took."""
    taken: list[float] = []

    def run() -> float:
        taken.append(next(times))
        return taken[-1]

    settling = Settling(least_s)
    settling.wait(run)
    assert settling.seconds == pytest.approx(sum(taken))
    return settling, taken


def test_flat_times_have_settled_after_two_blocks() -> None:
    settling, _ = waited(repeat(0.01))
    assert settling.settled and settling.seconds == pytest.approx(0.6, abs=0.03)


def test_noise_is_no_drift() -> None:
    settling, _ = waited(0.01 * time for time in cycle(NOISE))
    assert settling.settled and settling.seconds < 0.7


def test_falling_times_are_waited_for() -> None:
    """From 12 ms to 3 ms in a second, then flat: the last runs are flat ones."""
    falling = [0.012 * 0.985**i for i in range(92)]
    settling, taken = waited(chain(falling, repeat(0.003)))
    assert settling.settled and sum(falling) < settling.seconds < 3.0
    assert set(taken[-100:]) == {0.003}


def test_a_sudden_drop_is_waited_for() -> None:
    settling, taken = waited(chain(repeat(0.01, 40), repeat(0.004)))
    assert settling.settled and taken[-75:] == [0.004] * 75
    assert len(taken) > 40 + 75


def test_times_that_never_settle_end_at_the_limit() -> None:
    settling, _ = waited(0.01 * 1.02**i for i in range(2000))
    assert settling.settled is False and LIMIT_S <= settling.seconds < LIMIT_S + 1.3


def test_long_runs_take_few() -> None:
    settling, taken = waited(iter([6.0, 2.0, 2.0]))
    assert settling.settled and len(taken) == 3
    settling, taken = waited(repeat(0.2))
    assert settling.settled and len(taken) == 2 * BLOCK_RUNS


def test_fresh_kernels_are_given_time() -> None:
    """Two seconds without a trend, of which the first may be those of kernels that are not optimised yet."""
    settling, taken = waited(chain(repeat(0.01, 150), repeat(0.004)), least_s=2.0)
    assert settling.settled and 2.0 <= settling.seconds < 3.0 and taken[-100:] == [0.004] * 100


def test_repetitions_that_drift_do_not_count() -> None:
    settling = Settling(limit_s=1.0)
    settling.wait(repeat(0.1).__next__)
    assert settling.accept([0.1, 0.101, 0.099, 0.1]) and settling.settled
    assert not settling.accept([0.1, 0.09, 0.08, 0.07]) and settling.settled is False
    assert settling.accept([0.1, 0.09, 0.08, 0.07]), "the limit is over"
    assert settling.settled is False


def test_repetitions_are_compared_with_the_warm_up() -> None:
    settling = Settling()
    settling.wait(repeat(0.1).__next__)
    assert settling.accept([0.099]) and not settling.accept([0.05])


def test_drift() -> None:
    assert drifts([10, 11, 10], [9, 9, 8]) and drifts([1, 1], [2, 2])
    assert not drifts([10, 10.1, 10.2], [9.9, 9.95, 10])  # by less than 3 %
    assert not drifts([10, 14, 9, 12], [9, 13, 8, 10])  # they overlap
