"""POST /v1/messages/count_tokens: the tokens of a request of Anthropic's API."""

import asyncio

from starlette.responses import Response

from llamagpu.serve.body import decode
from llamagpu.serve.chat import prompt
from llamagpu.serve.http import Call, json_response
from llamagpu.serve.messages import CountRequest, task_of
from llamagpu.serve.state import Server


async def handle(server: Server, call: Call) -> Response:
    request = decode(call.body, CountRequest)
    server.check_model(request.model)
    _, ids, _ = await asyncio.to_thread(prompt, task_of(request, server.llama), server.llama)
    return json_response({"input_tokens": len(ids)})
