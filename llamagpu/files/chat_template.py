"""Renders a model's own chat template, in a process that is kept for the next one (template_sandbox.py).

Templates come with the file and nothing in them is trusted. The process has a limit of CPU time and of memory, shares
no handle with this one and ends with it.
"""

import atexit
import json
import os
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from llamagpu.errors import BadArgument, LlamaGpuError
from llamagpu.files.isolated import isolated_python

CPU_SECONDS = 5.0  # templates in use take 10 to 130 ms
WALL_SECONDS = 60.0  # for a busy machine, and where the system has no limit of CPU time (Windows)
SOURCE_CHARS = 1 << 16  # the longest in use have about 30,000 and compile in 0.1 s, the slowest of this length in 3 s
OUT_OF_MEMORY = 12  # exit status, as in template_sandbox.py
KILLED = -getattr(signal, "SIGKILL", -1)  # exit status; 1 on Windows
REMEDY_RAW = "Use --raw to send the prompt without the template."


def render(
    template: str,
    messages: list[dict[str, Any]],
    *,
    bos_token: str,
    eos_token: str,
    add_generation_prompt: bool = True,
    **kwargs: Any,
) -> str:
    """The prompt for these messages. `kwargs` are further variables of the template, such as tools."""
    names = {"tools": None, "documents": None} | kwargs
    names |= {"messages": messages, "bos_token": bos_token, "eos_token": eos_token}
    names["add_generation_prompt"] = add_generation_prompt
    if len(template) > SOURCE_CHARS:
        raise LlamaGpuError(f"the chat template is {len(template):,} characters long", REMEDY_RAW)
    try:
        request = json.dumps({"template": template, "names": names, "seconds": CPU_SECONDS})
    except (TypeError, ValueError, RecursionError) as error:
        remedy = "give text, numbers, lists and dicts"
        raise BadArgument(f"the chat template cannot get a message that is not JSON: {error}", remedy) from None
    answer = _sandbox.ask(request.encode() + b"\n")
    if "text" in answer:
        return answer["text"]
    raise LlamaGpuError("".join(c if c.isprintable() else " " for c in answer["cause"]), REMEDY_RAW)


def start() -> None:
    """Start the process, which then is ready when the model is: the first prompt comes 80 ms earlier."""
    _sandbox.start()


class _Sandbox:
    """The process that renders. A new one replaces one that has ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.lock, suppress(LlamaGpuError):  # `ask` tells it
            self._running()

    def ask(self, request: bytes) -> dict[str, str]:
        with self.lock:
            process = self._running()
            alarm = threading.Timer(WALL_SECONDS, process.kill)
            alarm.daemon = True
            alarm.start()
            try:
                return _exchange(process, request)
            except BaseException:  # Ctrl-C: the answer must not be taken for that of the next request
                self.close()
                raise
            finally:
                alarm.cancel()

    def _running(self) -> "subprocess.Popen[bytes]":
        if self.process and self.process.poll() is not None:
            self.close()
        self.process = self.process or _start()
        return self.process

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            with suppress(OSError):  # closing flushes a request that was not read
                self.process.__exit__(None, None, None)
            self.process = None


def _start() -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            isolated_python(Path(__file__).with_name("template_sandbox.py"), "jinja2", "markupsafe"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C at the terminal is for this process only
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )
    except (OSError, ValueError) as error:
        raise LlamaGpuError(f"cannot start a process for the chat template: {error}", REMEDY_RAW) from error


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> dict[str, str]:
    assert process.stdin and process.stdout
    with suppress(OSError):  # it ended before it had read all
        process.stdin.write(request)
        process.stdin.flush()
    answer = process.stdout.readline()
    return json.loads(answer) if answer else {"cause": _cause_of_death(process.wait())}


def _cause_of_death(status: int) -> str:
    if status == OUT_OF_MEMORY:
        return "the chat template takes too much memory"
    if status == -getattr(signal, "SIGPROF", 0):
        return f"the chat template takes more than {CPU_SECONDS:g} seconds: it may never end"
    if status == KILLED:
        return f"the chat template takes more than {WALL_SECONDS:g} seconds: it may never end"
    return f"the chat template ended the process that renders it (exit status {status})"


def _forget() -> None:
    """After a fork the process belongs to the parent."""
    global _sandbox
    _sandbox = _Sandbox()


_sandbox = _Sandbox()
atexit.register(lambda: _sandbox.close())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
