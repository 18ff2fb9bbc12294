"""Packers of GGUF types whose weights come from tables (grids), or are ternary.

The `gguf` package has the grids. It is imported when a file has such a type, and only then: it takes 0.15 s.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[Any]  # u8
Rows = Callable[[Bytes], NDArray[Any]]  # from blocks [b, bytes] to [b, ...]


def _words(blocks: Bytes, dtype: type[np.generic]) -> NDArray[Any]:
    return np.ascontiguousarray(blocks).view(dtype)


def _fields(values: NDArray[Any], shifts: tuple[int, ...], mask: int) -> NDArray[Any]:
    """[b, m] words -> [b, m * shifts]: the bits of each word at each shift."""
    found = values[..., None] >> np.array(shifts, values.dtype) & values.dtype.type(mask)
    return np.asarray(found).reshape(len(values), -1)


def _nibbles(values: Bytes) -> Bytes:
    return _fields(values, (0, 4), 0x0F)


def _with_high_bits(low: Bytes, high: NDArray[Any]) -> NDArray[np.uint16]:
    return np.asarray(low | high.astype(np.uint16) << 8)


def _sevens(words: NDArray[Any]) -> Bytes:
    """u32 words of four 7-bit signs -> bytes of signs: the eighth makes their number even."""
    return np.asarray(_even_signs()[_fields(words, (0, 7, 14, 21), 0x7F)])


@cache
def _even_signs() -> NDArray[np.uint8]:
    index = np.arange(128, dtype=np.uint8)
    odd = np.unpackbits(index[:, None], axis=1).sum(axis=1, dtype=np.uint8) & 1
    return np.asarray(index | odd << 7, np.uint8)


@cache
def _sign_bytes() -> NDArray[np.uint64]:
    """For each byte of signs eight int8 of 1 or -1, as a word."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return (1 - 2 * bits.astype(np.int8)).view(np.uint64)[:, 0]


@cache
def _grid(ggml_type: str) -> NDArray[Any]:
    """The entries of a grid, 8 or 4 int8 as a word. Those of IQ1 are 8 times gguf's, + 1, and then - 1."""
    from gguf import quants

    kind = getattr(quants, ggml_type)
    kind.init_grid()
    entries = np.ascontiguousarray(kind.grid[0, 0].astype(np.int8))
    if ggml_type.startswith("IQ1"):
        entries = np.concatenate([8 * entries + 1, 8 * entries - 1])
    return entries.view(np.uint64 if entries.shape[1] == 8 else np.uint32)[:, 0]


def _iq1_s_high(words: NDArray[Any]) -> NDArray[Any]:
    return _fields(words, (0, 3, 6, 9), 7) | np.repeat(words >> 12 & np.uint16(8), 4, axis=1)


def _first_f16(blocks: Bytes) -> NDArray[Any]:
    return _words(blocks[:, :2], np.float16)[:, 0]


def _iq1_m_scale(blocks: Bytes) -> NDArray[Any]:
    """A nibble in each of four words."""
    nibbles = _words(blocks[:, 48:], np.uint16) >> np.uint16(12)
    return np.asarray((nibbles << np.array([0, 4, 8, 12], np.uint16)).sum(axis=1, dtype=np.uint16).view(np.float16))


@dataclass(frozen=True, slots=True)
class Grid:
    """A type whose blocks of 256 weights are d * (2 s + 1) / divisor times integers, with an s for each group."""

    divisor: int
    sub_scales: Rows  # s of each group
    index: Rows  # of entries of the grid
    signs: Rows | None = None  # a byte for 8 weights
    scale: Rows = _first_f16  # d
    group: int = 32


# Fields of a block in order, with their bytes
GRIDS = {
    # d 2 | 8 x (index 4, signs and s 4)
    "IQ2_XXS": Grid(
        8,
        lambda b: _words(b[:, 2:], np.uint32)[:, 1::2] >> 28,
        lambda b: _words(b[:, 2:], np.uint32)[:, ::2].copy().view(np.uint8),
        lambda b: _sevens(_words(b[:, 2:], np.uint32)[:, 1::2]),
    ),
    # d 2 | 32 words of index 9 bits, signs 7 | s 8
    "IQ2_XS": Grid(
        8,
        lambda b: _nibbles(b[:, 66:]),
        lambda b: _words(b[:, 2:66], np.uint16) & np.uint16(511),
        lambda b: _even_signs()[_words(b[:, 2:66], np.uint16) >> 9],
        group=16,
    ),
    # d 2 | index 32 | signs 32 | high bits of the index 8 | s 8
    "IQ2_S": Grid(
        8,
        lambda b: _nibbles(b[:, 74:]),
        lambda b: _with_high_bits(b[:, 2:34], _fields(b[:, 66:74], (0, 2, 4, 6), 3)),
        lambda b: b[:, 34:66],
        group=16,
    ),
    # d 2 | index 64 | signs and s 32
    "IQ3_XXS": Grid(
        4,
        lambda b: _words(b[:, 66:], np.uint32) >> 28,
        lambda b: b[:, 2:66],
        lambda b: _sevens(_words(b[:, 66:], np.uint32)),
    ),
    # d 2 | index 64 | high bits of the index 8 | signs 32 | s 4
    "IQ3_S": Grid(
        1,
        lambda b: _nibbles(b[:, 106:]),
        lambda b: _with_high_bits(b[:, 2:66], _fields(b[:, 66:74], tuple(range(8)), 1)),
        lambda b: b[:, 74:106],
    ),
    # d 2 | index 32 | 8 words of four times 3 high bits of the index, s, the highest bit of the index
    "IQ1_S": Grid(
        8,
        lambda b: _words(b[:, 34:], np.uint16) >> 12 & 7,
        lambda b: _with_high_bits(b[:, 2:34], _iq1_s_high(_words(b[:, 34:], np.uint16))),
    ),
    # index 32 | 4 high bits of the index 16 | 4 words of four s, with a nibble of d each
    "IQ1_M": Grid(
        8,
        lambda b: _fields(_words(b[:, 48:], np.uint16), (0, 3, 6, 9), 7),
        lambda b: _with_high_bits(b[:, :32], _nibbles(b[:, 32:48])),
        scale=_iq1_m_scale,
        group=16,
    ),
}


def pack_grid(ggml_type: str, blocks: Bytes, words: Bytes, scales: Bytes) -> None:
    """Integers as int8, scales as f32: d has 11 bits and 2 s + 1 has 5, so that their product is exact."""
    grid = GRIDS[ggml_type]
    integers = _grid(ggml_type)[grid.index(blocks)].view(np.int8).reshape(len(blocks), -1)
    if grid.signs:
        integers *= _sign_bytes()[grid.signs(blocks)].view(np.int8).reshape(integers.shape)
    words.view(np.int8)[...] = integers
    factors = (2 * grid.sub_scales(blocks).astype(np.float32) + 1) / np.float32(grid.divisor)
    scales.view(np.float32)[...] = grid.scale(blocks).astype(np.float32)[:, None] * factors


def _planes(qs: Bytes, width: int, unpack: Rows) -> Bytes:
    """Runs of `width` bytes; the first digit of all of a run, then the second, ..."""
    return unpack(qs.reshape(len(qs), -1, 1, width)).reshape(len(qs), -1)


def _digits(count: int, qs: Bytes) -> Bytes:
    """A byte is 256 / 243 of a number of digits to the base 3: multiplied by 3, it overflows into the highest."""
    powers = 3 ** np.arange(count, dtype=np.uint8)[:, None]
    return (qs * powers).astype(np.uint16) * np.uint16(3) >> 8


def pack_ternary(ggml_type: str, blocks: Bytes, words: Bytes, scales: Bytes) -> None:
    """TQ1_0, TQ2_0: d (the last two bytes) times -1 .. 2, as nibbles + 8 under sub-scales of 1."""
    if ggml_type == "TQ2_0":  # 2 x 32 bytes, 4 planes of 2 bits
        trits = _planes(blocks[:, :64], 32, lambda qs: qs >> np.array([[0], [2], [4], [6]], np.uint8) & 3)
    else:  # 32 and 16 bytes of 5 digits to the base 3, the highest first, and 4 bytes of 4
        parts = (blocks[:, :32], 32, 5), (blocks[:, 32:48], 16, 5), (blocks[:, 48:52], 4, 4)
        trits = np.hstack([_planes(part, width, partial(_digits, count)) for part, width, count in parts])
    nibbles = trits.astype(np.uint8) + 7
    words[...] = nibbles[:, ::2] | nibbles[:, 1::2] << 4
    scales[:, :2], scales[:, 2:4], scales[:, 4:] = blocks[:, -2:], 0, 1


MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)  # twice the weights

MXFP4_SCALES = np.ldexp(np.float32(1), np.arange(256) - 128)  # of half the weights


def pack_mxfp4(blocks: Bytes, words: Bytes, scales: Bytes) -> None:
    # exponent 1 | qs 16: byte j = weight j (low nibble), j + 16 (high), an index into MXFP4_VALUES
    nibbles = np.hstack([blocks[:, 1:] & 0x0F, blocks[:, 1:] >> 4])
    words.view(np.int8)[...] = MXFP4_VALUES[nibbles]
    scales.view(np.float32)[...] = MXFP4_SCALES[blocks[:, :1]]
