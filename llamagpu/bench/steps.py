"""The time of one step for each number of token rows, on the GPU's clock and in a running loop.

In the running loop the host records the next step while the GPU runs this one, as in decode. All steps of a loop start
at one position, so that they cost the same.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby, pairwise

from llamagpu import markdown
from llamagpu.bench.bench import BenchOptions, case_facts, linear_flops, model_facts, open_for, plan_runs
from llamagpu.bench.cases import BadValue, BenchCase
from llamagpu.bench.report import FORMATS, Row
from llamagpu.engine import routes
from llamagpu.engine.decode import SUBMISSIONS_IN_FLIGHT
from llamagpu.engine.engine import Engine
from llamagpu.engine.load import Progress, Source, load_model
from llamagpu.engine.options import Precision
from llamagpu.engine.precision import resolve_precision
from llamagpu.engine.sequence import Sequence
from llamagpu.engine.step_inputs import Segment
from llamagpu.gpu.device import Gpu, map_device_lost
from llamagpu.gpu.recorder import Pending, Step
from llamagpu.gpu.settle import DRIFT
from llamagpu.gpu.timing import TimedRecorder, busy_ns

FIELDS = (
    "build_commit", "model_filename", "model_type", "type_k", "n_depth", "n_rows", "gpu_ns", "wall_ns", "wall_per_gpu",
    "rows_per_s", "linear_tflops", "settled", "cliff", "test_time", "adapter", "driver", "backend",
    "wgpu_version", "kernel_set", "precision",
)  # fmt: skip
COLUMNS = ("model", "rows", "GPU us", "wall us", "wall/GPU", "tok/s", "TFLOP/s", "cliff")
LOOP_S = 0.02  # of one measured loop
MIN_STEPS, MAX_STEPS = 5, 64  # of it; on a software adapter 2
SOFTWARE_ROWS = 32  # most rows of the ladder there: more take minutes
MAX_SWEEPS = 10  # of the rows that drift, before the measured ones
NOISE = 0.03  # more rows in so much less time are no cliff
JUMP = 1.35  # one row more takes so many times as long

Starts = Callable[[str, int], None]  # gets the stage and the rows of a loop that is about to run


def ladder(most: int, width: Callable[[int], int]) -> list[int]:
    """Every number of rows up to 32, four in an octave above, and both sides of where another plan begins."""
    octaves = (first * quarter // 4 for first in (32, 64, 128, 256, 512, 1024) for quarter in range(4, 8))
    edges = (m + i for m in range(1, most) if width(m) != width(m + 1) for i in (0, 1))
    return sorted(m for m in {*range(1, 33), *octaves, *edges, most} if m <= most)


# Cliffs


@dataclass(frozen=True, slots=True)
class Cliff:
    rows: int
    than: int  # fewer rows
    ns: float
    than_ns: float

    def __str__(self) -> str:
        times = f"{self.rows} rows take {self.ns / 1e3:.0f} us"
        if self.ns < self.than_ns:
            return f"{times}, less than {self.than} with {self.than_ns / 1e3:.0f} us"
        return f"{times}, {self.ns / self.than_ns:.2f} times as long as {self.than}"

    @property
    def mark(self) -> str:
        return f"< {self.than}" if self.ns < self.than_ns else f"{self.ns / self.than_ns:.2f}x"


def find_cliffs(times: Mapping[int, float]) -> list[Cliff]:
    """Rows that take less time than fewer rows, and single rows more that take much longer."""
    found, slowest = [], min(times)
    for before, m in pairwise(sorted(times)):
        if times[m] < (1 - NOISE) * times[slowest]:
            found.append(Cliff(m, slowest, times[m], times[slowest]))
        elif m == before + 1 and times[m] > JUMP * times[before]:
            found.append(Cliff(m, before, times[m], times[before]))
        slowest = max(slowest, m, key=lambda rows: times[rows])
    return found


def told(cliffs: Items[Cliff]) -> list[str]:
    """A line for each cliff; of the rows that are faster than the same fewer rows, only the fastest."""
    groups = groupby(cliffs, key=lambda cliff: (cliff.than, cliff.ns < cliff.than_ns))
    return [str(min(members, key=lambda cliff: cliff.ns)) for _, members in groups]


# Measuring


@dataclass(slots=True)
class StepTimes:
    """The measurements of one number of rows, an entry for each loop."""

    wall_ns: list[float] = field(default_factory=list)
    gpu_ns: list[float] = field(default_factory=list)  # empty without timestamps
    settled: bool | None = None


class StepLoop:
    """Runs steps of one engine at one position."""

    def __init__(self, engine: Engine, position: int) -> None:
        self.engine, self.position = engine, position
        self.recorder = TimedRecorder(engine.gpu)
        self.in_flight = 1 if engine.gpu.software else SUBMISSIONS_IN_FLIGHT
        self.step_ns: dict[int, float] = {}  # by rows, as last measured

    def run(self, rows: int) -> tuple[float, float | None]:
        """Nanoseconds of a step by wall clock, and on the GPU's clock."""
        fitting = int(LOOP_S * 1e9 / self.step_ns.get(rows, 1e9))
        count = 2 if self.engine.gpu.software else max(MIN_STEPS, min(MAX_STEPS, fitting))
        wall, gpu = self._loop(rows, count)
        self.step_ns[rows] = wall
        return wall, gpu

    def _loop(self, rows: int, count: int) -> tuple[float, float | None]:
        model, recorder = self.engine.model, self.recorder
        model.write_step([Segment(0, self.position, [0] * rows)])
        steps, pending = [Step(model.plan(rows, self.position), rows, self.position)], deque[Pending]()
        for _ in range(count):
            if len(pending) == self.in_flight:
                pending.popleft().wait()
            pending.append(recorder.submit(steps, model.sampler.ring, ahead=True))
        for result in pending:
            result.wait()
        spans, passes = recorder.take_spans()
        wall = (spans[-1].done - spans[0].done) / (count - 1) * 1e9
        return wall, None if passes is None else busy_ns(passes) / count

    def step_time(self, rows: int) -> float:
        """On the GPU's clock where there is one."""
        wall, gpu = self.run(rows)
        return wall if gpu is None else gpu


def settle(time_of: Callable[[int], float], rows: Items[int], sweeps: int = MAX_SWEEPS) -> set[int]:
    """Sweep over the rows until none takes another time than in the sweep before; those that never do."""
    times = {m: time_of(m) for m in rows}
    left = list(rows)
    for _ in range(sweeps):
        before, times = times, {m: time_of(m) for m in left}
        left = [m for m in left if abs(times[m] / before[m] - 1) > DRIFT]
        if not left:
            break
    return set(left)


def measure(loop: StepLoop, rows: Items[int], repetitions: int, starts: Starts) -> dict[int, StepTimes]:
    """Sweeps over all rows, so that a slow moment of the machine does not meet all runs of one of them."""

    def time_of(m: int) -> float:
        starts("warm-up", m)
        return loop.step_time(m)

    gpu, found = loop.engine.gpu, {m: StepTimes() for m in rows}
    for m in rows:  # compiles
        time_of(m)
    loop.engine.check()
    drifting = set() if gpu.software else settle(time_of, rows)
    for i in range(repetitions):
        for m in rows:
            starts(f"sweep {i + 1} of {repetitions}", m)
            wall, on_gpu = loop.run(m)
            found[m].wall_ns.append(wall)
            found[m].gpu_ns += [] if on_gpu is None else [on_gpu]
            found[m].settled = None if gpu.software else m not in drifting
    return found


def bench_steps(
    source: Source,
    rows: Items[int],
    depth: int,
    options: BenchOptions,
    starts: Starts = lambda stage, rows: None,
    progress: Progress | None = None,
) -> list[Row]:
    """A row for each number of token rows of one model; of none given, the ladder up to the default chunk."""
    with map_device_lost(), closing(Gpu.open(options.device)) as gpu:
        fast = resolve_precision(gpu, options.precision) is Precision.FAST
        default = SOFTWARE_ROWS if gpu.software else routes.default_chunk(gpu.caps, fast)
        most = max(rows, default=default)
        case = BenchCase(most, most, None, depth, most, 0)
        (run,) = plan_runs([case], options, gpu)
        with closing(open_for(source, [case])) as opened:
            loaded = load_model(opened, run.options, gpu=gpu, progress=progress)
            engine, model = loaded.engine, loaded.engine.model
            if most > model.chunk and rows:
                raise BadValue(f"a step has at most {model.chunk} rows here, not {most}", "ask for fewer rows")
            engine.reserve(Sequence(), depth + most)
            wanted = sorted(set(rows)) or ladder(model.chunk, model.plan_width)
            found = measure(StepLoop(engine, depth), wanted, options.repetitions, starts)
            known = case_facts(model_facts(opened), engine, case)
            return marked([known | step_row(m, found[m], linear_flops(loaded.weights, m)) for m in wanted])


def step_row(m: int, times: StepTimes, flops: int) -> Row:
    wall, gpu = statistics.median(times.wall_ns), statistics.median(times.gpu_ns) if times.gpu_ns else None
    return {
        "test_time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "n_rows": m,
        "gpu_ns": None if gpu is None else round(gpu),
        "wall_ns": round(wall),
        "wall_per_gpu": None if gpu is None else wall / gpu,
        "rows_per_s": 1e9 * m / wall,
        "linear_tflops": flops / (gpu or wall) / 1e3,
        "settled": times.settled,
    }


def marked(rows: list[Row]) -> list[Row]:
    """The rows, each with the cliff found at it."""
    marks = {cliff.rows: cliff.mark for cliff in cliffs_of(rows)}
    return [row | {"cliff": marks.get(row["n_rows"])} for row in rows]


# Reports


def cliffs_of(rows: Items[Row]) -> list[Cliff]:
    """The cliffs in the rows of one model."""
    return find_cliffs({row["n_rows"]: row["gpu_ns"] or row["wall_ns"] for row in rows})


def written(rows: Items[Row], output: str) -> str:
    if output == "md":
        return markdown.table(COLUMNS, [cells(row) for row in rows])
    printer = FORMATS[output](FIELDS, FIELDS)
    return printer.header() + "".join(map(printer.row, rows)) + printer.footer()


def cells(row: Row) -> list[str]:
    gpu, ratio = ("-", "-") if row["gpu_ns"] is None else (f"{row['gpu_ns'] / 1e3:.1f}", f"{row['wall_per_gpu']:.3f}")
    times = [gpu, f"{row['wall_ns'] / 1e3:.1f}", ratio]
    speeds = [f"{row['rows_per_s']:.1f}", f"{row['linear_tflops']:.3g}"]
    return [row["model_type"], str(row["n_rows"]), *times, *speeds, row["cliff"] or ""]


def asides(rows: Items[Row]) -> list[str]:
    """Lines for stderr about one model: its cliffs, and the rows whose times did not settle."""
    lines = told(cliffs_of(rows)) or ["no cliffs: more rows never take less time than fewer"]
    drifting = [str(row["n_rows"]) for row in rows if row["settled"] is False]
    lines += [f"not settled, measure again: {', '.join(drifting)} rows"] * bool(drifting)
    return [f"{rows[0]['model_type']}: {line}" for line in lines]
