"""Checks of the arguments of the Python API. Each error names the argument and its value."""

import operator
from collections.abc import Mapping

from llamagpu.errors import check_argument

MAX_PENALTY = 100.0  # repeat_penalty, and 1 / MAX_PENALTY at least: logits times much more would overflow
ROLES = ("system", "user", "assistant", "tool", "developer")


def token_ids(name: str, values: object) -> list[int]:
    """A list of ints. A text is not one, and neither is a list of texts."""
    try:
        if not isinstance(values, str | bytes):
            return [operator.index(value) for value in values]  # type: ignore[attr-defined]
    except TypeError:
        pass
    check_argument(name, values, False, "a list of token ids" + (", or one str" if name == "prompt" else ""))
    raise AssertionError


def stop_strings(stop: object) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else stop
    valid = isinstance(texts, list | tuple) and all(isinstance(text, str) and text for text in texts)
    check_argument("stop", stop, valid, "a str, or a list of them; none may be empty")
    return tuple(texts)  # type: ignore[arg-type]


def check_messages(messages: object) -> None:
    expected = 'a list such as [{"role": "user", "content": "Hello!"}]'
    check_argument("messages", messages, isinstance(messages, list | tuple) and bool(messages), expected)
    for i, message in enumerate(messages):  # type: ignore[arg-type, var-annotated]
        check_argument(f"messages[{i}]", message, isinstance(message, Mapping), "a dict with role and content")
        for key in ("role", "content"):
            value, expected = message.get(key), "a str" if key in message else f"the {key}, a str"
            valid = isinstance(value, str) or (key == "content" and value is None and "tool_calls" in message)
            check_argument(f"messages[{i}][{key!r}]", value, valid, expected)
        role = message["role"]
        check_argument(f"messages[{i}]['role']", role, role in ROLES, f"one of {', '.join(ROLES)}")
