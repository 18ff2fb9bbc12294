"""The commands that measure and inspect: `profile`, `verify`, `devices`."""

import json
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llamagpu.cli import options as o
from llamagpu.cli.bench import SYNTHETIC_HELP, choice, sources
from llamagpu.cli.terminal import check_folder, interruptible, log, progress_line, write
from llamagpu.engine.options import EngineOptions
from llamagpu.gpu.caps import Library
from llamagpu.hub.catalogue import DEFAULT

if TYPE_CHECKING:
    from llamagpu.engine.load import Source

SyntheticOption = Annotated[str, typer.Option("--synthetic", help=SYNTHETIC_HELP)]


def one_source(model: str, hf_repo: str | None, synthetic: str, offline: bool, quiet: bool) -> "Source":
    """The model that --synthetic, -hf or -m names, in this order."""
    names = None if synthetic or hf_repo else [model]
    repos = [hf_repo] if hf_repo and not synthetic else None
    (source,) = sources(names, repos, "", [synthetic] if synthetic else None, offline, quiet)
    return source


def profile(
    model: o.ModelOption = DEFAULT,
    hf_repo: o.HfOption = None,
    synthetic: SyntheticOption = "",
    n_prompt: Annotated[int, typer.Option("-p", "--n-prompt", min=0, help="Prompt tokens, in one step.")] = 512,
    n_gen: Annotated[int, typer.Option("-n", "--n-gen", min=0, help="Decode steps.")] = 8,
    n_depth: Annotated[int, typer.Option("-d", "--n-depth", min=0, help="Tokens in the KV cache before both.")] = 0,
    cache_type: o.CacheOption = None,
    precision: o.PrecisionOption = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write a trace for ui.perfetto.dev to this file (default: none).")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page with charts to this file (default: none).")
    ] = None,
    output: Annotated[str, typer.Option("-o", "--output", help="Output format: md or json.")] = "md",
    device: o.DeviceOption = None,
    backend: o.BackendOption = Library.AUTO,
    offline: o.OfflineOption = False,
    quiet: o.QuietOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Time every dispatch of a prefill and some decode steps with GPU timestamps."""
    from llamagpu.bench.bench import model_facts, open_for
    from llamagpu.bench.cases import BenchCase, positions
    from llamagpu.engine.load import load_model
    from llamagpu.gpu.device import Gpu
    from llamagpu.profile import html as page
    from llamagpu.profile import report
    from llamagpu.profile.profile import profile as measure

    choice(output, ("md", "json"), "-o")
    for path in (trace, html):
        if path:
            check_folder(path)
    source = one_source(model, hf_repo, synthetic, offline, quiet)
    chunk = max(1, n_prompt)
    case = BenchCase(chunk, chunk, cache_type, n_depth, n_prompt, n_gen)
    options = EngineOptions(context=positions([case]), chunk=chunk, kv_type=cache_type, precision=precision)
    with interruptible() as check, closing(Gpu.open(device)) as gpu, closing(open_for(source, [case])) as opened:
        loaded = load_model(opened, options, gpu=gpu, progress=progress_line("loading", quiet, check))
        found = measure(loaded.engine, model_facts(opened).type, n_prompt, n_gen, n_depth)
    if trace:
        save(trace, json.dumps(report.trace(found)))
    if html:
        save(html, page.page(found))
    write(json.dumps(report.as_json(found)) + "\n" if output == "json" else report.text(found))
    if (paths := [str(path) for path in (html, trace) if path]) and not quiet:
        log(f"written: {', '.join(paths)}")


def save(path: Path, text: str) -> None:
    from llamagpu.files.atomic import atomic_write

    with atomic_write(path) as file:
        file.write(text.encode())


def verify(
    quick: Annotated[bool, o.option("--quick", help="Check one storage and one head shape only.")] = False,
    as_json: o.JsonOption = False,
    device: o.DeviceOption = None,
    backend: o.BackendOption = Library.AUTO,
    quiet: o.QuietOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Check the arithmetic of an adapter: every kernel against float64, then a tiny model. Exit code 7 if wrong."""
    from llamagpu.gpu.device import Gpu
    from llamagpu.verify import verify as v

    if not as_json:
        write(v.HEADER + "\n")
    with interruptible() as check, closing(Gpu.open(device)) as gpu:

        def show(done: v.Check) -> None:
            check()
            if not as_json and (not quiet or not done.ok):
                write(done.line() + "\n")

        checks = v.verify(gpu, quick, show)
        name = f"{gpu.name} ({gpu.info['library']})"
    if as_json:
        write(json.dumps([asdict(c) | {"ok": c.ok} for c in checks], indent=1) + "\n")
    v.need_right(checks)
    if not quiet:
        log(f"{len(checks)} checks on {name}: all within their bounds")


def devices(
    as_json: o.JsonOption = False,
    kernels: Annotated[
        bool, o.option("--kernels", help="List the dispatches of the plans that run the model.")
    ] = False,
    wgsl: Annotated[
        str,
        typer.Option(
            "--wgsl", help="Print the composed WGSL of this dispatch of --kernels, such as 512.7 (default: none)."
        ),
    ] = "",
    model: o.ModelOption = DEFAULT,
    hf_repo: o.HfOption = None,
    synthetic: SyntheticOption = "",
    ctx_size: o.ContextOption = 0,
    ubatch: o.UbatchOption = None,
    cache_type: o.CacheOption = None,
    precision: o.PrecisionOption = None,
    device: o.DeviceOption = None,
    backend: o.BackendOption = Library.AUTO,
    offline: o.OfflineOption = False,
    quiet: o.QuietOption = False,
    debug: o.DebugOption = False,
) -> None:
    """List the adapters with their features and limits, or with --kernels the dispatches of a model on one of them."""
    from llamagpu import devices as d

    if not kernels and not wgsl:
        adapters = d.list_devices(device)
        as_text = "\n".join(d.device_lines(adapters))
        return write((json.dumps([asdict(a) for a in adapters], indent=1) if as_json else as_text) + "\n")
    from llamagpu.engine.load import load_model

    source = one_source(model, hf_repo, synthetic, offline, quiet)
    options = EngineOptions(device, ctx_size or None, ubatch, cache_type, precision)
    with interruptible() as check:
        progress = progress_line("loading", quiet, check)
        with closing(load_model(source, options, progress=progress)) as loaded:
            planned = d.planned_dispatches(loaded.engine)
            if wgsl:
                text = d.find_dispatch(planned, wgsl).source
            elif as_json:
                text = json.dumps([p.as_json() for p in planned], indent=1)
            else:
                text = "\n".join(d.dispatch_lines(loaded.engine, planned))
    write(text + "\n")
