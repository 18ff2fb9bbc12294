"""GGUF tensors to packed matrices, in numpy.

A packed matrix dequantises to the numbers that ggml gives, bit for bit. Only F32 is rounded, to f16.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamagpu.errors import BadFile, Unsupported
from llamagpu.files.gguf_file import BLOCKS, REMEDY_REFETCH, RawTensor, shown
from llamagpu.files.grid_types import GRIDS, pack_grid, pack_mxfp4, pack_ternary
from llamagpu.files.storage import SUPER_BLOCK, Layout, PackedMatrix, Storage, dequantize, widen

# File bytes that a packer takes at once. Smaller batches stay in L2, but a numpy call costs 1-3 us, and threads compete
# for the interpreter: 256 KiB gives 650 MB/s of Q4_K on one core or two, 1 MiB 760 and 1070 (Neoverse-N1).
BATCH_BYTES = 1 << 20
Bytes = NDArray[Any]  # u8; numpy's types call some results of bitwise operations signed


# Helpers of the packers. Everything runs on contiguous arrays: numpy does 16 bytes in 0.9 ns there.


def _copy(to: NDArray[np.generic], source: NDArray[np.generic]) -> None:
    # numpy copies 16 bytes in 1 ns if the last axis is one void item, and in 8 ns as single bytes.
    item = f"V{to.shape[-1]}"
    to.view(item)[...] = source.view(item)


def _gather(view: NDArray[np.generic]) -> Bytes:
    """Some bytes of every block, contiguous and aligned."""
    out = np.empty(view.shape, np.uint8)
    _copy(out, view)
    return out


def _pair(values: Bytes) -> Bytes:
    """[r, 2m] bytes below 16 -> [r, m] bytes: the even one in the low nibble, the odd one in the high."""
    two = values.view(np.uint16)
    return (two | two >> 4).astype(np.uint8)


def _pair_halves(qs: Bytes, words: Bytes) -> None:
    """qs [r, m]: low nibbles are weights 0 .. m-1, high nibbles m .. 2m-1 -> the same weights as pairs."""
    out = words.reshape(len(qs), 2, -1)
    _copy(out[:, 0], _pair(qs & 0x0F))
    _copy(out[:, 1], _pair(qs >> 4))


def _pair_planes(qs: Bytes) -> list[Bytes]:
    """qs [r, m]: bits 2s, 2s+1 of byte j are weight s*m + j -> for each s [r, m/2] pairs."""
    low, high = _pair(qs & 0x0F), _pair(qs >> 4)
    return [low & 0x33, low >> 2 & 0x33, high & 0x33, high >> 2 & 0x33]


def _copy_scales(f16_bytes: Bytes, scales: Bytes) -> None:
    """f16_bytes [b, 2 or 4]: the block's scale (and offset), stored as they are."""
    _copy(scales, f16_bytes)


def _store_sub_scales(d: Bytes, sub_scales: NDArray[np.generic], scales: Bytes) -> None:
    """d [b, 2] bytes of f16, sub_scales [b, groups] int8 -> super-blocks without offsets."""
    _copy(scales[:, :2], d)
    scales[:, 2:4] = 0
    _copy(scales[:, 4:], sub_scales.view(np.uint8))


def _store_sub_offsets(d: Bytes, sub_scales: Bytes, dmin: Bytes, minima: Bytes, scales: Bytes) -> None:
    """A minimum is an offset with the other sign: x - d * m = x + (-d) * m, bit for bit."""
    _copy(scales[:, :2], d)
    _copy(scales[:, 2:4], dmin)
    scales[:, 3] ^= 0x80
    scales[:, 4::2], scales[:, 5::2] = sub_scales, minima


def _k_quant_scales(blocks: Bytes, scales: Bytes) -> None:
    # Q4_K, Q5_K: d f16, dmin f16 | 12 bytes for 8 scales, 8 minima of 6 bits: 0-3 hold scales 0-3, 4-7 minima
    # 0-3; their top 2 bits are those of scales (minima) 4-7, whose low 4 are the low (high) nibbles of 8-11
    s, m, rest = (_gather(blocks[:, i : i + 4]).view(np.uint32) for i in (4, 8, 12))  # 4 at a time
    scale = np.hstack([s & 0x3F3F3F3F, rest & 0x0F0F0F0F | s >> 2 & 0x30303030])
    minimum = np.hstack([m & 0x3F3F3F3F, rest >> 4 & 0x0F0F0F0F | m >> 2 & 0x30303030])
    _store_sub_offsets(blocks[:, :2], scale.view(np.uint8), blocks[:, 2:4], minimum.view(np.uint8), scales)


# A packer per GGUF type: blocks [b, bytes] u8, a view of the file -> words [b, bytes] u8, scales [b, bytes] u8.
# Comments name a block's fields in order with their bytes; "+ 8": stored with 8 added.


def _q4(blocks: Bytes, words: Bytes, scales: Bytes) -> None:
    # Q4_0: d f16, Q4_1: d f16, offset f16 | qs 16: byte j = weight j (low nibble), j + 16 (high); Q4_0 + 8
    _copy_scales(blocks[:, :-16], scales)
    _pair_halves(_gather(blocks[:, -16:]), words)


def _q5(blocks: Bytes, words: Bytes, scales: Bytes) -> None:
    # Q5_0: d, Q5_1: d, offset | qh 4: bit j = bit 4 of weight j | qs 16 as Q4_0; Q5_0 + 16
    _copy_scales(blocks[:, :-20], scales)
    qs, out = _gather(blocks[:, -16:]), words.reshape(-1, 2, 16)
    _copy(out[:, 0], qs & 0x0F)
    _copy(out[:, 1], qs >> 4)
    words |= np.unpackbits(_gather(blocks[:, -20:-16]), bitorder="little").reshape(words.shape) << 4
    if scales.shape[1] == 2:  # no offset
        words -= 16


def _q8(blocks: Bytes, words: Bytes, scales: Bytes) -> None:
    # Q8_0: d f16 | 32 int8
    _copy_scales(blocks[:, :2], scales)
    _copy(words, blocks[:, 2:])


def _q2_k(blocks: Bytes, words: Bytes, scales: Bytes) -> None:
    # 16: scale (low nibble), minimum (high) of 16 weights | qs 64: 2 x 32, 4 planes of 2 bits | d, dmin f16
    factors = _gather(blocks[:, :16])
    _store_sub_offsets(blocks[:, 80:82], factors & 0x0F, blocks[:, 82:], factors >> 4, scales)
    out = words.reshape(-1, 4, 16)
    for s, plane in enumerate(_pair_planes(_gather(blocks[:, 16:80]).reshape(-1, 32))):
        _copy(out[:, s], plane)


def _q3_k(blocks: Bytes, words: Bytes, scales: Bytes) -> None:
    # hmask 32: bit i of byte j = bit 2 of weight 32i + j | qs 64 as Q2_K; + 4 | 12: low 4 bits of 16 scales =
    # the low, then the high nibbles of bytes 0-7; high 2 bits = bytes 8-11 in 4 planes; + 32 | d f16
    s0, s1, rest = (_gather(blocks[:, i : i + 4]).view(np.uint32) for i in (96, 100, 104))  # 4 at a time
    low = np.hstack([s0, s1, s0 >> 4, s1 >> 4]) & 0x0F0F0F0F
    high = np.hstack([rest << 4, rest << 2, rest, rest >> 2]) & 0x30303030
    _store_sub_scales(blocks[:, 108:], (low | high).view(np.uint8) - 32, scales)
    mask, out = _gather(blocks[:, :32]), words.reshape(-1, 2, 4, 16)
    for h, bits in enumerate([_pair(mask & 0x0F), _pair(mask >> 4)]):
        for s, plane in enumerate(_pair_planes(_gather(blocks[:, 32 + 32 * h : 64 + 32 * h]))):
            _copy(out[:, h, s], (plane | (bits >> s & 0x11) << 2) + 0x44)  # + 4 becomes q4's + 8


def _q4_k(blocks: Bytes, words: Bytes, scales: Bytes) -> None:
    # d, dmin, scales 16 | qs 128: 4 x 32, byte j = weight j (low nibble), j + 32 (high)
    _k_quant_scales(blocks, scales)
    _pair_halves(_gather(blocks[:, 16:]).reshape(-1, 32), words)


def _q5_k(blocks: Bytes, words: Bytes, scales: Bytes) -> None:
    # d, dmin, scales 16 | qh 32: bit i of byte j = bit 4 of weight 32i + j | qs 128 as Q4_K
    _k_quant_scales(blocks, scales)
    high, out = _gather(blocks[:, 16:48]), words.reshape(-1, 4, 2, 32)
    for i in range(4):
        qs = _gather(blocks[:, 48 + 32 * i : 80 + 32 * i])
        _copy(out[:, i, 0], qs & 0x0F | (high >> 2 * i & 1) << 4)
        _copy(out[:, i, 1], qs >> 4 | (high >> 2 * i + 1 & 1) << 4)


def _q6_k(blocks: Bytes, words: Bytes, scales: Bytes) -> None:
    # ql 128: 2 x 64, byte j = low bits of weight j (low nibble), j + 64 (high) | qh 64: high 2 bits in Q2_K's
    # order; + 32 | 16 int8 scales | d f16
    _store_sub_scales(blocks[:, 208:], _gather(blocks[:, 192:208]), scales)
    low, high = _gather(blocks[:, :128]).reshape(-1, 64), _gather(blocks[:, 128:192]).reshape(-1, 32)
    a, b, out = _gather(low[:, :32]), _gather(low[:, 32:]), words.reshape(-1, 4, 32)
    _copy(out[:, 0], (a & 0x0F | high << 4 & 0x30) - 32)
    _copy(out[:, 1], (b & 0x0F | high << 2 & 0x30) - 32)
    _copy(out[:, 2], (a >> 4 | high & 0x30) - 32)
    _copy(out[:, 3], (b >> 4 | high >> 2 & 0x30) - 32)


_IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
# A u16 of four nibbles -> their four values: a quarter of the lookups (2 ns each) of one per weight.
_IQ4_TWO = np.stack([np.tile(_IQ4_VALUES, 16), np.repeat(_IQ4_VALUES, 16)], axis=1).view(np.uint16)[:, 0]
_IQ4_FOUR = np.stack([np.tile(_IQ4_TWO, 256), np.repeat(_IQ4_TWO, 256)], axis=1).view(np.uint32)[:, 0]


def _look_up(qs: Bytes, words: Bytes) -> None:
    pairs = np.empty((len(words), words.shape[1] // 2), np.uint8)
    _pair_halves(qs, pairs)
    np.take(_IQ4_FOUR, pairs.view(np.uint16), out=words.view(np.uint32), mode="clip")


def _iq4_nl(blocks: Bytes, words: Bytes, scales: Bytes) -> None:
    # d f16 | qs 16 as Q4_0, a nibble being an index into _IQ4_VALUES
    _copy_scales(blocks[:, :2], scales)
    _look_up(_gather(blocks[:, 2:]), words)


def _iq4_xs(blocks: Bytes, words: Bytes, scales: Bytes) -> None:
    # d f16 | u16: bits 2i, 2i+1 = top of scale i | 4: nibble i = its low 4 bits; + 32 | qs 128: 8 x IQ4_NL
    high = _gather(blocks[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = _gather(blocks[:, 4:8]).view(np.uint32) >> np.arange(0, 32, 4, dtype=np.uint32) & 0x0F
    _store_sub_scales(blocks[:, :2], (low | high << 4).astype(np.int8) - 32, scales)
    _look_up(_gather(blocks[:, 8:]).reshape(-1, 16), words)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How one GGUF type is stored: the layout of its rows, and the packer that makes them."""

    storage: Storage
    group: int
    has_offset: bool
    pack: Callable[[Bytes, Bytes, Bytes], None]
    super_blocks: bool = False  # 256 weights share the scale of int8 sub-scales
    f32_scales: bool = False  # f16 would not hold them
    growth: int = 1  # a batch has so many times fewer blocks: they become large

    @property
    def scale_bits(self) -> int:
        return 8 if self.super_blocks else 32 if self.f32_scales else 16

    def layout(self, k: int) -> Layout:
        return Layout(self.storage, k, self.group, self.has_offset, self.scale_bits)


FORMATS = {
    "Q4_0": BlockFormat(Storage.Q4, 32, False, _q4),
    "Q4_1": BlockFormat(Storage.Q4, 32, True, _q4),
    "Q4_K": BlockFormat(Storage.Q4, 32, True, _q4_k, super_blocks=True),
    "Q2_K": BlockFormat(Storage.Q4, 16, True, _q2_k, super_blocks=True),
    "Q3_K": BlockFormat(Storage.Q4, 16, False, _q3_k, super_blocks=True),
    "Q5_0": BlockFormat(Storage.Q8, 32, False, _q5),
    "Q5_1": BlockFormat(Storage.Q8, 32, True, _q5),
    "Q5_K": BlockFormat(Storage.Q8, 32, True, _q5_k, super_blocks=True),
    "Q6_K": BlockFormat(Storage.Q8, 16, False, _q6_k, super_blocks=True),
    "Q8_0": BlockFormat(Storage.Q8, 32, False, _q8),
    "IQ4_NL": BlockFormat(Storage.Q8, 32, False, _iq4_nl),
    "IQ4_XS": BlockFormat(Storage.Q8, 32, False, _iq4_xs, super_blocks=True),
    **{
        name: BlockFormat(Storage.Q8, grid.group, False, partial(pack_grid, name), f32_scales=True, growth=8)
        for name, grid in GRIDS.items()
    },
    **{
        name: BlockFormat(Storage.Q4, 32, False, partial(pack_ternary, name), super_blocks=True, growth=8)
        for name in ("TQ1_0", "TQ2_0")
    },
    "MXFP4": BlockFormat(Storage.Q8, 32, False, pack_mxfp4, f32_scales=True, growth=4),
}
FLOATS = {"F16": np.float16, "BF16": np.uint16, "F32": np.float32}  # BF16 is the upper half of an f32


def layout_of(ggml_type: str, k: int) -> Layout:
    """The layout of rows of k weights of a supported type, as `repack` gives them."""
    if ggml_type in FLOATS:
        return Layout(Storage.BF16 if ggml_type == "BF16" else Storage.F16, k, k)
    return FORMATS[ggml_type].layout(k)


def packed_bytes(ggml_type: str, n: int, k: int) -> int:
    layout = layout_of(ggml_type, k)
    return n * (layout.row_bytes + layout.scale_row_bytes)


def repack(tensor: RawTensor, threads: int = 1) -> PackedMatrix:
    """The rows of a matrix. The GGUF reader has checked its shape and size."""
    n, k = prod(tensor.shape[:-1]), tensor.shape[-1]
    if tensor.ggml_type in FLOATS:
        return _repack_floats(tensor, n, k, threads)
    block_format = _format(tensor)
    layout = block_format.layout(k)
    weights, size = BLOCKS[tensor.ggml_type]
    blocks = tensor.data.reshape(-1, size)
    block = block_format.layout(weights)
    words = np.empty((len(blocks), block.row_bytes), np.uint8)
    scales = np.empty((len(blocks), block.scale_row_bytes), np.uint8)

    def pack(start: int, stop: int) -> None:
        block_format.pack(blocks[start:stop], words[start:stop], scales[start:stop])
        floats = _gather(scales[start:stop, :4]) if block_format.super_blocks else scales[start:stop]
        finite = np.isfinite(floats.view(np.float32 if block_format.f32_scales else np.float16))
        if not finite.all():
            raise _damaged(tensor, f"the scale of block {start + int(np.argmin(finite.all(axis=1)))}")

    _in_batches(pack, len(blocks), max(1, BATCH_BYTES // (size * block_format.growth)), threads)
    rows = words.reshape(n, -1).view(np.uint8 if layout.storage is Storage.Q4 else np.int8)
    if block_format.super_blocks:
        return PackedMatrix(layout, rows, scales.reshape(n, k // SUPER_BLOCK, -1))
    floats = scales.view(np.float32 if block_format.f32_scales else np.float16)
    return PackedMatrix(layout, rows, floats.reshape(n, -1, layout.scale_width))


def _repack_floats(tensor: RawTensor, n: int, k: int, threads: int) -> PackedMatrix:
    source = tensor.data.view(FLOATS[tensor.ggml_type]).reshape(n, k)
    words = np.empty((n, k + k % 2), np.uint16 if tensor.ggml_type == "BF16" else np.float16)
    words[:, k:] = 0
    last = 0x7F80 if tensor.ggml_type == "BF16" else 0x7BFF  # BF16 infinity; 65504

    def pack(start: int, stop: int) -> None:
        words[start:stop, :k] = source[start:stop]
        # the source is checked only where a value is that large
        if (words[start:stop].view(np.uint16) & 0x7FFF).max() >= last:
            values = widen(source[start:stop])
            _check_finite(tensor, values, start * k)
            worst = float(np.abs(values).max())
            if worst > 65504:
                raise Unsupported(
                    f"tensor {shown(tensor.name)} has a weight of {worst:g}, and f16 ends at 65504",
                    "Use a quantised file of this model (Q8_0, Q4_0, ...), or make a BF16 one with `llamagpu convert`.",
                )

    _in_batches(pack, n, max(1, BATCH_BYTES // (k * source.itemsize)), threads)
    return PackedMatrix(layout_of(tensor.ggml_type, k), words)


def _in_batches(pack: Callable[[int, int], None], count: int, size: int, threads: int) -> None:
    """pack(start, stop) over 0 .. count, `size` at a time; of several errors the one of the lowest start is raised."""

    def run(first: int, last: int) -> None:
        with np.errstate(all="ignore"):  # damaged scales overflow on their way to being reported
            for start in range(first, last, size):
                pack(start, min(start + size, last))

    # Freeing one large block makes glibc keep the packers' temporaries on its heap from here on, where it would
    # map and fault in fresh pages for each of them: 190 instead of 390 ns per Q4_K block.
    np.empty(8 << 20, np.uint8)
    threads = min(threads, -(-count // size))
    if threads <= 1:
        return run(0, count)
    bounds = [count * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, bounds[:-1], bounds[1:]))


def to_f32(tensor: RawTensor) -> NDArray[np.float32]:
    """A norm, a bias or RoPE factors as f32 in the tensor's shape, whatever its type."""
    if tensor.ggml_type not in FLOATS:
        return dequantize(repack(tensor)).astype(np.float32).reshape(tensor.shape)
    values = widen(tensor.data.view(FLOATS[tensor.ggml_type])).astype(np.float32)
    _check_finite(tensor, values)
    return values.reshape(tensor.shape)


def _check_finite(tensor: RawTensor, values: NDArray[np.floating], first: int = 0) -> None:
    finite = np.isfinite(values)
    if not finite.all():
        raise _damaged(tensor, f"value {first + int(np.argmin(finite))}")


def _damaged(tensor: RawTensor, what: str) -> BadFile:
    return BadFile(f"tensor {shown(tensor.name)} is damaged: {what} is NaN or infinite", REMEDY_REFETCH)


def _format(tensor: RawTensor) -> BlockFormat:
    if tensor.ggml_type not in FORMATS:
        raise Unsupported(
            f"tensor {shown(tensor.name)} has type {tensor.ggml_type}, which is not supported",
            f"Types that work: {', '.join([*FORMATS, *FLOATS])}.",
        )
    return FORMATS[tensor.ggml_type]
