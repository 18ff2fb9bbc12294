"""POST /tokenize: a text as token ids."""

import asyncio

import msgspec
from starlette.responses import Response

from llamagpu.serve.body import decode
from llamagpu.serve.generating import check_length
from llamagpu.serve.http import Call, json_response
from llamagpu.serve.state import Server


class TokenizeRequest(msgspec.Struct):
    content: str
    add_special: bool = False  # BOS, where the model uses it
    parse_special: bool = True  # control tokens are recognised in the text
    with_pieces: bool = False


async def handle(server: Server, call: Call) -> Response:
    request, llama = decode(call.body, TokenizeRequest), server.llama
    check_length(request.content, llama, "content")
    bos = None if request.add_special else False
    ids = await asyncio.to_thread(llama.tokenizer.encode, request.content, bos, request.parse_special)
    if not request.with_pieces:
        return json_response({"tokens": ids})
    pieces = (llama.tokenizer.token_bytes(id).decode("utf-8", "replace") for id in ids)
    return json_response({"tokens": [{"id": id, "piece": piece} for id, piece in zip(ids, pieces, strict=True)]})
