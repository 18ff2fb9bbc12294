"""The exceptions that users see. Each carries its exit code; cli/main.py is the only place that catches them."""

from collections.abc import Iterator
from contextlib import contextmanager


class LlamaGpuError(Exception):
    """One line with the cause and one line with the remedy, which may be empty."""

    exit_code = 1  # a runtime error: missing or damaged file, no network, no disk space

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(cause)
        self.cause = cause
        self.remedy = remedy


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


class DeviceLost(LlamaGpuError):
    """The GPU went away while it was working."""

    exit_code = 6


class NumericCheckFailed(LlamaGpuError):
    """A kernel's result on this adapter is outside its error bound."""

    exit_code = 7


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
