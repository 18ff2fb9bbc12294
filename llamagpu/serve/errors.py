"""Errors as the APIs report them: a status, and a JSON object in the API's own shape."""

import math
from typing import Any

from llamagpu.errors import BadArgument, DeviceLost, DoesNotFit, GrammarFailed, LlamaGpuError, Overloaded, WrongState

# Status -> the error's type in OpenAI's API and in Anthropic's
TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("invalid_request_error", "authentication_error"),
    403: ("invalid_request_error", "permission_error"),
    404: ("invalid_request_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("invalid_request_error", "invalid_request_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    503: ("server_error", "overloaded_error"),
}
SERVER_ERROR = ("server_error", "api_error")


class ApiError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = {} if retry_after is None else {"Retry-After": str(math.ceil(retry_after))}

    def openai(self) -> dict[str, Any]:
        kind, _ = TYPES.get(self.status, SERVER_ERROR)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """The API has no place for the field's name: the message says it."""
        _, kind = TYPES.get(self.status, SERVER_ERROR)
        named = not self.param or self.param in self.message
        message = self.message if named else f"{self.param}: {self.message}"
        return {"type": "error", "error": {"type": kind, "message": message}}


def invalid(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def as_api_error(error: BaseException, param: str | None = None) -> ApiError:
    """What a request's error is to its client. `param`: the field that it came from, if that is known."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RecursionError):
        return ApiError(400, "the body is nested too deeply", param=param)
    if not isinstance(error, LlamaGpuError):
        return ApiError(500, "an internal error; the server's log has it", code="internal_error")
    message = f"{error.cause}; {error.remedy}" if error.remedy else error.cause
    if isinstance(error, DoesNotFit):
        return ApiError(400, message, param=param, code="context_length_exceeded")
    if isinstance(error, Overloaded):
        return ApiError(429, message, code="queue_full", retry_after=1)
    if isinstance(error, DeviceLost | WrongState):
        return ApiError(503, message, code="unavailable", retry_after=1)
    if isinstance(error, GrammarFailed):
        return ApiError(400, message, param=param, code="grammar_failed")
    if isinstance(error, BadArgument):
        return ApiError(400, message, param=param or field_of(error.cause))
    return ApiError(400, message, param=param) if param else ApiError(500, message)


def field_of(cause: str) -> str | None:
    """`top_p is 2` names top_p: the checks of arguments begin with the name."""
    name, verb, _ = [*cause.split(" ", 2), "", ""][:3]
    return name if verb == "is" and name.isidentifier() else None
