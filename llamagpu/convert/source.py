"""The source of a conversion: GGUF metadata, and tensors by GGUF name whose rows are read as floats."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import Keys
from numpy.typing import NDArray

from llamagpu.convert import vocab
from llamagpu.convert.awq_gptq import QuantisedMatrix
from llamagpu.errors import BadFile, Unsupported
from llamagpu.files.architectures import REMEDY_ARCHITECTURE
from llamagpu.files.config import ModelConfig, check_tensors, tensor_shapes, used_shapes
from llamagpu.files.gguf_file import BLOCKS, REMEDY_REFETCH, GgufFile, RawTensor, shown, unsupported_type
from llamagpu.files.repack import to_f32
from llamagpu.files.safetensors_file import Stored
from llamagpu.files.storage import widen
from llamagpu.files.tokenizer import Tokenizer

Rows = Callable[[int, int], NDArray[np.float32]]  # start, stop -> [stop - start, k]
Blocks = Callable[[int, int], NDArray[np.uint8]]  # start, stop -> [stop - start, bytes]
# Metadata about the file, not the model
FILE_KEYS = (Keys.General.FILE_TYPE, Keys.General.QUANTIZATION_VERSION, Keys.General.ALIGNMENT)


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    nbytes: int  # in the source
    open: Callable[[], Rows]  # a vector has one row
    ggml_type: str = "F16"  # that holds its numbers
    blocks: Blocks | None = None  # its rows in that type, where the source has them
    quantised: QuantisedMatrix | None = None  # in an AWQ or GPTQ source

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows, of all experts where there are some, and columns."""
        return prod(self.shape[:-1]), self.shape[-1]


@dataclass(slots=True)
class Source:
    name: str  # of the model
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    files: list[Path]  # that hold the tensors
    gguf: GgufFile | None = None  # the source itself, if it is one
    config: ModelConfig = field(init=False)

    def __post_init__(self) -> None:
        """Refuse what would become a file that nothing loads."""
        empty = np.zeros(0, np.uint8)
        shapes = {t.name: RawTensor(t.name, t.ggml_type, t.shape, empty) for t in self.tensors.values()}
        self.config = ModelConfig.from_gguf(self.metadata, shapes)
        check_tensors(self.config, shapes)
        if surplus := sorted(shapes.keys() - used_shapes(self.config, shapes)):
            layers = f"{self.config.layers} layer{'s' * (self.config.layers > 1)}"
            cause = f"tensor {shown(surplus[0])} has no place in a {self.config.arch} model of {layers}"
            raise Unsupported(cause, REMEDY_ARCHITECTURE)
        Tokenizer.from_gguf(self.metadata)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def file_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    @property
    def quantised(self) -> list[QuantisedMatrix]:
        return [tensor.quantised for tensor in self.tensors.values() if tensor.quantised]

    def drop_pages(self) -> None:
        """Return the pages of a mapped file that were read so far."""
        if self.gguf:
            self.gguf.drop_pages()

    def close(self) -> None:
        if self.gguf:
            self.gguf.close()


def float_tensor(name: str, stored: Stored, row_order: NDArray[np.int64] | None = None, shift: int = 0) -> Tensor:
    """`row_order`: the order of the rows in GGUF. `shift` is added to the values of a vector."""

    def read(start: int, stop: int) -> NDArray[np.float32]:
        if len(stored.shape) == 1:
            values = widen(stored.read()) + np.float32(shift)
            return (values if row_order is None else values[row_order])[None]
        if row_order is None:
            return widen(stored.read(start, stop))
        wanted = row_order[start:stop]
        first = int(wanted.min())
        return widen(stored.read(first, int(wanted.max()) + 1)[wanted - first])

    check_floats(stored, 1, 2)
    return Tensor(name, stored.shape, stored.nbytes, lambda: read, float_type(stored))


def float_type(stored: Stored) -> str:
    return "BF16" if stored.dtype == "BF16" else "F16"


def check_floats(stored: Stored, *dims: int) -> None:
    if stored.dtype not in ("F64", "F32", "F16", "BF16") or len(stored.shape) not in dims:
        raise Unsupported(
            f"tensor {stored.name} is {stored.dtype} of shape {list(stored.shape)}",
            "F32, F16 and BF16 weights work.",
        )


def expert_tensor(name: str, experts: Sequence[Stored]) -> Tensor:
    """The matrices of all experts as one tensor [experts, n, k]."""
    for stored in experts:
        check_floats(stored, 2)
        if stored.shape != experts[0].shape:
            raise BadFile(f"tensor {stored.name} is larger or smaller than that of the first expert", REMEDY_REFETCH)
    n, k = experts[0].shape

    def read(start: int, stop: int) -> NDArray[np.float32]:
        numbers = range(start // n, -(-stop // n))
        spans = [(experts[i], max(start - i * n, 0), min(stop - i * n, n)) for i in numbers]
        return np.concatenate([widen(expert.read(first, last)) for expert, first, last in spans])

    size = sum(stored.nbytes for stored in experts)
    return Tensor(name, (len(experts), n, k), size, lambda: read, float_type(experts[0]))


def alternate_tensor(name: str, stored: Stored, part: int, parts: int) -> Tensor:
    """One of `parts` vectors [experts, n] whose values alternate in an array."""
    check_floats(stored, 2)
    experts, n = stored.shape
    rows = lambda start, stop: widen(stored.read(start, stop))[:, part::parts]  # noqa: E731
    return Tensor(name, (experts, n // parts), stored.nbytes // parts, lambda: rows)


def mxfp4_tensor(name: str, nibbles: Stored, scales: Stored, part: int, parts: int) -> Tensor:
    """One of `parts` matrices of all experts, whose rows alternate in arrays [experts, n, k/32, 16] and [..., k/32]."""
    if nibbles.dtype != "U8" or scales.dtype != "U8" or nibbles.shape != (*scales.shape, 16) or len(scales.shape) != 3:
        raise BadFile(f"tensor {shown(nibbles.name)} does not fit its scales", REMEDY_REFETCH)
    experts, n, groups = scales.shape
    flat = [replace(stored, shape=(experts * n, *stored.shape[2:])) for stored in (nibbles, scales)]

    def blocks(start: int, stop: int) -> NDArray[np.uint8]:
        """A byte has two neighbours in the source, and weights j and j + 16 in GGUF."""
        pairs, exponents = (stored.read(parts * start, parts * stop)[part::parts] for stored in flat)
        values = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*exponents.shape, 32)
        found = np.concatenate([exponents[..., None], values[..., :16] | values[..., 16:] << 4], axis=-1)
        return found.reshape(stop - start, -1)

    return block_tensor(RawTensor(name, "MXFP4", (experts, n // parts, 32 * groups), np.zeros(0, np.uint8)), blocks)


def from_gguf(path: Path) -> Source:
    file = GgufFile(path)
    try:
        metadata = {k: v for k, v in file.metadata.items() if k not in FILE_KEYS and not k.startswith("split.")}
        tensors = {name: gguf_tensor(raw) for name, raw in file.tensors.items()}
        return Source(path.stem, metadata, tensors, file.files, file)
    except BaseException:
        file.close()
        raise


def gguf_tensor(raw: RawTensor) -> Tensor:
    if raw.ggml_type not in BLOCKS or len(raw.shape) > 3:
        raise unsupported_type(raw)
    data = raw.data.reshape(prod(raw.shape[:-1]), -1)
    return block_tensor(raw, lambda start, stop: data[start:stop])


def block_tensor(raw: RawTensor, blocks: Blocks) -> Tensor:
    """A tensor whose rows the source has as GGUF blocks; `raw` describes it."""

    def rows(start: int, stop: int) -> NDArray[np.float32]:
        return to_f32(replace(raw, shape=(stop - start, raw.shape[-1]), data=blocks(start, stop).reshape(-1)))

    weights, size = BLOCKS[raw.ggml_type]
    return Tensor(raw.name, raw.shape, prod(raw.shape) // weights * size, lambda: rows, raw.ggml_type, blocks)


# llama2.c: seven numbers, then f32 arrays. One array holds a tensor of all layers; q and k have GGUF's row order.
LLAMA2C_ATTENTION = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output")
LLAMA2C_TENSORS = (*LLAMA2C_ATTENTION, "ffn_norm", "ffn_gate", "ffn_down", "ffn_up")


def from_llama2c(path: Path) -> Source:
    with path.open("rb") as file:
        head = file.read(28)
    if len(head) < 28 or head[:4] == b"24ka":
        raise Unsupported(f"{path}: not a llama2.c model of the first format", "Export it with `--version 0`.")
    dim, ffn, layers, heads, kv_heads, vocab_size, context = struct.unpack("<7i", head)
    tied, vocab_size = vocab_size > 0, abs(vocab_size)
    if not all(0 < n < 1 << 24 for n in (dim, ffn, layers, heads, kv_heads, vocab_size, context)) or dim % heads:
        raise BadFile(f"{path}: not a llama2.c model (its header makes no sense)", "Give a .gguf file or a folder.")
    kv_width = dim // heads * kv_heads
    layer = 2 * dim + 2 * dim * dim + 2 * kv_width * dim + 3 * ffn * dim
    values = dim + layers * layer + vocab_size * dim * (1 if tied else 2)
    promised = 28 + 4 * (values if tied else values + context * (dim // heads))
    if path.stat().st_size < promised:
        raise BadFile(f"{path}: {path.stat().st_size:,} bytes, and its header promises {promised:,}", "Fetch it again.")
    keys = {
        Keys.General.ARCHITECTURE: "llama",
        Keys.General.TYPE: "model",
        Keys.General.NAME: path.stem,
        Keys.LLM.BLOCK_COUNT: layers,
        Keys.LLM.CONTEXT_LENGTH: context,
        Keys.LLM.EMBEDDING_LENGTH: dim,
        Keys.LLM.FEED_FORWARD_LENGTH: ffn,
        Keys.Attention.HEAD_COUNT: heads,
        Keys.Attention.HEAD_COUNT_KV: kv_heads,
        Keys.Attention.LAYERNORM_RMS_EPS: 1e-5,
        Keys.Rope.FREQ_BASE: 10000.0,
        Keys.Rope.DIMENSION_COUNT: dim // heads,
        Keys.LLM.VOCAB_SIZE: vocab_size,
    }
    metadata: dict[str, Any] = {key.format(arch="llama"): value for key, value in keys.items()}
    metadata |= vocab.llama2c(path.parent / "tokenizer.bin", vocab_size)
    table = RawTensor("token_embd.weight", "F32", (vocab_size, dim), np.zeros(0, np.uint8))
    shapes = tensor_shapes(ModelConfig.from_gguf(metadata, {table.name: table}))
    order = ["token_embd", *(f"blk.{i}.{name}" for name in LLAMA2C_TENSORS for i in range(layers)), "output_norm"]
    tensors, offset = {}, 28
    for name in [f"{name}.weight" for name in order]:
        stored = Stored(path, name, "F32", shapes[name], offset)
        tensors[name] = float_tensor(name, stored)
        offset += stored.nbytes
    if not tied:
        offset += 4 * context * (dim // heads)  # tables of cosines and sines, no longer used
        stored = Stored(path, "output.weight", "F32", (vocab_size, dim), offset)
        tensors[stored.name] = float_tensor(stored.name, stored)
    return Source(path.stem, metadata, tensors, [path])
