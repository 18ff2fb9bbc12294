"""The `chat` command: a read-eval-print loop over one conversation."""

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from llamagpu.cli import options as o
from llamagpu.cli.generate import sampling, stream, summary, system_message
from llamagpu.cli.models import find_model, open_model
from llamagpu.cli.terminal import Usage, interruptible, log, progress_line, write
from llamagpu.engine.options import EngineOptions
from llamagpu.errors import DoesNotFit

if TYPE_CHECKING:
    from llamagpu.engine.sampler import Sampling
    from llamagpu.llama import Llama, Message


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
    """Chat with a model. /clear starts a new conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer."""
    path = find_model(model, hf_repo, offline, quiet)
    options = EngineOptions(device, ctx_size or None, ubatch, cache_type, precision)
    with interruptible() as check:
        llama = open_model(path, options, quiet, verbose, check)
    how = sampling(temp, top_k, top_p, min_p, repeat_penalty, repeat_last_n, seed, verbose)
    repl(llama, system, how, predict, quiet, verbose)


def repl(llama: "Llama", system: str | None, sampling: "Sampling", predict: int, quiet: bool, verbose: bool) -> None:
    """Answer line by line. Each prompt is the whole conversation, and only its new tokens are computed."""
    if llama.tokenizer.chat_template is None:
        raise Usage("this model has no chat template", "it continues text: use `llamagpu generate`")
    messages = system_message(system)
    while (line := read_line()) is not None and line != "/exit":
        if line == "/clear":
            messages = system_message(system)
        elif line:
            question: Message = {"role": "user", "content": line}
            text = answer(llama, [*messages, question], sampling, predict, quiet, verbose)
            if text is not None:
                messages += [question, {"role": "assistant", "content": text}]


def answer(
    llama: "Llama", messages: "list[Message]", sampling: "Sampling", predict: int, quiet: bool, verbose: bool
) -> str | None:
    """Print and return the next message. None if the conversation does not fit into the context."""
    with interruptible() as check:
        try:
            ids = llama.encode_chat(messages)
            progress = progress_line("reading", quiet, check)
            run = llama.generate(ids, max_tokens=predict, sampling=sampling, progress=progress)
        except DoesNotFit as error:
            log(f"error: {error.cause}\n       /clear starts a new conversation")
            return None
        stream(run, check)
    if verbose or run.finish_reason == "context":
        log(summary(run))
    return run.text


def read_line() -> str | None:
    """The user's next line; None at the end of input. Only a terminal gets a prompt and line editing."""
    prompt = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    if prompt:
        with suppress(ImportError):  # Windows has none
            import readline  # noqa: F401
    try:
        return input(prompt)
    except EOFError:
        if prompt:
            write("\n")
        return None
