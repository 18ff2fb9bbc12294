"""Encodes texts with the tokenizers library, in a process of its own (vocab.py starts it).

A hostile tokenizer.json takes any memory, or makes the Rust code panic. This module imports only that library and the
standard library.
"""

import json
import os
import sys
from contextlib import suppress
from typing import Any

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

MEMORY = 1 << 30  # bytes of address space; Llama 3's vocabulary takes 0.2 GiB
MAX_IDS = 1 << 16  # for texts of a few hundred characters


def main() -> None:
    """Read path, texts and seconds of CPU time as JSON. Write the ids of each text, or the error."""
    request = json.load(sys.stdin)
    limit(request["seconds"])
    answer: dict[str, Any]
    try:
        answer = {"ids": encode(request["path"], request["texts"])}
    except BaseException as error:  # panics of Rust code are not Exceptions
        answer = {"error": str(error)[:1000]}
    json.dump(answer, sys.stdout)


def limit(seconds: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the stacks of its threads count as memory
    if resource:
        for kind, value in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_CORE, 0)):
            with suppress(ValueError, OSError):  # macOS does not limit memory
                resource.setrlimit(kind, (value, value))


def encode(path: str, texts: list[str]) -> list[list[list[int]]]:
    """The ids of each text without special tokens, and with them."""
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(path)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    found = [[tokenizer.encode(text, add_special_tokens=special).ids for special in (False, True)] for text in texts]
    if sum(len(ids) for pair in found for ids in pair) > MAX_IDS:
        raise ValueError("a short text gives too many tokens")
    return found
