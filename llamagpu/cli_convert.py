"""`llamagpu convert`: any Llama checkpoint in, a quantised model out, and how much it lost."""

import json
import re
from collections.abc import Callable
from contextlib import ExitStack, closing
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamagpu import options as o
from llamagpu.errors import LlamaGpuError
from llamagpu.terminal import Usage, bar, interruptible, note, on_terminal, out, read_text

if TYPE_CHECKING:
    from llamagpu.tools.convert.convert import Plan
    from llamagpu.tools.convert.source import Source


class Target(StrEnum):
    q4_0 = "q4_0"
    q4_1 = "q4_1"
    q8_0 = "q8_0"
    f16 = "f16"
    packed = "packed"


class Output(StrEnum):
    q8_0 = "q8_0"
    q6_k = "q6_k"
    f16 = "f16"


class Effort(StrEnum):
    fast = "fast"
    best = "best"


def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="A Hugging Face folder, a GGUF or llama2.c file, a name, or hf:user/repo."
        ),
    ],
    target: Annotated[str | None, typer.Argument(metavar="[OUT]", help="The file to write.")] = None,
    to: Annotated[
        Target | None,
        typer.Option("--to", help="Type of the weights, or packed: ready for the device. Default q4_0."),
    ] = None,
    keep_output: Annotated[
        Output, typer.Option("--keep-output", help="Type of output matrix and embeddings beside 4-bit weights.")
    ] = Output.q8_0,
    quality: Annotated[
        Effort | None,
        typer.Option("--quality", help="best searches every group's scale; fast rounds. Default fast."),
    ] = None,
    calibrate: Annotated[
        str | None, typer.Option("--calibrate", help="A text on which to see what weights matter, for best.")
    ] = None,
    evaluate: Annotated[
        str | None, typer.Option("--eval", help="A text for perplexity and KL divergence, before and after.")
    ] = None,
    chunks: Annotated[int, typer.Option("--chunks", min=0, help="Of 512 tokens for --eval; 0: all.")] = 0,
    threads: Annotated[int, typer.Option("-t", "--threads", min=0, help="0: one per core.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Overwrite OUT.")] = False,
    device: o.DeviceOption = None,
    offline: o.OfflineOption = False,
    as_json: o.JsonOption = False,
    quiet: o.QuietOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Convert a checkpoint to a Q4 GGUF, or to a packed file that loads without repacking."""
    from llamagpu.tools.convert import report
    from llamagpu.tools.convert.convert import beside, open_source, original, plan, remove_stale
    from llamagpu.tools.convert.convert import convert as run

    texts = {name: read_text(None, file) for name, file in (("c", calibrate), ("e", evaluate)) if file}
    best = quality == Effort.best or (quality is None and calibrate is not None)
    if calibrate and not best:
        raise Usage("--calibrate does nothing for --quality fast", "use --quality best")
    with ExitStack() as undo:
        check = undo.enter_context(interruptible())
        found = undo.enter_context(closing(open_source(source, not quiet, offline)))
        progress = undo.enter_context(closing(TensorBar(quiet, check)))
        chosen = plan(found, to, keep_output, packed=Path(target or "").suffix == ".safetensors")
        path = choose_path(found, target, to, chosen, force)
        if not quiet and not on_terminal():
            note(f"converting {found.name} ({found.nbytes / 1e6:,.0f} MB) to {path}")
        remove_stale(path)
        if texts:
            from llamagpu.tools.convert.observe import check_texts

            context = check_texts(found, texts.values(), device)
            before = undo.enter_context(original(found, path, threads, progress))
        importance = {}
        if calibrate:
            importance = calibration(before, texts["c"], device, context, bar("calibrating", quiet, check))
        made = run(found, path, chosen, best=best, importance=importance, threads=threads, progress=progress)
        if evaluate:
            from llamagpu.tools.convert.observe import compare

            paths = {"before": before, "after": path}
            if best:
                paths["plain"] = undo.enter_context(beside(path, "plain", found, chosen, threads, progress))
            show = bar("evaluating", quiet, check)
            figures = compare(list(paths.values()), texts["e"], show, device, context, most=chunks)
            made.quality = dict(zip(paths, figures, strict=True))
    out(json.dumps(report.as_json(made), indent=1) if as_json else "\n".join(report.lines(made)))
    out("\n")


def choose_path(source: "Source", wanted: str | None, to: str | None, chosen: "Plan", force: bool) -> Path:
    suffix = ".safetensors" if chosen.packed else ".gguf"
    name = re.sub(r"[.-](I?Q\d\w*|B?F16|F32)$", "", source.name, flags=re.IGNORECASE)
    path = Path(wanted or ".").expanduser()
    if path.is_dir():
        path /= f"{name}-{to or ('packed' if chosen.packed else 'q4_0')}{suffix}"
    if path.suffix != suffix:
        cause = f"--to {to}" if to else "no GGUF type holds this checkpoint exactly: it" if chosen.packed else "convert"
        other = ", or use --to q4_1" if chosen.packed and to is None else ""
        raise Usage(f"{cause} writes a {suffix} file, and OUT is {path.name}", f"name it {path.stem}{suffix}{other}")
    if path.exists() and any(path.samefile(file) for file in source.files):
        raise Usage(f"{path} is the source, or part of it", "name another file")
    if path.exists() and not force:
        raise LlamaGpuError(f"{path} exists already", "use --force to overwrite it, or name another file")
    return path


def calibration(
    path: Path, text: str, device: str | None, context: int, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    from llamagpu.engine.generate import Llama
    from llamagpu.tools.convert.observe import calibrate

    with Llama(path, device=device, context=context) as llama:
        return calibrate(llama, text, progress, context)


class TensorBar:
    """Tensor, bytes, speed and time left, on a terminal. It is also where Ctrl-C acts."""

    def __init__(self, quiet: bool, check: Callable[[], None]) -> None:
        self.shown, self.check = not quiet and on_terminal(), check
        self.bar: Any = None

    def __call__(self, name: str, done: int, total: int) -> None:
        self.check()
        if not name:
            self.close()
        elif self.shown:
            if self.bar is None:
                self.open(total)
            self.bar.update(self.task, description=name, completed=done)

    def open(self, total: int) -> None:
        from rich import progress
        from rich.console import Console

        columns = (
            progress.TextColumn("{task.description:<26}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
        )
        self.bar = progress.Progress(*columns, console=Console(stderr=True), transient=True)
        self.task = self.bar.add_task("", total=total)
        self.bar.start()

    def close(self) -> None:
        """Rich hides the cursor meanwhile: it must come back whatever happens."""
        if self.bar:
            self.bar.stop()
        self.bar = None
