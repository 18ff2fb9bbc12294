"""`bench`, with llama-bench's options, formats and columns, and `bench kernels`."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from llamagpu import options as o
from llamagpu.terminal import Usage, bar, interruptible, note, out, status

if TYPE_CHECKING:
    from llamagpu.tools.bench import Source
    from llamagpu.tools.profile import Profile

# llama-bench's options that say nothing here; each takes a value
NOTHING_TO_SET = (
    "-ngl --n-gpu-layers -t --threads -C --cpu-mask --cpu-strict --poll -ncmoe --n-cpu-moe -sm --split-mode "
    "-mg --main-gpu -nkvo --no-kv-offload -lm --load-mode -mmp --mmap -dio --direct-io -embd --embeddings "
    "-ts --tensor-split -ot --override-tensor -nopo --no-op-offload --no-host -fitt --fit-target -fitc "
    "--fit-ctx --numa --prio -rpc --rpc"
)
IGNORED = set(NOTHING_TO_SET.split())
FORMATS = ("csv", "json", "jsonl", "md", "sql", "none")
Names = list[str] | None


class BenchGroup(TyperGroup):
    """Drops what llama-bench knows and we do not, and says so."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        kept, dropped = [], []
        rest = iter(args)
        for arg in rest:
            name = arg.partition("=")[0].replace("_", "-") if arg.startswith("--") else arg
            if name not in IGNORED:
                kept.append(arg)
                continue
            dropped.append(name)
            if "=" not in arg:
                next(rest, None)
        if dropped:
            note(f"ignored, there is nothing to set here: {' '.join(dict.fromkeys(dropped))}")
        return super().parse_args(ctx, kept)


bench_app = typer.Typer(cls=BenchGroup, invoke_without_command=True, rich_markup_mode=None)


# fmt: off
@bench_app.callback()
def bench(
    context: typer.Context,
    model: Annotated[Names, typer.Option("-m", "--model", help="GGUF files or names.")] = None,
    hf_repo: Annotated[Names, typer.Option("-hf", "-hfr", "--hf-repo", help="user/repo[:QUANT].")] = None,
    hf_file: Annotated[str, typer.Option("-hff", "--hf-file", help="A file in -hf's repository.")] = "",
    hf_token: Annotated[str, typer.Option("-hft", "--hf-token", help="Access token.")] = "",
    synthetic: Annotated[Names, typer.Option(
        "--synthetic", help="NAME[:QUANT]: a real model's shapes, random weights, no file.")] = None,
    n_prompt: Annotated[Names, typer.Option("-p", "--n-prompt", help="Prompt tokens [512].")] = None,
    n_gen: Annotated[Names, typer.Option("-n", "--n-gen", help="Generated tokens [128].")] = None,
    n_pg: Annotated[Names, typer.Option("-pg", help="PP,TG: a prompt and then generated tokens.")] = None,
    n_depth: Annotated[Names, typer.Option("-d", "--n-depth", help="Tokens in the cache before [0].")] = None,
    batch: Annotated[Names, typer.Option("-b", "--batch-size", help="At most at once [2048].")] = None,
    ubatch: Annotated[Names, typer.Option("-ub", "--ubatch-size", help="Prompt tokens a step [1024 or 512].")] = None,
    type_k: Annotated[Names, typer.Option("-ctk", "--cache-type-k", help="f16 or f32.")] = None,
    type_v: Annotated[Names, typer.Option("-ctv", "--cache-type-v", help="The same as -ctk.")] = None,
    flash_attn: Annotated[str, typer.Option("-fa", "--flash-attn", help="Always on here.")] = "",
    precision: o.PrecisionOption = None,
    device: o.DeviceOption = None,
    list_devices: Annotated[bool, typer.Option("--list-devices", help="Show the adapters and end.")] = False,
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", min=1, help="Runs of each test.")] = 5,
    delay: Annotated[float, typer.Option("--delay", min=0, help="Seconds of rest before each test.")] = 0,
    no_warmup: Annotated[bool, typer.Option("--no-warmup", help="Measure the first run too.")] = False,
    progress: Annotated[bool, typer.Option("--progress", help="Say which test runs, on stderr.")] = False,
    output: Annotated[str, typer.Option("-o", "--output", help="csv, json, jsonl, md or sql.")] = "md",
    output_err: Annotated[str, typer.Option("-oe", "--output-err", help="The same, to stderr.")] = "none",
    plot: Annotated[Path | None, typer.Option("--plot", help="A picture: speed, and a roofline.")] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="And where the time went.")] = False,
    offline: o.OfflineOption = False,
    quiet: o.QuietOption = False,
    debug: o.DebugOption = False,
) -> None:
    # fmt: on
    """Tokens per second, with llama-bench's options, formats and columns.

    Options that take several values take commas, repeats and ranges: 1,2 and 128-512, 0-4096+1024, 1-64*2.
    """
    if context.invoked_subcommand:
        return
    if list_devices:
        from llamagpu.tools import devices

        return out("\n".join(devices.device_lines(devices.list_devices(device))) + "\n")
    from llamagpu.tools import report, report_plot
    from llamagpu.tools.bench import Settings
    from llamagpu.tools.bench import bench as measure
    from llamagpu.tools.bench_tests import make_tests, numbers

    tests = make_tests(
        numbers(n_prompt or ["512"]), numbers(n_gen or ["128"]), [pair(text) for text in n_pg or []],
        numbers(n_depth or ["0"]), numbers(batch or ["2048"], 1), numbers(ubatch, 1) if ubatch else [0],
        kv_types(type_k, type_v),
    )  # fmt: skip
    given = {"n_batch": batch, "n_ubatch": ubatch, "type_k": type_k, "type_v": type_v, "devices": device}
    shown = [name for name, value in (given | {"flash_attn": flash_attn}).items() if value]
    kinds = [(out, choice(output, FORMATS, "-o")), (err, choice(output_err, FORMATS, "-oe"))]
    printers = [(write, report.printer(kind, shown)) for write, kind in kinds if kind != "none"]
    if plot:
        report_plot.need_matplotlib()
    if hf_token:
        os.environ["HF_TOKEN"] = hf_token
    if flash_attn in ("0", "off"):
        note("ignored: -fa off (attention never makes a matrix of scores here)")
    chosen = sources(model, hf_repo, hf_file, synthetic, offline, quiet)
    settings = Settings(repetitions, delay, not no_warmup, precision, device)
    rows: list[report.Row] = []
    profiles: list[Profile] = []
    with interruptible() as check:
        for source in chosen:
            status(f"{source}: preparing", quiet)
            probe = roofline_probe(source, profiles) if plot else None
            tick = counting(check, f"{source}: run", quiet)
            measured = measure(source, tests, settings, tick, bar("loading", quiet, check), probe)
            for row in announced(measured, source, len(tests), progress):
                status("", quiet)
                for write, printer in printers:  # an error before the first row stands alone
                    write(("" if rows else printer.header()) + printer.row(row))
                rows.append(row)
                if not quiet:
                    note(report.aside(row))
    for write, printer in printers:
        write(("" if rows else printer.header()) + printer.footer())
    if verbose and output == "md":
        out("\n" + report.table(report.DETAILS, [report.details(row) for row in rows], left=2))
        out("".join(f"\n{line}\n" for line in dict.fromkeys(map(report.conditions, rows))))
    if plot:
        report_plot.plot(rows, profiles, plot)


def err(text: str) -> None:
    if sys.stderr is not None:
        print(text, end="", file=sys.stderr, flush=True)


def counting(check: Callable[[], None], label: str, quiet: bool) -> Callable[[], None]:
    """`check`, which every run of a test calls; a test may take minutes, and somebody may be waiting."""
    runs = count(1)

    def tick() -> None:
        check()
        status(f"{label} {next(runs)}", quiet)

    return tick


def announced(rows: Iterator[Any], source: "Source", count: int, wanted: bool) -> Iterator[Any]:
    for i in range(count):
        if wanted:
            note(f"llamagpu bench: {source}: benchmark {i + 1}/{count}: starting")
        yield next(rows)
    next(rows, None)  # it gives the memory back


def roofline_probe(source: "Source", found: "list[Profile]") -> Callable[[Any, float], None]:
    def probe(model: Any, copy: float) -> None:
        from llamagpu.tools.profile import profile

        name = source.name if isinstance(source, Path) else source
        found.append(profile(model, name, min(model.chunk, model.limit - 8), 4, 0, copy))

    return probe


# What both files of measuring commands need


def choice(value: str, known: Sequence[str], option: str) -> str:
    if value not in known:
        raise Usage(f"{option} {value}: there is no such thing", f"choose {', '.join(known)}")
    return value


def pair(text: str) -> tuple[int, int]:
    first, _, second = text.partition(",")
    if not (first.isdigit() and second.isdigit()):
        raise Usage(f"-pg {text}: it takes two numbers", "such as -pg 512,128")
    return int(first), int(second)


def split(texts: Names) -> list[str]:
    return [part for text in texts or [] for part in text.split(",") if part]


def kv_types(k: Names, v: Names) -> list[str | None]:
    """llama-bench varies keys and values independently; here they are of one type."""
    wanted = [[choice(kind, ("f16", "f32"), "-ctk") for kind in split(texts)] for texts in (k or v, v or k)]
    if wanted[0] != wanted[1]:
        raise Usage("keys and values are cached in one type here", "give -ctk and -ctv the same list")
    return [*wanted[0]] or [None]


def sources(
    model: Names, hf_repo: Names, hf_file: str, synthetic: Names, offline: bool, quiet: bool
) -> "list[Source]":
    """Models by --synthetic, then files that are there; smollm2 when nothing is named."""
    from llamagpu.engine.synthetic import parse
    from llamagpu.tools.models import resolve

    made = split(synthetic)
    for name in made:
        parse(name)
    specs = split(model) + [f"hf:{repo}/{hf_file}" if hf_file else f"hf:{repo}" for repo in split(hf_repo)]
    if not specs and not made:
        specs = ["smollm2"]
    return [*made, *(resolve(spec, progress=not quiet, offline=offline) for spec in specs)]


@bench_app.command("kernels")
def kernels(
    op: Annotated[Names, typer.Option("--op", help="gemm, gemv, loads, norm, fused, attend [all].")] = None,
    shape: Annotated[Names, typer.Option("--shape", help="A name, as for --synthetic, or NxK.")] = None,
    tokens: Annotated[Names, typer.Option("--tokens", help="M where it is many [32,128,512].")] = None,
    output: Annotated[str, typer.Option("-o", "--output", help="md, json or jsonl.")] = "md",
    device: o.DeviceOption = None,
    quiet: o.QuietOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Each specialised kernel against its naive baseline: GPU time, ratio, error against float64."""
    from llamagpu.gpu.device import Gpu
    from llamagpu.tools import kernel_bench as kb
    from llamagpu.tools.bench_tests import numbers

    choice(output, ("md", "json", "jsonl"), "-o")
    wanted = [choice(name, tuple(kb.OPS), "--op") for name in split(op) or kb.OPS]
    given = numbers(tokens, 1) if tokens else []
    shapes = [kb.check_shape(name) for name in split(shape)]
    with interruptible() as check, closing(Gpu.open(device)) as gpu:
        rows = []
        shapes = shapes or (["smollm2"] if gpu.software else ["llama-3.2-1b", "llama-3.1-8b"])
        many = given or (kb.TOKENS[:1] if gpu.software else kb.TOKENS)  # a CPU takes minutes for 512
        for row in kb.kernel_bench(gpu, wanted, shapes, many):
            check()
            rows.append(row)
            if output == "jsonl":
                out(json.dumps(asdict(row)) + "\n")
            elif not quiet:
                note(row.line())
    if output == "json":
        out(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    elif output == "md":
        out(kb.markdown(rows))
