"""GET /slots: what each slot does."""

from typing import Any

from starlette.responses import Response

from llamagpu.serve.http import Call, json_response
from llamagpu.serve.state import Server


async def handle(server: Server, call: Call) -> Response:
    llama = server.llama
    running = {request.sequence.slot: request for request in list(llama.scheduler.running)}
    free = set(llama.scheduler.slots)  # without those whose requests have ended, but not the steps under way
    slots: list[dict[str, Any]] = []
    for number in range(llama.loaded.settings.slots):
        slot: dict[str, Any] = {"id": number, "n_ctx": llama.context, "is_processing": number not in free}
        if request := running.get(number):
            prompt = {"n_prompt_tokens": len(request.prompt), "n_prompt_tokens_cache": request.cached}
            slot |= {"state": request.state.name.lower(), **prompt, "n_decoded": len(request.new)}
        slots.append(slot)
    return json_response(slots)
