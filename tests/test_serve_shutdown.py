"""The server's beginning and end: signals, ports, slow clients."""

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from serving import START_S, served

from llamagpu.errors import LlamaGpuError
from llamagpu.serve.options import is_public
from llamagpu.serve.server import HttpServer, TimedProtocol, listen

LONG = {"prompt": "a", "max_tokens": 300, "temperature": 0, "stream": True}


def test_signals_wait_for_requests(gpu: Any, tmp_path: Path) -> None:
    """The first one stops accepting, and the request that runs comes to its end; exit code 0."""
    with (
        served(tmp_path, "--grace", "120") as server,
        httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=START_S) as r,
    ):
        lines = r.iter_lines()
        next(lines)
        server.process.terminate()
        rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        assert server.process.wait(START_S) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


def test_after_the_grace_requests_end_with_an_error(gpu: Any, tmp_path: Path) -> None:
    with (
        served(tmp_path, "--grace", "0", "--parallel", "1") as server,
        httpx.stream("POST", f"{server.url}/v1/completions", json={**LONG, "n": 100}, timeout=START_S) as r,
    ):
        lines = r.iter_lines()
        next(lines)
        server.process.terminate()
        assert "shutting down" in [line for line in lines if line][-1]
        assert server.process.wait(START_S) == 0
    assert not any("Traceback" in line for line in server.lines)


def test_the_second_signal_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    server = HttpServer(uvicorn.Config(lambda: None), lambda text: None, 0, lambda: None)
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit and not codes
    server.handle_exit(signal.SIGTERM, None)
    assert codes == [143]


def test_a_port_in_use() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(LlamaGpuError, match="cannot listen at"),
    ):
        listen("127.0.0.1", taken.getsockname()[1])


def test_public_addresses() -> None:
    assert [is_public(host) for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "::", "192.168.1.2")] == [
        *[False] * 3,
        *[True] * 3,
    ]


def test_slow_headers_end_the_connection() -> None:
    """A byte now and then does not keep a connection open; a request that runs does not have this limit."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.4)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    async def main() -> tuple[bytes, bytes]:
        protocol = type("Protocol", (TimedProtocol,), {"header_s": 0.2})
        config = uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_config=None)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = uvicorn.Server(config)
            running = asyncio.create_task(server.serve([listener]))
            try:
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                for byte in b"GET / HT":
                    writer.write(bytes([byte]))
                    await asyncio.sleep(0.01)
                slow = await reader.read()
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                answered = await reader.read()
            finally:
                server.should_exit = True
                await running
        return slow, answered

    slow, answered = asyncio.run(asyncio.wait_for(main(), START_S))
    assert slow == b"" and answered.startswith(b"HTTP/1.1 200") and b"done" in answered
