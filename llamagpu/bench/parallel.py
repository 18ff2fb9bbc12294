"""Many sequences at once, with llama-batched-bench's columns: prompts of PP tokens, TG new ones each, B sequences."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import closing
from dataclasses import dataclass
from itertools import count

import numpy as np

from llamagpu import markdown
from llamagpu.bench.bench import BenchOptions, case_facts, model_facts, open_for
from llamagpu.bench.cases import BenchCase
from llamagpu.bench.report import FORMATS, Row, settling_line
from llamagpu.engine.engine import Engine
from llamagpu.engine.load import Progress, Source, check_memory, load_model, resolve
from llamagpu.engine.options import EngineOptions
from llamagpu.engine.pages import PAGE
from llamagpu.engine.sampler import Sampling
from llamagpu.engine.scheduler import Request, Scheduler
from llamagpu.gpu.device import Gpu, map_device_lost
from llamagpu.gpu.settle import Settling

COLUMNS = ("PP", "TG", "B", "N_KV", "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s", "T s", "S t/s")
FIELDS = (
    "build_commit", "model_filename", "model_type", "type_k", "pp", "tg", "pl", "is_pp_shared", "n_kv", "t_pp",
    "speed_pp", "t_tg", "speed_tg", "t", "speed", "settled", "settle_ns", "test_time", "adapter", "driver", "backend",
    "wgpu_version", "kernel_set", "precision",
)  # fmt: skip
GREEDY = Sampling(temperature=0)

Starts = Callable[[int, int, int, int], None]  # gets PP, TG, B and the repetition that is about to run


@dataclass(frozen=True, slots=True)
class Times:
    prompts_s: float  # until the first token of every sequence
    tokens_s: float  # from there to the last token of the last sequence
    later: int  # tokens that came in that time

    @property
    def seconds(self) -> float:
        return self.prompts_s + self.tokens_s


def prompts_of(engine: Engine, tokens: int, count: int, shared: bool, seed: int) -> list[list[int]]:
    """Random prompts, or one prompt in which only the last token differs. Another count gets others: the pages of
    earlier ones are still there."""
    rng = np.random.default_rng((seed, count))
    found = rng.integers(0, engine.config.vocab, (count, tokens))
    if shared:
        found[:, :-1] = found[0, :-1]
    return [[int(id) for id in row] for row in found]


def run(engine: Engine, prompts: Items[list[int]], new: int, check: Callable[[], None] = lambda: None) -> Times:
    """All prompts, then `new` tokens after each of them, all together as in llama-batched-bench.

    `check` is called between steps, and may raise an error.
    """
    scheduler = Scheduler(engine)
    scheduler.prompts_first = True
    requests = [Request(prompt, GREEDY, max(new, 1)) for prompt in prompts]  # prompts end with a token

    def step_until(reached: Callable[[Request], object]) -> None:
        while not all(map(reached, requests)):
            check()
            scheduler.step()
            for request in requests:
                if request.error:
                    raise request.error

    began = time.perf_counter()
    for request in requests:
        scheduler.submit(request)
    step_until(lambda request: request.new)
    first, there = time.perf_counter(), sum(len(request.new) for request in requests)
    step_until(lambda request: request.done)
    later = sum(len(request.new) for request in requests) - there
    return Times(first - began, time.perf_counter() - first, later)


def bench_parallel(
    source: Source,
    widths: Items[int],
    case: BenchCase,
    shared: bool,
    options: BenchOptions,
    starts: Starts = lambda pp, tg, b, repetition: None,
    progress: Progress | None = None,
    check: Callable[[], None] = lambda: None,
) -> list[Row]:
    """A row for each number of sequences, each with an engine for so many: it does not depend on the other rows.

    Of the repetitions the fastest counts, as in llama-batched-bench one run. `check` is called between steps, and may
    raise an error.
    """
    with (
        map_device_lost(),
        closing(Gpu.open(options.device, max(widths))) as gpu,
        closing(open_for(source, [case])) as opened,
    ):
        largest = resolve(engine_options(max(widths), case, options), opened, gpu)
        check_memory(opened, largest, gpu)  # before anything is measured
        loaded = load_model(opened, engine_options(widths[0], case, options), gpu=gpu, progress=progress)
        facts, engine, rows = model_facts(opened), loaded.engine, []
        for i, width in enumerate(widths):
            if i:
                engine = loaded.another_engine(engine_options(width, case, options))
            measured = measure(engine, case, width, shared, options, starts, check)
            rows.append(case_facts(facts, engine, case) | measured)
            engine.free()
        return rows


def engine_options(width: int, case: BenchCase, options: BenchOptions) -> EngineOptions:
    """A KV cache for `width` sequences of the case."""
    return EngineOptions(
        context=max(case.tokens, case.n_prompt + 1),
        chunk=case.n_ubatch or None,
        kv_type=case.kv_type,
        precision=options.precision,
        parallel=width,
        kv_positions=width * (case.tokens + PAGE),
    )


def measure(
    engine: Engine,
    case: BenchCase,
    width: int,
    shared: bool,
    options: BenchOptions,
    starts: Starts,
    check: Callable[[], None] = lambda: None,
) -> Row:
    """Run the sequences to warm up, once or on a GPU until the times have settled, then `repetitions` times."""
    gpu, prompt, new, numbers, settling = engine.gpu, case.n_prompt, case.n_gen, count(), Settling()

    def once() -> Times:
        number = next(numbers)
        starts(prompt, new, width, number)
        return run(engine, prompts_of(engine, prompt, width, shared, number), new, check)

    def seconds() -> float:
        return once().seconds

    if options.warmup:
        compiled_s = gpu.compile_seconds
        once()
        settling.compiled(gpu.compile_seconds - compiled_s)
        if not gpu.software:
            settling.wait(seconds)
    runs = settling.repeat(
        seconds, lambda: [once() for _ in range(options.repetitions)], lambda runs: [times.seconds for times in runs]
    )
    best = min(runs, key=lambda times: times.seconds)
    settled = {"settled": settling.settled, "settle_ns": round(settling.seconds * 1e9)}
    return row(prompt, new, width, shared, best) | settled


def row(prompt: int, new: int, width: int, shared: bool, times: Times) -> Row:
    computed = width + prompt - 1 if shared else width * prompt
    return {
        "test_time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "pp": prompt,
        "tg": new,
        "pl": width,
        "is_pp_shared": shared,
        "n_kv": computed + width * new,
        "t_pp": times.prompts_s,
        "speed_pp": computed / times.prompts_s,
        "t_tg": times.tokens_s,
        "speed_tg": times.later / times.tokens_s if times.later else 0.0,
        "t": times.seconds,
        "speed": (computed + width * new) / times.seconds,
    }


def written(rows: Items[Row], output: str) -> str:
    if output == "md":
        return markdown.table(COLUMNS, [cells(row) for row in rows])
    printer = FORMATS[output](FIELDS, FIELDS)
    return printer.header() + "".join(map(printer.row, rows)) + printer.footer()


def settling_lines(rows: Items[Row]) -> list[str]:
    """Lines for stderr about the waits for steady times."""
    return [line for row in rows if (line := settling_line(f"{row['model_type']}, {row['pl']} sequences", row))]


def cells(row: Row) -> list[str]:
    counts = [str(row[name]) for name in ("pp", "tg", "pl", "n_kv")]
    pairs = ((row["t_pp"], row["speed_pp"]), (row["t_tg"], row["speed_tg"]), (row["t"], row["speed"]))
    return counts + [text for seconds, speed in pairs for text in (f"{seconds:.3f}", f"{speed:.2f}")]
