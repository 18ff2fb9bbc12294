"""The options that several commands share: names, limits and help, each written once."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from llamagpu.arguments import MAX_PENALTY
from llamagpu.engine.options import KvType, Precision
from llamagpu.gpu.caps import Library


def option(*names: str, help: str, **more: Any) -> Any:
    """An option that also has an environment variable: LLAMAGPU_ and its first long name in capitals."""
    long_name = next(name for name in names if name.startswith("--"))
    variable = "LLAMAGPU_" + long_name[2:].upper().replace("-", "_")
    return typer.Option(*names, help=help, envvar=variable, show_envvar=False, **more)


def set_debug(wanted: bool) -> None:
    if wanted:
        os.environ["LLAMAGPU_DEBUG"] = "1"


def set_backend(library: Library) -> Library:
    os.environ["LLAMAGPU_BACKEND"] = library  # whatever opens a device reads it
    return library


def finite(least: float, most: float = math.inf) -> Callable[[float], float]:
    """A callback that refuses what is outside the range, infinity and NaN: `min` lets them through or misnames them."""
    range_text = f"from {least:g} up" if most == math.inf else f"from {least:g} to {most:g}"

    def check(value: float) -> float:
        if not least <= value <= most or value == math.inf:
            raise typer.BadParameter(f"{value:g}: it must be a finite number {range_text}")
        return value

    return check


def by_model(text: str, default: float) -> dict[str, Any]:
    """The help of an option whose default `use_suggested_sampling` sets."""
    return {"help": f"{text} (default: the model's, else {default:g}).", "show_default": False}


def complete_name(incomplete: str) -> list[tuple[str, str]]:
    """The names that a shell offers, with titles. If none fits, the shell offers files."""
    from llamagpu.hub.catalogue import CATALOGUE

    return [(e.name, e.title) for e in CATALOGUE.values() if e.name.startswith(incomplete)]


def complete_model(incomplete: str) -> list[tuple[str, str]]:
    from llamagpu.hub.catalogue import CATALOGUE

    return [(name, title) for name, title in complete_name(incomplete) if CATALOGUE[name].runs]


def use_suggested_sampling(context: typer.Context, model: str) -> str:
    """Make the sampling that the catalogue suggests for the model the default of the options that follow."""
    from llamagpu.hub.catalogue import suggested_sampling

    if not context.params.get("hf_repo") and (suggested := suggested_sampling(model)):
        defaults: dict[str, Any] = {"temp" if name == "temperature" else name: v for name, v in suggested.items()}
        if penalty := defaults.pop("repeat_penalty", None):  # --temp 0 alone stays greedy
            defaults["repeat_penalty"] = lambda: penalty if context.params["temp"] else 1.0
        context.default_map = defaults
    return model


def forget_suggested_sampling(context: typer.Context, repo: str | None) -> str | None:
    if repo:
        context.default_map = None  # -m is not used
    return repo


MODEL_HELP = "Model: a GGUF file, a name (`llamagpu models`), or hf:user/repo[:QUANT]."
ModelOption = Annotated[str, option("-m", "--model", help=MODEL_HELP, autocompletion=complete_model)]
SampledModelOption = Annotated[
    str,
    option(
        *("-m", "--model"),
        help=MODEL_HELP.replace("models`)", "models`; its suggested sampling applies)"),
        is_eager=True,  # before the options whose defaults the model sets
        callback=use_suggested_sampling,
        autocompletion=complete_model,
    ),
]
HfOption = Annotated[
    str | None,
    typer.Option(
        *("-hf", "--hf-repo"),
        help="Hugging Face repository: user/repo[:QUANT] (default: -m).",
        is_eager=True,
        callback=forget_suggested_sampling,
    ),
]
OfflineOption = Annotated[bool, option("--offline", help="Use only models in the cache.")]
DeviceOption = Annotated[
    str | None,
    option(
        "-dev", "--device", help="Adapter: number or part of its name, see `llamagpu devices` (default: the first GPU)."
    ),
]
BackendOption = Annotated[
    Library,
    option("--backend", callback=set_backend, help="WebGPU by wgpu or by Dawn; auto: Dawn where it is faster."),
]
PromptOption = Annotated[
    str | None, typer.Option("-p", "--prompt", help="Text; - reads standard input (default: -, if it is piped).")
]
FileOption = Annotated[
    str | None, typer.Option("-f", "--file", help="File with the text; - reads standard input (default: none).")
]
PredictOption = Annotated[
    int,
    option(
        *("-n", "--predict", "--n-predict", "--max-tokens"),
        min=-1,
        help="Most new tokens; -1: until the model or the context ends.",
    ),
]
ContextOption = Annotated[
    int, option("-c", "--ctx-size", min=0, help="Context length in tokens; 0: the model's, if the KV cache holds it.")
]
KvMemoryOption = Annotated[
    int | None,
    option(
        "--kv-memory",
        min=1,
        help="MiB for the KV cache (default: what -c needs; without -c at most 2048, on a CPU 512).",
    ),
]
TempOption = Annotated[float, option("--temp", callback=finite(0), **by_model("Sampling temperature; 0: greedy", 0.8))]
TopKOption = Annotated[int, option("--top-k", min=0, **by_model("Sample from the k likeliest tokens; 0: from all", 40))]
TopPOption = Annotated[
    float,
    option(
        "--top-p",
        min=0,
        max=1,
        **by_model("Sample from the likeliest tokens that together have this probability; 1: all", 0.95),
    ),
]
MinPOption = Annotated[
    float,
    option(
        "--min-p",
        min=0,
        max=1,
        **by_model("Exclude tokens below this fraction of the likeliest one's probability; 0: none", 0.05),
    ),
]
PenaltyOption = Annotated[
    float,
    option(
        "--repeat-penalty",
        callback=finite(1 / MAX_PENALTY, MAX_PENALTY),
        **by_model("Penalty on tokens of the recent text; 1: none", 1),
    ),
]
LastNOption = Annotated[
    int, option("--repeat-last-n", min=0, help="Number of recent tokens that the penalties apply to; 0: no penalties.")
]
PresenceOption = Annotated[
    float,
    option(
        "--presence-penalty",
        min=-100,
        max=100,
        help="Subtracted from the logits of tokens of the recent text; 0: none.",
    ),
]
FrequencyOption = Annotated[
    float,
    option(
        "--frequency-penalty",
        min=-100,
        max=100,
        help="Subtracted from their logits for each time they occur; 0: none.",
    ),
]
BiasOption = Annotated[
    list[str] | None,
    typer.Option(
        *("-l", "--logit-bias"),
        metavar="TOKEN_ID(+/-)BIAS",
        help="Added to the logit of a token, as in 15043+1 or 15043-inf; may be repeated (default: none).",
    ),
]
SeedOption = Annotated[int, option("-s", "--seed", help="Seed of sampling; -1: a new one for each run.")]
SystemOption = Annotated[
    str | None,
    option("-sys", "--system", "--system-prompt", help="System message for the chat template (default: none)."),
]
TemplateOption = Annotated[
    str | None, option("--chat-template-file", help="Chat template in Jinja (default: the one in the model's file).")
]
UbatchOption = Annotated[
    int | None,
    option(
        *("-ub", "--ubatch-size"),
        min=1,
        help="Prompt tokens per step (default: with precision fast 1024 on GPUs, 2048 on matrix units; 32 with high on "
        "CPUs; else 512; at least two for each sequence that may run).",
    ),
]
CacheOption = Annotated[
    KvType | None,
    option(
        *("-ctk", "-ctv", "--cache-type"),
        help="KV cache type: f16, f32 or q8_0 (default: f16 on GPUs with native f16, else f32).",
    ),
]
PromptCacheOption = Annotated[
    Path | None,
    option(
        *("--prompt-cache", "--prompt-cache-file"),
        help="File that stores the KV cache of the prompt for the next run (default: none).",
    ),
]
PromptCacheRoOption = Annotated[bool, option("--prompt-cache-ro", help="Read --prompt-cache, but do not write it.")]
PrecisionOption = Annotated[
    Precision | None,
    option(
        "--precision",
        help="Activations in int8 (fast) or f32 (high) (default: fast on NVIDIA, AMD and Intel GPUs "
        "whose 8-bit arithmetic passes a check when a model is loaded, else high).",
    ),
]
JsonOption = Annotated[bool, option("--json", help="Print JSON on stdout.")]
QuietOption = Annotated[bool, option("-q", "--quiet", help="Print nothing but errors on stderr.")]
VerboseOption = Annotated[bool, option("-v", "--verbose", help="Print the memory plan and the times of loading.")]
DebugOption = Annotated[bool, option("--debug", help="Print a traceback on errors.", callback=set_debug)]
NameArgument = Annotated[
    str,
    typer.Argument(
        help="A name from `llamagpu models`, NAME:QUANT, or hf:user/repo[:QUANT].", autocompletion=complete_name
    ),
]
