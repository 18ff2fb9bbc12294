"""`bench --parallel`."""

from typing import TYPE_CHECKING

from llamagpu.cli.bench import choice
from llamagpu.cli.terminal import interruptible, progress_line, status_line, write

if TYPE_CHECKING:
    from llamagpu.bench.bench import BenchOptions
    from llamagpu.bench.report import Row
    from llamagpu.engine.load import Source


def parallel(
    models: "list[Source]",
    widths: list[int],
    prompts: list[int],
    gens: list[int],
    shared: bool,
    options: "BenchOptions",
    output: str,
    quiet: bool,
) -> None:
    """Prompts of each length and new tokens of each number, for each number of sequences."""
    from llamagpu.bench import parallel as bench
    from llamagpu.cli.bench_progress import source_name

    choice(output, ("csv", "json", "jsonl", "md"), "-o")
    found: list[Row] = []
    with interruptible() as check:
        for source in models:
            name = source_name(source)

            def starts(pp: int, tg: int, b: int, repetition: int, name: str = name) -> None:
                check()
                status_line(f"{name}: {b} sequences of {pp} + {tg} tokens, run {repetition}", quiet)

            for prompt in prompts:
                for new in gens:
                    loading = progress_line("loading", quiet, check)
                    found += bench.bench_parallel(source, widths, prompt, new, shared, options, starts, loading)
        status_line("", quiet)
    write(bench.written(found, output))
