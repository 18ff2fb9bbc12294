"""Between a person and a model: prompts go in, text streams out, and what it took is summed up."""

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from llamagpu.errors import DoesNotFit
from llamagpu.terminal import Interrupted, Usage, bar, interruptible, note, out

if TYPE_CHECKING:
    from llamagpu.engine.generate import Generation, Llama
    from llamagpu.engine.sampler import Sampling


def encode(llama: "Llama", text: str, system: str | None, raw: bool) -> list[int]:
    """An instruct model gets its chat template, a base model or --raw the text as it is."""
    if not raw and llama.tokenizer.chat_template is not None:
        return llama.encode_chat([*system_message(system), {"role": "user", "content": text}])
    if system:
        reason = "--raw leaves that out" if raw else "this model has none"
        raise Usage(f"--system goes into the chat template, and {reason}", "put it into the prompt")
    return llama.tokenizer.encode(text)


def system_message(text: str | None) -> list[dict[str, Any]]:
    return [{"role": "system", "content": text}] if text else []


def stream(run: "Generation", check: Callable[[], None], shown: bool = True) -> None:
    """Print tokens as they come, then one newline; Ctrl-C ends it."""
    try:
        for token in run:
            if shown and token.text:
                out(token.text)
            check()
    except Interrupted:
        run.finish_reason = "interrupted"
    if shown:
        out("\n")


def result(run: "Generation") -> dict[str, Any]:
    t = run.timings
    timings = {
        "load_s": run.llama.load_times.total_s,
        "first_token_s": t.first_token_s,
        "prompt_tokens": t.prompt_tokens,
        "cached_tokens": t.cached_tokens,
        "prefill_tps": t.prefill_tps,
        "tokens": t.tokens,
        "decode_tps": t.decode_tps,
    }
    return {
        "prompt_ids": run.prompt_ids,
        "ids": run.ids,
        "text": run.text,
        "finish_reason": run.finish_reason,
        "timings": timings,
    }


def summary(run: "Generation") -> str:
    t = run.timings
    kept = f" ({t.cached_tokens} from the cache)" if t.cached_tokens else ""
    said = [f"load {run.llama.load_times.total_s:.2f} s"]
    speed = f", {t.prefill_tps:.1f} tok/s" if t.prefill_s else ""
    said.append(f"prompt {t.prompt_tokens} tokens{kept}{speed}")
    if t.tokens:
        said.append(f"first token {t.first_token_s:.2f} s")
    if t.tokens > 1:
        said.append(f"{t.tokens} tokens, {t.decode_tps:.1f} tok/s")
    if run.finish_reason == "context":
        said.append(f"the context of {run.llama.limit} is full")
    if run.finish_reason == "interrupted":
        said.append("interrupted")
    return " | ".join(said)


def converse(
    llama: "Llama", system: str | None, choices: "Sampling", predict: int, quiet: bool, verbose: bool
) -> None:
    """Line by line, each answer knowing what was said; the model reads again only what is new."""
    if llama.tokenizer.chat_template is None:
        raise Usage("this model has no chat template", "it continues text: use `llamagpu generate`")
    messages = system_message(system)
    while (line := ask()) is not None and line != "/exit":
        if line == "/clear":
            messages = system_message(system)
        elif line:
            turn = {"role": "user", "content": line}
            said = answer(llama, [*messages, turn], choices, predict, quiet, verbose)
            if said is not None:
                messages += [turn, {"role": "assistant", "content": said}]


def answer(
    llama: "Llama", messages: list[Any], choices: "Sampling", predict: int, quiet: bool, verbose: bool
) -> str | None:
    """Print and return the next turn; None if there is no room for it."""
    with interruptible() as check:
        try:
            ids = llama.encode_chat(messages)
            progress = bar("reading", quiet, check)
            run = llama.generate(ids, max_tokens=predict, sampling=choices, progress=progress)
        except DoesNotFit as error:
            note(f"error: {error.cause}\n       /clear starts a new conversation")
            return None
        stream(run, check)
    if verbose or run.finish_reason == "context":
        note(summary(run))
    return run.text


def ask() -> str | None:
    """A line from the user, None at the end. Only a terminal is prompted, and has its lines edited."""
    prompt = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    if prompt:
        with suppress(ImportError):  # Windows has none
            import readline  # noqa: F401
    try:
        return input(prompt)
    except EOFError:
        if prompt:
            out("\n")
        return None
