"""`bench`, with llama-bench's options, formats and columns, and `bench kernels`."""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llamagpu.cli import options as o
from llamagpu.cli.terminal import Usage, interruptible, log, progress_line, status_line, write
from llamagpu.cli.usage import BenchGroup
from llamagpu.engine.options import KvType
from llamagpu.errors import LlamaGpuError
from llamagpu.gpu.caps import Library
from llamagpu.hub.catalogue import DEFAULT

if TYPE_CHECKING:
    from llamagpu.bench.bench import Probe
    from llamagpu.bench.report import Row
    from llamagpu.engine.engine import Engine
    from llamagpu.engine.load import Source
    from llamagpu.profile.profile import Profile

FORMATS = ("csv", "json", "jsonl", "md", "sql", "none")
Names = list[str] | None


bench_app = typer.Typer(cls=BenchGroup, invoke_without_command=True, rich_markup_mode=None)


SYNTHETIC_HELP = "NAME[@llama][:QUANT]: a real model's sizes (as a Llama), random weights, no file (default: none)."


@bench_app.callback()
def bench(
    context: typer.Context,
    model: Annotated[Names, typer.Option("-m", "--model", help="GGUF files or names (default: smollm2).")] = None,
    hf_repo: Annotated[
        Names,
        typer.Option("-hf", "-hfr", "--hf-repo", help="Hugging Face repositories: user/repo[:QUANT] (default: none)."),
    ] = None,
    hf_file: Annotated[
        str, typer.Option("-hff", "--hf-file", help="File in the repository of -hf (default: by QUANT).")
    ] = "",
    hf_token: Annotated[
        str, typer.Option("-hft", "--hf-token", help="Access token for Hugging Face (default: HF_TOKEN).")
    ] = "",
    synthetic: Annotated[Names, typer.Option("--synthetic", help=SYNTHETIC_HELP)] = None,
    n_prompt: Annotated[Names, typer.Option("-p", "--n-prompt", help="Prompt tokens (default: 512).")] = None,
    n_gen: Annotated[Names, typer.Option("-n", "--n-gen", help="Generated tokens (default: 128).")] = None,
    n_pg: Annotated[
        Names, typer.Option("-pg", help="PP,TG: prompt tokens, then generated tokens (default: none).")
    ] = None,
    n_depth: Annotated[
        Names, typer.Option("-d", "--n-depth", help="Tokens in the KV cache before each case (default: 0).")
    ] = None,
    n_parallel: Annotated[
        Names,
        typer.Option(
            *("-npl", "--parallel"),
            help="Sequences at once: measure these, with llama-batched-bench's columns (default: one, as llama-bench).",
        ),
    ] = None,
    shared_prompt: Annotated[
        bool, typer.Option("-pps", "--shared-prompt", help="With --parallel: one prompt, shared in pages of 64.")
    ] = False,
    batch: Annotated[Names, typer.Option("-b", "--batch-size", help="Upper limit of -ub (default: 2048).")] = None,
    ubatch: Annotated[
        Names,
        typer.Option(
            *("-ub", "--ubatch-size"),
            help="Prompt tokens per step (default: with precision fast 1024 on GPUs, 2048 on matrix units; 32 with "
            "high on CPUs; else 512; at least two for each sequence of --parallel).",
        ),
    ] = None,
    type_k: Annotated[
        Names,
        typer.Option(
            *("-ctk", "--cache-type-k"),
            help="KV cache type: f16, f32 or q8_0 (default: f16 on GPUs with native f16, else f32).",
        ),
    ] = None,
    type_v: Annotated[Names, typer.Option("-ctv", "--cache-type-v", help="The same as -ctk.")] = None,
    flash_attn: Annotated[str, typer.Option("-fa", "--flash-attn", help="Ignored: flash attention is always on.")] = "",
    precision: o.PrecisionOption = None,
    device: o.DeviceOption = None,
    backend: o.BackendOption = Library.AUTO,
    list_devices: Annotated[bool, typer.Option("--list-devices", help="Print the adapters and end.")] = False,
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", min=1, help="Repetitions of each case.")] = 5,
    delay: Annotated[
        float, typer.Option("--delay", callback=o.finite(0), help="Seconds of rest before each case.")
    ] = 0,
    no_warmup: Annotated[bool, typer.Option("--no-warmup", help="Do not run each case first, to warm up.")] = False,
    progress: Annotated[bool, typer.Option("--progress", help="Print on stderr which case runs.")] = False,
    output: Annotated[str, typer.Option("-o", "--output", help="Output format: csv, json, jsonl, md or sql.")] = "md",
    output_err: Annotated[str, typer.Option("-oe", "--output-err", help="A second output, to stderr.")] = "none",
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Plot speeds and a roofline to this file (default: none).")
    ] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Print also where the time is spent.")] = False,
    offline: o.OfflineOption = False,
    quiet: o.QuietOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Measure tokens per second, with llama-bench's options, formats and columns.

    Options with several values take commas, repeats and ranges: 1,2 and 128-512, 0-4096+1024, 1-64*2.
    """
    if context.invoked_subcommand:
        return
    if list_devices:
        from llamagpu import devices

        return write("\n".join(devices.device_lines(devices.list_devices(device))) + "\n")
    from llamagpu import markdown
    from llamagpu.bench import plot as picture
    from llamagpu.bench import report
    from llamagpu.bench.bench import BenchOptions
    from llamagpu.bench.bench import bench as measure
    from llamagpu.bench.cases import make_cases, numbers
    from llamagpu.cli.bench_progress import BenchProgress, source_name

    pairs = [prompt_and_gen(text) for text in n_pg or []]
    settings = (
        numbers(batch or ["2048"], 1),
        numbers(ubatch, 1) if ubatch else [0],
        kv_types(type_k, type_v),
    )
    if n_parallel:
        from llamagpu.cli.bench_parallel import parallel

        choice(output, ("csv", "json", "jsonl", "md"), "-o")
        for name, value in (("-d", n_depth), ("-oe", output_err != "none"), ("--plot", plot)):
            if value:
                raise Usage(f"--parallel does not take {name}", "leave one of them out")
        pairs = pairs or list(product(numbers(n_prompt or ["128"], 1), numbers(n_gen or ["64"], 1)))
        models = sources(model, hf_repo, hf_file, synthetic, offline, quiet)
        options = BenchOptions(repetitions, delay, not no_warmup, precision, device)
        cases = make_cases([], [], pairs, [0], *settings)
        return parallel(models, numbers(n_parallel, 1), cases, shared_prompt, options, output, quiet)
    if shared_prompt:
        raise Usage("-pps is for several sequences", "give --parallel, too")
    cases = make_cases(
        numbers(n_prompt or ["512"]), numbers(n_gen or ["128"]), pairs, numbers(n_depth or ["0"]), *settings
    )
    given = {"n_batch": batch, "n_ubatch": ubatch, "type_k": type_k, "type_v": type_v, "devices": device}
    shown = [name for name, value in (given | {"flash_attn": flash_attn}).items() if value]
    outputs = [(write, choice(output, FORMATS, "-o")), (write_err, choice(output_err, FORMATS, "-oe"))]
    printers = [(put, report.printer(name, shown)) for put, name in outputs if name != "none"]
    if plot:
        picture.need_matplotlib()
    if hf_token:
        os.environ["HF_TOKEN"] = hf_token
    if flash_attn in ("0", "off"):
        log("ignored: -fa off (flash attention is always on)")
    models = sources(model, hf_repo, hf_file, synthetic, offline, quiet)
    options = BenchOptions(repetitions, delay, not no_warmup, precision, device)
    held = "json" in (output, output_err)  # a line between two rows would stand inside the list
    more = "; -v or -o json tells more" if output == "md" and not verbose else ""
    rows: list[Row] = []
    asides: list[str] = []
    profiles: list[Profile] = []
    with interruptible() as check:
        for source in models:
            status_line(f"{source_name(source)}: preparing", quiet)
            probe = roofline_probe(source, profiles) if plot else None
            monitor = BenchProgress(source, cases, repetitions, quiet, progress, check)
            measured = measure(source, cases, options, monitor, progress_line("loading", quiet, check), probe)
            for row in measured:
                status_line("", quiet)
                for put, printer in printers:  # the first row may raise an error, so the header waits for it
                    put(("" if rows else printer.header()) + printer.row(row))
                rows.append(row)
                told = "\n".join(filter(None, (report.settling(row), report.aside(row) + more)))
                asides.append(told)
                if not quiet and not held:
                    log(told)
    for put, printer in printers:
        put(("" if rows else printer.header()) + printer.footer())
    if not quiet and held:
        log("\n".join(asides))
    if verbose and output == "md":
        write("\n" + markdown.table(report.DETAILS, [report.details(row) for row in rows], left=2))
        write("".join(f"\n{line}\n" for line in dict.fromkeys(map(report.conditions, rows))))
    if plot:
        picture.plot(rows, profiles, plot)


def write_err(text: str) -> None:
    if sys.stderr is not None:
        print(text, end="", file=sys.stderr, flush=True)


def roofline_probe(source: "Source", found: "list[Profile]") -> "Probe":
    """Profiles one engine of the model for the plot."""

    def probe(engine: "Engine", copy: float) -> None:
        from llamagpu.cli.bench_progress import source_name
        from llamagpu.profile.profile import profile

        rows = min(engine.model.chunk, engine.settings.context - 8)
        found.append(profile(engine, source_name(source), rows, 4, 0, copy))

    return probe


# Arguments of the measuring commands


def choice(value: str, known: Sequence[str], option: str) -> str:
    if value not in known:
        raise Usage(f"{option} does not take {value}", f"choose {', '.join(known)}")
    return value


def prompt_and_gen(text: str) -> tuple[int, int]:
    first, _, second = text.partition(",")
    if not (first.isdigit() and second.isdigit()):
        raise Usage(f"-pg {text}: it takes two numbers", "such as -pg 512,128")
    return int(first), int(second)


def split(texts: Names) -> list[str]:
    return [value for text in texts or [] for value in text.split(",") if value]


def kv_types(k: Names, v: Names) -> list[KvType | None]:
    """llama-bench varies the types of keys and values independently; here they have one type."""
    keys, values = (
        [KvType(choice(name, tuple(KvType), "-ctk")) for name in split(texts)] for texts in (k or v, v or k)
    )
    if keys != values:
        raise Usage("keys and values are cached in one type here", "give -ctk and -ctv the same list")
    return [*keys] or [None]


def sources(model: Names, hf_repo: Names, hf_file: str, synthetic: Names, offline: bool, quiet: bool) -> "list[Source]":
    """The synthetic models, then the files, fetched if necessary. The default is smollm2."""
    from llamagpu.engine.synthetic import AS_LLAMA, SHAPES, parse
    from llamagpu.hub.registry import resolve

    names = split(synthetic)
    for spec in names:
        try:
            parse(spec)
        except LlamaGpuError as error:
            name = spec.partition(":")[0].removesuffix(AS_LLAMA)
            near = [] if name in SHAPES else get_close_matches(name, SHAPES, n=1)
            raise Usage(error.cause, f"did you mean {near[0]}?" if near else error.remedy) from error
    specs = split(model) + [f"hf:{repo}/{hf_file}" if hf_file else f"hf:{repo}" for repo in split(hf_repo)]
    if not specs and not names:
        specs = [DEFAULT]
    return [*names, *(resolve(spec, progress=not quiet, offline=offline) for spec in specs)]


@bench_app.command("kernels", short_help="Measure each kernel against its naive baseline.")
def kernels(
    op: Annotated[
        Names, typer.Option("--op", help="gemm, gemv, loads, norm, fused or attend (default: all of them).")
    ] = None,
    shape: Annotated[
        Names, typer.Option("--shape", help="Names as for --synthetic, or NxK (default: by the adapter).")
    ] = None,
    tokens: Annotated[
        Names, typer.Option("--tokens", help="Token rows of a prompt (default: 32,128,512; on a CPU 32).")
    ] = None,
    output: Annotated[str, typer.Option("-o", "--output", help="Output format: md, json or jsonl.")] = "md",
    device: o.DeviceOption = None,
    backend: o.BackendOption = Library.AUTO,
    quiet: o.QuietOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Measure each specialised kernel against its naive baseline: GPU time, ratio, error against float64."""
    from llamagpu.bench import kernels as kb
    from llamagpu.bench.cases import numbers
    from llamagpu.gpu.device import Gpu

    choice(output, ("md", "json", "jsonl"), "-o")
    wanted = [choice(name, tuple(kb.OPS), "--op") for name in split(op) or kb.OPS]
    given = numbers(tokens, 1) if tokens else []
    shapes = [kb.check_shape(name) for name in split(shape)]
    with interruptible() as check, closing(Gpu.open(device)) as gpu:
        rows = []
        shapes = shapes or (["smollm2"] if gpu.software else ["llama-3.2-1b", "llama-3.1-8b"])
        row_counts = given or (kb.TOKENS[:1] if gpu.software else kb.TOKENS)  # a CPU takes minutes for 512
        for row in kb.kernel_bench(gpu, wanted, shapes, row_counts):
            check()
            rows.append(row)
            if output == "jsonl":
                write(json.dumps(asdict(row)) + "\n")
            elif not quiet:
                log(row.line())
    if output == "json":
        write(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    elif output == "md":
        write(kb.markdown(rows))
