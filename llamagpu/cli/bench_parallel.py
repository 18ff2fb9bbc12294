"""`bench --parallel`."""

from typing import TYPE_CHECKING

from llamagpu.cli.terminal import Usage, interruptible, log, progress_line, status_line, write

if TYPE_CHECKING:
    from llamagpu.bench.bench import BenchOptions
    from llamagpu.bench.cases import BenchCase
    from llamagpu.bench.report import Row
    from llamagpu.engine.load import Source


def parallel(
    models: "list[Source]",
    widths: list[int],
    cases: "list[BenchCase]",
    shared: bool,
    options: "BenchOptions",
    output: str,
    quiet: bool,
) -> None:
    """Each case with each number of sequences."""
    from llamagpu.bench import parallel as bench
    from llamagpu.cli.bench_progress import source_name
    from llamagpu.engine.step_inputs import MAX_SEGMENTS

    if max(widths) > MAX_SEGMENTS:
        raise Usage(f"--parallel {max(widths)}: a step has {MAX_SEGMENTS} sequences at most", "give fewer")
    for case in cases:
        if 0 < case.n_ubatch < max(widths):
            cause = f"-ub {case.n_ubatch}: a step has no row for each of {max(widths)} sequences"
            raise Usage(cause, f"give {max(widths)} or more")
    found: list[Row] = []
    with interruptible() as check:
        for source in models:
            name = source_name(source)

            def starts(pp: int, tg: int, b: int, repetition: int, name: str = name) -> None:
                status_line(f"{name}: {b} sequences of {pp} + {tg} tokens, run {repetition}", quiet)

            for case in cases:
                loading = progress_line("loading", quiet, check)
                found += bench.bench_parallel(source, widths, case, shared, options, starts, loading, check)
        status_line("", quiet)
    write(bench.written(found, output))
    if not quiet and (lines := bench.settling_lines(found)):
        log("\n".join(lines))
