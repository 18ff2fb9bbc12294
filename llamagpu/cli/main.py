"""The command line: arguments, messages, exit codes. `main` catches and reports every error."""

import os
import sys
import traceback
from typing import Annotated

import typer

from llamagpu import __version__
from llamagpu.cli import measure
from llamagpu.cli import options as o
from llamagpu.cli.chat import chat
from llamagpu.cli.convert import convert
from llamagpu.cli.generate import generate
from llamagpu.cli.models import models_app
from llamagpu.cli.perplexity import perplexity
from llamagpu.cli.terminal import Interrupted, log, write
from llamagpu.cli.tokenize import tokenize
from llamagpu.errors import DoesNotFit, LlamaGpuError

app = typer.Typer(
    name="llamagpu",
    help="Run Llama-family GGUF models on any WebGPU adapter.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Rich takes 0.1 s to import, and its boxes leave 20 columns for the help
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (generate, chat, tokenize, perplexity, convert):
    app.command()(command)
app.add_typer(models_app, name="models")
measure.mount(app)


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


def report(error: Exception) -> int:
    """Print cause and remedy on stderr and return the exit code."""
    if isinstance(error, LlamaGpuError):
        if isinstance(error, Interrupted):
            log("interrupted")
        elif error.cause:
            log(f"error: {error.cause}" + (f"\n       {error.remedy}" if error.remedy else ""))
        return error.exit_code
    if hasattr(error, "show") and hasattr(error, "exit_code"):  # typer's own, from click or its copy of it
        error.show()
        return int(error.exit_code)
    if isinstance(error, MemoryError):
        log("error: this machine has no memory left\n       use a smaller model, or a smaller -c or -ub")
        return DoesNotFit.exit_code
    first = next(iter(str(error).strip().splitlines()), "")
    log(f"error: {type(error).__name__}: {first}\n       this is a bug; --debug shows where")
    return 1
