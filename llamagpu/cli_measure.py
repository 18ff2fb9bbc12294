"""The commands that measure: `bench`, `profile`, `verify`."""

import json
import os
import tempfile
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from llamagpu import options as o
from llamagpu.cli_bench import bench_app, choice, sources
from llamagpu.errors import LlamaGpuError
from llamagpu.terminal import bar, interruptible, note, out


def mount(app: typer.Typer) -> None:
    app.add_typer(bench_app, name="bench")
    app.command()(profile)
    app.command()(verify)


def profile(
    model: o.ModelOption = "smollm2",
    hf_repo: o.HfOption = None,
    synthetic: Annotated[str, typer.Option("--synthetic", help="NAME[:QUANT] instead of a file.")] = "",
    n_prompt: Annotated[int, typer.Option("-p", "--n-prompt", min=0, help="Prompt tokens, one step.")] = 512,
    n_gen: Annotated[int, typer.Option("-n", "--n-gen", min=0, help="Decode steps.")] = 8,
    n_depth: Annotated[int, typer.Option("-d", "--n-depth", min=0, help="Tokens in the cache before.")] = 0,
    cache_type: o.CacheOption = None,
    precision: o.PrecisionOption = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="A trace for ui.perfetto.dev.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="One page with charts.")] = None,
    output: Annotated[str, typer.Option("-o", "--output", help="md or json.")] = "md",
    device: o.DeviceOption = None,
    offline: o.OfflineOption = False,
    quiet: o.QuietOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Where the time goes: a GPU timestamp between all dispatches of one prefill and some decode steps."""
    from llamagpu.engine.selfcheck import use_fast
    from llamagpu.gpu.device import Gpu
    from llamagpu.tools import report_html, report_profile
    from llamagpu.tools.bench import load
    from llamagpu.tools.bench_tests import Test, positions
    from llamagpu.tools.profile import profile as measure

    choice(output, ("md", "json"), "-o")
    names = None if synthetic or hf_repo else [model]
    repos, made = [hf_repo] if hf_repo else None, [synthetic] if synthetic else None
    (source,) = sources(names, repos, "", made, offline, quiet)
    chunk = max(1, n_prompt)
    test = Test(chunk, chunk, cache_type, n_depth, n_prompt, n_gen)
    with interruptible() as check, closing(Gpu.open(device)) as gpu:
        fast = use_fast(gpu, precision)
        loaded = load(source, gpu, [test], bar("loading", quiet, check), fast)
        on_device = loaded.transformer(gpu, positions([test]), chunk, cache_type, fast)
        found = measure(on_device, loaded.type, n_prompt, n_gen, n_depth)
    if trace:
        save(trace, json.dumps(report_profile.trace(found)))
    if html:
        save(html, report_html.page(found))
    as_json = json.dumps(report_profile.as_json(found)) + "\n" if output == "json" else ""
    out(as_json or report_profile.text(found))


def save(path: Path, text: str) -> None:
    """Under its name only when it is whole."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            file.write(text)
        os.chmod(file.name, 0o644)  # a temporary file is its owner's alone
        os.replace(file.name, path)
    except OSError as error:
        raise LlamaGpuError(f"cannot write {path}: {error.strerror}", "check the folder") from error


def verify(
    quick: Annotated[bool, o.option("--quick", help="One storage form, one head shape.")] = False,
    as_json: o.JsonOption = False,
    device: o.DeviceOption = None,
    quiet: o.QuietOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Check this adapter's arithmetic: every kernel against float64, then a tiny model. Exit 7 if wrong."""
    from llamagpu.gpu.device import Gpu
    from llamagpu.tools import verify as v

    if not as_json:
        out(v.HEADER + "\n")
    with interruptible() as check, closing(Gpu.open(device)) as gpu:

        def seen(done: v.Check) -> None:
            check()
            if not as_json and (not quiet or not done.ok):
                out(done.line() + "\n")

        checks = v.verify(gpu, quick, seen)
        name = gpu.info["device"]
    if as_json:
        out(json.dumps([asdict(c) | {"ok": c.ok} for c in checks], indent=1) + "\n")
    v.need_right(checks)
    if not quiet:
        note(f"{len(checks)} checks on {name}: all within their bounds")
