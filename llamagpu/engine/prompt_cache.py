"""The keys and values of a prompt in a file, for a later run to go on from.

In the file: PREFIX, what they were made of (JSON), the token ids (u32), keys and values as `read_cache` gives them,
the SHA-256 of all that. What a run does not recognise as its own, to the last byte, it refuses.
"""

import hashlib
import json
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from numpy.typing import NDArray

from llamagpu.errors import BadFile, DoesNotFit, LlamaGpuError, about
from llamagpu.files.gguf_file import show
from llamagpu.files.replacing import Overtaken, replacing

if TYPE_CHECKING:
    from llamagpu.engine.generate import Llama

PREFIX = struct.Struct("<16sIII")  # MAGIC, FORMAT, bytes of the JSON, tokens
MAGIC = b"llamagpu prompt\n"
FORMAT = 1  # another one whenever the cache's layout or the numbers in it change
MOST_JSON = 4096
WHOLE_BYTES = 64 << 10  # a tensor up to this size is hashed whole
RUNS, RUN_BYTES = 16, 256  # and of a larger one so many evenly spaced runs
Progress = Callable[[int, int], None]


def save(llama: "Llama", path: Path, tokens: int | None = None, progress: Progress | None = None) -> None:
    """The first `tokens` of what the model has read, or all. Of two runs that write one file the later one wins."""
    model = llama.model
    ids = model.history[:tokens]
    if not ids:
        raise LlamaGpuError("there is no prompt to save yet", "generate first")
    made_of = json.dumps(made(llama)).encode()
    start = PREFIX.pack(MAGIC, FORMAT, len(made_of), len(ids)) + made_of + np.array(ids, "<u4").tobytes()
    size = len(start) + len(ids) * model.position_bytes + hashlib.sha256().digest_size
    with suppress(Overtaken), replacing(path, size) as file:
        digest = hashlib.sha256()
        for piece in chain([np.frombuffer(start, np.uint8)], model.read_cache(len(ids))):
            file.write(piece.data)
            digest.update(piece.data)
            if progress:
                progress(100 * file.tell() // size, 100)
        file.write(digest.digest())


def load(llama: "Llama", path: Path, progress: Progress | None = None) -> int:
    """Put a saved prompt in the place of what the model has read; how many tokens it has."""
    model, digest = llama.model, hashlib.sha256()
    with about(path), opened(path) as file:
        size = os.fstat(file.fileno()).st_size

        def take(count: int) -> NDArray[np.uint8]:
            piece = np.frombuffer(file.read(count), np.uint8)
            if len(piece) < count:
                raise refused()
            digest.update(piece.data)
            if progress:
                progress(100 * file.tell() // size, 100)
            return piece

        tokens = check_start(take, made(llama))
        if not tokens or size != file.tell() + tokens * (4 + model.position_bytes) + digest.digest_size:
            raise refused()
        ids = take(4 * tokens).view("<u4").tolist()
        make_room(llama, tokens)
        model.write_cache(tokens, take)
        if file.read() != digest.digest():
            raise refused()
        model.history = ids
    return tokens


def opened(path: Path) -> BinaryIO:
    try:
        if path.exists() and not path.is_file():  # to open a pipe would wait for a writer
            raise refused("not a prompt cache: not even a regular file")
        return path.open("rb")
    except OSError as error:
        raise BadFile(f"cannot read {path}: {error.strerror}", "check the name of the prompt cache") from error


def check_start(take: Callable[[int], NDArray[np.uint8]], ours: dict[str, str]) -> int:
    """How many tokens follow, after making sure that they are for this run."""
    magic, version, length, tokens = PREFIX.unpack(take(PREFIX.size).tobytes())
    if magic != MAGIC:
        raise refused("not a prompt cache")
    if version != FORMAT:
        raise refused(f"a prompt cache of another version of llamagpu (format {version}, not {FORMAT})")
    try:
        theirs = json.loads(take(min(length, MOST_JSON)).tobytes())
        differing = [key for key in ours if theirs[key] != ours[key]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise refused() from None
    if "model" in differing:
        raise refused("the prompt cache was made with another model")
    if differing:
        key = differing[0]
        raise refused(f"the prompt cache was made with {key} {show(str(theirs[key]))}, and this run has {ours[key]}")
    return int(tokens)


def refused(cause: str = "the prompt cache is damaged or cut short") -> BadFile:
    return BadFile(cause, "delete it, or name another file")


def make_room(llama: "Llama", tokens: int) -> None:
    if tokens > llama.limit:
        cause = f"the prompt cache holds {tokens} tokens, and the context {llama.limit}"
        raise DoesNotFit(cause, "use a larger -c, or another file")
    llama.plan_memory(max(tokens, llama.memory.context)).check(llama.gpu)
    llama.model.truncate(0)
    llama.model.room_for(tokens)


def made(llama: "Llama") -> dict[str, str]:
    """All that keys and values of given ids depend on."""
    return {"model": fingerprint(llama), **llama.model.cache_kind}


def fingerprint(llama: "Llama") -> str:
    """Of the hyper-parameters and weights, not the name or date of the file, its tokenizer or template. A part of each
    large tensor has to do: all of an 8B model would take as long to hash as thousands of tokens to read."""
    digest = hashlib.sha256(repr(llama.config).encode())
    for label, data in llama.file.contents():
        if data.size > WHOLE_BYTES:
            data = data[: data.size // RUNS * RUNS].reshape(RUNS, -1)[:, :RUN_BYTES]
        digest.update(label.encode() + data.tobytes())
    return digest.hexdigest()
