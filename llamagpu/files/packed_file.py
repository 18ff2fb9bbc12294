"""The packed checkpoint: one safetensors file with every matrix as the device wants it, joined and ordered:
loading maps it and uploads from the map. Beside the matrices it holds a GGUF header for all else."""

import json
import mmap
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from llamagpu.errors import BadFile
from llamagpu.files.config import LlamaConfig
from llamagpu.files.gguf_file import AGAIN, BLOCKS, GgufFile, RawTensor, read_metadata, show
from llamagpu.files.gguf_writer import encode_header
from llamagpu.files.repack import Packed
from llamagpu.files.safetensors_file import DTYPES, read_header

FORMAT = "llamagpu packed 2"
READS = (FORMAT, "llamagpu packed 1")  # in which scales of K-quants are f32
NAMES = {np.dtype(numpy).str: name for name, numpy in DTYPES.items() if name != "BF16"}
FORMS = {"U8": ("q4", "q6"), "I8": ("q8",), "F16": ("f16",)}  # by the type of a matrix's words
Matrix = tuple[list[Packed], NDArray[np.float32] | None]  # parts one below the other, bias


class PackedTensors(dict[str, RawTensor]):
    """Kinds and shapes by GGUF name; `jobs` gives the matrices, joined and ordered for the device already."""

    jobs: Callable[[LlamaConfig], Iterator[tuple[str, Callable[[], Matrix]]]]
    device_bytes: Callable[[bool, bool], int]


class PackedFile:
    """The same face as GgufFile has. `tensors` gives kinds and shapes, and only of the vectors the data."""

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
        self.metadata = read_metadata(self.path, self._array("gguf", 1, "U8").tobytes())
        listed = self._listed(notes)
        self.tensors = PackedTensors((name, self._tensor(name, *entry)) for name, entry in listed.items())
        self.tensors.jobs, self.tensors.device_bytes = self.jobs, self.device_bytes

    def _listed(self, notes: dict[str, str]) -> dict[str, tuple[str, list[int]]]:
        try:
            found = json.loads(notes["tensors"])
            sound = all(
                kind in BLOCKS and shape and all(type(n) is int and 0 < n < 1 << 40 for n in shape)
                for kind, shape in found.values()
            )
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
            sound = False
        if not sound:
            raise BadFile(f"{self.path}: its list of tensors is damaged", AGAIN)
        return dict(found)

    def _tensor(self, name: str, kind: str, shape: list[int]) -> RawTensor:
        data = np.zeros(0, np.uint8)
        if len(shape) == 1:
            values = self._array(name, 1, "F32")
            if kind != "F32" or values.shape != tuple(shape):
                raise self._bad(name)
            data = values.view(np.uint8)
        return RawTensor(name, kind, tuple(shape), data)

    def _bad(self, name: str) -> BadFile:
        return BadFile(f"{self.path}: {show(name)} is missing or damaged", AGAIN)

    def _array(self, name: str, dims: int, *dtypes: str) -> NDArray[Any]:
        stored = self.arrays.get(name)
        if stored is None or stored.dtype not in dtypes or len(stored.shape) != dims or 0 in stored.shape:
            raise self._bad(name)
        flat = np.frombuffer(self._map, DTYPES[stored.dtype], int(np.prod(stored.shape)), stored.offset)
        return flat.reshape(stored.shape)

    def jobs(self, config: LlamaConfig) -> Iterator[tuple[str, Callable[[], Matrix]]]:
        """Every matrix in order of use, for `load_weights`."""
        c, q, kv = config, config.heads * config.head_dim, config.kv_heads * config.head_dim
        shapes = {"token_embd": (c.vocab, c.dim)}
        for i in range(c.layers):
            shapes[f"blk.{i}.qkv"] = q + 2 * kv, c.dim
            shapes[f"blk.{i}.attn_output"] = c.dim, q
            if f"blk.{i}.gate_up.0.words" in self.arrays:
                shapes[f"blk.{i}.gate_up"] = 2 * c.ffn_dim, c.dim
            else:
                shapes[f"blk.{i}.ffn_gate"] = shapes[f"blk.{i}.ffn_up"] = c.ffn_dim, c.dim
            shapes[f"blk.{i}.ffn_down"] = c.dim, c.ffn_dim
        if not c.tied:
            shapes["output"] = c.vocab, c.dim
        for label, (n, k) in shapes.items():
            yield label, partial(self.matrix, label, n, k)

    def matrix(self, label: str, n: int, k: int) -> Matrix:
        parts: list[Packed] = []
        while f"{label}.{len(parts)}.words" in self.arrays:
            parts.append(self._part(f"{label}.{len(parts)}", k))
        if sum(part.n for part in parts) != n:
            raise self._bad(label)
        bias = self._array(f"{label}.bias", 1, "F32") if f"{label}.bias" in self.arrays else None
        if bias is not None and (bias.shape != (n,) or not np.isfinite(bias).all()):
            raise self._bad(f"{label}.bias")
        return parts, bias

    def _part(self, label: str, k: int) -> Packed:
        words = self._array(f"{label}.words", 2, *FORMS)
        n, widths = len(words), {"q4": k // 2, "q6": 3 * k // 4, "q8": k, "f16": k + k % 2}
        form = next((f for f in FORMS[self.arrays[f"{label}.words"].dtype] if words.shape[1] == widths[f]), "")
        if not form or (form == "q6" and k % 64):
            raise self._bad(label)
        if form == "f16":
            return Packed(form, n, k, k, words, None)
        scales = self._array(f"{label}.scales", 3, "F16", "F32", "I8", "U8")
        (_, groups, size), records = scales.shape, scales.itemsize == 1
        width = 1 + (scales.dtype == np.uint8) if records else size
        group = 256 * width // max(1, size - 4) if records else k // groups
        odd = {"q6": (group, width) != (16, 1), "q8": (group, width) == (16, 2)}  # what no type has, and no kernel
        if group not in (16, 32) or width > 2 or odd.get(form):
            raise self._bad(f"{label}.scales")
        shape = (n, k // 256, 4 + 256 // group * width) if records else (n, k // group, width)
        if scales.shape != shape or k % (256 if records else group):
            raise self._bad(f"{label}.scales")
        floats = np.ascontiguousarray(scales[..., :4]).view(np.float16) if records else scales
        if not np.isfinite(floats).all():
            raise BadFile(f"{self.path}: {label}.scales holds NaN or infinity", AGAIN)
        return Packed(form, n, k, group, words, scales)

    def device_bytes(self, half: bool, fast: bool) -> int:
        """What a GPU takes for the arrays: scales as f32 where it cannot convert f16, else those of `fast` as f16."""
        total, sizes = -self.arrays["gguf"].nbytes, {"F32": 2 if fast else 4, "F16": 2, "I8": 1, "U8": 1}
        for name, a in self.arrays.items():
            scale = name.endswith(".scales")
            total += prod(a.shape) * (sizes.get(a.dtype, 4) if half else 4) if scale else a.nbytes
        return total

    def contents(self) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        for a in self.arrays.values():
            yield f"{a.name} {a.dtype} {a.shape}", np.frombuffer(self._map, np.uint8, a.nbytes, a.offset)

    def close(self) -> None:
        self.tensors, self.arrays = PackedTensors(), {}  # what still uses the map keeps it


def open_model(path: str | Path) -> GgufFile | PackedFile:
    return PackedFile(path) if Path(path).suffix == ".safetensors" else GgufFile(path)


class PackedWriter:
    """Arrays one after the other behind room for the header, which is written last."""

    def __init__(
        self, file: BinaryIO, metadata: dict[str, Any], tensors: dict[str, tuple[str, tuple[int, ...]]]
    ) -> None:
        self.file, self.entries = file, dict[str, dict[str, Any]]()
        self.notes = {"format": FORMAT, "tensors": json.dumps(tensors)}
        # An entry takes 130 bytes; a tensor gives at most three: words, scales, bias. Pages align the data.
        self.room = -(-(1000 + len(json.dumps(self.notes)) + 400 * len(tensors)) // 4096) * 4096
        self.at = 0
        file.write(bytes(self.room))
        self.put("gguf", np.frombuffer(encode_header(metadata), np.uint8))

    def put(self, name: str, array: NDArray[Any]) -> None:
        entry = {
            "dtype": NAMES[array.dtype.str],
            "shape": array.shape,
            "data_offsets": [self.at, self.at + array.nbytes],
        }
        self.entries[name] = entry
        self.at += array.nbytes
        self.file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def put_matrix(self, label: str, matrix: Matrix) -> None:
        parts, bias = matrix
        for i, part in enumerate(parts):
            self.put(f"{label}.{i}.words", part.words)
            if part.scales is not None:
                self.put(f"{label}.{i}.scales", part.scales)
        if bias is not None:
            self.put(f"{label}.bias", bias)

    def finish(self) -> None:
        header = json.dumps({"__metadata__": self.notes, **self.entries}).encode().ljust(self.room - 8)
        assert len(header) == self.room - 8, "the header outgrew its room"
        self.file.seek(0)
        self.file.write(len(header).to_bytes(8, "little") + header)
