"""The routes of the server."""

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llamagpu.serve import (
    apply_template,
    chat_completions,
    completions,
    count_tokens,
    detokenize,
    embeddings,
    health,
    messages,
    metrics_page,
    models,
    page,
    responses,
    slots,
    tokenize,
)
from llamagpu.serve.errors import ApiError
from llamagpu.serve.http import AccessLog, Endpoint, Handler, json_response
from llamagpu.serve.state import Server

GET: dict[str, Handler] = {
    "/v1/models": models.handle,
    "/v1/models/{model:path}": models.handle_one,
    "/metrics": metrics_page.handle,
    "/slots": slots.handle,
}
POST: dict[str, Handler] = {
    "/v1/chat/completions": chat_completions.handle,
    "/v1/completions": completions.handle,
    "/v1/embeddings": embeddings.handle,
    "/v1/responses": responses.handle,
    "/v1/messages": messages.handle,
    "/v1/messages/count_tokens": count_tokens.handle,
    "/tokenize": tokenize.handle,
    "/detokenize": detokenize.handle,
    "/apply-template": apply_template.handle,
}
OPEN: dict[str, Handler] = {  # without a key
    "/": page.handle,
    "/health": health.handle,
}
ANTHROPIC = "/v1/messages"


def make_app(server: Server, **options: Any) -> Starlette:
    def routes(handlers: dict[str, Handler], method: str, open_to_all: bool = False) -> list[Route]:
        return [
            Route(path, Endpoint(server, path, handler, shape_of(path), open_to_all), methods=[method])
            for path, handler in handlers.items()
        ]

    cors = Middleware(
        CORSMiddleware, allow_origins=list(server.options.cors), allow_methods=["GET", "POST"], allow_headers=["*"]
    )
    return Starlette(
        routes=[*routes(GET, "GET"), *routes(POST, "POST"), *routes(OPEN, "GET", open_to_all=True)],
        middleware=[Middleware(AccessLog, server), *([cors] if server.options.cors else ())],
        exception_handlers={HTTPException: refuse},
        **options,
    )


def shape_of(path: str) -> Any:
    return ApiError.anthropic if path.startswith(ANTHROPIC) else ApiError.openai


async def refuse(request: Request, error: Exception) -> Response:
    """Paths and methods that do not exist."""
    assert isinstance(error, HTTPException)
    found = ApiError(error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}")
    return json_response(shape_of(request.url.path)(found), error.status_code, error.headers)
