"""Reads GGUF v2 and v3, whole or split: metadata as Python values, tensors as views of the mapped file.

Nothing in the file is trusted: counts, lengths and offsets are checked before memory is allocated for them. That is
why this reader exists beside the one of the `gguf` package, which trusts what it reads. The tables here equal gguf's
(a test compares them); they are copied because importing `gguf` takes 0.15 s, which every start would pay.
"""

import contextlib
import math
import mmap
import re
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamagpu.errors import BadFile, Unsupported

# ggml type number -> name, weights per block, bytes per block
GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
SUPPORTED = (
    "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS",
    "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0", "MXFP4",
    "F16", "BF16", "F32",
)  # fmt: skip
BLOCKS = {name: (weights, size) for name, weights, size in GGML_TYPES.values() if name in SUPPORTED}

# Real files stay far below: about 40 keys, 1,137 tensors (405B), 10 MB of metadata, 0.9 million strings.
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_HEADER_BYTES = 256 << 20
MAX_STRINGS = 1 << 22  # 4 million take about 2 s and 250 MB
ALIGNMENTS = tuple(1 << i for i in range(21))

SPLIT_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
REMEDY_REFETCH = "The file is damaged or cut short: fetch it again."
REMEDY_NOT_GGUF = "Give a .gguf file; `llamagpu convert` makes one from safetensors."

STRING, ARRAY = 8, 9
# GGUF value type -> its type code, the same for struct and numpy
TYPE_CODES = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
SCALARS = {value_type: struct.Struct("<" + code) for value_type, code in TYPE_CODES.items()}
DTYPES = {value_type: np.dtype("<" + code) for value_type, code in TYPE_CODES.items()}
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")

FOREIGN = (  # files that are given by mistake: first bytes, description, remedy
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself", "Run `git lfs pull`."),
    (b"PK\x03\x04", "a zip archive (perhaps a PyTorch checkpoint)", REMEDY_NOT_GGUF),
    (b"\x1f\x8b", "a gzip archive", "Unpack it first."),
    (b"<", "an HTML or XML page, perhaps a failed download", REMEDY_REFETCH),
    (b"{", "a JSON file", REMEDY_NOT_GGUF),
    (b"lmgg", "a GGML file, the format before GGUF", "Use a GGUF version of the model."),
    (b"tjgg", "a GGJT file, the format before GGUF", "Use a GGUF version of the model."),
    (b"fmgg", "a GGMF file, the format before GGUF", "Use a GGUF version of the model."),
    (b"\0\0\0\0\0\0\0\0", "filled with zeros, perhaps an unfinished download", REMEDY_REFETCH),
)


@dataclass(frozen=True, slots=True)
class RawTensor:
    name: str
    ggml_type: str  # "Q4_0", ...; "type 37" for a number that ggml does not define
    shape: tuple[int, ...]  # numpy order: [N, K], K contiguous
    data: NDArray[np.uint8]  # exactly the tensor's bytes, a view of the file; empty when ggml_type is "type ..."


class GgufFile:
    """A model. `path` may be any file of a split model: the first one holds the metadata, all hold tensors."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, RawTensor] = {}
        self.files: list[Path] = []  # one, or all files of a split model
        self._maps: list[mmap.mmap] = []
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        split = SPLIT_NAME.search(self.path.name)
        if split and int(split[1]) > 1:
            self.path = _split_path(self.path, 1, int(split[2]))
        self.metadata, self.tensors = self._read_file(self.path)
        parts = _small_count(self.path, self.metadata, "split.count", 1)
        if parts <= 1:
            return
        if _small_count(self.path, self.metadata, "split.no", 0) or not SPLIT_NAME.search(self.path.name):
            raise BadFile(
                f"{self.path}: one of {parts} parts of a split model, under a name that hides the others",
                f"Give the parts their own names again (NAME-00001-of-{parts:05d}.gguf, ...), in one folder.",
            )
        paths = [_split_path(self.path, i, parts) for i in range(2, parts + 1)]
        missing = [p.name for p in paths if not p.exists()]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise BadFile(
                f"{self.path}: {len(missing)} of {parts} parts missing: {', '.join(missing[:3])}{more}",
                "Put all parts into one folder.",
            )
        for part in paths:
            _, tensors = self._read_file(part)
            if twice := self.tensors.keys() & tensors.keys():
                raise BadFile(f"{part}: tensor {shown(min(twice))} is in an earlier part too", REMEDY_REFETCH)
            self.tensors |= tensors
        total = _small_count(self.path, self.metadata, "split.tensors.count", len(self.tensors))
        if total != len(self.tensors):
            raise BadFile(f"{self.path}: the parts hold {len(self.tensors)} tensors, not {total}", REMEDY_REFETCH)

    def _read_file(self, path: Path) -> tuple[dict[str, Any], dict[str, RawTensor]]:
        mapped = _map(path)
        self._maps.append(mapped)
        self.files.append(path)
        _check_magic(path, mapped)
        header = _Header(path, mapped)
        try:
            return header.metadata(), header.tensors()
        except struct.error:  # a fixed-size field ran over the end
            raise header.bad("the header is cut short") from None

    def contents(self) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        """A description of every tensor, and its bytes."""
        for t in self.tensors.values():
            yield f"{t.name} {t.ggml_type} {t.shape}", t.data

    def drop_pages(self) -> None:
        """Return the pages read so far to the system, where they would count as memory in use."""
        for mapped in self._maps:
            if hasattr(mmap, "MADV_DONTNEED"):
                mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        self.tensors = {}
        for mapped in self._maps:
            with contextlib.suppress(BufferError):  # a tensor's data is in use: freeing it unmaps the file
                mapped.close()
        self._maps = []


def read_metadata(path: Path, raw: bytes) -> dict[str, Any]:
    """The metadata of a GGUF header that is embedded in another file."""
    _check_magic(path, raw)
    header = _Header(path, raw)
    try:
        return header.metadata()
    except struct.error:
        raise header.bad("the header is cut short") from None


def shown(value: object) -> str:
    """A value from a file for a message: on one line, shortened, with control characters escaped."""
    if isinstance(value, list | np.ndarray):
        return f"an array of {len(value):,}"
    text = str(value)
    text = text if len(text) <= 80 else text[:77] + "..."
    return repr(text) if isinstance(value, str) else text


def unsupported_type(tensor: RawTensor) -> Unsupported:
    number = next((f" (type {i})" for i, known in GGML_TYPES.items() if known[0] == tensor.ggml_type), "")
    return Unsupported(
        f"tensor {shown(tensor.name)} is {tensor.ggml_type}{number}, which is not supported",
        f"These types work: {', '.join(SUPPORTED)}.",
    )


def _split_path(path: Path, number: int, count: int) -> Path:
    return path.with_name(SPLIT_NAME.sub(f"-{number:05d}-of-{count:05d}.gguf", path.name))


def _small_count(path: Path, metadata: dict[str, Any], key: str, default: int) -> int:
    value = metadata.get(key, default)
    if type(value) is not int or not 0 <= value < 100_000:
        raise BadFile(f"{path}: {key} is {shown(value)}, not a sensible count", REMEDY_REFETCH)
    return value


def _map(path: Path) -> mmap.mmap:
    try:
        info = path.stat()
        if stat.S_ISDIR(info.st_mode):
            raise BadFile(f"{path}: is a directory", "Name the .gguf file inside it.")
        if not stat.S_ISREG(info.st_mode):
            raise BadFile(f"{path}: is not a regular file", "Save the model to a file first.")
        if info.st_size == 0:
            raise BadFile(f"{path}: is empty", "Fetch the file again.")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise BadFile(f"{path}: no such file", "Check the path, or see `llamagpu models`.") from None
    except PermissionError:
        raise BadFile(f"{path}: no permission to read it", "Check the owner and mode of the file.") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise BadFile(f"{path}: cannot be read: {error}", "Check the path and the disk.") from None


def _check_magic(path: Path, mapped: mmap.mmap | bytes) -> None:
    first = mapped[:32]
    if first[:4] != b"GGUF":
        if first[8:10] == b'{"':
            raise BadFile(f"{path}: not GGUF: looks like a safetensors file", REMEDY_NOT_GGUF)
        for magic, what, remedy in FOREIGN:
            if first.lstrip(b" \r\n\t").startswith(magic):
                raise BadFile(f"{path}: not GGUF: looks like {what}", remedy)
        raise BadFile(f"{path}: not GGUF: it begins with {first[:4]!r}", REMEDY_NOT_GGUF)
    if len(first) < 24:
        raise BadFile(f"{path}: the header is cut short at byte {len(mapped)}", REMEDY_REFETCH)
    version = U32.unpack_from(first, 4)[0]
    if version not in (2, 3):
        if int.from_bytes(first[4:8], "big") in (1, 2, 3):
            raise Unsupported(f"{path}: a big-endian GGUF file", "Use the little-endian file of the model.")
        if version == 1:
            raise Unsupported(f"{path}: GGUF version 1", "Versions 2 and 3 work: use a newer file.")
        raise BadFile(f"{path}: GGUF version {version} is not known (2 and 3 are)", REMEDY_REFETCH)


class _Header:
    """A cursor over the bytes between the magic and the tensor data."""

    def __init__(self, path: Path, buf: mmap.mmap | bytes) -> None:
        self.path, self.buf, self.pos, self.end = path, buf, 24, min(len(buf), MAX_HEADER_BYTES)
        self.strings = 0  # in arrays, so far
        self.alignment = 32  # of the data section
        self.tensor_count, self.key_count = struct.unpack_from("<QQ", buf, 8)
        # A key takes at least 8 (length) + 4 (type) + 1 (value) bytes, a tensor 8 (length) + 4 (n_dims) + 8 (dim) + 12.
        self.check_count("metadata keys", self.key_count, 13, MAX_KEYS)
        self.check_count("tensors", self.tensor_count, 32, MAX_TENSORS)

    def bad(self, cause: str) -> BadFile:
        return BadFile(f"{self.path}: {cause}", REMEDY_REFETCH)

    def check_count(self, what: str, count: int, size: int, most: int = 1 << 63) -> None:
        """Refuse a count that does not fit into the remaining bytes, before anything is allocated."""
        if count * size > self.end - self.pos:
            raise self.bad(f"it claims {count:,} {what}, more than the rest of it can hold")
        if count > most:
            raise self.bad(f"it claims {count:,} {what}; at most {most:,} are read")

    def take(self, field: struct.Struct) -> Any:
        (value,) = field.unpack_from(self.buf, self.pos)
        self.pos += field.size
        return value

    def string(self, what: str, errors: str = "strict") -> str:
        length = self.take(U64)
        self.check_count(f"bytes in {what}", length, 1)
        start, self.pos = self.pos, self.pos + length
        try:
            return self.buf[start : self.pos].decode("utf-8", errors)
        except UnicodeDecodeError:
            raise self.bad(f"{what} is not valid UTF-8") from None

    def metadata(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for i in range(self.key_count):
            key = self.string(f"the name of metadata key {i}")
            if key in found:
                raise self.bad(f"metadata key {shown(key)} is there twice")
            found[key] = self.value(key)
        self.alignment = found.get("general.alignment", 32)
        if type(self.alignment) is not int or self.alignment not in ALIGNMENTS:
            raise self.bad(f"general.alignment is {shown(self.alignment)}, not a power of two")
        return found

    def value(self, key: str) -> Any:
        value_type = self.take(U32)
        if value_type in SCALARS:
            return self.take(SCALARS[value_type])
        if value_type == STRING:
            return self.string(f"metadata key {shown(key)}", "replace")
        if value_type != ARRAY:
            raise self.bad(f"metadata key {shown(key)} has unknown value type {value_type}")
        value_type, count = self.take(U32), self.take(U64)
        if value_type == STRING:
            return self.string_array(key, count)
        if value_type not in DTYPES:
            raise self.bad(f"metadata key {shown(key)} is an array of unknown or nested type {value_type}")
        dtype = DTYPES[value_type]
        self.check_count(f"elements in metadata key {shown(key)}", count, dtype.itemsize)
        start, self.pos = self.pos, self.pos + count * dtype.itemsize
        return np.frombuffer(self.buf[start : self.pos], dtype)  # a slice is a copy: it outlives the mapping

    def string_array(self, key: str, count: int) -> list[str]:
        self.check_count(f"strings in metadata key {shown(key)}", count, 8, MAX_STRINGS - self.strings)
        self.strings += count
        # A broken string in a vocabulary would give wrong text without an error; elsewhere it does no harm.
        errors = "strict" if key.startswith("tokenizer.") else "replace"
        buf, pos, end, length_at = self.buf, self.pos, self.end, U64.unpack_from
        strings: list[str] = []
        try:
            for _ in range(count):  # 410,000 times for a Llama 3 vocabulary: without calls of methods
                start = pos + 8
                pos = start + length_at(buf, pos)[0]
                if pos > end:
                    raise self.bad(f"string {len(strings)} of metadata key {shown(key)} is cut short")
                strings.append(buf[start:pos].decode("utf-8", errors))
        except UnicodeDecodeError:
            raise self.bad(f"string {len(strings)} of metadata key {shown(key)} is not valid UTF-8") from None
        self.pos = pos
        return strings

    def tensor_info(self, i: int) -> tuple[str, str, tuple[int, ...], int, int]:
        """Name, ggml type, shape, bytes (0 for an unknown type), offset in the data section."""
        name = self.string(f"the name of tensor {i}")
        n_dims = self.take(U32)
        if not 1 <= n_dims <= 4:
            raise self.bad(f"tensor {shown(name)} has {n_dims} dimensions")
        shape = tuple(self.take(U64) for _ in range(n_dims))[::-1]
        number, offset = self.take(U32), self.take(U64)
        if 0 in shape:
            raise self.bad(f"tensor {shown(name)} has shape {list(shape)}, with nothing in it")
        ggml_type, weights, size = GGML_TYPES.get(number, (f"type {number}", 1, 0))
        if shape[-1] % weights:
            raise self.bad(f"tensor {shown(name)}: rows of {shape[-1]:,} do not divide into {ggml_type} blocks")
        return name, ggml_type, shape, math.prod(shape) // weights * size, offset

    def tensors(self) -> dict[str, RawTensor]:
        infos = [self.tensor_info(i) for i in range(self.tensor_count)]
        alignment = self.alignment
        base = -(-self.pos // alignment) * alignment  # of the data section
        found: dict[str, RawTensor] = {}
        free = 0  # first byte of the data section after the tensors seen so far
        for name, ggml_type, shape, size, offset in sorted(infos, key=lambda info: info[-1]):
            if name in found:
                raise self.bad(f"tensor {shown(name)} is there twice")
            if offset % alignment:
                raise self.bad(f"tensor {shown(name)} starts at {offset:,}, not a multiple of {alignment}")
            if offset < free:
                raise self.bad(f"tensor {shown(name)} overlaps the one before it")
            free = offset + size
            if base + free > len(self.buf):
                raise self.bad(f"tensor {shown(name)} ends at byte {base + free:,} of {len(self.buf):,}")
            found[name] = RawTensor(name, ggml_type, shape, np.frombuffer(self.buf, np.uint8, size, base + offset))
        return {info[0]: found[info[0]] for info in infos}  # in the file's order
