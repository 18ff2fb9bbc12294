"""POST /apply-template: the prompt of a chat request as text, without an answer."""

import asyncio

from starlette.responses import Response

from llamagpu.serve.body import decode
from llamagpu.serve.chat import check, render
from llamagpu.serve.chat_completions import ChatRequest, task_of
from llamagpu.serve.http import Call, json_response
from llamagpu.serve.state import Server


async def handle(server: Server, call: Call) -> Response:
    llama = server.llama
    task = task_of(decode(call.body, ChatRequest), llama)
    check(task)
    _, text, _ = await asyncio.to_thread(render, task, llama)
    return json_response({"prompt": text})
