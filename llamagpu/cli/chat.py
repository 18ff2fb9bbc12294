"""The `chat` command: arguments, and the choice between a terminal and a pipe."""

import sys

import typer

from llamagpu.cli import options as o
from llamagpu.cli.generate import parse_bias, sampling
from llamagpu.cli.grammar import GrammarOption, RegexOption, SchemaOption, read_grammar
from llamagpu.cli.models import find_model, open_model
from llamagpu.cli.terminal import interruptible, log
from llamagpu.engine.options import EngineOptions
from llamagpu.files import chat_template
from llamagpu.gpu.caps import Library
from llamagpu.hub.catalogue import DEFAULT


def chat(
    model: o.SampledModelOption = DEFAULT,
    hf_repo: o.HfOption = None,
    system: o.SystemOption = None,
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
    json_schema: SchemaOption = None,
    grammar: GrammarOption = None,
    regex: RegexOption = None,
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
    """Chat with a model. /help lists the commands; Ctrl-C stops an answer, Ctrl-D ends.

    Piped, each line of standard input is a message.
    """
    matched = read_grammar(json_schema, grammar, regex)
    bias = parse_bias(logit_bias)
    path = find_model(model, hf_repo, offline, quiet)
    chat_template.start()
    options = EngineOptions(device, ctx_size or None, ubatch, cache_type, precision, kv_memory=kv_memory)
    with interruptible() as check:
        llama = open_model(path, options, quiet, verbose, check)
    penalties = (repeat_penalty, repeat_last_n, presence_penalty, frequency_penalty)
    how = sampling(temp, top_k, top_p, min_p, penalties, bias, seed, verbose)
    from llamagpu.cli.repl import Pipe, Repl

    if not (sys.stdin and sys.stdout and sys.stdin.isatty() and sys.stdout.isatty()):
        raise typer.Exit(Repl(llama, Pipe(), system, how, predict, quiet, verbose, matched).run())
    from llamagpu.cli.prompt import Terminal  # here: prompt_toolkit takes 0.1 s to import

    with Terminal() as terminal:
        repl = Repl(llama, terminal, system, how, predict, quiet, verbose, matched)
        if not quiet:
            log(f"{path.name}, context {llama.context}, /help lists the commands")
        repl.run()
