"""How many token rows a step has: as many as take STEP_S at most.

A watchdog of the operating system ends work that takes about two seconds. A chunk of 1024 tokens of an 8B model takes
16 s on a GPU of 1 TFLOP/s.
"""

STEP_S = 1.0
TRIAL_ROWS = 32  # of a step that tells how fast the GPU is, before the first one of more rows


class StepSize:
    """`rows` is at most `chunk` and never less than one; a size that was cut is a power of two.

    Not `timed`, a CPU adapter, it is the chunk: nothing watches a CPU, and steps of other sizes round differently.
    """

    def __init__(self, chunk: int, timed: bool) -> None:
        self.chunk, self.rows, self.timed = chunk, chunk, timed
        self.needs_trial = timed and chunk > TRIAL_ROWS

    def after_trial(self, seconds: float) -> None:
        """A short step takes longer by row than a long one: only one that is clearly too slow counts."""
        self.needs_trial = False
        if seconds * self.rows / TRIAL_ROWS > 2 * STEP_S:
            self.rows = self._fitting(TRIAL_ROWS, seconds)

    def after_step(self, rows: int, seconds: float) -> None:
        """The next step is shorter if this one took too long: attention takes longer from step to step."""
        if seconds > STEP_S:
            self.rows = min(self.rows, self._fitting(rows, seconds))
        elif self.rows < self.chunk and seconds < STEP_S / 4 and rows == self.rows:
            self.rows = min(self.chunk, 2 * self.rows)

    def _fitting(self, rows: int, seconds: float) -> int:
        fitting = max(1, int(rows * STEP_S / seconds))
        return min(self.chunk, 1 << (fitting.bit_length() - 1))
