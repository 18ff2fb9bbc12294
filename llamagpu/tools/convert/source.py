"""What can be converted, all in one form: GGUF metadata, and tensors by GGUF name that give rows of floats."""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamagpu.errors import BadFile, Unsupported
from llamagpu.files.config import LlamaConfig, check_tensors, tensor_shapes
from llamagpu.files.gguf_file import BLOCKS, GgufFile, RawTensor, unsupported_kind
from llamagpu.files.repack import small
from llamagpu.files.safetensors_file import Stored, widen
from llamagpu.tools.convert import vocab
from llamagpu.tools.convert.fourbit import FourBit

Rows = Callable[[int, int], NDArray[np.float32]]  # start, stop -> [stop - start, k]
OWN_KEYS = (
    "general.file_type",
    "general.quantization_version",
    "general.alignment",
)  # of a file, not of the model


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    nbytes: int  # in the source
    open: Callable[[], Rows]  # a vector is one row
    raw: RawTensor | None = None  # in a GGUF source
    four_bit: FourBit | None = None  # in an AWQ or GPTQ source

    @property
    def matrix(self) -> tuple[int, int]:
        return (1, self.shape[0]) if len(self.shape) == 1 else (self.shape[0], self.shape[1])


@dataclass(slots=True)
class Source:
    name: str  # of the model
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    files: list[Path]  # that hold them
    gguf: GgufFile | None = None  # the source itself, if it is one
    config: LlamaConfig = field(init=False)

    def __post_init__(self) -> None:
        """Refuses what is no whole model: see `check_tensors`."""
        empty = np.zeros(0, np.uint8)
        shapes = {t.name: t.raw or RawTensor(t.name, "F16", t.shape, empty) for t in self.tensors.values()}
        self.config = LlamaConfig.from_gguf(self.metadata, shapes)
        check_tensors(self.config, shapes)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def four_bit(self) -> list[FourBit]:
        return [tensor.four_bit for tensor in self.tensors.values() if tensor.four_bit]

    def close(self) -> None:
        if self.gguf:
            self.gguf.close()


def float_tensor(name: str, stored: Stored, rows: NDArray[np.int64] | None = None) -> Tensor:
    """`rows`: the order that GGUF wants them in."""

    def read(start: int, stop: int) -> NDArray[np.float32]:
        if len(stored.shape) == 1:
            values = widen(stored.read())
            return (values if rows is None else values[rows])[None]
        if rows is None:
            return widen(stored.read(start, stop))
        wanted = rows[start:stop]
        first = int(wanted.min())
        return widen(stored.read(first, int(wanted.max()) + 1)[wanted - first])

    if stored.dtype not in ("F64", "F32", "F16", "BF16") or not 1 <= len(stored.shape) <= 2:
        raise Unsupported(
            f"tensor {stored.name} is {stored.dtype} of shape {list(stored.shape)}",
            "F32, F16 and BF16 weights work.",
        )
    return Tensor(name, stored.shape, stored.nbytes, lambda: read)


def from_gguf(path: Path) -> Source:
    file = GgufFile(path)
    try:
        metadata = {k: v for k, v in file.metadata.items() if k not in OWN_KEYS and not k.startswith("split.")}
        tensors = {name: gguf_tensor(raw) for name, raw in file.tensors.items()}
        return Source(path.stem, metadata, tensors, file.parts, file)
    except BaseException:
        file.close()
        raise


def gguf_tensor(raw: RawTensor) -> Tensor:
    if raw.kind not in BLOCKS or len(raw.shape) > 2:
        raise unsupported_kind(raw)
    n = raw.shape[0] if len(raw.shape) > 1 else 1
    size = raw.data.size // n

    def rows(start: int, stop: int) -> NDArray[np.float32]:
        shape = (stop - start, raw.shape[-1])
        return np.asarray(small(RawTensor(raw.name, raw.kind, shape, raw.data[start * size : stop * size])), np.float32)

    return Tensor(raw.name, raw.shape, raw.data.size, lambda: rows, raw=raw)


# llama2.c: seven numbers, then f32 arrays, each kind of all layers together; q and k are in GGUF's order
LAYER_ARRAYS = (
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_down", "ffn_up",
)  # fmt: skip


def from_llama2c(path: Path) -> Source:
    with path.open("rb") as file:
        head = file.read(28)
    if len(head) < 28 or head[:4] == b"24ka":
        raise Unsupported(f"{path}: not a llama2.c model of the first format", "Export it with `--version 0`.")
    dim, ffn, layers, heads, kv_heads, vocab_size, context = struct.unpack("<7i", head)
    tied, vocab_size = vocab_size > 0, abs(vocab_size)
    if not all(0 < n < 1 << 24 for n in (dim, ffn, layers, heads, kv_heads, vocab_size, context)) or dim % heads:
        raise BadFile(f"{path}: not a llama2.c model (its header makes no sense)", "Give a .gguf file or a folder.")
    metadata: dict[str, Any] = {
        "general.architecture": "llama", "general.type": "model", "general.name": path.stem,
        "llama.block_count": layers, "llama.context_length": context, "llama.embedding_length": dim,
        "llama.feed_forward_length": ffn, "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0, "llama.rope.dimension_count": dim // heads,
        "llama.vocab_size": vocab_size,
    }  # fmt: skip
    metadata |= vocab.llama2c(path.parent / "tokenizer.bin", vocab_size)
    table = RawTensor("token_embd.weight", "F32", (vocab_size, dim), np.zeros(0, np.uint8))
    shapes = tensor_shapes(LlamaConfig.from_gguf(metadata, {table.name: table}))
    order = [
        "token_embd",
        *(f"blk.{i}.{part}" for part in LAYER_ARRAYS for i in range(layers)),
        "output_norm",
    ]
    tensors, offset = {}, 28
    for name in [f"{name}.weight" for name in order]:
        stored = Stored(path, name, "F32", shapes[name], offset)
        tensors[name] = float_tensor(name, stored)
        offset += stored.nbytes
    if not tied:
        offset += 4 * context * (dim // heads)  # tables of cosines and sines, no longer used
        stored = Stored(path, "output.weight", "F32", (vocab_size, dim), offset)
        tensors[stored.name] = float_tensor(stored.name, stored)
        offset += stored.nbytes
    if path.stat().st_size < offset:
        raise BadFile(f"{path}: {path.stat().st_size:,} bytes, and its header promises {offset:,}", "Fetch it again.")
    return Source(path.stem, metadata, tensors, [path])
