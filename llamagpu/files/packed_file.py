"""The packed checkpoint: a safetensors file with every matrix in the layout that is uploaded to the device.

q, k, v and gate, up are fused. Loading maps the file and uploads from the map. An embedded GGUF header holds the
metadata. `llamagpu convert --to packed` writes such a file (convert/packed_writer.py).
"""

import json
import mmap
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamagpu.errors import BadFile
from llamagpu.files.config import ModelConfig, is_vector
from llamagpu.files.gguf_file import BLOCKS, REMEDY_REFETCH, GgufFile, RawTensor, read_metadata, shown
from llamagpu.files.matrices import LoadedMatrix, MatrixSource, matrix_sources
from llamagpu.files.safetensors_file import DTYPES, read_header
from llamagpu.files.storage import SUPER_BLOCK, Layout, PackedMatrix, Storage

FORMAT = "llamagpu packed 2"
READS = (FORMAT, "llamagpu packed 1")  # the first version stored the scales of K-quants as f32
STORAGES = {  # by the type of the words
    "U8": (Storage.Q4, Storage.Q6),
    "I8": (Storage.Q8,),
    "F16": (Storage.F16,),
    "BF16": (Storage.BF16,),
}
STACKED = ("gate_up", "ffn_gate", "ffn_up", "ffn_down")  # the matrices that every expert has
SCALE_BITS = {"F32": 32, "F16": 16, "I8": 8, "U8": 8}


class PackedFile:
    """Has the interface of GgufFile. `tensors` holds types and shapes, and data only for the vectors."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.arrays, notes = read_header(self.path)
        if notes.get("format") not in READS:
            raise BadFile(
                f"{self.path}: a safetensors file that is not packed for this program",
                "Give its folder to `llamagpu convert`, or a .gguf file.",
            )
        with self.path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.metadata: dict[str, Any] = read_metadata(self.path, self._array("gguf", 1, "U8").tobytes())
        listed = self._listed(notes)
        self.tensors = {name: self._tensor(name, *entry) for name, entry in listed.items()}

    def _listed(self, notes: dict[str, str]) -> dict[str, tuple[str, list[int]]]:
        try:
            found = json.loads(notes["tensors"])
            sound = all(
                ggml_type in BLOCKS and shape and all(type(n) is int and 0 < n < 1 << 40 for n in shape)
                for ggml_type, shape in found.values()
            )
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
            sound = False
        if not sound:
            raise BadFile(f"{self.path}: its list of tensors is damaged", REMEDY_REFETCH)
        return dict(found)

    def _tensor(self, name: str, ggml_type: str, shape: list[int]) -> RawTensor:
        data = np.zeros(0, np.uint8)
        if is_vector(name, shape):
            values = self._array(name, 1, "F32")
            if ggml_type != "F32" or values.size != prod(shape):
                raise self._bad(name)
            data = values.view(np.uint8)
        return RawTensor(name, ggml_type, tuple(shape), data)

    def _bad(self, name: str) -> BadFile:
        return BadFile(f"{self.path}: {shown(name)} is missing or damaged", REMEDY_REFETCH)

    def _array(self, name: str, dims: int, *dtypes: str) -> NDArray[Any]:
        stored = self.arrays.get(name)
        if stored is None or stored.dtype not in dtypes or len(stored.shape) != dims or 0 in stored.shape:
            raise self._bad(name)
        flat = np.frombuffer(self._map, DTYPES[stored.dtype], prod(stored.shape), stored.offset)
        return flat.reshape(stored.shape)

    def matrix_sources(self, config: ModelConfig) -> list[MatrixSource]:
        """Every matrix in the order of use."""
        c, experts = config, config.experts or 1
        shapes = {"token_embd": (c.vocab, c.dim)}
        for i, kind in enumerate(c.kinds):
            shapes[f"blk.{i}.qkv"] = c.mixer_rows(kind), c.dim
            shapes[f"blk.{i}.attn_output"] = c.dim, c.mixer_width(kind)
            inside = experts * c.ffn_dim
            if f"blk.{i}.gate_up.0.words" in self.arrays:
                shapes[f"blk.{i}.gate_up"] = 2 * inside, c.dim
            else:
                shapes[f"blk.{i}.ffn_gate"] = shapes[f"blk.{i}.ffn_up"] = inside, c.dim
            shapes[f"blk.{i}.ffn_down"] = experts * c.dim, c.ffn_dim
            if c.experts:
                shapes[f"blk.{i}.ffn_gate_inp"] = c.experts, c.dim
        if not c.tied:
            shapes["output"] = c.vocab, c.dim
        return [
            replace(self._source(label, n, k), experts=experts if label.endswith(STACKED) else 1)
            for label, (n, k) in shapes.items()
        ]

    def _source(self, label: str, n: int, k: int) -> MatrixSource:
        names: list[str] = []
        while f"{label}.{len(names)}.words" in self.arrays:
            names.append(f"{label}.{len(names)}")
        layouts = [self._layout(name, k) for name in names]
        rows = [self.arrays[f"{name}.words"].shape[0] for name in names]
        if sum(rows) != n or any(count % 2 for count in rows[:-1]):  # kernels compute rows in pairs
            raise self._bad(label)
        has_bias = f"{label}.bias" in self.arrays
        if has_bias and self._array(f"{label}.bias", 1, "F32").shape != (n,):
            raise self._bad(f"{label}.bias")
        shards = dict(zip(names, layouts, strict=True))
        return MatrixSource(label, tuple(zip(layouts, rows, strict=True)), has_bias, partial(self._load, label, shards))

    def _layout(self, name: str, k: int) -> Layout:
        words = self._array(f"{name}.words", 2, *STORAGES)
        n, width = words.shape
        row_bytes, storages = width * words.itemsize, STORAGES[self.arrays[f"{name}.words"].dtype]
        storage = next((s for s in storages if Layout(s, k, k).row_bytes == row_bytes), None)
        if storage is None or (storage is Storage.Q6 and k % 64):
            raise self._bad(name)
        if storage.two_bytes:
            return Layout(storage, k, k)
        scales = self._array(f"{name}.scales", 3, *SCALE_BITS)
        (_, groups, size), bits = scales.shape, SCALE_BITS[self.arrays[f"{name}.scales"].dtype]
        has_offset = scales.dtype == np.uint8 if bits == 8 else size == 2
        group = SUPER_BLOCK * (1 + has_offset) // max(1, size - 4) if bits == 8 else k // groups
        layout = Layout(storage, k, group, bool(has_offset), bits)
        known = group in (16, 32) and not (group == 16 and has_offset and storage is not Storage.Q4)
        if not known or (storage is Storage.Q6 and group != 16):  # no GGUF type has this layout, and no kernel reads it
            raise self._bad(f"{name}.scales")
        expected = (n, k // SUPER_BLOCK, layout.super_block_bytes) if bits == 8 else (n, k // group, layout.scale_width)
        if scales.shape != expected or k % (SUPER_BLOCK if bits == 8 else group):
            raise self._bad(f"{name}.scales")
        return layout

    def _load(self, label: str, shards: dict[str, Layout]) -> LoadedMatrix:
        bias = self._array(f"{label}.bias", 1, "F32") if f"{label}.bias" in self.arrays else None
        if bias is not None and not np.isfinite(bias).all():
            raise self._bad(f"{label}.bias")
        return LoadedMatrix([self._matrix(name, layout) for name, layout in shards.items()], bias)

    def _matrix(self, name: str, layout: Layout) -> PackedMatrix:
        words = self._array(f"{name}.words", 2, *STORAGES)
        if not layout.scale_bits:
            return PackedMatrix(layout, words)
        scales = self._array(f"{name}.scales", 3, *SCALE_BITS)
        scales = scales.view(np.uint8) if layout.scale_bits == 8 else scales
        floats = np.ascontiguousarray(scales[..., :4]).view(np.float16) if layout.scale_bits == 8 else scales
        if not np.isfinite(floats).all():
            raise BadFile(f"{self.path}: {name}.scales holds NaN or infinity", REMEDY_REFETCH)
        return PackedMatrix(layout, words, scales)

    def contents(self) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        """A description of every array, and its bytes."""
        for a in self.arrays.values():
            yield f"{a.name} {a.dtype} {a.shape}", np.frombuffer(self._map, np.uint8, a.nbytes, a.offset)

    def close(self) -> None:
        self.tensors, self.arrays = {}, {}  # the map lives as long as an array that views it


ModelFile = GgufFile | PackedFile


def open_model_file(path: str | Path) -> ModelFile:
    return PackedFile(path) if Path(path).suffix == ".safetensors" else GgufFile(path)


def file_matrices(file: ModelFile, config: ModelConfig) -> list[MatrixSource]:
    """Every matrix of the model in the file, in the order of use."""
    return file.matrix_sources(config) if isinstance(file, PackedFile) else matrix_sources(file.tensors, config)
