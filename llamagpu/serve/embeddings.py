"""POST /v1/embeddings: texts as vectors of length 1."""

import asyncio
import base64
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.responses import Response

from llamagpu.llama import Llama
from llamagpu.serve.body import decode
from llamagpu.serve.completions import prompts_of
from llamagpu.serve.errors import ApiError, invalid
from llamagpu.serve.generating import check_length, room_for, too_long
from llamagpu.serve.http import Call, json_response
from llamagpu.serve.state import Server


class EmbeddingRequest(msgspec.Struct):
    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    pooling: Literal["mean", "last"] | None = None  # None: what the model's file says


async def handle(server: Server, call: Call) -> Response:
    return json_response(await complete(server, decode(call.body, EmbeddingRequest)))


async def complete(server: Server, request: EmbeddingRequest) -> dict[str, Any]:
    model, llama = server.check_model(request.model), server.llama
    if request.dimensions not in (None, llama.config.dim):
        raise invalid(f"dimensions: this model has {llama.config.dim}", "dimensions")
    with server.engine.admitted(1):  # however many inputs there are, one of them waits at a time
        inputs = await asyncio.to_thread(encode, request, llama)
        data = []
        for i, ids in enumerate(inputs):
            row = await server.engine.call(partial(llama.embed_ids, ids, pooling=request.pooling))
            data.append({"object": "embedding", "index": i, "embedding": shown(row, request.encoding_format)})
    tokens = sum(map(len, inputs))
    server.metrics.prompt_tokens += tokens
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def encode(request: EmbeddingRequest, llama: Llama) -> list[list[int]]:
    found = []
    for item in prompts_of(request.input, llama, "input"):
        if isinstance(item, str):
            check_length(item, llama, "input")
        ids = llama.tokenizer.encode(item) if isinstance(item, str) else item
        if not ids:
            raise ApiError(400, "input is empty", param="input")
        if len(ids) > room_for(llama):
            raise too_long(f"has {len(ids)} tokens", llama, "input")
        found.append(ids)
    return found


def shown(row: NDArray[np.float32], form: str) -> str | list[float]:
    return base64.b64encode(row.astype("<f4").tobytes()).decode() if form == "base64" else row.tolist()
