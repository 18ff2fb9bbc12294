"""Writes the packed checkpoint that files/packed_file.py reads."""

import json
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from llamagpu.convert.gguf_header import encode_header
from llamagpu.files.matrices import LoadedMatrix
from llamagpu.files.packed_file import FORMAT
from llamagpu.files.safetensors_file import DTYPES

DTYPE_NAMES = {np.dtype(numpy).str: name for name, numpy in DTYPES.items() if name != "U16"}  # u16 is BF16


class PackedWriter:
    """Reserves space for the header, writes the arrays after it, and writes the header last."""

    def __init__(
        self, file: BinaryIO, metadata: dict[str, Any], tensors: dict[str, tuple[str, tuple[int, ...]]]
    ) -> None:
        self.file, self.entries = file, dict[str, dict[str, Any]]()
        self.notes = {"format": FORMAT, "tensors": json.dumps(tensors)}
        # A tensor has at most three entries (words, scales, bias) of 130 bytes each. The data begin at a page boundary.
        self.header_bytes = -(-(1000 + len(json.dumps(self.notes)) + 400 * len(tensors)) // 4096) * 4096
        self.position = 0
        file.write(bytes(self.header_bytes))
        self.put("gguf", np.frombuffer(encode_header(metadata), np.uint8))

    def put(self, name: str, array: NDArray[Any]) -> None:
        end = self.position + array.nbytes
        dtype = DTYPE_NAMES[array.dtype.str]
        self.entries[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [self.position, end]}
        self.position = end
        self.file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def put_matrix(self, label: str, loaded: LoadedMatrix) -> None:
        for i, matrix in enumerate(loaded.matrices):
            self.put(f"{label}.{i}.words", matrix.words)
            if matrix.scales is not None:
                # The dtype tells the reader whether super-blocks have offsets: U8 with offsets, I8 without.
                signed = matrix.layout.scale_bits == 8 and not matrix.layout.has_offset
                self.put(f"{label}.{i}.scales", matrix.scales.view(np.int8) if signed else matrix.scales)
        if loaded.bias is not None:
            self.put(f"{label}.bias", loaded.bias)

    def finish(self) -> None:
        header = json.dumps({"__metadata__": self.notes, **self.entries}).encode().ljust(self.header_bytes - 8)
        assert len(header) == self.header_bytes - 8, "the header outgrew its space"
        self.file.seek(0)
        self.file.write(len(header).to_bytes(8, "little") + header)
