"""Input and output of the commands. stdout gets only the result; everything else goes to stderr."""

import errno
import os
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from llamagpu.errors import LlamaGpuError


class Usage(LlamaGpuError):
    """The arguments contradict each other, or lack something."""

    exit_code = 2


class Interrupted(LlamaGpuError):
    """Ctrl-C."""

    exit_code = 130


class PipeClosed(LlamaGpuError):
    """The reader of stdout has closed the pipe. The command ends without a message."""

    exit_code = 141  # as a shell shows a process that SIGPIPE ended


def write(data: str | bytes) -> None:
    """Write to stdout and flush."""
    if sys.stdout is None:  # closed by the parent process
        raise PipeClosed("")
    try:
        if isinstance(data, bytes):
            sys.stdout.buffer.write(data)
        else:
            sys.stdout.write(data)
        sys.stdout.flush()
    except OSError as error:
        # The interpreter must not try to write the rest of the buffer when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno in (errno.EPIPE, errno.EINVAL):  # EINVAL: Windows
            raise PipeClosed("") from None
        raise LlamaGpuError(f"cannot write to stdout: {error.strerror}", "check the disk") from error


def log(text: str) -> None:
    """Print lines on stderr. They replace a status line. A terminal gets them broken between words."""
    if sys.stderr is None:
        return
    # Commands that a message recommends begin as this one did: scripts/run sets the variable.
    text = text.replace("`llamagpu ", f"`{os.environ.get('LLAMAGPU_PROGRAM') or 'llamagpu'} ")
    if on_terminal():
        text = "\r\033[K" + "\n".join(fold(line, shutil.get_terminal_size().columns) for line in text.split("\n"))
    print(text, file=sys.stderr, flush=True)


def fold(line: str, width: int) -> str:
    """Break a line between words. The further lines are indented as it is; a word is never broken."""
    if len(line) <= width:
        return line
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def show_engine_log(verbose: bool) -> None:
    """Print what the engine logs: warnings, and with `verbose` what it finds out about the adapter."""
    import logging

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            log_in_text(record.getMessage())

    logger = logging.getLogger("llamagpu")
    logger.handlers = [Handler()]
    logger.setLevel(logging.INFO if verbose else logging.WARNING)


def log_in_text(text: str) -> None:
    """Print a line on stderr while a text is being written to stdout, which may be the same terminal."""
    if on_terminal() and sys.stdout is not None and sys.stdout.isatty():
        sys.stderr.write("\n")  # `log` clears the line
    log(text)


def on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def status_line(text: str, quiet: bool) -> None:
    """Show a line on stderr that the next one replaces, on a terminal only. An empty text clears it."""
    if not quiet and on_terminal():
        fits = shutil.get_terminal_size().columns - 1  # a line that wraps cannot be replaced
        sys.stderr.write(f"\r\033[K{text if len(text) <= fits else text[: fits - 3] + '...'}")
        sys.stderr.flush()


def progress_line(label: str, quiet: bool, check: Callable[[], None]) -> Callable[[int, int], None]:
    """A callback (done, total) that shows a status line after half a second. Each call also runs `check`."""
    started = time.perf_counter()

    def show(done: int, total: int) -> None:
        check()
        if time.perf_counter() - started > 0.5:
            status_line("" if done == total else f"{label} {done}/{total}", quiet)

    return show


def read_text(prompt: str | None, file: str | None) -> str:
    """The text of -p TEXT or -f FILE, or standard input if it is piped or named with -. Bytes are kept as they are."""
    if prompt is not None and file is not None:
        raise Usage("both -p and -f are given", "one of them says where the text comes from")
    if prompt is not None and prompt != "-":
        return prompt
    if file is not None and file != "-":
        try:
            raw = Path(file).read_bytes()
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            reason = getattr(error, "strerror", None) or error
            raise LlamaGpuError(f"{file}: {reason}", "check the name of the file") from error
        return raw.decode("utf-8", "surrogateescape")
    explicit = prompt is not None or file is not None
    raw = b"" if sys.stdin is None or (sys.stdin.isatty() and not explicit) else sys.stdin.buffer.read()
    if not raw and not explicit:
        raise Usage("there is no text", "give it with -p TEXT or -f FILE, or pipe it in")
    return raw.decode("utf-8", "surrogateescape")


def has_content(path: Path) -> bool:
    """Whether the file must not be overwritten. An empty file, as mktemp makes it, may be."""
    return path.exists() and not (path.is_file() and path.stat().st_size == 0)


def check_folder(path: Path) -> None:
    """Refuse a file that cannot be written, before any work is done for it."""
    if not os.access(path.parent, os.W_OK | os.X_OK):
        reason = "no permission to write there" if path.parent.exists() else "there is no such folder"
        raise LlamaGpuError(f"cannot write {path}: {reason}", "name another file")


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Within the block Ctrl-C only sets a flag. The yielded function raises Interrupted if the flag is set.

    Python raises KeyboardInterrupt at any bytecode. In a callback of wgpu it would be lost, and the wait for the
    callback would never end. The second Ctrl-C ends the process from a thread, because the main thread may be waiting
    for the GPU.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored, as in a background job
        yield lambda: None
        return
    pressed = threading.Event()
    reader, writer = os.pipe()
    if os.name != "nt":
        os.set_blocking(writer, False)

    def watch() -> None:
        count = 0
        while number := os.read(reader, 1)[0]:
            count += number == signal.SIGINT
            if count == 2:
                os._exit(Interrupted.exit_code)

    def check() -> None:
        if pressed.is_set():
            raise Interrupted("interrupted")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    signal.signal(signal.SIGINT, lambda *_: pressed.set())
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield check
    finally:
        signal.set_wakeup_fd(before)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(writer, b"\0")
        watcher.join()
        os.close(reader)
        os.close(writer)
