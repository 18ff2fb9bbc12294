"""The command line: arguments, messages, exit codes. `main` is where every error ends."""

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamagpu import cli_measure
from llamagpu import options as o
from llamagpu.cli_convert import convert
from llamagpu.errors import DoesNotFit, LlamaGpuError, about
from llamagpu.talk import converse, encode, result, stream, summary
from llamagpu.terminal import Interrupted, Usage, bar, check_folder, interruptible, is_there, note, out, read_text

if TYPE_CHECKING:
    from pathlib import Path

    from llamagpu.engine.generate import Generation, Llama
    from llamagpu.engine.sampler import Sampling

app = typer.Typer(
    name="llamagpu",
    help="Run Llama-family GGUF models on any WebGPU adapter.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes 0.1 s to import, and its boxes leave 20 columns for the words
    context_settings={"help_option_names": ["-h", "--help"]},
)
models_app = typer.Typer(help="Models by name: list, fetch, remove.", rich_markup_mode=None)
app.add_typer(models_app, name="models")
app.command()(convert)


def show_version(wanted: bool) -> None:
    if wanted:
        from llamagpu import __version__

        out(f"llamagpu {__version__}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: o.DebugOption = False,
) -> None:
    if context.invoked_subcommand is None:
        out(context.get_help() + "\n")


@app.command()
def generate(
    model: o.ModelOption = "smollm2",
    hf_repo: o.HfOption = None,
    prompt: o.PromptOption = None,
    file: o.FileOption = None,
    predict: o.PredictOption = -1,
    ctx_size: o.ContextOption = 0,
    temp: o.TempOption = 0.8,
    top_k: o.TopKOption = 40,
    top_p: o.TopPOption = 0.95,
    min_p: o.MinPOption = 0.05,
    repeat_penalty: o.PenaltyOption = 1.0,
    repeat_last_n: o.LastNOption = 64,
    seed: o.SeedOption = -1,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", "-r", "--reverse-prompt", help="End before this text; may be repeated."),
    ] = None,
    ignore_eos: Annotated[bool, o.option("--ignore-eos", help="Go on after the model's end token.")] = False,
    raw: Annotated[
        bool, o.option("--raw", "-no-cnv", help="Continue the text as it is: no chat template.")
    ] = False,
    system: o.SystemOption = None,
    ubatch: o.UbatchOption = None,
    cache_type: o.CacheOption = None,
    prompt_cache: o.PromptCacheOption = None,
    prompt_cache_ro: o.PromptCacheRoOption = False,
    precision: o.PrecisionOption = None,
    device: o.DeviceOption = None,
    offline: o.OfflineOption = False,
    as_json: o.JsonOption = False,
    quiet: o.QuietOption = False,
    verbose: o.VerboseOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Write text: from -p, -f or standard input to stdout, token by token."""
    text = read_text(prompt, file)
    if prompt_cache_ro and not prompt_cache:
        raise Usage("--prompt-cache-ro is given without a file", "name it with --prompt-cache FILE")
    if prompt_cache and not prompt_cache_ro:
        check_folder(prompt_cache)
    path = find_model(model, hf_repo, offline, quiet)
    with interruptible() as check:
        llama = open_model(
            path, quiet, verbose, check,
            device=device, context=ctx_size or None, chunk=ubatch, kv_type=cache_type, precision=precision,
        )  # fmt: skip
        if prompt_cache and (prompt_cache_ro or is_there(prompt_cache)):
            restored = llama.load_prompt(prompt_cache, bar("restoring prompt", quiet, check))
            if verbose:
                note(f"{prompt_cache}: {restored} tokens restored in {llama.load_times.prompt_s:.2f} s")
        run = llama.generate(
            encode(llama, text, system, raw),
            max_tokens=predict,
            sampling=sampling(temp, top_k, top_p, min_p, repeat_penalty, repeat_last_n, seed, verbose),
            stop=stop or [],
            ignore_eos=ignore_eos,
            progress=bar("reading prompt", quiet, check),
        )
        stream(run, check, shown=not as_json)
        if as_json:
            out(json.dumps(result(run), ensure_ascii=False) + "\n")
        elif not quiet:
            note(summary(run))
    if prompt_cache and not prompt_cache_ro:
        keep(run, prompt_cache, quiet)
    if run.finish_reason == "interrupted":
        raise typer.Exit(Interrupted.exit_code)


def keep(run: "Generation", path: "Path", quiet: bool) -> None:
    """Save the prompt if it was read to its end, unless the file holds all of it; the last token is always read."""
    times = run.timings
    if times.prefill_s and (times.cached_tokens < times.prompt_tokens - 1 or not os.path.exists(path)):
        with interruptible() as check:
            run.llama.save_prompt(path, times.prompt_tokens, bar("saving prompt", quiet, check))


def sampling(
    temp: float, top_k: int, top_p: float, min_p: float, penalty: float, last_n: int, seed: int, verbose: bool
) -> "Sampling":
    from llamagpu.engine.sampler import Sampling

    if seed < 0:
        seed = int.from_bytes(os.urandom(4), "little")
    if verbose and temp > 0:
        note(f"seed {seed}")
    return Sampling(temp, top_k, top_p, min_p, penalty, last_n, seed)


@app.command()
def chat(
    model: o.ModelOption = "smollm2",
    hf_repo: o.HfOption = None,
    system: o.SystemOption = None,
    predict: o.PredictOption = -1,
    ctx_size: o.ContextOption = 0,
    temp: o.TempOption = 0.8,
    top_k: o.TopKOption = 40,
    top_p: o.TopPOption = 0.95,
    min_p: o.MinPOption = 0.05,
    repeat_penalty: o.PenaltyOption = 1.0,
    repeat_last_n: o.LastNOption = 64,
    seed: o.SeedOption = -1,
    ubatch: o.UbatchOption = None,
    cache_type: o.CacheOption = None,
    precision: o.PrecisionOption = None,
    device: o.DeviceOption = None,
    offline: o.OfflineOption = False,
    quiet: o.QuietOption = False,
    verbose: o.VerboseOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Talk with a model, line by line. /clear starts anew; /exit or Ctrl-D ends; Ctrl-C stops an answer."""
    path = find_model(model, hf_repo, offline, quiet)
    with interruptible() as check:
        llama = open_model(
            path, quiet, verbose, check,
            device=device, context=ctx_size or None, chunk=ubatch, kv_type=cache_type, precision=precision,
        )  # fmt: skip
    choices = sampling(temp, top_k, top_p, min_p, repeat_penalty, repeat_last_n, seed, verbose)
    converse(llama, system, choices, predict, quiet, verbose)


@app.command()
def tokenize(
    model: o.ModelOption = "smollm2",
    hf_repo: o.HfOption = None,
    prompt: o.PromptOption = None,
    file: o.FileOption = None,
    no_bos: Annotated[bool, o.option("--no-bos", help="No BOS token in front.")] = False,
    no_special: Annotated[
        bool, o.option("--no-special", help="Take the text of special tokens as plain text.")
    ] = False,
    decode: Annotated[bool, o.option("--decode", help="The way back: a JSON list of ids to text.")] = False,
    offline: o.OfflineOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Text to a JSON list of token ids, or back with --decode. Needs no GPU."""
    from llamagpu.files.packed_file import open_model as open_file
    from llamagpu.files.tokenizer import Tokenizer

    text = read_text(prompt, file)
    path = find_model(model, hf_repo, offline)
    with about(path):
        tokenizer = Tokenizer.from_gguf(open_file(path).metadata)
        if decode:
            out(tokenizer.decode_bytes(ids_of(text), special=not no_special))
        else:
            ids = tokenizer.encode(text, bos=False if no_bos else None, special=not no_special)
            out(json.dumps(ids) + "\n")


def ids_of(text: str) -> list[int]:
    try:
        ids = json.loads(text)
    except (ValueError, RecursionError):
        ids = None
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise Usage("--decode wants a JSON list of ids", "such as [1, 2, 3]")
    return ids


@app.command()
def perplexity(
    model: o.ModelOption = "smollm2",
    hf_repo: o.HfOption = None,
    file: o.FileOption = None,
    ctx_size: Annotated[
        int, o.option("-c", "--ctx-size", min=8, help="Tokens of a chunk; its second half counts.")
    ] = 512,
    cache_type: o.CacheOption = None,
    precision: o.PrecisionOption = None,
    device: o.DeviceOption = None,
    offline: o.OfflineOption = False,
    as_json: o.JsonOption = False,
    quiet: o.QuietOption = False,
    verbose: o.VerboseOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Perplexity of a text from -f or standard input, by the method of llama-perplexity."""
    from llamagpu.tools.perplexity import perplexity as measure

    text = read_text(None, file)
    path = find_model(model, hf_repo, offline, quiet)
    with interruptible() as check:
        llama = open_model(
            path, quiet, verbose, check,
            device=device, context=ctx_size, kv_type=cache_type, precision=precision,
        )  # fmt: skip
        found = measure(llama, text, ctx_size, bar("chunks", quiet, check))
    if as_json:
        counted = {"tokens": found.tokens, "chunks": found.chunks, "ctx_size": ctx_size}
        out(json.dumps({"perplexity": found.value, "error": found.error, **counted}) + "\n")
    else:
        chunks = f"{found.tokens} tokens in {found.chunks} chunks of {ctx_size}"
        out(f"PPL = {found.value:.4f} +/- {found.error:.4f} ({chunks})\n")


@app.command()
def devices(
    as_json: o.JsonOption = False,
    kernels: Annotated[
        bool, o.option("--kernels", help="Which kernel each shape of the model takes.")
    ] = False,
    model: o.ModelOption = "smollm2",
    hf_repo: o.HfOption = None,
    device: o.DeviceOption = None,
    offline: o.OfflineOption = False,
    debug: o.DebugOption = False,
) -> None:
    """The adapters: features, limits, which one is used and why."""
    from llamagpu.tools.devices import device_lines, kernel_lines, list_devices, model_kernels

    found = model_kernels(find_model(model, hf_repo, offline), device) if kernels else list_devices(device)
    lines = kernel_lines(found) if kernels else device_lines(found)
    out((json.dumps(found, indent=1) if as_json else "\n".join(lines)) + "\n")


@models_app.callback(invoke_without_command=True)
def models_list(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        from llamagpu.tools.models import list_models

        for m in list_models():
            state = "fetched" if m.path else "-"
            out(f"{m.name:<12}{m.file_bytes / 1e6:8.1f} MB  {state:<8} {m.title}\n")


@models_app.command("pull")
def models_pull(name: o.NameArgument) -> None:
    """Fetch a model into the cache and print its path."""
    from llamagpu.tools.models import pull

    out(f"{pull(name)}\n")


@models_app.command("rm")
def models_rm(name: o.NameArgument) -> None:
    """Remove a fetched model from the cache."""
    from llamagpu.tools.models import remove

    note(f"removed {remove(name)}")


@models_app.command("path")
def models_path(name: o.NameArgument) -> None:
    """Print where a fetched model lies."""
    from llamagpu.tools.models import path

    out(f"{path(name)}\n")


cli_measure.mount(app)


def find_model(model: str, hf_repo: str | None, offline: bool, quiet: bool = False) -> "Path":
    from llamagpu.tools.models import resolve

    return resolve(f"hf:{hf_repo}" if hf_repo else model, progress=not quiet, offline=offline)


def open_model(
    path: "Path", quiet: bool, verbose: bool, check: Callable[[], None], **settings: Any
) -> "Llama":
    """The model on its device, with what is to be said on the way; settings as for Llama."""
    from llamagpu.engine.generate import Llama

    def on_plan(plan: Any, gpu: Any) -> None:
        check()
        if gpu.software and not quiet:
            why = "" if settings["device"] else " (no GPU was found)"
            note(f"{gpu.info['device']} is a software adapter: it works, slowly{why}")
            if settings.get("kv_type") == "f16":
                note("an f16 cache needs other kernels there, several times as slow: leave -ctk and -ctv out")
        if verbose:
            note(f"{path} on {gpu.info['device']}")
            note("\n".join(plan.lines()))

    llama = Llama(path, on_plan=on_plan, progress=bar("loading", quiet, check), **settings)
    check()
    if verbose:
        t = llama.load_times
        note(f"header {t.open_s:.2f} s, device {t.device_s:.2f} s, weights {t.weights_s:.2f} s, "
             f"kernels {t.compile_s:.2f} s, precision {llama.precision}, "
             f"layers {'joined' if llama.model.joined else 'apart'}")  # fmt: skip
    if settings.get("precision") == "fast" != llama.precision and not quiet:
        note("int8 activations do not suit this model's shapes: precision high is used")
    if llama.tokenizer.warning and not quiet:
        note(llama.tokenizer.warning)
    return llama


def main() -> None:
    """Exit codes: those of the exceptions, 2 for usage, 130 after Ctrl-C, 0 if nothing went wrong."""
    for file, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "strict")):
        if hasattr(file, "reconfigure"):  # None when closed
            file.reconfigure(encoding="utf-8", errors=errors)
    try:
        code = app(standalone_mode=False) or 0  # with standalone_mode typer would take Ctrl-C for itself
    except (KeyboardInterrupt, typer.Abort):
        code = Interrupted.exit_code
    except Exception as error:
        if os.environ.get("LLAMAGPU_DEBUG") == "1":
            traceback.print_exc()
        code = report(error)
    sys.exit(code)


def report(error: Exception) -> int:
    """What went wrong and what to do about it, on stderr; the exit code."""
    if isinstance(error, LlamaGpuError):
        if isinstance(error, Interrupted):
            note("interrupted")
        elif error.cause:
            note(f"error: {error.cause}" + (f"\n       {error.remedy}" if error.remedy else ""))
        return error.exit_code
    if hasattr(error, "show") and hasattr(error, "exit_code"):  # typer's own, from click or its copy of it
        error.show()
        return int(error.exit_code)
    if isinstance(error, MemoryError):
        note("error: this machine has no memory left\n       use a smaller model, or a smaller -c or -ub")
        return DoesNotFit.exit_code
    first = next(iter(str(error).strip().splitlines()), "")
    note(f"error: {type(error).__name__}: {first}\n       this is a bug; --debug shows where")
    return 1
