"""What typer parses: llama.cpp's options that have no effect here, and usage errors in our words."""

import re
import sys
from collections import deque
from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

from llamagpu.cli.terminal import Usage, log

# Options of llama.cpp's programs that have no effect here. Those of llama-bench all take a value.
BENCH_OPTIONS = (
    "-ngl --n-gpu-layers -t --threads -C --cpu-mask --cpu-strict --poll -ncmoe --n-cpu-moe -sm --split-mode "
    "-mg --main-gpu -nkvo --no-kv-offload -lm --load-mode -mmp --mmap -dio --direct-io -embd --embeddings "
    "-ts --tensor-split -ot --override-tensor -nopo --no-op-offload --no-host -fitt --fit-target -fitc "
    "--fit-ctx --numa --prio -rpc --rpc"
)
RUN_OPTIONS = (
    "-ngl --gpu-layers --n-gpu-layers -t --threads -tb --threads-batch -C --cpu-mask -Cr --cpu-range --cpu-strict "
    "--poll --prio -b --batch-size -ncmoe --n-cpu-moe -sm --split-mode -mg --main-gpu -ts --tensor-split "
    "-ot --override-tensor --numa -fa --flash-attn"
)
RUN_FLAGS = (
    "-cmoe --cpu-moe -nkvo --no-kv-offload --mlock --mmap --no-mmap --warmup --no-warmup --jinja "
    "--no-display-prompt --simple-io"
)


def without_ignored(args: Iterable[str], params: Iterable[Any], options: str, flags: str = "") -> list[str]:
    """The arguments without those that have no effect here, which a line on stderr names.

    `params` are the command's own: one of them, or the value of one, may look like an ignored option.
    """
    own = {name: not getattr(param, "is_flag", False) for param in params for name in param.opts}  # takes a value
    kept: list[str] = []
    dropped: list[str] = []
    rest = deque(args)
    while rest:
        arg = rest.popleft()
        name = arg.partition("=")[0].replace("_", "-") if arg.startswith("--") else arg
        takes_value = name in options.split()
        if name not in own and (takes_value or name in flags.split()):
            dropped.append(name)
            if takes_value and "=" not in arg and rest and not re.match("-[a-zA-Z-]", rest[0]):
                rest.popleft()
            continue
        kept.append(arg)
        if arg == "--":
            kept += rest
            break
        if own.get(arg) and rest:
            kept.append(rest.popleft())
    if dropped and not {"-q", "--quiet"} & set(kept):
        log(f"ignored, because it has no effect here: {' '.join(dict.fromkeys(dropped))}")
    return kept


class RunCommand(TyperCommand):
    """Accepts llama-cli's options that have no effect here."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, without_ignored(args, self.params, RUN_OPTIONS, RUN_FLAGS))


class BenchGroup(TyperGroup):
    """Accepts llama-bench's options that have no effect here."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, without_ignored(args, self.params, BENCH_OPTIONS))


# Words of pydantic, which typer checks values with, and ours
WORDS = (
    (r"^Value error, ", ""),
    (r"^Input should be a valid number.*", "it must be a number"),
    (r"^Input should be a valid integer.*", "it must be a whole number"),
    (r"^Input should be a valid boolean.*", "it must be true or false"),
    (r"^Input should be greater than or equal to ", "it must be at least "),
    (r"^Input should be less than or equal to ", "it must be at most "),
    (r"\.$", ""),
)


def usage_error(error: Any, command: str) -> Usage:
    """An error of typer's parser as a cause that names option and value, and a remedy that names the command."""
    context, param = getattr(error, "ctx", None), getattr(error, "param", None)
    remedy = f"`{command} --help` lists what it takes"
    if param is None or type(error).__name__ != "BadParameter":
        message = re.sub(
            r"^Got unexpected extra arguments?\(?s?\)? \((.*)\)$", r"unexpected: \1", error.format_message()
        )
        message = message.rstrip(".")
        return Usage(message[:1].lower() + message[1:], remedy)
    reason = error.message
    for pattern, ours in WORDS:
        reason = re.sub(pattern, ours, reason)
    typed = {arg.partition("=")[0] for arg in sys.argv}
    name = min(param.opts, key=lambda name: (name not in typed, not name.startswith("--")))
    source = context.get_parameter_source(param.name) if context else None
    if source is not None and source.name == "ENVIRONMENT":
        name = str(param.envvar)
    cause = error.__cause__  # pydantic's, with the value; click puts the value into the message
    value = str(cause.errors()[0]["input"]) if hasattr(cause, "errors") else ""
    given = "" if not value or repr(value) in reason else f" {value if value.isprintable() else repr(value)}"
    colon = "" if ": it must" in reason else ":"  # `options.finite` names the value, too
    return Usage(f"{name}{given}{colon} {reason}", remedy)
