"""What `bench` says on stderr while it runs: the test, the run, the time left."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from llamagpu.bench.bench import ModelFacts, Monitor
from llamagpu.bench.cases import BenchCase
from llamagpu.cli.terminal import log, on_terminal, status_line
from llamagpu.engine.load import Source
from llamagpu.gpu.device import Gpu

SOFTWARE_RATE = 5e9  # parameters times tokens per second, roughly: 2 CPU cores read a prompt at 8e9 and decode at 3e9
SLOW = (
    "{} is a software adapter: this takes about {:.0f} minutes or more\n"
    "for a quick look: `llamagpu bench --synthetic tiny`, or `llamagpu bench -m smollm2 -p 32 -n 16 -r 2`"
)


class BenchProgress(Monitor):
    """`announce`: with llama-bench's words, on a terminal too. `check` raises an error after Ctrl-C."""

    def __init__(
        self,
        source: Source,
        cases: Sequence[BenchCase],
        repetitions: int,
        quiet: bool,
        announce: bool,
        check: Callable[[], None],
    ) -> None:
        self.source, self.cases, self.repetitions = source, cases, repetitions
        self.quiet, self.announce, self.check = quiet, announce, check
        self.number = 0  # of the present case, from 1
        self.started = 0.0

    def opened(self, gpu: Gpu, model: ModelFacts) -> None:
        minutes = software_minutes(model.params, self.cases, self.repetitions)
        if gpu.software and minutes >= 1 and not self.quiet:
            log(SLOW.format(gpu.name, minutes))

    def case_starts(self, case: BenchCase) -> None:
        self.check()
        self.number += 1
        self.started = time.perf_counter()
        if self.announce:
            log(f"llamagpu bench: {self.source}: benchmark {self.number}/{len(self.cases)}: starting")
        elif not self.quiet and not on_terminal():
            log(self.label)

    def run_starts(self, stage: str, done: int, runs: int) -> None:
        self.check()
        left = time_left(time.perf_counter() - self.started, done, runs)
        status_line(f"{self.label}, {stage}{left}", self.quiet)

    @property
    def label(self) -> str:
        return (
            f"{source_name(self.source)}: test {self.number} of {len(self.cases)}, {self.cases[self.number - 1].name}"
        )


def source_name(source: Source) -> str:
    return source.name if isinstance(source, Path) else source


def software_minutes(params: int, cases: Sequence[BenchCase], repetitions: int) -> float:
    """A rough lower bound of the time on a software adapter, with the runs that warm up and time the first token."""
    return params * sum(case.tokens for case in cases) * (repetitions + 2) / SOFTWARE_RATE / 60


def time_left(elapsed: float, done: int, runs: int) -> str:
    """The time that a case needs still, after the first of its runs."""
    if not done:
        return ""
    seconds = elapsed / done * max(0, runs - done)
    return f", about {seconds / 60:.0f} min left" if seconds > 90 else f", about {seconds:.0f} s left"
