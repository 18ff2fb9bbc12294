"""AWQ and GPTQ matrices as Q4 groups of 32 with a scale and an offset.

f32 holds (nibble - zero point) * scale exactly; f16 is used where it does too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamagpu.errors import BadFile, Unsupported
from llamagpu.files.gguf_file import REMEDY_REFETCH, shown
from llamagpu.files.safetensors_file import Stored
from llamagpu.files.storage import Layout, PackedMatrix, Storage, take_rows, widen

GROUP = 32  # of the packed matrix; a group of the checkpoint is a multiple of it
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output, of 8, that each nibble of a word belongs to, lowest nibble first
GPTQ_ORDER = tuple(range(8))
WORDS = ("I32", "U32")
# The GGUF types that stand for the three layouts: an f16 scale; f16 scale and offset; f32 scale and offset. The last
# layout exists only in packed files, where its matrices are listed as Q4_K.
SYMMETRIC, F16_OFFSETS, F32_OFFSETS = "Q4_0", "Q4_1", "Q4_K"


class Method(StrEnum):
    AWQ = "awq"
    GPTQ = "gptq"


@dataclass(frozen=True, slots=True)
class QuantisationConfig:
    """quantization_config of config.json."""

    method: Method
    group: int  # weights of a row that share a scale; -1: all
    zero_shift: int  # added to the stored zero points

    @classmethod
    def read(cls, config: dict[str, Any]) -> "QuantisationConfig":
        method = config.get("quant_method", "awq" if "w_bit" in config else "gptq")
        bits = config.get("bits", config.get("w_bit"))
        group = config.get("group_size", config.get("q_group_size"))
        if method not in list(Method):
            raise Unsupported(f"a checkpoint quantised by {shown(method)}", "AWQ, GPTQ and f32, f16, bf16 work.")
        if bits != 4 or type(group) is not int or (group != -1 and (group < GROUP or group % GROUP)):
            cause = f"{method} with {shown(bits)} bits in groups of {shown(group)}"
            raise Unsupported(cause, "4 bits in groups of 32, 64, ... work.")
        version = str(config.get("version", "gemm")).lower()
        if method == Method.AWQ and version != "gemm":
            raise Unsupported(f"AWQ in the {shown(version)} layout", "Use a checkpoint in the gemm layout.")
        # AutoGPTQ stores zero points less one; its second format stores them unchanged
        shifted = method == Method.GPTQ and config.get("checkpoint_format") != "gptq_v2"
        return cls(Method(method), group, int(shifted))


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """A 4-bit matrix in a checkpoint. Its arrays are read only when they are needed."""

    name: str  # in GGUF
    config: QuantisationConfig
    shape: tuple[int, int]  # [n, k]
    words: Stored  # AWQ [k, n/8], GPTQ [k/8, n] u32
    zeros: Stored  # [k/group, n/8] u32
    scales: Stored  # [k/group, n]
    group_index: Stored | None  # [k] GPTQ: the group of each column
    row_order: NDArray[np.int64] | None = None  # the order of the rows in GGUF

    @classmethod
    def find(cls, name: str, prefix: str, stored: dict[str, Stored], config: QuantisationConfig) -> "QuantisedMatrix":
        missing = [array for array in ("qweight", "qzeros", "scales") if f"{prefix}.{array}" not in stored]
        if missing:
            raise BadFile(f"missing tensors: {', '.join(f'{prefix}.{array}' for array in missing)}", REMEDY_REFETCH)
        words, zeros, scales = (stored[f"{prefix}.{array}"] for array in ("qweight", "qzeros", "scales"))
        group_index = stored.get(f"{prefix}.g_idx")
        sound = words.dtype in WORDS and zeros.dtype in WORDS and scales.dtype in ("F16", "BF16", "F32")
        if not sound or any(len(array.shape) != 2 or 0 in array.shape for array in (words, zeros, scales)):
            raise Unsupported(f"{prefix} is not what {config.method} writes", "I32 words and F16 scales are.")
        awq = config.method is Method.AWQ
        k, n = words.shape[0] * (1 if awq else 8), scales.shape[1]
        group = k if config.group == -1 else config.group
        shapes = (k, n // 8) if awq else (k // 8, n), (k // group, n // 8), (k // group, n)
        for array, shape in zip((words, zeros, scales), shapes, strict=True):
            if array.shape != shape or k % group or n % 8 or k % GROUP:
                cause = f"tensor {shown(array.name)} of shape {list(array.shape)} does not fit the others"
                raise BadFile(cause, REMEDY_REFETCH)
        if group_index and (group_index.shape != (k,) or group_index.dtype not in WORDS):
            raise BadFile(f"tensor {shown(group_index.name)} does not give {k} groups", REMEDY_REFETCH)
        return cls(name, config, (n, k), words, zeros, scales, group_index)

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.zeros.nbytes + self.scales.nbytes

    @property
    def group(self) -> int:
        return self.shape[1] // self.scales.shape[0]

    @property
    def nibble_order(self) -> tuple[int, ...]:
        return AWQ_ORDER if self.config.method is Method.AWQ else GPTQ_ORDER

    def contiguous_groups(self) -> bool:
        """Whether the columns of each group are contiguous. After GPTQ with act-order they are not."""
        if self.group_index is None:
            return True
        return bool((self.group_index.read() == np.arange(self.shape[1]) // self.group).all())

    def exact_type(self) -> str:
        """The smallest layout that holds the weights exactly."""
        if not self.contiguous_groups():
            raise Unsupported(
                f"tensor {self.name}: GPTQ with act-order (desc_act) spreads each group over the whole row",
                "Groups of 32 cannot hold that: use a checkpoint without desc_act, or --to q8_0 or f16.",
            )
        scale, zero = self.scale_and_zero()
        if not _fits_f16(scale):
            return F32_OFFSETS
        return SYMMETRIC if (zero == 8).all() else F16_OFFSETS if _fits_f16(-zero * scale) else F32_OFFSETS

    def scale_and_zero(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """[n, groups] each."""
        scale = widen(self.scales.read()).T
        if not np.isfinite(scale).all():
            raise BadFile(f"tensor {shown(self.scales.name)} holds NaN or infinity", REMEDY_REFETCH)
        zero = (_unpack_nibbles(self.zeros, self.nibble_order) + self.config.zero_shift) & 15
        return np.ascontiguousarray(scale), zero.T.astype(np.float32)

    def load(self, ggml_type: str) -> PackedMatrix:
        """The whole matrix in groups of 32. F16_OFFSETS rounds the offsets to f16 if they need more."""
        scale, zero = self.scale_and_zero()
        has_offset, bits = ggml_type != SYMMETRIC, 32 if ggml_type == F32_OFFSETS else 16
        per_group = np.stack([scale, -zero * scale], axis=-1) if has_offset else scale[..., None]
        scales = np.repeat(per_group, self.group // GROUP, axis=1)
        scales = scales.astype(np.float32 if bits == 32 else np.float16)
        layout = Layout(Storage.Q4, self.shape[1], GROUP, has_offset, bits)
        packed = PackedMatrix(layout, self.q4_words(), scales)
        return packed if self.row_order is None else take_rows(packed, self.row_order)

    def q4_words(self) -> NDArray[np.uint8]:
        """[n, k/2] in the order of Storage.Q4, rows in the order of the checkpoint."""
        n, k = self.shape
        if self.config.method is Method.AWQ:
            nibbles = _unpack_nibbles(self.words, AWQ_ORDER)  # [k, n]
            return np.ascontiguousarray((nibbles[::2] | nibbles[1::2] << 4).T)
        raw = self.words.read().view(np.uint8).reshape(k // 8, n, 4)  # a word is 8 columns in the order of Q4
        return np.ascontiguousarray(raw.swapaxes(0, 1)).reshape(n, k // 2)

    def reader(self) -> Callable[[int, int], NDArray[np.float32]]:
        """A function that gives rows start .. stop as floats, whatever the order of the groups."""
        scale, zero = self.scale_and_zero()
        groups = np.arange(self.shape[1]) // self.group if self.group_index is None else self.group_index.read()
        if groups.min() < 0 or groups.max() >= scale.shape[1]:
            raise BadFile(f"tensor {self.name}: its g_idx names groups that are not there", REMEDY_REFETCH)
        words = self.q4_words()
        order = np.arange(self.shape[0]) if self.row_order is None else self.row_order

        def rows(start: int, stop: int) -> NDArray[np.float32]:
            at = order[start:stop]
            values = np.stack([words[at] & 15, words[at] >> 4], axis=-1).reshape(len(at), -1).astype(np.float32)
            return (values - zero[at][:, groups]) * scale[at][:, groups]

        return rows


def _unpack_nibbles(stored: Stored, order: tuple[int, ...]) -> NDArray[np.uint8]:
    """[r, c] words of 8 -> [r, 8c]; nibble i of a word is the word's value order[i]."""
    words = stored.read().view(np.uint32)
    out = np.empty((*words.shape, 8), np.uint8)
    for i, position in enumerate(order):
        out[..., position] = words >> np.uint32(4 * i) & 15
    return out.reshape(len(words), -1)


def _fits_f16(values: NDArray[np.float32]) -> bool:
    with np.errstate(over="ignore"):
        return bool((values.astype(np.float16) == values).all())


def to_blocks(packed: PackedMatrix) -> NDArray[np.uint8]:
    """The matrix as Q4_0 or Q4_1 blocks, [n, bytes]: the inverse of `repack`."""
    assert packed.scales is not None
    words = packed.words.reshape(-1, 16)
    first, second = words[:, :8], words[:, 8:]  # weights 0-15 and 16-31
    low = first & 15 | (second & 15) << 4
    high = first >> 4 | second & 0xF0
    nibbles = np.stack([low, high], axis=-1).reshape(-1, 16)
    scales = np.ascontiguousarray(packed.scales, np.float16).view(np.uint8).reshape(len(words), -1)
    return np.hstack([scales, nibbles]).reshape(packed.n, -1)
