"""The `convert` command: quantises a checkpoint and reports the error."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llamagpu.cli import options as o
from llamagpu.cli.terminal import Usage, interruptible, log, progress_line, read_text, write
from llamagpu.errors import DeviceLost, DoesNotFit, LlamaGpuError
from llamagpu.gpu.caps import Library
from llamagpu.progress import ByteProgress

if TYPE_CHECKING:
    from llamagpu.convert.convert import Plan
    from llamagpu.convert.source import Source

# Remedies for other commands, and what they are for `convert`
REMEDIES = {
    "use a GGUF file by its path": "give a folder or a file as SOURCE",
    "give a GGUF file, a name": "give a Hugging Face folder, a GGUF file, a name",
    "; perplexity also takes a smaller -c (8 or more)": "",
}


class Target(StrEnum):
    q4_0 = "q4_0"
    q4_1 = "q4_1"
    q8_0 = "q8_0"
    f16 = "f16"
    bf16 = "bf16"
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
    target: Annotated[
        str | None, typer.Argument(metavar="[OUT]", help="File to write (default: named after SOURCE and --to).")
    ] = None,
    to: Annotated[
        Target | None,
        typer.Option(
            "--to",
            help="Type of the weights; packed loads without repacking (default: q4_0; AWQ and GPTQ are kept exactly).",
        ),
    ] = None,
    keep_output: Annotated[
        Output, typer.Option("--keep-output", help="Type of the output matrix and the embeddings with 4-bit weights.")
    ] = Output.q8_0,
    quality: Annotated[
        Effort | None,
        typer.Option(
            "--quality",
            help="fast: round to nearest; best: search the best scales (default: fast, with --calibrate best).",
        ),
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(
            "--calibrate", help="Text that shows which weights matter most, for --quality best (default: none)."
        ),
    ] = None,
    evaluate: Annotated[
        str | None,
        typer.Option("--eval", help="Text for perplexity and KL divergence, before and after (default: none)."),
    ] = None,
    chunks: Annotated[int, typer.Option("--chunks", min=0, help="Chunks of 512 tokens for --eval; 0: all.")] = 0,
    threads: Annotated[int, typer.Option("-t", "--threads", min=0, help="Threads; 0: one per core.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Overwrite OUT.")] = False,
    device: o.DeviceOption = None,
    backend: o.BackendOption = Library.AUTO,
    offline: o.OfflineOption = False,
    as_json: o.JsonOption = False,
    quiet: o.QuietOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Convert a checkpoint to a Q4 GGUF, or to a packed file that loads without repacking."""
    from llamagpu.convert import report
    from llamagpu.convert.convert import PLAIN, open_source, original_model, plan, remove_stale, temporary_model
    from llamagpu.convert.convert import convert as run

    texts = {name: read_text(None, file) for name, file in (("calibrate", calibrate), ("eval", evaluate)) if file}
    best = quality == Effort.best or (quality is None and calibrate is not None)
    if calibrate and not best:
        raise Usage("--calibrate does nothing for --quality fast", "use --quality best")
    with ExitStack() as undo:
        undo.enter_context(own_remedies())
        check = undo.enter_context(interruptible())
        found = undo.enter_context(closing(open_source(source, not quiet, offline)))
        size = found.file_bytes
        bar = undo.enter_context(ByteProgress(size, shown=not quiet))

        def progress(name: str, done: int, total: int) -> None:
            check()
            if name:
                bar.update(name, done * size // max(1, total))
            else:
                bar.close()

        planned = plan(found, to, keep_output, packed=Path(target or "").suffix == ".safetensors")
        path = output_path(found, target, to, planned, force)
        if not quiet and not bar.shown:
            log(f"converting {found.name} ({size / 1e6:,.0f} MB) to {path}")
        for warning in planned.warnings if not quiet else ():
            log(f"warning: {warning}")
        remove_stale(path)
        importance = {}
        if texts:
            from llamagpu.convert import calibrate as measuring

            context = measuring.check_texts(found, texts.values(), device)
            before = undo.enter_context(original_model(found, path, threads, progress))
        if calibrate:
            line = progress_line("calibrating", quiet, check)
            importance = measuring.calibrate(before, texts["calibrate"], line, device, context)
        result = run(found, path, planned, best=best, importance=importance, threads=threads, progress=progress)
        if evaluate:
            paths = {"before": before, "after": path}
            if best:
                paths["plain"] = undo.enter_context(temporary_model(path, PLAIN, found, planned, threads, progress))
            line = progress_line("evaluating", quiet, check)
            figures = measuring.compare(list(paths.values()), texts["eval"], line, device, context, most=chunks)
            result.quality = dict(zip(paths, figures, strict=True))
    told = () if quiet else planned.warnings
    write(json.dumps(report.as_json(result), indent=1) if as_json else "\n".join(report.lines(result, told)))
    write("\n")


@contextmanager
def own_remedies() -> Iterator[None]:
    """Errors of fetching and running a model advise options of `generate`, which `convert` does not have."""
    try:
        yield
    except (DoesNotFit, DeviceLost) as error:
        error.advise("leave out --calibrate and --eval, which run the model, or choose another --device")
        raise
    except LlamaGpuError as error:
        for theirs, ours in REMEDIES.items():
            error.advise(error.remedy.replace(theirs, ours))
        raise


def output_path(source: "Source", wanted: str | None, to: str | None, planned: "Plan", force: bool) -> Path:
    suffix = ".safetensors" if planned.packed else ".gguf"
    name = re.sub(r"[.-](I?Q\d\w*|B?F16|F32)$", "", source.name, flags=re.IGNORECASE)
    path = Path(wanted or ".").expanduser()
    if path.is_dir():
        path /= f"{name}-{to or ('packed' if planned.packed else 'q4_0')}{suffix}"
    if path.suffix != suffix:
        default = "no GGUF type holds this checkpoint exactly: it" if planned.packed else "convert"
        cause = f"--to {to}" if to else default
        other = ", or use --to q4_1" if planned.packed and to is None else ""
        raise Usage(f"{cause} writes a {suffix} file, and OUT is {path.name}", f"name it {path.stem}{suffix}{other}")
    if path.exists() and any(path.samefile(file) for file in source.files):
        raise Usage(f"{path} is the source, or part of it", "name another file")
    if path.exists() and not force:
        raise LlamaGpuError(f"{path} exists already", "use --force to overwrite it, or name another file")
    return path
