"""Writes GGUF v3: all that stands before the data, and the room that the data takes."""

import math
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamagpu.files.gguf_file import ARRAY, BLOCKS, CODES, KINDS, STRING

ALIGNMENT = 32
KIND_NUMBERS = {name: number for number, (name, _, _) in KINDS.items()}
VALUE_TYPES = {np.dtype("<" + code).str: kind for kind, code in CODES.items()}
U32, I32, F32, BOOL, U64 = 4, 5, 6, 7, 10

TensorInfo = tuple[str, str, tuple[int, ...]]  # name, kind, shape [N, K]


def tensor_bytes(kind: str, shape: tuple[int, ...]) -> int:
    weights, size = BLOCKS[kind]
    return math.prod(shape) // weights * size


def padding(size: int) -> bytes:
    return bytes(-size % ALIGNMENT)


def encode_header(metadata: dict[str, Any], tensors: Iterable[TensorInfo] = ()) -> bytes:
    """Magic to the first tensor's data. The tensors' data follow in order, each padded to ALIGNMENT."""
    tensors = list(tensors)
    out = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        out += [_string(key), _value(value)]
    offset = 0
    for name, kind, shape in tensors:
        out.append(_string(name))
        out.append(struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape)))
        out.append(struct.pack("<IQ", KIND_NUMBERS[kind], offset))
        size = tensor_bytes(kind, shape)
        offset += size + len(padding(size))
    header = b"".join(out)
    return header + padding(len(header))


def _string(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    """Whole numbers as u32 where they fit and reals as f32, which is what llama.cpp asks for; arrays keep
    their type."""
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    if isinstance(value, int):
        kind = I32 if value < 0 else U32 if value < 1 << 32 else U64
        return struct.pack("<I" + CODES[kind], kind, value)
    if isinstance(value, float):
        return struct.pack("<If", F32, value)
    if isinstance(value, list) and (not value or isinstance(value[0], str)):
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_string, value))
    array: NDArray[Any] = np.asarray(value)
    return struct.pack("<IIQ", ARRAY, VALUE_TYPES[array.dtype.str], array.size) + array.tobytes()
