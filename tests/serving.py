"""Servers for tests: `llamagpu serve` in a process of its own, with a tiny random model, or one in this process."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
from gguf_builder import tiny_llama

from llamagpu import Llama
from llamagpu.serve.app import make_app
from llamagpu.serve.engine_thread import EngineThread
from llamagpu.serve.metrics import Metrics
from llamagpu.serve.options import ServeOptions
from llamagpu.serve.state import Server

START_S = 120.0  # on a busy machine
# ChatML, with tools as Qwen has them. A message "think" makes the prompt end within reasoning.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
# Tools: <tools>{{ tools | tojson }}</tools>, calls within <tool_call></tool_call><|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if messages[-1].content == "think" %}<think>
{% endif %}{% endif %}"""
MODEL = "tiny"
# A random model's tokens are about equally likely: a seed gives the same text alone and in company only where both
# compute nearly the same numbers.
EXACT = {"precision": "high", "kv_type": "f32"}
EXACT_ARGUMENTS = ("--precision", "high", "-ctk", "f32")


@dataclass
class Served:
    url: str
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)  # of stderr

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(START_S)


@contextmanager
def served(
    folder: Path, *arguments: str, model: Path | None = None, template: str | None = TEMPLATE
) -> Iterator[Served]:
    """A server that is ready. Without a template the model's own is used."""
    path = model or tiny_llama(folder / f"{MODEL}.gguf", context=2048)
    command = [sys.executable, "-m", "llamagpu", "serve", "-m", str(path), "--port", "0"]
    command += [*EXACT_ARGUMENTS, *arguments]
    if template is not None:
        template_file = folder / "template.jinja"
        template_file.write_text(template)
        command += ["--chat-template-file", str(template_file)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TERM": "dumb"})
    server, ready = Served("", process), threading.Event()

    def read() -> None:
        assert process.stderr
        for line in process.stderr:
            server.lines.append(line.rstrip())
            if found := re.search(r"is ready at (\S+)", line):
                server.url = found[1]
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(START_S) and server.url, "\n".join(server.lines)
        yield server
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
        reader.join()


@asynccontextmanager
async def served_here(load: Callable[[], Llama]) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client of a server whose model a test may tamper with. Answers come when they are complete."""
    engine = EngineThread(load, Metrics(), 8, lambda: None)
    app = make_app(Server(ServeOptions(model=MODEL), engine, Metrics(), lambda text: None))
    engine.start()
    await engine.call(lambda: None)  # the model is loaded then
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    try:
        async with openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=client) as api:
            yield api
    finally:
        await engine.stop()
