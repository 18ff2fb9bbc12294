"""`bench steps`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llamagpu.cli import options as o
from llamagpu.cli.bench import SYNTHETIC_HELP, Names, choice, sources
from llamagpu.cli.terminal import interruptible, log, progress_line, status_line, write
from llamagpu.gpu.caps import Library

if TYPE_CHECKING:
    from llamagpu.bench.report import Row


def steps(
    model: Annotated[Names, typer.Option("-m", "--model", help="GGUF files or names (default: smollm2).")] = None,
    synthetic: Annotated[Names, typer.Option("--synthetic", help=SYNTHETIC_HELP)] = None,
    rows: Annotated[
        Names,
        typer.Option(
            "--rows",
            help="Token rows of a step, such as 1-64 (default: 1 to 32, then 4 an octave and where plans change).",
        ),
    ] = None,
    depth: Annotated[int, typer.Option("-d", "--n-depth", min=0, help="Tokens in the KV cache before each step.")] = 0,
    precision: o.PrecisionOption = None,
    device: o.DeviceOption = None,
    backend: o.BackendOption = Library.AUTO,
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", min=1, help="Sweeps over all rows.")] = 3,
    output: Annotated[str, typer.Option("-o", "--output", help="Output format: csv, json, jsonl or md.")] = "md",
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Plot the times over the rows to this file (default: none).")
    ] = None,
    offline: o.OfflineOption = False,
    quiet: o.QuietOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Measure the time of one step for each number of token rows: on the GPU, and by wall clock in a running loop.

    Name cliffs: more rows that take less time than fewer, and one row more that takes 1.35 times as long.
    """
    from llamagpu.bench import plot as picture
    from llamagpu.bench import steps as bench
    from llamagpu.bench.bench import BenchOptions
    from llamagpu.bench.cases import numbers
    from llamagpu.cli.bench_progress import source_name

    choice(output, ("csv", "json", "jsonl", "md"), "-o")
    wanted = numbers(rows, 1) if rows else []
    if plot:
        picture.need_matplotlib()
    options = BenchOptions(repetitions, precision=precision, device=device)
    found: list[Row] = []
    with interruptible() as check:
        for source in sources(model, None, "", synthetic, offline, quiet):
            name = source_name(source)

            def starts(stage: str, m: int, name: str = name) -> None:
                check()
                status_line(f"{name}: {stage}, {m} rows", quiet)

            loading = progress_line("loading", quiet, check)
            of_model = bench.bench_steps(source, wanted, depth, options, starts, loading)
            status_line("", quiet)
            if not quiet:
                log("\n".join(bench.asides(of_model)))
            found += of_model
    write(bench.written(found, output))
    if plot:
        picture.plot_steps(found, plot)
