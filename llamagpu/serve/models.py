"""GET /v1/models: the one model of this server."""

from typing import Any

from starlette.responses import Response

from llamagpu.serve.http import Call, json_response
from llamagpu.serve.state import Server


async def handle(server: Server, call: Call) -> Response:
    return json_response({"object": "list", "data": [model_object(server)]})


async def handle_one(server: Server, call: Call) -> Response:
    server.check_model(call.path["model"])
    return json_response(model_object(server))


def model_object(server: Server) -> dict[str, Any]:
    llama = server.llama
    return {
        "id": server.options.model,
        "object": "model",
        "type": "model",  # Anthropic's
        "display_name": server.options.model,
        "created": server.created,
        "owned_by": "llamagpu",
        "meta": {
            "n_vocab": llama.config.vocab,
            "n_ctx": llama.context,
            "n_ctx_train": llama.config.context,
            "n_embd": llama.config.dim,
        },
    }
