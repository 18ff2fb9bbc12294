"""The `batch` command: arguments and progress."""

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llamagpu.cli import options as o
from llamagpu.cli.models import find_model, open_model
from llamagpu.cli.serve import need_packages
from llamagpu.cli.terminal import Interrupted, Usage, log, on_terminal, read_text, status_line
from llamagpu.engine.options import EngineOptions
from llamagpu.errors import LlamaGpuError
from llamagpu.files import chat_template
from llamagpu.gpu.caps import Library
from llamagpu.hub.catalogue import DEFAULT

if TYPE_CHECKING:
    from llamagpu.batch import Progress
    from llamagpu.llama import Llama

LINE_S = 30.0  # between two lines of progress where there is no terminal


def batch(
    source: Annotated[
        Path | None, typer.Option("-i", "--input", help="JSONL file of requests in OpenAI's batch format.")
    ] = None,
    target: Annotated[
        Path | None, typer.Option("-o", "--output", help="JSONL file of answers; it may have some already.")
    ] = None,
    model: o.SampledModelOption = DEFAULT,
    hf_repo: o.HfOption = None,
    parallel: Annotated[int, o.option("-np", "--parallel", min=1, help="Generations that share a step.")] = 8,
    shard: Annotated[str, typer.Option("--shard", help="Part of the lines, i/n: 2/4 is the second of four.")] = "1/1",
    timeout: Annotated[float, o.option("--timeout", help="Seconds for a request.", callback=o.finite(0.1))] = 3600.0,
    template_file: o.TemplateOption = None,
    ctx_size: o.ContextOption = 0,
    kv_memory: o.KvMemoryOption = None,
    temp: o.TempOption = 0.8,
    top_k: o.TopKOption = 40,
    top_p: o.TopPOption = 0.95,
    min_p: o.MinPOption = 0.05,
    repeat_penalty: o.PenaltyOption = 1.0,
    repeat_last_n: o.LastNOption = 64,
    ubatch: o.UbatchOption = None,
    cache_type: o.CacheOption = None,
    precision: o.PrecisionOption = None,
    device: o.DeviceOption = None,
    backend: o.BackendOption = Library.AUTO,
    offline: o.OfflineOption = False,
    quiet: o.QuietOption = False,
    verbose: o.VerboseOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Answer a file of requests. Ended and started again, it goes on where it was.

    Needs the extra: pip install "llamagpu[serve]".
    """
    need_packages()
    from llamagpu.batch import Shard, run_batch
    from llamagpu.serve.options import ServeOptions

    if source is None or target is None:
        raise Usage("the files are missing", "name them with -i IN.jsonl and -o OUT.jsonl")
    if source.resolve() == target.resolve():
        raise Usage("-i and -o are the same file", "name another output")
    index, count = read_shard(shard)
    template = read_text(None, template_file) if template_file else None
    path = find_model(model, hf_repo, offline, quiet)
    chat_template.start()
    engine_options = EngineOptions(device, ctx_size or None, ubatch, cache_type, precision, kv_memory=kv_memory)

    def load() -> "Llama":
        from llamagpu.llama import Sampling

        llama = open_model(path, engine_options, quiet, verbose, lambda: None, parallel)
        llama.sampling = Sampling(temp, top_k, top_p, min_p, repeat_penalty, repeat_last_n)
        llama.tokenizer.chat_template = template or llama.tokenizer.chat_template
        return llama

    options = ServeOptions(
        model=path.stem if model.endswith(".gguf") else model,
        aliases=(model, path.name, path.stem),
        queue=1 << 20,
        timeout_s=timeout,
    )
    show = ProgressLines(quiet)
    try:
        progress = run_batch(load, options, source, target, Shard(index - 1, count), show)
    except KeyboardInterrupt:
        raise Interrupted("interrupted", "the same command goes on from here") from None
    if not quiet:
        status_line("", quiet)
        log(summary(progress))
    if progress.done and progress.failed == progress.done:
        raise LlamaGpuError(f"none of {progress.done} requests succeeded", f"{target} says why, line by line")


class ProgressLines:
    """A status line on a terminal, else a line now and then."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.latest = time.perf_counter()

    def __call__(self, progress: "Progress") -> None:
        status_line(summary(progress), self.quiet)
        if not self.quiet and not on_terminal() and time.perf_counter() - self.latest > LINE_S:
            self.latest = time.perf_counter()
            log(summary(progress))


def summary(progress: "Progress") -> str:
    fields = [f"{progress.skipped + progress.done}/{progress.total} requests"]
    if progress.skipped:
        fields.append(f"{progress.skipped} of them before")
    if progress.failed:
        fields.append(f"{progress.failed} failed")
    if progress.tokens:
        fields.append(f"{progress.tokens} tokens, {progress.tokens_per_second:.1f} tok/s")
    if (left := progress.seconds_left) and left >= 1:
        fields.append(f"{left:.0f} s left")
    return ", ".join(fields)


def read_shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    index, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= index <= count:
        raise Usage(f"--shard {text}", "give i/n, such as 2/4 for the second of four")
    return index, count
