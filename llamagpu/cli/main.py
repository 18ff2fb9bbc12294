"""The command line: arguments, messages, exit codes. `main` catches and reports every error."""

import os
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from llamagpu import __version__
from llamagpu.cli import measure
from llamagpu.cli import options as o
from llamagpu.cli.batch import batch
from llamagpu.cli.bench import bench_app
from llamagpu.cli.bench_steps import steps
from llamagpu.cli.chat import chat
from llamagpu.cli.convert import convert
from llamagpu.cli.generate import generate
from llamagpu.cli.models import models_app
from llamagpu.cli.perplexity import perplexity
from llamagpu.cli.serve import serve
from llamagpu.cli.terminal import Interrupted, Usage, log, write
from llamagpu.cli.tokenize import tokenize
from llamagpu.cli.usage import RunCommand, usage_error
from llamagpu.errors import DoesNotFit, LlamaGpuError

# In the order of `--help`. A summary of its own is never cut off.
SUMMARIES = {
    "generate": "Generate text from a prompt.",
    "chat": "Chat with a model.",
    "serve": "Serve a model over HTTP, as OpenAI and Anthropic do.",
    "batch": "Answer a file of requests.",
    "models": "List, fetch and remove models by name.",
    "bench": "Measure tokens per second, as llama-bench does.",
    "devices": "List the adapters, or the dispatches that run a model.",
    "convert": "Convert or quantise a checkpoint.",
    "tokenize": "Convert text to token ids, or back.",
    "perplexity": "Measure the perplexity of a text.",
    "profile": "Time every dispatch of a model.",
    "verify": "Check every kernel on an adapter against float64.",
}


class Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(self.commands, key=[*SUMMARIES, *self.commands].index)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """An abbreviation gets the names that it may stand for; typer itself suggests only what is spelled alike."""
        begun = [name for name in self.list_commands(ctx) if name.startswith(args[0])]
        if args[0] and begun and args[0] not in begun:
            raise Usage(f"no such command {args[0]!r}", f"did you mean {' or '.join(begun)}?")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="llamagpu",
    cls=Commands,
    help="Run Llama-family GGUF models on any WebGPU adapter.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Rich takes 0.1 s to import, and its boxes leave 20 columns for the help
    context_settings={"help_option_names": ["-h", "--help"]},
)
for run in (generate, chat, serve, batch, perplexity):
    app.command(cls=RunCommand, short_help=SUMMARIES[run.__name__])(run)
for other in (tokenize, convert, measure.profile, measure.verify, measure.devices):
    app.command(short_help=SUMMARIES[other.__name__])(other)
bench_app.command(short_help="Measure a step of each number of token rows, and find cliffs.")(steps)
for name, group in (("models", models_app), ("bench", bench_app)):
    app.add_typer(group, name=name, short_help=SUMMARIES[name])


def show_version(wanted: bool) -> None:
    if wanted:
        write(f"llamagpu {__version__}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def global_options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: o.DebugOption = False,
) -> None:
    if context.invoked_subcommand is None:
        write(context.get_help() + "\n")


def main() -> None:
    """Run the command. Exit codes: those of the exceptions, 2 for usage, 130 after Ctrl-C, else 0."""
    for file, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "strict")):
        if hasattr(file, "reconfigure"):  # None when closed
            file.reconfigure(encoding="utf-8", errors=errors)
    try:
        code = app(standalone_mode=False) or 0  # with standalone_mode typer would catch Ctrl-C itself
    except (KeyboardInterrupt, typer.Abort):
        code = Interrupted.exit_code
    except Exception as error:
        if os.environ.get("LLAMAGPU_DEBUG") == "1":
            traceback.print_exc()
        code = report(error)
    sys.exit(code)


def command_path() -> str:
    """The words of the command that was called."""
    command: Any = typer.main.get_command(app)
    words = ["llamagpu"]
    for word in sys.argv[1:]:
        command = getattr(command, "commands", {}).get(word)
        if command is None:
            break
        words.append(word)
    return " ".join(words)


def report(error: Exception) -> int:
    """Print cause and remedy on stderr and return the exit code."""
    if hasattr(error, "show") and hasattr(error, "format_message"):  # typer's own, from click or its copy of it
        error = usage_error(error, command_path())
    if isinstance(error, LlamaGpuError):
        if isinstance(error, Interrupted):
            log("interrupted")
        elif error.cause:
            log(f"error: {error.cause}" + (f"\n       {error.remedy}" if error.remedy else ""))
        return error.exit_code
    if isinstance(error, MemoryError):
        log("error: this machine has no memory left\n       use a smaller model; smaller -c and -ub need less")
        return DoesNotFit.exit_code
    first = next(iter(str(error).strip().splitlines()), "")
    log(f"error: {type(error).__name__}: {first}\n       this is a bug; --debug shows where")
    return 1
