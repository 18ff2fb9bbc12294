"""Finds and opens the model of a command, and the `models` commands."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from llamagpu.cli import options as o
from llamagpu.cli.terminal import log, progress_line, write
from llamagpu.engine.options import EngineOptions, KvType, Precision

if TYPE_CHECKING:
    from llamagpu.engine.memory import MemoryPlan
    from llamagpu.gpu.device import Gpu
    from llamagpu.llama import Llama

models_app = typer.Typer(help="List, fetch and remove models by name.", rich_markup_mode=None)


def find_model(model: str, hf_repo: str | None, offline: bool, quiet: bool = False) -> Path:
    """The file that -m or -hf names, fetched if necessary."""
    from llamagpu.hub.registry import resolve

    return resolve(f"hf:{hf_repo}" if hf_repo else model, progress=not quiet, offline=offline)


def open_model(path: Path, options: EngineOptions, quiet: bool, verbose: bool, check: Callable[[], None]) -> "Llama":
    """Open a model and log what a user should know about it. Ctrl-C interrupts the loading through `check`."""
    from llamagpu.llama import Llama

    def on_plan(plan: "MemoryPlan", gpu: "Gpu") -> None:
        check()
        if gpu.software and not quiet:
            why = "" if options.device else " (no GPU was found)"
            log(f"{gpu.name} is a software adapter: it works, slowly{why}")
            if options.kv_type is KvType.F16:
                log("an f16 cache needs other kernels there, several times as slow: leave -ctk and -ctv out")
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
def models_list(context: typer.Context, debug: o.DebugOption = False) -> None:
    if context.invoked_subcommand is None:
        from llamagpu.hub.registry import list_models

        for m in list_models():
            state = "fetched" if m.path else "-"
            write(f"{m.name:<12}{m.file_bytes / 1e6:8.1f} MB  {state:<8} {m.title}\n")


@models_app.command("pull")
def models_pull(name: o.NameArgument, debug: o.DebugOption = False) -> None:
    """Fetch a model into the cache and print its path."""
    from llamagpu.hub.registry import pull

    write(f"{pull(name)}\n")


@models_app.command("rm")
def models_rm(name: o.NameArgument, debug: o.DebugOption = False) -> None:
    """Remove a fetched model from the cache."""
    from llamagpu.hub.registry import remove

    log(f"removed {remove(name)}")


@models_app.command("path")
def models_path(name: o.NameArgument, debug: o.DebugOption = False) -> None:
    """Print the path of a fetched model."""
    from llamagpu.hub.registry import path

    write(f"{path(name)}\n")
