"""The `generate` command: encode the prompt, stream the text, print a summary."""

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llamagpu.cli import options as o
from llamagpu.cli.grammar import GrammarOption, RegexOption, SchemaOption, read_grammar
from llamagpu.cli.models import find_model, open_model
from llamagpu.cli.terminal import (
    Interrupted,
    Usage,
    check_folder,
    has_content,
    interruptible,
    log,
    log_in_text,
    on_terminal,
    progress_line,
    read_text,
    write,
)
from llamagpu.cli.tokenize import check_bytes
from llamagpu.engine.options import EngineOptions
from llamagpu.files import chat_template
from llamagpu.gpu.caps import Library
from llamagpu.hub.catalogue import DEFAULT

if TYPE_CHECKING:
    from llamagpu.engine.sampler import Sampling
    from llamagpu.llama import Generation, Llama, Message

LARGER_MODEL = "qwen2.5-1.5b"
# The text repeats itself if the last WINDOW tokens have fewer than DISTINCT different runs of 4 tokens. The prose of
# this repository has at least 205, its tables and code at least 102 (SmolLM2's tokens).
WINDOW, DISTINCT = 256, 48
FEW_TOKENS = 16  # the time of so few is that of starting: their rate would say nothing about the speed


def generate(
    model: o.SampledModelOption = DEFAULT,
    hf_repo: o.HfOption = None,
    prompt: o.PromptOption = None,
    file: o.FileOption = None,
    predict: o.PredictOption = -1,
    ctx_size: o.ContextOption = 0,
    kv_memory: o.KvMemoryOption = None,
    temp: o.TempOption = 0.8,
    top_k: o.TopKOption = 40,
    top_p: o.TopPOption = 0.95,
    min_p: o.MinPOption = 0.05,
    repeat_penalty: o.PenaltyOption = 1.0,
    repeat_last_n: o.LastNOption = 64,
    presence_penalty: o.PresenceOption = 0.0,
    frequency_penalty: o.FrequencyOption = 0.0,
    logit_bias: o.BiasOption = None,
    seed: o.SeedOption = -1,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", "-r", "--reverse-prompt", help="End before this text; may be repeated (default: none)."),
    ] = None,
    ignore_eos: Annotated[bool, o.option("--ignore-eos", help="Continue after the model's end token.")] = False,
    json_schema: SchemaOption = None,
    grammar: GrammarOption = None,
    regex: RegexOption = None,
    raw: Annotated[
        bool, o.option("--raw", "-no-cnv", help="Continue the text as it is, without the chat template.")
    ] = False,
    system: o.SystemOption = None,
    ubatch: o.UbatchOption = None,
    cache_type: o.CacheOption = None,
    prompt_cache: o.PromptCacheOption = None,
    prompt_cache_ro: o.PromptCacheRoOption = False,
    precision: o.PrecisionOption = None,
    device: o.DeviceOption = None,
    backend: o.BackendOption = Library.AUTO,
    offline: o.OfflineOption = False,
    as_json: o.JsonOption = False,
    quiet: o.QuietOption = False,
    verbose: o.VerboseOption = False,
    debug: o.DebugOption = False,
) -> None:
    """Generate text from -p, -f or standard input and stream it to stdout."""
    text = read_text(prompt, file)
    if stop and "" in stop:
        raise Usage("--stop has no text", "give the text to end before, or leave --stop out")
    if prompt_cache_ro and not prompt_cache:
        raise Usage("--prompt-cache-ro is given without a file", "name it with --prompt-cache FILE")
    if prompt_cache and not prompt_cache_ro:
        check_folder(prompt_cache)
    matched = read_grammar(json_schema, grammar, regex)
    bias = parse_bias(logit_bias)
    path = find_model(model, hf_repo, offline, quiet)
    if not raw:
        chat_template.start()
    options = EngineOptions(device, ctx_size or None, ubatch, cache_type, precision, kv_memory=kv_memory)
    with interruptible() as check:
        llama = open_model(path, options, quiet, verbose, check)
        if prompt_cache and (prompt_cache_ro or has_content(prompt_cache)):
            restored = llama.load_prompt(prompt_cache, progress_line("restoring prompt", quiet, check))
            if verbose:
                log(f"{prompt_cache}: {restored} tokens restored in {llama.load_times.prompt_s:.2f} s")
        penalties = (repeat_penalty, repeat_last_n, presence_penalty, frequency_penalty)
        how = sampling(temp, top_k, top_p, min_p, penalties, bias, seed, verbose)
        run = llama.generate(
            encode(llama, text, system, raw),
            max_tokens=predict,
            sampling=how,
            stop=stop or [],
            grammar=matched,
            ignore_eos=ignore_eos,
            progress=progress_line("reading prompt", quiet, check),
        )
        stream(run, check, shown=not as_json, warn=not quiet)
        if as_json:
            write(json.dumps(result(run), ensure_ascii=False) + "\n")
        elif not quiet:
            log(summary(run))
            if model == DEFAULT and not hf_repo and on_terminal():
                log(f"a larger model should write better: `llamagpu generate -m {LARGER_MODEL} -p ...`")
    if prompt_cache and not prompt_cache_ro:
        save_prompt(run, prompt_cache, quiet)
    if run.finish_reason == "interrupted":
        llama.close()  # a driver may crash where the process ends while steps run (SwiftShader does)
        raise typer.Exit(Interrupted.exit_code)


def encode(llama: "Llama", text: str, system: str | None, raw: bool) -> list[int]:
    """The prompt ids: with the chat template for an instruct model, without it for a base model or --raw."""
    check_bytes(llama.tokenizer, text)
    if not raw and llama.tokenizer.chat_template is not None:
        if not text.strip():
            raise Usage("the message is empty", "give some text; --raw starts from nothing")
        return llama.encode_chat([*system_message(system), {"role": "user", "content": text}])
    if system:
        reason = "--raw leaves that out" if raw else "this model has none"
        raise Usage(f"--system goes into the chat template, and {reason}", "put it into the prompt")
    return llama.tokenizer.encode(text)


def system_message(text: str | None) -> "list[Message]":
    return [{"role": "system", "content": text}] if text else []


def parse_bias(entries: Sequence[str] | None) -> dict[int, float]:
    """TOKEN_ID+BIAS and TOKEN_ID-BIAS, as llama.cpp writes them."""
    biases = {}
    for entry in entries or ():
        found = re.fullmatch(r"(\d+)([+-](?:\d+\.?\d*|\.\d+|inf))", entry)
        if not found or not (abs(float(found[2])) <= 100 or found[2] == "-inf"):
            raise Usage(
                f"--logit-bias is {entry}", "give a token id and a number from -100 to +100, as 15043+1; or 15043-inf"
            )
        biases[int(found[1])] = float(found[2])
    return biases


def sampling(
    temp: float,
    top_k: int,
    top_p: float,
    min_p: float,
    penalties: tuple[float, int, float, float],
    bias: dict[int, float],
    seed: int,
    verbose: bool,
) -> "Sampling":
    """`penalties`: repeat penalty, its window, presence and frequency penalty."""
    from llamagpu.engine.sampler import Sampling

    if seed < 0:
        seed = int.from_bytes(os.urandom(4), "little")
    if verbose and temp > 0:
        log(f"seed {seed}")
    repeat, last_n, presence, frequency = penalties
    return Sampling(temp, top_k, top_p, min_p, repeat, last_n, seed, presence, frequency, bias)


def stream(run: "Generation", check: Callable[[], None], shown: bool = True, warn: bool = False) -> None:
    """Write each token as it is generated, then one newline. Ctrl-C ends the generation.

    `warn`: say once on stderr that the text repeats itself.
    """
    try:
        for token in run:
            if shown and token.text:
                write(token.text)
            check()
            if warn and len(run.ids) % 32 == 0 and repeats_itself(run.ids):
                log_in_text(
                    "the text repeats itself: try --repeat-penalty 1.1 or a larger model, and -n for its length"
                )
                warn = False
    except Interrupted:
        run.finish_reason = "interrupted"
    if shown:
        write("\n")


def repeats_itself(ids: Sequence[int]) -> bool:
    last = ids[-WINDOW:]
    return len(last) == WINDOW and len(set(zip(last, last[1:], last[2:], last[3:], strict=False))) < DISTINCT


def result(run: "Generation") -> dict[str, object]:
    """The JSON object of --json."""
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
    """One line with the measured times and speeds."""
    t = run.timings
    cached = f" ({t.cached_tokens} from the cache)" if t.cached_tokens else ""
    few = t.cached_tokens and t.prompt_tokens - t.cached_tokens < FEW_TOKENS
    speed = f", {t.prefill_tps:.1f} tok/s" if t.prefill_s and not few else ""
    fields = [f"load {run.llama.load_times.total_s:.2f} s", f"prompt {t.prompt_tokens} tokens{cached}{speed}"]
    if t.tokens:
        fields.append(f"first token {t.first_token_s:.2f} s")
    if t.tokens > 1:
        fields.append(f"{t.tokens} tokens, {t.decode_tps:.1f} tok/s")
    if run.finish_reason == "context":
        fields.append(f"the context of {run.llama.context} is full")
    if run.finish_reason == "interrupted":
        fields.append("interrupted")
    return " | ".join(fields)


def save_prompt(run: "Generation", path: Path, quiet: bool) -> None:
    """Save the prompt cache if the whole prompt was computed and the file does not hold all of it.

    The last token is computed in every run, so it is never from the cache.
    """
    times = run.timings
    if times.prefill_s and (times.cached_tokens < times.prompt_tokens - 1 or not path.exists()):
        with interruptible() as check:
            run.llama.save_prompt(path, times.prompt_tokens, progress_line("saving prompt", quiet, check))
