"""GET /: the chat page, one file without any other request. Only its own script may run in it."""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.responses import Response

from llamagpu.serve.http import Call
from llamagpu.serve.state import Server


async def handle(server: Server, call: Call) -> Response:
    page, policy = read_page()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(page, headers=headers, media_type="text/html")


@cache
def read_page() -> tuple[bytes, str]:
    """The page, and the policy that lets nothing run but the script in it."""
    page = Path(__file__).with_name("page.html").read_bytes()
    script = re.search(rb"<script>(.*?)</script>", page, re.S)
    assert script
    digest = base64.b64encode(hashlib.sha256(script[1]).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy
