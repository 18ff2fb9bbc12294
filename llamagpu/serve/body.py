"""The body of a request: read within limits, decoded and checked in one pass."""

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from llamagpu.serve.errors import ApiError, invalid

T = TypeVar("T")


async def read_body(request: Request, max_bytes: int, seconds: float) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:18]) > max_bytes:
        raise too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                body += piece
                if len(body) > max_bytes:
                    raise too_large(max_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {seconds:g} s") from None
    except ClientDisconnect:
        raise ApiError(400, "the body is incomplete") from None
    return bytes(body)


def too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes:,} bytes", code="request_too_large")


def decode(body: bytes, kind: type[T]) -> T:
    """The body as a msgspec.Struct. Fields that it does not have are ignored, as the real APIs do."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        name = field(path)
        told = f"{name}: {message}" if path else message
        if missing := re.match(r"Object missing required field `(\w+)`", message):
            name = ".".join(filter(None, (name, missing[1])))
        raise invalid(told, name or None) from None
    except RecursionError:
        raise invalid("the body is nested too deeply") from None
    except ValueError as error:  # msgspec.DecodeError, UnicodeDecodeError
        raise invalid(f"the body is not JSON: {error}") from None


def field(path: str) -> str:
    """`$.messages[0].role` -> `messages[0].role`"""
    return re.sub(r"^\$\.?", "", path.rstrip("`"))


def encode(value: Any) -> bytes:
    return msgspec.json.encode(value)
