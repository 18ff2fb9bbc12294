"""Runs the server: sockets, signals, the engine thread's beginning and end."""

import asyncio
import math
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from llamagpu.errors import LlamaGpuError
from llamagpu.llama import Llama
from llamagpu.serve.app import make_app
from llamagpu.serve.engine_thread import EngineThread
from llamagpu.serve.http import BODY, ChunkedBody
from llamagpu.serve.metrics import Metrics
from llamagpu.serve.options import ServeOptions
from llamagpu.serve.state import Server

Log = Callable[[str], None]
LAST_WORDS_S = 5  # for the errors of requests that have not ended in time


def serve(load: Callable[[], Llama], options: ServeOptions, log: Log, log_access: Log) -> None:
    """Serve until a signal comes. `load` opens the model, in the engine's thread, while the port answers with 503."""
    listener = listen(options.host, options.port)
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    metrics = Metrics()

    def on_end() -> None:
        http.should_exit = True

    def on_ready() -> None:
        log(f"{options.model} is ready at {url}")

    engine = EngineThread(load, metrics, options.queue, on_end, on_ready, options.warm_up)
    state = Server(options, engine, metrics, log_access)

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.stop()

    protocol = type("Protocol", (TimedProtocol,), {"header_s": options.header_s})
    config = uvicorn.Config(
        make_app(state, lifespan=lifespan),
        http=protocol,
        ws="none",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(options.grace_s) + LAST_WORDS_S,
    )
    http = HttpServer(config, log, options.grace_s, engine.end)
    log(f"listening at {url}")
    http.run(sockets=[listener])
    if engine.error is not None:
        raise engine.error


def listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        if os.name != "nt":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        cause = f"cannot listen at {host} port {port}: {error.strerror or error}"
        raise LlamaGpuError(cause, "choose others with --host and --port") from error
    return listener


class HttpServer(uvicorn.Server):
    """The first signal stops accepting and waits for the requests that run, the second one ends the process.

    `end` is called after `grace_s` seconds of that: the requests that still run get an error.
    """

    def __init__(self, config: uvicorn.Config, log: Log, grace_s: float, end: Callable[[], None]) -> None:
        super().__init__(config)
        self.log, self.grace_s, self.end = log, grace_s, end

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self.grace_s, self.end)
        await super().shutdown(sockets)
        timer.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, number: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + number)
        self.should_exit = True
        self.log("shutting down: requests that run may end; the next signal ends them")


class TimedProtocol(H11Protocol):
    """Closes connections whose headers do not come within `header_s`. Requests find in their scope where chunks go."""

    header_s = 20.0
    timer: Any = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._clear_timer()
        elif self.timer is None:
            self._set_timer()

    def handle_events(self) -> None:
        try:
            super().handle_events()
        except UnicodeDecodeError:  # in the path
            self.send_400_response("Invalid HTTP request received.")
        if self.cycle is not None:  # its task has not begun
            scope: Any = self.cycle.scope
            scope[BODY] = ChunkedBody(self.transport, self.flow)

    def _set_timer(self) -> None:
        self.timer = self.loop.call_later(self.header_s, self.transport.close)

    def _clear_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
