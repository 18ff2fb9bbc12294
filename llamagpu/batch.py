"""Answers a JSONL file of requests in OpenAI's batch format. What is in the output already is not computed again."""

import asyncio
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from llamagpu.errors import BadFile, LlamaGpuError
from llamagpu.files.lock import try_lock
from llamagpu.llama import Llama
from llamagpu.serve import chat_completions, completions, embeddings, responses
from llamagpu.serve.body import decode, encode
from llamagpu.serve.engine_thread import EngineThread
from llamagpu.serve.errors import ApiError, as_api_error, invalid
from llamagpu.serve.metrics import Metrics
from llamagpu.serve.options import ServeOptions
from llamagpu.serve.state import Server

ENDPOINTS: dict[str, tuple[type[Any], Callable[[Server, Any], Awaitable[dict[str, Any]]]]] = {
    "/v1/chat/completions": (chat_completions.ChatRequest, chat_completions.complete),
    "/v1/completions": (completions.CompletionRequest, completions.complete),
    "/v1/embeddings": (embeddings.EmbeddingRequest, embeddings.complete),
    "/v1/responses": (responses.ResponseRequest, responses.complete),
}
REQUESTS_PER_SLOT = 2  # that are under way: the next prompts wait beside those that run


class Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class Finished(msgspec.Struct):
    """What tells that a line is done."""

    custom_id: str | None = None
    line: int | None = None


@dataclass(slots=True)
class Progress:
    total: int  # lines of this shard that are not empty
    skipped: int = 0  # that were done before
    done: int = 0
    failed: int = 0  # of those done
    tokens: int = 0  # generated
    began: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(time.perf_counter() - self.began, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        left = self.total - self.skipped - self.done
        return (time.perf_counter() - self.began) / self.done * left if self.done else None


@dataclass(frozen=True, slots=True)
class Shard:
    """Every `count`-th line, beginning with number `index` from 0."""

    index: int = 0
    count: int = 1


WHOLE = Shard()


def run_batch(
    load: Callable[[], Llama],
    options: ServeOptions,
    source: Path,
    target: Path,
    shard: Shard = WHOLE,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Answer all requests. It may be ended at any time and started again."""
    progress = Progress(sum(1 for _ in lines(source, shard)))
    with appending(target) as file:
        ids, numbers = finished(target)

        def write(result: dict[str, Any]) -> None:
            file.write(encode(result) + b"\n")  # one write: a line is there as a whole, or the next run removes it
            file.flush()

        batch = Batch(options, progress, write, report)
        asyncio.run(batch.run(load, source, shard, ids, numbers))
    return progress


class Batch:
    def __init__(
        self,
        options: ServeOptions,
        progress: Progress,
        write: Callable[[dict[str, Any]], None],
        report: Callable[[Progress], None],
    ) -> None:
        self.options, self.progress, self.write, self.report = options, progress, write, report

    async def run(
        self, load: Callable[[], Llama], source: Path, shard: Shard, ids: set[str], numbers: set[int]
    ) -> None:
        metrics = Metrics()
        engine = EngineThread(load, metrics, self.options.queue)
        server = Server(self.options, engine, metrics, lambda text: None)
        engine.start()
        try:
            await engine.call(lambda: None)  # the model is loaded then
            self.progress.began = time.perf_counter()
            if engine.error is None:
                await self._answer_all(server, source, shard, ids, numbers)
        except ExceptionGroup as failed:  # of the tasks
            await engine.stop()
            raise (engine.error or failed.exceptions[0]) from None
        finally:
            await engine.stop()
        if engine.error is not None:
            raise engine.error

    async def _answer_all(self, server: Server, source: Path, shard: Shard, ids: set[str], numbers: set[int]) -> None:
        places = asyncio.Semaphore(REQUESTS_PER_SLOT * server.llama.loaded.settings.slots)

        async def work(number: int, raw: bytes) -> None:
            try:
                self._add(await answer(server, number, raw), server)
            finally:
                places.release()

        seen: set[str] = set()
        async with asyncio.TaskGroup() as tasks:
            for number, raw in lines(source, shard):
                custom_id = id_of(raw)
                again = custom_id in seen
                seen |= {custom_id} if custom_id is not None else set()
                if number in numbers or (custom_id in ids and not again):
                    self.progress.skipped += 1
                elif again:
                    self._add(invalid_line(number, f"the custom_id {custom_id!r} is there twice"), server)
                else:
                    await places.acquire()
                    tasks.create_task(work(number, raw))

    def _add(self, result: dict[str, Any], server: Server) -> None:
        self.write(result)
        self.progress.done += 1
        self.progress.failed += result["error"] is not None or result["response"]["status_code"] != 200
        self.progress.tokens = server.metrics.generated_tokens
        self.report(self.progress)


async def answer(server: Server, number: int, raw: bytes) -> dict[str, Any]:
    """The line of the output for a line of the input."""
    try:
        line = decode(raw, Line)
    except ApiError as error:
        return invalid_line(number, error.message)
    try:
        status, body = 200, await respond(server, line)
    except Exception as raised:
        refusal = as_api_error(raised)
        if server.engine.error is not None or refusal.status == 503:
            raise  # the engine has ended: this line is not done
        status, body = refusal.status, refusal.openai()
    response = {"status_code": status, "request_id": uuid.uuid4().hex, "body": body}
    return {**heading(number), "custom_id": line.custom_id, "response": response, "error": None}


def heading(number: int) -> dict[str, Any]:
    return {"id": f"batch_req_{uuid.uuid4().hex}", "line": number}


def invalid_line(number: int, cause: str) -> dict[str, Any]:
    error = {"code": "invalid_line", "message": f"line {number}: {cause}"}
    return {**heading(number), "custom_id": None, "response": None, "error": error}


async def respond(server: Server, line: Line) -> dict[str, Any]:
    if line.method != "POST" or line.url not in ENDPOINTS:
        raise ApiError(404, f"{line.method[:20]} {line.url[:100]} is none of POST {', '.join(ENDPOINTS)}", param="url")
    kind, complete = ENDPOINTS[line.url]
    request = decode(bytes(line.body), kind)
    if getattr(request, "stream", None):
        raise invalid("stream is not possible in a batch", "stream")
    return await complete(server, request)


def lines(source: Path, shard: Shard) -> Iterator[tuple[int, bytes]]:
    """The lines of a shard that are not empty, with their numbers from 1."""
    try:
        if source.exists() and not source.is_file():  # it is read twice
            raise BadFile(f"{source} is no regular file", "write the requests to a file first")
        with source.open("rb") as file:
            for i, raw in enumerate(file):
                if raw.strip() and i % shard.count == shard.index:
                    yield i + 1, raw
    except OSError as error:
        raise BadFile(f"{source}: {error.strerror}", "check the name of the file") from error


def id_of(raw: bytes) -> str | None:
    try:
        return msgspec.json.decode(raw, type=Finished).custom_id
    except (ValueError, RecursionError):
        return None


def finished(target: Path) -> tuple[set[str], set[int]]:
    """The ids that an output has, and the numbers of lines without one. An unfinished last line is removed."""
    ids: set[str] = set()
    numbers: set[int] = set()
    if not target.exists():
        return ids, numbers
    with target.open("r+b") as file:
        end = 0
        for raw in file:
            if not raw.endswith(b"\n"):
                file.truncate(end)
                break
            end += len(raw)
            try:
                found = msgspec.json.decode(raw, type=Finished)
            except (ValueError, RecursionError):
                raise BadFile(f"{target}: this is no output of a batch", "name another file with -o") from None
            if found.custom_id is not None:
                ids.add(found.custom_id)
            elif found.line is not None:
                numbers.add(found.line)
    return ids, numbers


@contextmanager
def appending(target: Path) -> Iterator[IO[bytes]]:
    """The output, locked: another run would take a line that is being written for an unfinished one."""
    try:
        file = target.open("ab")
    except OSError as error:
        raise BadFile(f"cannot write {target}: {error.strerror}", "name another file with -o") from error
    with file:
        if target.is_file() and not try_lock(file):
            raise LlamaGpuError(f"another run is writing {target}", "wait for it, or name another file with -o")
        yield file
        os.fsync(file.fileno())
