"""One request: the body is read, the handler runs, the answer is sent; all of it ends when the client goes away."""

import asyncio
import hmac
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl

from llamagpu.serve.body import encode, read_body
from llamagpu.serve.errors import ApiError, as_api_error
from llamagpu.serve.state import Server

log = logging.getLogger("llamagpu.serve")
CLIENT_GONE = 499  # the status in the log, as nginx has it
ROUTE, BODY = "llamagpu.route", "llamagpu.body"  # in the scope; BODY is where server.py runs the connection
ErrorShape = Callable[[ApiError], dict[str, Any]]


@dataclass(slots=True)
class Call:
    body: bytes
    path: Mapping[str, str] = field(default_factory=dict)  # what stands for the names in the route


@dataclass(slots=True)
class EventStream:
    """Server-sent events. What the generator raises before its first event is an ordinary error response."""

    events: AsyncGenerator[bytes, None]


class ChunkedBody:
    """Writes chunks of a response that has begun straight to the connection.

    Through the application's layers and h11 the event loop took 28 us for a token of 64 streams, so 21.
    """

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self.transport, self.flow = transport, flow

    async def write(self, data: bytes) -> None:
        if self.flow.write_paused:
            await self.flow.drain()
        if not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


Handler = Callable[[Server, Call], Awaitable[Response | EventStream]]


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode(value), status, headers, "application/json")


def event(value: Any, name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + encode(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class AccessLog:
    """Counts every request, and writes a line for it."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self.app, self.server = app, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.perf_counter(), CLIENT_GONE

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_noting)
        finally:
            seconds = time.perf_counter() - started
            self.server.metrics.count_request(scope.get(ROUTE, "none"), status, seconds)
            self.server.log_access(scope, status, seconds)


class Endpoint:
    """A handler as an ASGI application. `shape`: how the API writes errors; `open_to_all`: it needs no key."""

    def __init__(
        self, server: Server, route: str, handler: Handler, shape: ErrorShape, open_to_all: bool = False
    ) -> None:
        self.server, self.route, self.handler = server, route, handler
        self.shape, self.open_to_all = shape, open_to_all

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ROUTE] = self.route
        request = Request(scope, receive)
        try:
            self._check(request.headers)
            options = self.server.options
            body = await read_body(request, options.body_bytes, options.body_s)
        except ApiError as error:
            await self._refuse(error, request, send)
            return
        answer = asyncio.create_task(self._answer(Call(body, request.path_params), request, send))
        gone = asyncio.create_task(until_disconnect(receive))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:  # also when the server's time to shut down is over
            for task in (answer, gone):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await answer

    def _check(self, headers: Headers) -> None:
        options = self.server.options
        if (host := headers.get("host")) and not options.allows_host(host):
            message = f"{host[:100]} is no name of this server; --allowed-host allows it"
            raise ApiError(403, message, code="host_not_allowed")
        if origin := headers.get("origin"):
            own = origin.partition("://")[2] == headers.get("host")
            if not own and "*" not in options.cors and origin not in options.cors:
                raise ApiError(403, f"pages of {origin[:100]} may not use this server; --cors allows them")
        if options.api_keys and not self.open_to_all and not has_key(headers, options.api_keys):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    async def _answer(self, call: Call, request: Request, send: Send) -> None:
        try:
            response = await self.handler(self.server, call)
            if isinstance(response, EventStream):
                async with aclosing(response.events) as events:
                    await self._stream(await anext(events), events, request.scope, send)
            else:
                await response(request.scope, request.receive, send)
        except Exception as error:
            await self._refuse(reported(error), request, send)

    async def _refuse(self, error: ApiError, request: Request, send: Send) -> None:
        response = json_response(self.shape(error), error.status, error.headers)
        await response(request.scope, request.receive, send)

    async def _stream(self, first: bytes, events: AsyncGenerator[bytes, None], scope: Scope, send: Send) -> None:
        async def send_chunk(chunk: bytes) -> None:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})

        body: ChunkedBody | None = scope.get(BODY) if scope["http_version"] == "1.1" else None
        write = body.write if body else send_chunk
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
                   (b"x-accel-buffering", b"no")]  # fmt: skip
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await write(first)
        try:
            async for chunk in events:
                await write(chunk)
        except Exception as error:  # the status is sent: the stream ends with the error
            shown = self.shape(reported(error))
            await write(event(shown, "error" if "type" in shown else None))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def reported(error: Exception) -> ApiError:
    found = as_api_error(error)
    if found.status == 500:
        log.error("a request has failed", exc_info=error)
    return found


async def until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def has_key(headers: Headers, keys: tuple[str, ...]) -> bool:
    """Whether the Authorization header, or Anthropic's x-api-key, has one of the keys. Takes the same time for all."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return any([hmac.compare_digest(given.encode(), key.encode()) for key in keys])
