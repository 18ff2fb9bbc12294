"""Finds and opens the model of a command, and the `models` commands."""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llamagpu.cli import options as o
from llamagpu.cli.terminal import log, progress_line, show_engine_log, write
from llamagpu.engine.options import EngineOptions, KvType, Precision
from llamagpu.errors import LlamaGpuError

if TYPE_CHECKING:
    from llamagpu.engine.memory import MemoryPlan
    from llamagpu.gpu.device import Gpu
    from llamagpu.hub.catalogue import Entry
    from llamagpu.llama import Llama

models_app = typer.Typer(help="List, search, fetch and remove models by name.", rich_markup_mode=None)


def find_model(model: str, hf_repo: str | None, offline: bool, quiet: bool = False) -> Path:
    """The file that -m or -hf names, fetched if necessary."""
    from llamagpu.hub.registry import resolve

    return resolve(f"hf:{hf_repo}" if hf_repo else model, progress=not quiet, offline=offline)


def open_model(
    path: Path,
    options: EngineOptions,
    quiet: bool,
    verbose: bool,
    check: Callable[[], None],
    sequences: int | None = None,
) -> "Llama":
    """Open a model and log what a user should know about it. Ctrl-C interrupts the loading through `check`.

    `sequences`: how many generations share a step, with room for each in the KV cache.
    """
    from llamagpu.llama import PARALLEL, Llama

    show_engine_log(verbose)

    def on_plan(plan: "MemoryPlan", gpu: "Gpu") -> None:
        check()
        if gpu.software and not quiet:
            why = "" if options.device else " (no GPU was found)"
            log(f"{gpu.name} is a software adapter: it works, slowly{why}")
            if options.kv_type in (KvType.F16, KvType.Q8_0):
                slow = f"a cache of {options.kv_type} needs other kernels there, several times as slow"
                log(f"{slow}: leave -ctk and -ctv out")
        if verbose:
            log(f"{path} on {gpu.name}")
            log("\n".join(plan.lines()))

    llama = Llama(
        path,
        device=options.device,
        context=options.context,
        chunk=options.chunk,
        kv_type=options.kv_type,
        precision=options.precision,
        kv_memory=options.kv_memory,
        kv_sequences=sequences or 1,
        parallel=sequences or PARALLEL,
        progress=progress_line("loading", quiet, check),
        on_plan=on_plan,
    )
    check()
    if verbose:
        t = llama.load_times
        log(
            f"header {t.open_s:.2f} s, device {t.device_s:.2f} s, weights {t.weights_s:.2f} s, "
            f"kernels {t.compile_s:.2f} s, precision {llama.precision}, {'fused' if llama.fused else 'unfused'}"
        )
    if options.precision is Precision.FAST and llama.precision != Precision.FAST and not quiet:
        log("int8 activations do not suit this model's shapes: precision high is used")
    if llama.tokenizer.warning and not quiet:
        log(llama.tokenizer.warning)
    return llama


@models_app.callback(invoke_without_command=True)
def models(context: typer.Context, debug: o.DebugOption = False) -> None:
    if context.invoked_subcommand is None:
        models_list()


@models_app.command("list")
def models_list(debug: o.DebugOption = False) -> None:
    """List the models that have a name.

    The status: tried (by the developers), should run (its architecture does), or not yet.
    """
    from llamagpu.hub.catalogue import CATALOGUE

    print_models(CATALOGUE.values())


@models_app.command("search")
def models_search(
    text: Annotated[list[str], typer.Argument(help="Words of a name, title or licence.")],
    debug: o.DebugOption = False,
) -> None:
    """List the models whose name, title or licence has all the words."""
    from llamagpu.hub.catalogue import search, suggest

    words = " ".join(text)
    found = search(words)
    if not found:
        near = suggest(words)
        remedy = f"did you mean {' or '.join(near)}?" if near else "give any other as hf:user/repo[:QUANT]"
        raise LlamaGpuError(f"no model that has a name matches {words}", remedy)
    print_models(found)


def print_models(entries: "Iterable[Entry]") -> None:
    """A line for each, after a heading on a terminal."""
    from llamagpu.hub.registry import DEFAULT, list_models

    rows = [("name", "size", "fetched", "status", "model")] if sys.stdout and sys.stdout.isatty() else []
    for m in list_models(entries):
        fetched, default = "fetched" if m.path else "-", " (default)" if m.entry.name == DEFAULT else ""
        rows.append((m.entry.name, size(m.entry.file_bytes), fetched, m.entry.status, m.entry.title + default))
    for name, file_size, fetched, status, title in rows:
        write(f"{name:<16}{file_size:>8}  {fetched:<9}{status:<12}{title}\n")


def size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


@models_app.command("info")
def models_info(name: o.NameArgument, debug: o.DebugOption = False) -> None:
    """Print what is known about a model that has a name."""
    from llamagpu.hub.registry import fetched, find_entry

    entry = find_entry(name)
    options = {key.replace("temperature", "temp").replace("_", "-"): value for key, value in entry.sampling.items()}
    source = f"the wheel {entry.wheel.package} {entry.wheel.version}" if entry.wheel else entry.hub_spec
    other = f" (other quants: hf:{entry.repo})" if entry.wheel else ""
    fields = {
        "name": ", ".join((entry.name, *entry.aliases)),
        "title": entry.title,
        "from": f"{source}{other}",
        "size": f"{size(entry.file_bytes)} ({entry.quant})",
        "licence": entry.licence,
        "context": f"{entry.context} tokens",
        "architecture": entry.architecture,
        "sampling": " ".join(f"--{key} {value}" for key, value in options.items()) or "its maker suggests none",
        "status": entry.status,
        "fetched": str(fetched(entry) or "no"),
    }
    for key, value in fields.items():
        write(f"{key:<14}{value}\n")


@models_app.command("pull")
def models_pull(name: o.NameArgument, debug: o.DebugOption = False) -> None:
    """Fetch a model into the cache and print its path."""
    from llamagpu.hub.registry import pull

    write(f"{pull(name)}\n")


@models_app.command("rm")
def models_rm(name: o.NameArgument, debug: o.DebugOption = False) -> None:
    """Remove a fetched model from the cache. Hugging Face tools share theirs: they lose the file, too."""
    from llamagpu.hub.registry import remove

    log(f"removed {remove(name)}")


@models_app.command("path")
def models_path(name: o.NameArgument, debug: o.DebugOption = False) -> None:
    """Print the path of a fetched model."""
    from llamagpu.hub.registry import path

    write(f"{path(name)}\n")
