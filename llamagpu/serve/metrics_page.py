"""GET /metrics: figures for Prometheus."""

from starlette.responses import Response

from llamagpu.serve.http import Call
from llamagpu.serve.state import Server


async def handle(server: Server, call: Call) -> Response:
    scheduler = server.llama.scheduler
    pool = scheduler.engine.cache.pool
    running = len(scheduler.running)
    gauges = {
        "requests_processing": ("Generations that run.", running),
        "requests_deferred": ("Generations that wait.", max(0, server.engine.reserved - running)),
        "batch_width": ("Sequences of the latest step.", running),
        "slots": ("Sequences that a step may have.", scheduler.engine.settings.slots),
        "kv_pages": ("Pages of the KV cache.", pool.count),
        "kv_pages_used": ("Pages of the KV cache that sequences hold.", pool.count - pool.available),
    }
    return Response(server.metrics.text(gauges), media_type="text/plain; version=0.0.4")
