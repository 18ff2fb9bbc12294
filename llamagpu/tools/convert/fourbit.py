"""AWQ and GPTQ matrices: nibbles, scales and zero points as q4 groups of 32 with a scale and an offset. In f32,
which holds (nibble - zero) * scale exactly; in f16 where that is exact too."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamagpu.errors import BadFile, Unsupported
from llamagpu.files.gguf_file import AGAIN, show
from llamagpu.files.repack import Packed, take_rows
from llamagpu.files.safetensors_file import Stored, widen

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of 8 outputs the nibbles of a word are, from the lowest
WORDS = ("I32", "U32")
PLAIN_ORDER = tuple(range(8))
# The GGUF type whose device layout each has: one f16 scale; f16 scale and offset; both in f32
SYMMETRIC, HALVES, SINGLES = "Q4_0", "Q4_1", "Q4_K"


@dataclass(frozen=True, slots=True)
class Method:
    """What config.json says of a quantised checkpoint."""

    name: str  # "awq" | "gptq"
    group: int  # weights of a row that share a scale; -1: all
    zero_shift: int  # added to the stored zero points

    @classmethod
    def read(cls, config: dict[str, Any]) -> "Method":
        name = config.get("quant_method", "awq" if "w_bit" in config else "gptq")
        bits = config.get("bits", config.get("w_bit"))
        group = config.get("group_size", config.get("q_group_size"))
        if name not in ("awq", "gptq"):
            raise Unsupported(f"a checkpoint quantised by {show(name)}", "AWQ, GPTQ and f32, f16, bf16 work.")
        if bits != 4 or type(group) is not int or (group != -1 and (group < 32 or group % 32)):
            cause = f"{name} with {show(bits)} bits in groups of {show(group)}"
            raise Unsupported(cause, "4 bits in groups of 32, 64, ... work.")
        version = str(config.get("version", "gemm")).lower()
        if name == "awq" and version != "gemm":
            raise Unsupported(f"AWQ in the {show(version)} layout", "Use a checkpoint in the gemm layout.")
        # AutoGPTQ stores a zero point less one; its second format does not
        return cls(name, group, int(name == "gptq" and config.get("checkpoint_format") != "gptq_v2"))


@dataclass(frozen=True, slots=True)
class FourBit:
    name: str
    method: Method
    shape: tuple[int, int]  # [n, k]
    words: Stored  # AWQ [k, n/8], GPTQ [k/8, n] u32
    zeros: Stored  # [k/group, n/8] u32
    scales: Stored  # [k/group, n]
    order: Stored | None  # GPTQ: the group of each column
    rows: NDArray[np.int64] | None = None  # the order that GGUF has them in

    @classmethod
    def find(cls, name: str, prefix: str, stored: dict[str, Stored], method: Method) -> "FourBit":
        missing = [part for part in ("qweight", "qzeros", "scales") if f"{prefix}.{part}" not in stored]
        if missing:
            raise BadFile(f"missing tensors: {', '.join(f'{prefix}.{part}' for part in missing)}", AGAIN)
        words, zeros, scales = (stored[f"{prefix}.{part}"] for part in ("qweight", "qzeros", "scales"))
        order = stored.get(f"{prefix}.g_idx")
        sound = words.dtype in WORDS and zeros.dtype in WORDS and scales.dtype in ("F16", "BF16", "F32")
        if not sound or any(len(part.shape) != 2 or 0 in part.shape for part in (words, zeros, scales)):
            raise Unsupported(f"{prefix} is not what {method.name} writes", "I32 words and F16 scales are.")
        k, n = words.shape[0] * (1 if method.name == "awq" else 8), scales.shape[1]
        group = k if method.group == -1 else method.group
        shapes = (k, n // 8) if method.name == "awq" else (k // 8, n), (k // group, n // 8), (k // group, n)
        for part, shape in zip((words, zeros, scales), shapes, strict=True):
            if part.shape != shape or k % group or n % 8 or k % 32:
                raise BadFile(f"tensor {show(part.name)} of shape {list(part.shape)} does not fit the others", AGAIN)
        if order and (order.shape != (k,) or order.dtype not in WORDS):
            raise BadFile(f"tensor {show(order.name)} does not give {k} groups", AGAIN)
        return cls(name, method, (n, k), words, zeros, scales, order)

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.zeros.nbytes + self.scales.nbytes

    @property
    def group(self) -> int:
        return self.shape[1] // self.scales.shape[0]

    def in_order(self) -> bool:
        """Each group's columns stand together: not so after GPTQ with act-order."""
        if self.order is None:
            return True
        groups = self.order.read()
        return bool((groups == np.arange(self.shape[1]) // self.group).all())

    def exact_kind(self) -> str:
        """The leanest layout that holds the weights exactly."""
        if not self.in_order():
            raise Unsupported(
                f"tensor {self.name}: GPTQ with act-order (desc_act) spreads each group over the whole row",
                "Groups of 32 cannot hold that: use a checkpoint without desc_act, or --to q8_0 or f16.",
            )
        scale, zero = self.scale_and_zero()
        if not _fits_half(scale):
            return SINGLES
        return SYMMETRIC if (zero == 8).all() else HALVES if _fits_half(-zero * scale) else SINGLES

    def scale_and_zero(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """[n, groups] each."""
        scale = widen(self.scales.read()).T
        if not np.isfinite(scale).all():
            raise BadFile(f"tensor {show(self.scales.name)} holds NaN or infinity", AGAIN)
        zero = (_nibbles(self.zeros, self.word_order()) + self.method.zero_shift) & 15
        return np.ascontiguousarray(scale), zero.T.astype(np.float32)

    def word_order(self) -> tuple[int, ...]:
        return AWQ_ORDER if self.method.name == "awq" else PLAIN_ORDER

    def load(self, kind: str) -> Packed:
        """The whole matrix in groups of 32; as HALVES the offsets are rounded to f16 if they must be."""
        n, k = self.shape
        scale, zero = self.scale_and_zero()
        per_group = scale[..., None] if kind == SYMMETRIC else np.stack([scale, -zero * scale], axis=-1)
        scales = np.repeat(per_group, self.group // 32, axis=1)
        scales = scales.astype(np.float32 if kind == SINGLES else np.float16)
        packed = Packed("q4", n, k, 32, self.pairs(), scales)
        return packed if self.rows is None else take_rows(packed, self.rows)

    def pairs(self) -> NDArray[np.uint8]:
        """[n, k/2]: the nibbles of columns 2j (low) and 2j + 1 (high)."""
        n, k = self.shape
        if self.method.name == "awq":
            nibbles = _nibbles(self.words, AWQ_ORDER)  # [k, n]
            return np.ascontiguousarray((nibbles[::2] | nibbles[1::2] << 4).T)
        raw = self.words.read().view(np.uint8).reshape(k // 8, n, 4)  # a word is 8 columns in order: our pairs
        return np.ascontiguousarray(raw.swapaxes(0, 1)).reshape(n, k // 2)

    def reader(self) -> Callable[[int, int], NDArray[np.float32]]:
        """Rows start .. stop as floats, whatever the order of the groups."""
        scale, zero = self.scale_and_zero()
        groups = np.arange(self.shape[1]) // self.group if self.order is None else self.order.read()
        if groups.min() < 0 or groups.max() >= scale.shape[1]:
            raise BadFile(f"tensor {self.name}: its g_idx names groups that are not there", AGAIN)
        pairs = self.pairs()
        places = np.arange(self.shape[0]) if self.rows is None else self.rows

        def rows(start: int, stop: int) -> NDArray[np.float32]:
            at = places[start:stop]
            values = np.stack([pairs[at] & 15, pairs[at] >> 4], axis=-1).reshape(len(at), -1).astype(np.float32)
            return (values - zero[at][:, groups]) * scale[at][:, groups]

        return rows


def _nibbles(stored: Stored, order: tuple[int, ...]) -> NDArray[np.uint8]:
    """[r, c] words of 8 -> [r, 8c]; nibble i of a word is the word's value order[i]."""
    words = stored.read().view(np.uint32)
    out = np.empty((*words.shape, 8), np.uint8)
    for i, place in enumerate(order):
        out[..., place] = words >> np.uint32(4 * i) & 15
    return out.reshape(len(words), -1)


def _fits_half(values: NDArray[np.float32]) -> bool:
    with np.errstate(over="ignore"):
        return bool((values.astype(np.float16) == values).all())


def blocks_of(packed: Packed) -> NDArray[np.uint8]:
    """The matrix as Q4_0 or Q4_1 blocks, [n, bytes]: the way back from `repack`."""
    assert packed.scales is not None
    pairs = packed.words.reshape(-1, 16)
    first, second = pairs[:, :8], pairs[:, 8:]  # weights 0-15 and 16-31
    low = first & 15 | (second & 15) << 4
    high = first >> 4 | second & 0xF0
    nibbles = np.stack([low, high], axis=-1).reshape(-1, 16)
    scales = np.ascontiguousarray(packed.scales, np.float16).view(np.uint8).reshape(len(pairs), -1)
    return np.hstack([scales, nibbles]).reshape(packed.n, -1)
