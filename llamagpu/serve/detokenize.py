"""POST /detokenize: token ids as text."""

import asyncio

import msgspec
from starlette.responses import Response

from llamagpu.files.tokenizer import Tokenizer
from llamagpu.serve.body import decode
from llamagpu.serve.errors import invalid
from llamagpu.serve.http import Call, json_response
from llamagpu.serve.state import Server


class DetokenizeRequest(msgspec.Struct):
    tokens: list[int]


async def handle(server: Server, call: Call) -> Response:
    request, tokenizer = decode(call.body, DetokenizeRequest), server.llama.tokenizer
    return json_response({"content": await asyncio.to_thread(text_of, request.tokens, tokenizer)})


def text_of(ids: list[int], tokenizer: Tokenizer) -> str:
    if not all(0 <= id < tokenizer.vocab_size for id in ids):
        raise invalid(f"tokens: ids go from 0 to {tokenizer.vocab_size - 1}", "tokens")
    return tokenizer.decode(ids)
