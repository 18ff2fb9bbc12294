"""Encodes the header of a GGUF file with the writer of the `gguf` package. output.py streams the data behind it."""

import math
import struct
from collections.abc import Iterable, Mapping
from io import BytesIO
from typing import Any

import numpy as np
from gguf import GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType, GGUFWriter, Keys
from gguf.gguf_writer import WriterState
from gguf.quants import quant_shape_to_byte_shape

from llamagpu.files.gguf_file import DTYPES

TensorInfo = tuple[str, str, tuple[int, ...]]  # name, ggml type, shape [n, k]
ARRAY_TYPES = {dtype.str: GGUFValueType(number) for number, dtype in DTYPES.items()}


class _HeaderWriter(GGUFWriter):
    """Encodes whole numpy arrays and empty arrays, which gguf's writer does not accept."""

    def _pack_val(
        self, val: Any, vtype: GGUFValueType, add_vtype: bool, sub_type: GGUFValueType | None = None
    ) -> bytes:
        if vtype is not GGUFValueType.ARRAY:
            return bytes(super()._pack_val(val, vtype, add_vtype, sub_type))
        if sub_type is GGUFValueType.STRING:  # 400,000 in a Llama 3 vocabulary: a call of super for each would be slow
            data = b"".join(struct.pack("<Q", len(raw)) + raw for raw in map(_utf8, val))
        else:
            data = val.tobytes()
        return struct.pack("<IIQ", vtype, sub_type, len(val)) + data


def encode_header(metadata: Mapping[str, Any], tensors: Iterable[TensorInfo] = ()) -> bytes:
    """The file up to the first tensor's data. The tensors' data must follow in order, each padded by `padding`."""
    architecture = Keys.General.ARCHITECTURE
    writer = _HeaderWriter(None, metadata[architecture])  # the writer adds this key itself
    for key, value in metadata.items():
        if key != architecture:
            writer.add_key_value(key, *_typed(value))
    for name, ggml_type, shape in tensors:
        size, raw_type = tensor_bytes(ggml_type, shape), GGMLQuantizationType[ggml_type]
        writer.add_tensor_info(name, shape, np.dtype(np.float32), size, raw_type)
    file = BytesIO()
    writer.fout, writer.state = [file], WriterState.EMPTY  # type: ignore[list-item]  # no path: nothing to open
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return file.getvalue() + padding(file.tell())


def tensor_bytes(ggml_type: str, shape: tuple[int, ...]) -> int:
    return math.prod(quant_shape_to_byte_shape(shape, GGMLQuantizationType[ggml_type]))


def padding(size: int) -> bytes:
    return bytes(GGUFWriter.ggml_pad(size, GGUF_DEFAULT_ALIGNMENT) - size)


def _utf8(text: str) -> bytes:
    """JSON and file names may hold lone surrogates, which strict UTF-8 refuses."""
    return text.encode("utf-8", "surrogatepass")


def _typed(value: Any) -> tuple[Any, GGUFValueType, GGUFValueType | None]:
    """A value, its type, and the type of its elements. llama.cpp expects u32 where the value fits, and f32."""
    if isinstance(value, str):
        return _utf8(value), GGUFValueType.STRING, None
    if isinstance(value, bool):
        return value, GGUFValueType.BOOL, None
    if isinstance(value, int):
        unsigned = GGUFValueType.UINT32 if value < 1 << 32 else GGUFValueType.UINT64
        return value, GGUFValueType.INT32 if value < 0 else unsigned, None
    if isinstance(value, float):
        return value, GGUFValueType.FLOAT32, None
    if isinstance(value, np.ndarray):
        return value, GGUFValueType.ARRAY, ARRAY_TYPES[value.dtype.str]
    return value, GGUFValueType.ARRAY, GGUFValueType.STRING
