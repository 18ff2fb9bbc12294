"""The exceptions that users see. Each carries its exit code; cli/main.py is the only place that catches them."""

import math
import numbers
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class LlamaGpuError(Exception):
    """One line with the cause and one line with the remedy, which may be empty."""

    exit_code = 1  # a runtime error: missing or damaged file, no network, no disk space

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(cause)
        self.cause = cause
        self.advise(remedy)

    def advise(self, remedy: str) -> None:
        """Set the remedy, which tracebacks show as a note."""
        self.remedy = remedy
        self.__notes__ = [remedy] if remedy else []


class BadArgument(LlamaGpuError, ValueError):
    """An argument has the wrong type or value."""

    exit_code = 2


class WrongState(LlamaGpuError, RuntimeError):
    """The Llama is closed, or the generation was closed or has failed."""


class GrammarFailed(LlamaGpuError):
    """The grammar became too complex for its limits, or no token continues the text, in the midst of a generation."""


class BadFile(LlamaGpuError):
    """The file is missing, cut short, damaged or hostile."""


class NoAdapter(LlamaGpuError):
    """No WebGPU adapter can be used on this machine."""

    exit_code = 3


class Unsupported(LlamaGpuError):
    """A sound file whose architecture, tensor type or feature this project does not run."""

    exit_code = 4


class DoesNotFit(LlamaGpuError):
    """Weights, KV cache or prompt need more than the adapter or the context has."""

    exit_code = 5


class Overloaded(LlamaGpuError):
    """More requests wait than the queue holds."""


class DeviceLost(LlamaGpuError):
    """The GPU went away while it was working."""

    exit_code = 6


class NumericCheckFailed(LlamaGpuError):
    """A kernel's result on this adapter is outside its error bound."""

    exit_code = 7


def install_extra(name: str) -> str:
    """The command that adds an extra to this installation, in its own environment: that of scripts/run is not the
    shell's. pip finds an installed clone by its name, any other by its folder."""
    from importlib import metadata  # 20 ms, which no start should pay for

    python = f'"{sys.executable}"' if " " in sys.executable else sys.executable
    try:
        metadata.distribution("llamagpu")
    except metadata.PackageNotFoundError:
        return f'{python} -m pip install -e "{Path(__file__).resolve().parents[1]}[{name}]"'
    return f'{python} -m pip install "llamagpu[{name}]"'


@contextmanager
def error_context(path: object) -> Iterator[None]:
    """Put the path in front of errors about a file: the code that reads its metadata or a tensor does not know it."""
    try:
        yield
    except (BadFile, Unsupported) as error:
        if str(path) not in error.cause:
            error.cause = f"{path}: {error.cause}"
            error.args = (error.cause,)
        raise


def check_argument(name: str, value: object, valid: bool, expected: str) -> None:
    """Raise BadArgument with the value unless it is valid."""
    if not valid:
        shown = " ".join(repr(value).split())  # numpy's are of several lines
        raise BadArgument(f"{name} is {shown if len(shown) <= 60 else shown[:57] + '...'}", f"give {expected}")


def is_number(value: Any, least: float, most: float = math.inf) -> bool:
    """Whether it is a finite number in this range."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return real and bool(least <= value <= most and value != math.inf)


def is_whole(value: Any, least: int) -> bool:
    """Whether it is an integer, at least `least`."""
    return isinstance(value, numbers.Integral) and is_number(value, least)
