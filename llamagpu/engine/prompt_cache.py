"""Saves the KV cache of a prompt to a file, so that a later run continues from it.

The file holds PREFIX, a JSON object of everything that keys and values depend on, the token ids (u32), the bytes of
KvCache.read, and the SHA-256 of all these. A run refuses a damaged file, and a file of another model or other settings.
"""

import hashlib
import json
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from llamagpu.engine.load import LoadedModel
from llamagpu.engine.model import Model
from llamagpu.engine.sequence import Sequence
from llamagpu.errors import BadFile, DoesNotFit, LlamaGpuError, error_context
from llamagpu.files.atomic import Superseded, atomic_write
from llamagpu.files.gguf_file import shown

PREFIX = struct.Struct("<16sIII")  # MAGIC, FORMAT, bytes of the JSON, tokens
MAGIC = b"llamagpu prompt\n"
FORMAT = 3  # changes whenever the layout of the KV cache or the numbers in it change
MAX_JSON = 4096
SMALL_BYTES = 64 << 10  # a tensor up to this size is hashed completely
SAMPLES, SAMPLE_BYTES = 16, 256  # of a larger one, this many evenly spaced samples
Progress = Callable[[int, int], None]


def save(
    loaded: LoadedModel, sequence: Sequence, path: Path, tokens: int | None = None, progress: Progress | None = None
) -> None:
    """Write the first `tokens` of the sequence, or all. If two runs write the same file, the later one wins."""
    if sequence in loaded.engine.unchecked:  # a generation that runs checks itself
        loaded.engine.check()
    cache, ids = loaded.engine.cache, sequence.ids[:tokens]
    if not ids:
        raise LlamaGpuError("there is no prompt to save yet", "generate first")
    identity = json.dumps(identity_of(loaded)).encode()
    start = PREFIX.pack(MAGIC, FORMAT, len(identity), len(ids)) + identity + np.array(ids, "<u4").tobytes()
    size = len(start) + len(ids) * cache.position_bytes + hashlib.sha256().digest_size
    with suppress(Superseded), atomic_write(path, size) as file:
        digest = hashlib.sha256()
        for piece in chain([np.frombuffer(start, np.uint8)], cache.read(sequence, len(ids))):
            file.write(piece.data)
            digest.update(piece.data)
            if progress:
                progress(100 * file.tell() // size, 100)
        file.write(digest.digest())


def load(loaded: LoadedModel, sequence: Sequence, path: Path, progress: Progress | None = None) -> int:
    """Replace the sequence by a saved prompt; return its number of tokens."""
    cache, digest = loaded.engine.cache, hashlib.sha256()
    with error_context(path), opened(path) as file:
        size = os.fstat(file.fileno()).st_size

        def take(count: int) -> NDArray[np.uint8]:
            piece = np.frombuffer(file.read(count), np.uint8)
            if len(piece) < count:
                raise refused()
            digest.update(piece.data)
            if progress:
                progress(100 * file.tell() // size, 100)
            return piece

        tokens = check_start(take, identity_of(loaded))
        if not tokens or size != file.tell() + tokens * (4 + cache.position_bytes) + digest.digest_size:
            raise refused()
        ids = take(4 * tokens).view("<u4").tolist()
        reserve(loaded, sequence, tokens)
        cache.write(sequence, tokens, take)
        if file.read() != digest.digest():
            raise refused()
        sequence.ids, sequence.checked = ids, tokens
    return tokens


def opened(path: Path) -> BinaryIO:
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
            raise refused("not a prompt cache: not even a regular file")
        return path.open("rb")
    except OSError as error:
        raise BadFile(f"cannot read {path}: {error.strerror}", "check the name of the prompt cache") from error


def check_start(take: Callable[[int], NDArray[np.uint8]], ours: dict[str, str]) -> int:
    """Check that the file is for this run; return its number of tokens."""
    magic, version, length, tokens = PREFIX.unpack(take(PREFIX.size).tobytes())
    if magic != MAGIC:
        raise refused("not a prompt cache")
    if version != FORMAT:
        raise refused(f"a prompt cache of another version of llamagpu (format {version}, not {FORMAT})")
    try:
        theirs = json.loads(take(min(length, MAX_JSON)).tobytes())
        differing = [key for key in ours if theirs[key] != ours[key]]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise refused() from None
    if "model" in differing:
        raise refused("the prompt cache was made with another model")
    if differing:
        key = differing[0]
        raise refused(f"the prompt cache was made with {key} {shown(str(theirs[key]))}, and this run has {ours[key]}")
    return int(tokens)


def refused(cause: str = "the prompt cache is damaged or cut short") -> BadFile:
    return BadFile(cause, "delete it, or name another file")


def reserve(loaded: LoadedModel, sequence: Sequence, tokens: int) -> None:
    context = loaded.settings.context
    if tokens > context:
        cause = f"the prompt cache holds {tokens} tokens, and the context {context}"
        raise DoesNotFit(cause, "use a larger -c, or another file")
    loaded.engine.end(sequence)
    loaded.engine.reserve(sequence, tokens)


def identity_of(loaded: LoadedModel) -> dict[str, str]:
    """Everything that keys and values of given ids depend on."""
    settings = loaded.settings
    return {
        "model": fingerprint(loaded),
        "cache type": settings.kv_type,
        "precision": computed_precision(loaded.engine.model),
        "layout": settings.backend,
    }


def computed_precision(model: Model) -> str:
    if model.int8_decode == model.int8_prefill:
        return "fast" if model.int8_decode else "high"
    return "mixed"


def fingerprint(loaded: LoadedModel) -> str:
    """A hash of hyper-parameters and weights, but not of the file's name or date, its tokenizer or template.

    Large tensors are sampled: hashing all of an 8B model would take as long as computing thousands of tokens.
    """
    digest = hashlib.sha256(repr(loaded.config).encode())
    for label, data in loaded.source.file.contents():
        if data.size > SMALL_BYTES:
            data = data[: data.size // SAMPLES * SAMPLES].reshape(SAMPLES, -1)[:, :SAMPLE_BYTES]
        digest.update(label.encode() + data.tobytes())
    return digest.hexdigest()
