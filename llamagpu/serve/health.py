"""GET /health: 200 when requests can be answered, 503 while the model loads or after the engine has ended."""

from starlette.responses import Response

from llamagpu.serve.http import Call, json_response
from llamagpu.serve.state import Server


async def handle(server: Server, call: Call) -> Response:
    if server.engine.error is not None:
        return json_response({"status": "error"}, 503)
    if server.engine.llama is None:
        return json_response({"status": "loading model"}, 503)
    return json_response({"status": "ok"})
