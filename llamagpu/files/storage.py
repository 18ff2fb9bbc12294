"""How a weight matrix is stored: layouts, packed matrices, and operations on their rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

SUPER_BLOCK = 256  # weights that share a super-block scale
TEXTURE_ROWS = 8  # matrix rows that lie side by side in one row of a texture
TEXTURE_STRIDE = 32  # f32 rows of a texture are padded to a multiple of the k that a kernel reads per iteration


class Storage(StrEnum):
    """The words of a matrix.

    Q4: [n, k/2] bytes, byte j holds k = 2j in the low nibble and 2j + 1 in the high one. Symmetric: (nibble - 8) *
    scale; with an offset: nibble * scale + offset. Q6: [n, 3k/4] bytes, see `to_q6`. (value - 32) * scale. Q8: [n, k]
    int8. value * scale (+ offset). F16, BF16: [n, k] f16, or the upper halves of f32 as u16; an odd k is padded by one
    zero. The texture storages are those of texture_layout.
    """

    Q4 = "q4"
    Q6 = "q6"
    Q8 = "q8"
    F16 = "f16"
    BF16 = "bf16"
    TEXTURE_Q4 = "texture_q4"
    TEXTURE_Q8 = "texture_q8"
    TEXTURE_F32 = "texture_f32"

    @property
    def bits(self) -> int:
        """Of one weight, without its scale."""
        return {"q4": 4, "q6": 6, "q8": 8, "f16": 16, "bf16": 16}.get(self.removeprefix("texture_"), 32)

    @property
    def two_bytes(self) -> bool:
        """Floats without scales, two in a word."""
        return self in (Storage.F16, Storage.BF16)


@dataclass(frozen=True, slots=True)
class Layout:
    """How the rows of a matrix are stored. Rows of equal layout can be in one matrix."""

    storage: Storage
    k: int  # columns (inputs)
    group: int  # weights that share one scale; k where there are no scales
    has_offset: bool = False  # an offset follows each scale
    scale_bits: int = 0  # 32: f32; 16: f16; 8: super-blocks of sub-scales; 0: no scales

    @property
    def scale_width(self) -> int:
        """Values for each group: a scale, or a scale and an offset."""
        return 1 + self.has_offset

    @property
    def f16_scales(self) -> bool:
        """Whether a group has an f16 scale and no offset."""
        return self.scale_bits == 16 and not self.has_offset

    @property
    def sub_scales(self) -> bool:
        """Whether a group has an int8 sub-scale and no offset."""
        return self.scale_bits == 8 and not self.has_offset

    @property
    def row_bytes(self) -> int:
        """Of the words of one row."""
        if self.storage.two_bytes:
            return 2 * (self.k + self.k % 2)
        return self.k * self.storage.bits // 8

    @property
    def scale_row_bytes(self) -> int:
        """Of the scales of one row. A super-block is two f16 (scale and offset), then int8 sub-scales."""
        if self.scale_bits == 8:
            return self.k // SUPER_BLOCK * self.super_block_bytes
        return self.k // self.group * self.scale_width * self.scale_bits // 8

    @property
    def super_block_bytes(self) -> int:
        return 4 + SUPER_BLOCK // self.group * self.scale_width

    @property
    def texels(self) -> int:
        """Width of a texture row, which holds TEXTURE_ROWS rows: words, and 4 texels of scales for each group."""
        if self.storage is Storage.TEXTURE_F32:
            return 2 * (-(-self.k // TEXTURE_STRIDE) * TEXTURE_STRIDE)
        words_per_texel = 4 if self.storage is Storage.TEXTURE_Q4 else 2
        return self.k // words_per_texel + self.k // self.group * 4


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight matrix in one layout."""

    layout: Layout
    words: NDArray[Any]  # [n, ...], see Storage
    # [n, k/group, 1 or 2] f16 or f32: scale (, offset). Super-blocks: [n, k/256, bytes] u8: the f16 scale of the
    # sub-scales, the f16 scale of the sub-offsets, then int8 sub-scales, each followed by its sub-offset if there is
    # one.
    scales: NDArray[Any] | None = None

    @property
    def n(self) -> int:
        return len(self.words)

    @property
    def k(self) -> int:
        return self.layout.k


def expand_scales(matrix: PackedMatrix) -> NDArray[np.floating]:
    """[n, k/group, 1 or 2] f16 or f32: scale (, offset). f16 (11 bits) times int8 is exact in f32."""
    layout, scales = matrix.layout, matrix.scales
    assert scales is not None
    if layout.scale_bits != 8:
        return scales
    width = layout.scale_width
    super_scales = np.ascontiguousarray(scales[..., :4]).view(np.float16)[..., None, :width].astype(np.float32)
    sub_scales = scales[..., 4:].view(np.int8).reshape(*super_scales.shape[:2], -1, width)
    expanded: NDArray[np.float32] = (sub_scales * super_scales).reshape(matrix.n, -1, width)
    return expanded


def dequantize(matrix: PackedMatrix) -> NDArray[np.float64]:
    """[n, k], computed as ggml does: an f32 product, then an f32 sum."""
    layout = matrix.layout
    if matrix.scales is None:
        return widen(matrix.words[:, : matrix.k]).astype(np.float64)
    scales = expand_scales(matrix).astype(np.float32)
    values = from_q6(matrix).words if layout.storage is Storage.Q6 else matrix.words
    if layout.storage is Storage.Q4:
        values = np.stack([values & 0x0F, values >> 4], axis=-1).view(np.int8) - 8 * (not layout.has_offset)
    weights = values.reshape(matrix.n, -1, layout.group).astype(np.float32) * scales[..., :1]
    if layout.has_offset:
        weights += scales[..., 1:]
    return weights.reshape(matrix.n, matrix.k).astype(np.float64)


def widen(values: NDArray[Any]) -> NDArray[np.float32]:
    """F16, BF16 (as u16), F32 or F64 -> f32."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):  # an f64 too large becomes inf, which is refused later
        return values.astype(np.float32, copy=False)


# Rows


def _map_arrays(
    matrices: Sequence[PackedMatrix], combine: Callable[[list[NDArray[Any]]], NDArray[Any]]
) -> PackedMatrix:
    words = combine([matrix.words for matrix in matrices])
    scales = [matrix.scales for matrix in matrices if matrix.scales is not None]
    return PackedMatrix(matrices[0].layout, words, combine(scales) if scales else None)


def take_rows(matrix: PackedMatrix, rows: NDArray[np.integer]) -> PackedMatrix:
    return _map_arrays([matrix], lambda arrays: np.take(arrays[0], rows, axis=0))


def slice_rows(matrix: PackedMatrix, start: int, stop: int) -> PackedMatrix:
    """A view: nothing is copied."""
    return _map_arrays([matrix], lambda arrays: arrays[0][start:stop])


def concat(matrices: Sequence[PackedMatrix]) -> list[PackedMatrix]:
    """All rows in order; neighbours of equal layout become one matrix."""
    runs = [list(run) for _, run in groupby(matrices, key=lambda matrix: matrix.layout)]
    return [run[0] if len(run) == 1 else _map_arrays(run, np.concatenate) for run in runs]


def interleave(a: PackedMatrix, b: PackedMatrix) -> PackedMatrix:
    """Rows a0, b0, a1, b1, ... of two matrices of one layout and size."""
    assert a.layout == b.layout and a.n == b.n
    return _map_arrays([a, b], lambda arrays: np.stack(arrays, axis=1).reshape(2 * a.n, *arrays[0].shape[1:]))


def rope_rows(heads: int, head_dim: int, rope_dims: int) -> NDArray[np.int64]:
    """The row order that brings the NeoX RoPE pairs of each head, (i, i + rope_dims/2), together."""
    head = np.arange(head_dim)
    head[:rope_dims] = head[:rope_dims].reshape(2, -1).T.ravel()
    return (np.arange(heads)[:, None] * head_dim + head).ravel()


# Six bits


def fits_q6(layout: Layout) -> bool:
    """Q6_K, which repack gives as int8: groups of 16 without offsets, under sub-scales (IQ2_S has f32 scales; its
    integers are larger)."""
    int8 = layout.storage is Storage.Q8 and layout.scale_bits == 8
    return int8 and layout.group == 16 and not layout.has_offset and layout.k % 64 == 0


def to_q6(matrix: PackedMatrix) -> PackedMatrix:
    """Q6_K in 6 bits.

    A row is its low nibbles, as Q4 stores them, then its high bit pairs: for each 32 weights one word of the even ones
    and one word of the odd ones, in which bits 2i of byte j belong to weight 4i + j of the plane.
    """
    n, k = matrix.n, matrix.k
    values = (matrix.words + np.int8(32)).view(np.uint8)
    pairs, words = values.view(np.uint16), np.empty((n, 3 * k // 4), np.uint8)
    words[:, : k // 2] = pairs & 0x0F | pairs >> 4 & 0xF0
    high = split_planes(values).view(np.uint32) >> 4 & 0x03030303  # [n * k / 32, 2, 4]
    merged = high[..., 0] | high[..., 1] << 2 | high[..., 2] << 4 | high[..., 3] << 6
    words[:, k // 2 :] = merged.view(np.uint8).reshape(n, k // 4)
    return PackedMatrix(q6_layout(matrix.layout), words, matrix.scales)


def q6_layout(layout: Layout) -> Layout:
    return Layout(Storage.Q6, layout.k, layout.group, layout.has_offset, layout.scale_bits)


def from_q6(matrix: PackedMatrix) -> PackedMatrix:
    """Q6_K in 6 bits back to int8."""
    n, k, words = matrix.n, matrix.k, matrix.words.view(np.uint8)
    low, high = words[:, : k // 2].reshape(-1, 16), words[:, k // 2 :].reshape(-1, 2, 1, 4)
    pairs = (high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(-1, 2, 16) << 4  # even, odd
    values = np.stack([low & 15 | pairs[:, 0], low >> 4 | pairs[:, 1]], axis=-1).reshape(n, k)
    layout = matrix.layout
    as_int8 = Layout(Storage.Q8, layout.k, layout.group, layout.has_offset, layout.scale_bits)
    return PackedMatrix(as_int8, values.view(np.int8) - np.int8(32), matrix.scales)


def split_planes(words: NDArray[Any]) -> NDArray[np.uint8]:
    """[n, k] bytes with the 16 even and then the 16 odd ones of each 32.

    That is the order in which the nibbles of Q4 are unpacked, so that int8 activations have one order for both.
    """
    pairs = words.reshape(-1, 16, 2).view(np.uint16)[..., 0]
    planes = np.empty((len(pairs), 2, 16), np.uint8)
    np.bitwise_and(pairs, 0xFF, out=planes[:, 0], casting="unsafe")
    np.right_shift(pairs, 8, out=planes[:, 1], casting="unsafe")
    return planes
