"""Reads safetensors: a JSON header with the type, shape and offset of every array, then the bytes.

Nothing in the header is trusted: sizes and offsets are checked before memory is allocated for them.
"""

import json
import math
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamagpu.errors import BadFile, Unsupported
from llamagpu.files.gguf_file import REMEDY_REFETCH, shown

# BF16 is read as u16 bits, because numpy has no such type; they are the upper half of an f32
DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2",
    "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip
MAX_HEADER_BYTES = 100 << 20  # the format's own limit


@dataclass(frozen=True, slots=True)
class Stored:
    """An array in a file; `read` reads it."""

    path: Path
    name: str
    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize

    def read(self, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Read rows start .. stop, or all. The file is not mapped: mapped pages count as memory of the process."""
        stop = self.shape[0] if stop is None else stop
        row = math.prod(self.shape[1:])
        dtype = np.dtype(DTYPES[self.dtype])
        count, offset = (stop - start) * row, self.offset + start * row * dtype.itemsize
        try:
            values = np.fromfile(self.path, dtype, count, offset=offset)
        except OSError as error:
            raise BadFile(f"{self.path}: cannot be read: {error.strerror}", "Check the disk.") from error
        if values.size != count:
            raise BadFile(f"{self.path}: was cut short while it was being read", REMEDY_REFETCH)
        return values.reshape(stop - start, *self.shape[1:])


def read_header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """The arrays by name, and the file's own notes (__metadata__)."""

    def bad(cause: str) -> BadFile:
        return BadFile(f"{path}: {cause}", REMEDY_REFETCH)

    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
            raise bad("is not a regular file")
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise bad("not safetensors, or cut short: its header does not fit")
            header = json.loads(file.read(length))
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror}", "Check the path and its permissions.") from error
    except (ValueError, RecursionError):
        raise bad("not safetensors: its header is not JSON") from None
    if not isinstance(header, dict):
        raise bad("not safetensors: its header is no JSON object")
    notes = header.pop("__metadata__", {})
    if not isinstance(notes, dict) or not all(isinstance(value, str) for value in notes.values()):
        raise bad("its notes (__metadata__) are not text")
    base = 8 + length
    arrays = {name: _stored(path, name, entry, base, size) for name, entry in header.items()}
    for left, right in pairwise(sorted(arrays.values(), key=lambda array: (array.offset, array.nbytes))):
        if left.offset + left.nbytes > right.offset:
            raise bad(f"tensors {shown(left.name)} and {shown(right.name)} overlap")
    return arrays, notes


def _stored(path: Path, name: str, entry: Any, base: int, size: int) -> Stored:
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sound = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in (*shape, start, stop))
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise BadFile(f"{path}: the header's entry for {shown(name)} is damaged", REMEDY_REFETCH)
    if dtype not in DTYPES:
        raise Unsupported(
            f"{path}: tensor {shown(name)} is {shown(dtype)}, which is not supported",
            "F32, F16, BF16 and the 4-bit AWQ and GPTQ formats work.",
        )
    stored = Stored(path, name, dtype, shape, base + start)
    if stop - start != stored.nbytes or base + stop > size:
        raise BadFile(f"{path}: tensor {shown(name)} does not fit its place in the file", REMEDY_REFETCH)
    return stored
