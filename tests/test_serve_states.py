"""What the server says while it loads, when its engine has ended, to other origins, and when time is over. No GPU."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import httpx
import pytest
from gguf_builder import tiny_llama

from llamagpu.errors import GrammarFailed, LlamaGpuError, NumericCheckFailed
from llamagpu.llama import Generation, Llama
from llamagpu.results import Timings, Token, Usage
from llamagpu.serve.app import make_app
from llamagpu.serve.engine_thread import EngineThread, Jobs, Update, arrive
from llamagpu.serve.errors import ApiError, as_api_error, field_of
from llamagpu.serve.metrics import Histogram, Metrics
from llamagpu.serve.options import ServeOptions
from llamagpu.serve.state import Server

BODY = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


@contextmanager
def loading() -> Iterator[tuple[Any, threading.Event]]:
    """A function that never finishes loading a model, until the event is set: then it fails."""
    go = threading.Event()

    def load() -> Llama:
        go.wait()
        raise LlamaGpuError("no such model")

    yield load, go
    go.set()


def make(load: Any, **options: Any) -> tuple[Server, httpx.AsyncClient, asyncio.Event]:
    ended = asyncio.Event()
    server = Server(ServeOptions(**options), EngineThread(load, Metrics(), 1, ended.set), Metrics(), lambda text: None)
    server.engine.start()
    client = httpx.AsyncClient(transport=httpx.ASGITransport(make_app(server)), base_url="http://localhost")
    return server, client, ended


def test_it_is_ready_when_it_says_so(tmp_path: Any, gpu: Any) -> None:
    """A client that waits for the line may ask at once."""
    path = tiny_llama(tmp_path / "tiny.gguf")

    async def main() -> None:
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def tell() -> None:
            ready.get_loop().call_soon_threadsafe(ready.set_result, engine.llama)

        engine = EngineThread(lambda: Llama(path, device=gpu), Metrics(), 1, on_ready=tell)
        engine.start()
        async with asyncio.timeout(60):
            assert await ready is not None
        await engine.stop()

    asyncio.run(main())


def test_it_may_end_while_it_warms_up(tmp_path: Any, gpu: Any) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    began = threading.Event()

    class Slow(Llama):
        def warm_up(self, stop: Any = None) -> None:
            began.set()
            while not stop():
                time.sleep(0.01)

    async def main() -> None:
        engine = EngineThread(lambda: Slow(path, device=gpu), Metrics(), 1, warm_up=True)
        engine.start()
        async with asyncio.timeout(60):
            await asyncio.to_thread(began.wait)
            with pytest.raises(ApiError, match="is being loaded"):
                engine.need_ready()
            await engine.stop()
        assert engine.error is None

    asyncio.run(main())


@pytest.mark.parametrize("arguments", [["--api-key", ""], ["--cors", "a.example"]], ids=" ".join)
def test_options_that_would_not_do_what_they_say(arguments: list[str]) -> None:
    """An empty key, as of a variable that is not set, would open the server; no page has an origin without a scheme."""
    command = [sys.executable, "-m", "llamagpu", "serve", "-m", "none.gguf", *arguments]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 2 and found.stderr.startswith(f"error: {arguments[0]}")


def test_while_it_loads_and_after_it_failed() -> None:
    async def main() -> None:
        with loading() as (load, go):
            server, client, ended = make(load)
            async with client:
                assert (await client.get("/health")).status_code == 503
                for path in ("/v1/chat/completions", "/v1/messages", "/tokenize", "/v1/embeddings"):
                    found = await client.post(path, json={**BODY, "content": "x", "input": "x"})
                    assert found.status_code == 503 and found.headers["Retry-After"] == "1"
                for path in ("/v1/models", "/metrics", "/slots"):
                    assert (await client.get(path)).status_code == 503
                assert (await client.get("/")).status_code == 200
                go.set()
                await ended.wait()
                assert isinstance(server.engine.error, LlamaGpuError)
                assert (await client.get("/health")).json() == {"status": "error"}
                assert (await client.post("/v1/chat/completions", json=BODY)).status_code == 503
                await server.engine.stop()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_origins_that_are_named() -> None:
    async def main() -> None:
        with loading() as (load, _):
            _, client, _ = make(load, cors=("https://a.example",), api_keys=("k",))
            asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
            async with client:
                allowed = await client.options("/v1/models", headers={"Origin": "https://a.example", **asked})
                assert allowed.status_code == 200
                assert allowed.headers["access-control-allow-origin"] == "https://a.example"
                other = await client.options("/v1/models", headers={"Origin": "https://b.example", **asked})
                assert other.status_code == 400
                refused = await client.get("/v1/models", headers={"Origin": "https://b.example"})
                assert refused.status_code == 403
                named = await client.get("/v1/models", headers={"Origin": "https://a.example"})
                assert named.status_code == 401

    asyncio.run(asyncio.wait_for(main(), 60))


LOCAL = ("localhost", "localhost:8080", "LOCALHOST:1", "127.0.0.1:9", "127.0.0.1", "[::1]:8080", "[::1]")
FOREIGN = ("evil.example", "evil.example:8080", "127.0.0.1.evil.example", "127.evil.example", "localhost.evil.example",
           "10.0.0.1", "0.0.0.0:8080", "[::2]", "[::1", "x@y:z", "é", ":8080")  # fmt: skip


@pytest.mark.parametrize(
    ("options", "allowed", "refused"),
    [
        ({}, LOCAL, FOREIGN),
        ({"host": "::1"}, LOCAL, FOREIGN),
        ({"host": "127.0.0.2"}, (*LOCAL, "127.0.0.2:80"), FOREIGN),
        ({"allowed_hosts": ("box.lan",)}, (*LOCAL, "box.lan:8080", "Box.lan"), (*FOREIGN, "a.box.lan")),
        ({"allowed_hosts": ("*",)}, (*LOCAL, "box.lan"), ()),
        ({"api_keys": ("k",)}, (*LOCAL, *FOREIGN), ()),  # the page does not have the key
        ({"host": "0.0.0.0"}, (*LOCAL, *FOREIGN), ()),
        ({"host": "0.0.0.0", "allowed_hosts": ("10.0.0.1",)}, (*LOCAL, "10.0.0.1:8080"), ("10.0.0.2", "evil.example")),
    ],
)
def test_names_of_the_server(options: Any, allowed: tuple[str, ...], refused: tuple[str, ...]) -> None:
    found = ServeOptions(**options)
    assert all(map(found.allows_host, allowed)) and not any(map(found.allows_host, refused))


def test_other_names_are_refused() -> None:
    """DNS rebinding: a page of evil.example asks 127.0.0.1 by its own name, so that its origin is the server's."""

    async def main() -> None:
        with loading() as (load, _):
            _, client, _ = make(load)
            names = {"Host": "evil.example", "Origin": "http://evil.example"}
            async with client:
                for path, kind in (
                    ("/v1/chat/completions", "invalid_request_error"),
                    ("/v1/messages", "permission_error"),
                ):
                    found = await client.post(path, json=BODY, headers=names)
                    error = found.json()["error"]
                    assert (found.status_code, error["type"]) == (403, kind) and "--allowed-host" in error["message"]
                assert (await client.get("/", headers={"Host": "evil.example"})).status_code == 403
                assert (await client.get("/", headers={"Host": "127.0.0.1:8080"})).status_code == 200

    asyncio.run(asyncio.wait_for(main(), 60))


def test_silence_and_the_end_of_time() -> None:
    class Run:
        prompt_ids = (1,)

    async def main() -> None:
        jobs = Jobs([cast(Generation, Run())], timeout_s=2)
        found = []
        with pytest.raises(ApiError) as caught:
            async for update in jobs.updates(silence_s=0.02):
                found.append(update)
        assert caught.value.status == 504 and found and not any(found)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_what_came_before_an_error_is_given_out() -> None:
    """Also if both arrive together, as on a busy machine."""

    class Run:
        prompt_ids = (1,)

    async def main() -> None:
        jobs, found = Jobs([cast(Generation, Run())] * 2, timeout_s=60), []
        usage, timings = Usage(1, 1, 0), Timings()
        arrive([Update(jobs[0], [Token(7, "a")], usage, timings), Update(jobs[1], [Token(8, "b")], usage, timings)])
        arrive([Update(jobs[0], [], usage, timings, error=NumericCheckFailed("no token can be sampled"))])
        with pytest.raises(NumericCheckFailed):
            async for update in jobs.updates():
                found += [(i, [token.text for token in tokens], jobs[i].ended) for i, tokens in update]
        assert found == [(0, ["a"], False), (1, ["b"], False)]

    asyncio.run(asyncio.wait_for(main(), 60))


def test_histograms_and_names_of_fields() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.add(value)
    assert list(histogram.samples()) == [
        *[('_bucket{le="1.0"}', 2), ('_bucket{le="2.0"}', 3), ('_bucket{le="+Inf"}', 4)],
        *[("_sum", 12.0), ("_count", 4)],
    ]
    assert field_of("top_p is 2") == "top_p" and field_of("the prompt is empty") is None


def test_a_grammar_that_fails_later_names_its_field_only_if_that_is_known() -> None:
    """`response_format`, `json_schema`, `grammar` or the schema of a tool."""
    failed = GrammarFailed("the grammar cannot go on: too complex", "use a simpler grammar")
    found = [as_api_error(failed, param).openai()["error"] for param in (None, "json_schema")]
    assert [(error["param"], error["code"]) for error in found] == [
        (None, "grammar_failed"),
        ("json_schema", "grammar_failed"),
    ]
