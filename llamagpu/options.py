"""The options that several commands share, each written once: names, limits, help."""

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer


def option(*names: str, help: str, **more: Any) -> Any:
    """An option that LLAMAGPU_ and its first long name in capitals set as well."""
    twin = next(name for name in names if name.startswith("--"))[2:].upper().replace("-", "_")
    return typer.Option(*names, help=help, envvar=f"LLAMAGPU_{twin}", show_envvar=False, **more)


def set_debug(wanted: bool) -> None:
    if wanted:
        os.environ["LLAMAGPU_DEBUG"] = "1"


class Precision(StrEnum):
    fast = "fast"
    high = "high"


class CacheType(StrEnum):
    f16 = "f16"
    f32 = "f32"


ModelOption = Annotated[
    str, option("-m", "--model", help="A GGUF file, a name (`llamagpu models`), or hf:user/repo[:QUANT].")
]
HfOption = Annotated[str | None, typer.Option("-hf", "--hf-repo", help="user/repo[:QUANT] on Hugging Face.")]
OfflineOption = Annotated[bool, option("--offline", help="Use only what is in the cache.")]
DeviceOption = Annotated[
    str | None, option("-dev", "--device", help="Adapter: number or part of its name (`llamagpu devices`).")
]
PromptOption = Annotated[str | None, typer.Option("-p", "--prompt", help="The text; - reads standard input.")]
FileOption = Annotated[
    str | None, typer.Option("-f", "--file", help="Take the text from a file; - reads standard input.")
]
PredictOption = Annotated[
    int, option("-n", "--predict", "--n-predict", "--max-tokens", min=-1, help="New tokens; -1: to the end.")
]
ContextOption = Annotated[
    int, option("-c", "--ctx-size", min=0, help="Context length; 0: it grows as needed, to the model's.")
]
TempOption = Annotated[float, option("--temp", min=0, help="Temperature; 0 takes the likeliest token.")]
TopKOption = Annotated[int, option("--top-k", min=0, help="Draw from the k likeliest; 0: from all.")]
TopPOption = Annotated[
    float, option("--top-p", min=0, max=1, help="Draw from the likeliest that together reach this.")
]
MinPOption = Annotated[
    float, option("--min-p", min=0, max=1, help="Drop what is less likely than this share of the likeliest.")
]
PenaltyOption = Annotated[
    float, option("--repeat-penalty", min=0.01, help="Above 1: makes what was said lately less likely.")
]
LastNOption = Annotated[int, option("--repeat-last-n", min=0, help="Tokens that the penalty looks back.")]
SeedOption = Annotated[int, option("-s", "--seed", help="Same seed, same text; -1: a new one each time.")]
SystemOption = Annotated[
    str | None, option("-sys", "--system", "--system-prompt", help="System message for the chat template.")
]
UbatchOption = Annotated[
    int | None, option("-ub", "--ubatch-size", min=1, help="Prompt tokens per step [GPU 1024, CPU and high 512].")
]
CacheOption = Annotated[
    CacheType | None, option("-ctk", "-ctv", "--cache-type", help="KV cache; the adapter's better one.")
]
PromptCacheOption = Annotated[
    Path | None,
    option(
        "--prompt-cache",
        "--prompt-cache-file",
        help="Keep what was read of the prompt in this file: the next run reads only what is new.",
    ),
]
PromptCacheRoOption = Annotated[
    bool, option("--prompt-cache-ro", help="Use the file of --prompt-cache, and leave it as it is.")
]
PrecisionOption = Annotated[
    Precision | None,
    option("--precision", help="Activations in int8 (fast) or f32 (high); fast where the GPU has the means."),
]
JsonOption = Annotated[bool, option("--json", help="JSON on stdout.")]
QuietOption = Annotated[bool, option("-q", "--quiet", help="Nothing on stderr but errors.")]
VerboseOption = Annotated[bool, option("-v", "--verbose", help="Memory plan and where the time went.")]
DebugOption = Annotated[bool, option("--debug", help="Show a traceback on errors.", callback=set_debug)]
NameArgument = Annotated[str, typer.Argument(help="A name from `llamagpu models`, or hf:user/repo[:QUANT].")]
