"""GGUF tensors -> the device's layout: q4, q8 or f16 rows with group scales, all in numpy.
What comes out dequantises bit for bit as ggml does; only F32 and BF16 are rounded, to f16."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

import numpy as np

from llamagpu.errors import BadFile, Unsupported
from llamagpu.files.gguf_file import AGAIN, BLOCKS, RawTensor, show

# File bytes per step. Smaller ones stay in L2, but a numpy call costs 1-3 us, and two threads fight for the
# interpreter: 256 KiB gives 650 MB/s of Q4_K on one core or two, 1 MiB 760 and 1070 (Neoverse-N1).
STEP_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Packed:
    """One weight matrix. q8: weight = int * scale; q4: (nibble - 8) * scale; with an offset the nibble is
    unsigned and both are int * scale + offset."""

    form: str  # "q4" | "q8" | "f16"; "q6" once it is made of q8 for a GPU
    n: int  # rows (outputs)
    k: int  # columns (inputs)
    group: int  # weights that share one scale; k for f16
    words: np.ndarray  # q4: [n, k/2] u8, byte j = k 2j (low nibble), 2j+1 (high); q8: [n, k] i8;
    #                    f16: [n, k + k%2] f16, an odd k padded by a 0
    scales: np.ndarray | None  # [n, k/group, 1 or 2] f16 or f32: scale (, offset); None for f16; or, of K-quants,
    #                            [n, k/256, bytes] records: 2 f16, steps of scales and of offsets, then the multiples
    #                            of them as int8; the array is i8 where there are no offsets, else u8

    @property
    def pair(self) -> bool:
        """Whether an offset follows each scale."""
        return self.scales is not None and (self.scales.dtype == np.uint8 or self.scales.shape[2] == 2)

    @property
    def layout(self) -> tuple[object, ...]:
        """Equal for matrices whose rows can stand in one matrix."""
        scales = () if self.scales is None else (self.scales.shape[2], self.scales.dtype)
        return self.form, self.k, self.group, *scales


# Steps shared by the packers. Everything runs on contiguous arrays: numpy does 16 bytes in 0.9 ns there.


def _copy(to: np.ndarray, source: np.ndarray) -> None:
    # With the last axis as one void item numpy moves 16 bytes in 1 ns, as bytes in an inner loop of 8 ns.
    item = f"V{to.shape[-1]}"
    to.view(item)[...] = source.view(item)


def _gather(view: np.ndarray) -> np.ndarray:
    """Some bytes of every block, contiguous and aligned."""
    out = np.empty(view.shape, np.uint8)
    _copy(out, view)
    return out


def _pair(values: np.ndarray) -> np.ndarray:
    """[r, 2m] bytes below 16 -> [r, m] bytes: the even one in the low nibble, the odd one in the high."""
    two = values.view(np.uint16)
    return (two | two >> 4).astype(np.uint8)


def _pair_halves(qs: np.ndarray, words: np.ndarray) -> None:
    """qs [r, m]: low nibbles are weights 0 .. m-1, high nibbles m .. 2m-1 -> the same weights as pairs."""
    out = words.reshape(len(qs), 2, -1)
    _copy(out[:, 0], _pair(qs & 0x0F))
    _copy(out[:, 1], _pair(qs >> 4))


def _pair_planes(qs: np.ndarray) -> list[np.ndarray]:
    """qs [r, m]: bits 2s, 2s+1 of byte j are weight s*m + j -> for each s [r, m/2] pairs."""
    low, high = _pair(qs & 0x0F), _pair(qs >> 4)
    return [low & 0x33, low >> 2 & 0x33, high & 0x33, high >> 2 & 0x33]


def _copy_scales(halves: np.ndarray, scales: np.ndarray) -> None:
    _copy(scales.view(np.uint8)[:, 0], halves)


def _keep_steps(d: np.ndarray, factors: np.ndarray, records: np.ndarray) -> None:
    """d [b, 2] bytes of f16, factors [b, groups] -> records of scales alone."""
    raw = records.view(np.uint8)
    _copy(raw[:, :2], d)
    raw[:, 2:4] = 0
    _copy(raw[:, 4:], factors.view(np.uint8))


def _keep_pairs(d: np.ndarray, factors: np.ndarray, dmin: np.ndarray, minima: np.ndarray, records: np.ndarray) -> None:
    """A minimum is an offset with the other sign: x - d * m = x + (-d) * m, bit for bit."""
    _copy(records[:, :2], d)
    _copy(records[:, 2:4], dmin)
    records[:, 3] ^= 0x80
    records[:, 4::2], records[:, 5::2] = factors, minima


def _scales_and_minima(blocks: np.ndarray, scales: np.ndarray) -> None:
    # Q4_K, Q5_K: d f16, dmin f16 | 12 bytes for 8 scales, 8 minima of 6 bits: 0-3 hold scales 0-3, 4-7 minima
    # 0-3; their top 2 bits are those of scales (minima) 4-7, whose low 4 are the low (high) nibbles of 8-11
    s, m, rest = (_gather(blocks[:, i : i + 4]).view(np.uint32) for i in (4, 8, 12))  # 4 at a time
    scale = np.hstack([s & 0x3F3F3F3F, rest & 0x0F0F0F0F | s >> 2 & 0x30303030])
    minimum = np.hstack([m & 0x3F3F3F3F, rest >> 4 & 0x0F0F0F0F | m >> 2 & 0x30303030])
    _keep_pairs(blocks[:, :2], scale.view(np.uint8), blocks[:, 2:4], minimum.view(np.uint8), scales)


# A packer per GGUF type: blocks [b, bytes] u8, a view of the file -> words [b, bytes] u8, scales [b, groups, 1 or 2]
# or records [b, bytes]. Comments name a block's parts in order with their bytes; "+ 8": stored with 8 added.


def _q4(blocks: np.ndarray, words: np.ndarray, scales: np.ndarray) -> None:
    # Q4_0: d f16, Q4_1: d f16, offset f16 | qs 16: byte j = weight j (low nibble), j + 16 (high); Q4_0 + 8
    _copy_scales(blocks[:, :-16], scales)
    _pair_halves(_gather(blocks[:, -16:]), words)


def _q5(blocks: np.ndarray, words: np.ndarray, scales: np.ndarray) -> None:
    # Q5_0: d, Q5_1: d, offset | qh 4: bit j = bit 4 of weight j | qs 16 as Q4_0; Q5_0 + 16
    _copy_scales(blocks[:, :-20], scales)
    qs, out = _gather(blocks[:, -16:]), words.reshape(-1, 2, 16)
    _copy(out[:, 0], qs & 0x0F)
    _copy(out[:, 1], qs >> 4)
    words |= np.unpackbits(_gather(blocks[:, -20:-16]), bitorder="little").reshape(words.shape) << 4
    if scales.shape[2] == 1:
        words -= 16


def _q8(blocks: np.ndarray, words: np.ndarray, scales: np.ndarray) -> None:
    # Q8_0: d f16 | 32 int8
    _copy_scales(blocks[:, :2], scales)
    _copy(words, blocks[:, 2:])


def _q2_k(blocks: np.ndarray, words: np.ndarray, scales: np.ndarray) -> None:
    # 16: scale (low nibble), minimum (high) of 16 weights | qs 64: 2 x 32, 4 planes of 2 bits | d, dmin f16
    factors = _gather(blocks[:, :16])
    _keep_pairs(blocks[:, 80:82], factors & 0x0F, blocks[:, 82:], factors >> 4, scales)
    out = words.reshape(-1, 4, 16)
    for s, plane in enumerate(_pair_planes(_gather(blocks[:, 16:80]).reshape(-1, 32))):
        _copy(out[:, s], plane)


def _q3_k(blocks: np.ndarray, words: np.ndarray, scales: np.ndarray) -> None:
    # hmask 32: bit i of byte j = bit 2 of weight 32i + j | qs 64 as Q2_K; + 4 | 12: low 4 bits of 16 scales =
    # the low, then the high nibbles of bytes 0-7; high 2 bits = bytes 8-11 in 4 planes; + 32 | d f16
    s0, s1, rest = (_gather(blocks[:, i : i + 4]).view(np.uint32) for i in (96, 100, 104))  # 4 at a time
    low = np.hstack([s0, s1, s0 >> 4, s1 >> 4]) & 0x0F0F0F0F
    high = np.hstack([rest << 4, rest << 2, rest, rest >> 2]) & 0x30303030
    _keep_steps(blocks[:, 108:], (low | high).view(np.uint8) - 32, scales)
    mask, out = _gather(blocks[:, :32]), words.reshape(-1, 2, 4, 16)
    for h, bits in enumerate([_pair(mask & 0x0F), _pair(mask >> 4)]):
        for s, plane in enumerate(_pair_planes(_gather(blocks[:, 32 + 32 * h : 64 + 32 * h]))):
            _copy(out[:, h, s], (plane | (bits >> s & 0x11) << 2) + 0x44)  # + 4 becomes q4's + 8


def _q4_k(blocks: np.ndarray, words: np.ndarray, scales: np.ndarray) -> None:
    # d, dmin, scales 16 | qs 128: 4 x 32, byte j = weight j (low nibble), j + 32 (high)
    _scales_and_minima(blocks, scales)
    _pair_halves(_gather(blocks[:, 16:]).reshape(-1, 32), words)


def _q5_k(blocks: np.ndarray, words: np.ndarray, scales: np.ndarray) -> None:
    # d, dmin, scales 16 | qh 32: bit i of byte j = bit 4 of weight 32i + j | qs 128 as Q4_K
    _scales_and_minima(blocks, scales)
    high, out = _gather(blocks[:, 16:48]), words.reshape(-1, 4, 2, 32)
    for i in range(4):
        qs = _gather(blocks[:, 48 + 32 * i : 80 + 32 * i])
        _copy(out[:, i, 0], qs & 0x0F | (high >> 2 * i & 1) << 4)
        _copy(out[:, i, 1], qs >> 4 | (high >> 2 * i + 1 & 1) << 4)


def _q6_k(blocks: np.ndarray, words: np.ndarray, scales: np.ndarray) -> None:
    # ql 128: 2 x 64, byte j = low bits of weight j (low nibble), j + 64 (high) | qh 64: high 2 bits in Q2_K's
    # order; + 32 | 16 int8 scales | d f16
    _keep_steps(blocks[:, 208:], _gather(blocks[:, 192:208]), scales)
    low, high = _gather(blocks[:, :128]).reshape(-1, 64), _gather(blocks[:, 128:192]).reshape(-1, 32)
    a, b, out = _gather(low[:, :32]), _gather(low[:, 32:]), words.reshape(-1, 4, 32)
    _copy(out[:, 0], (a & 0x0F | high << 4 & 0x30) - 32)
    _copy(out[:, 1], (b & 0x0F | high << 2 & 0x30) - 32)
    _copy(out[:, 2], (a >> 4 | high & 0x30) - 32)
    _copy(out[:, 3], (b >> 4 | high >> 2 & 0x30) - 32)


_CODES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
# A u16 of four nibbles -> their four codes: a quarter of the lookups (2 ns each) of one per weight.
_CODES_2 = np.stack([np.tile(_CODES, 16), np.repeat(_CODES, 16)], axis=1).view(np.uint16)[:, 0]
_CODES_4 = np.stack([np.tile(_CODES_2, 256), np.repeat(_CODES_2, 256)], axis=1).view(np.uint32)[:, 0]


def _look_up(qs: np.ndarray, words: np.ndarray) -> None:
    pairs = np.empty((len(words), words.shape[1] // 2), np.uint8)
    _pair_halves(qs, pairs)
    np.take(_CODES_4, pairs.view(np.uint16), out=words.view(np.uint32), mode="clip")


def _iq4_nl(blocks: np.ndarray, words: np.ndarray, scales: np.ndarray) -> None:
    # d f16 | qs 16 as Q4_0, a nibble being an index into _CODES
    _copy_scales(blocks[:, :2], scales)
    _look_up(_gather(blocks[:, 2:]), words)


def _iq4_xs(blocks: np.ndarray, words: np.ndarray, scales: np.ndarray) -> None:
    # d f16 | u16: bits 2i, 2i+1 = top of scale i | 4: nibble i = its low 4 bits; + 32 | qs 128: 8 x IQ4_NL
    high = _gather(blocks[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = _gather(blocks[:, 4:8]).view(np.uint32) >> np.arange(0, 32, 4, dtype=np.uint32) & 0x0F
    _keep_steps(blocks[:, :2], (low | high << 4).astype(np.int8) - 32, scales)
    _look_up(_gather(blocks[:, 8:]).reshape(-1, 16), words)


@dataclass(frozen=True, slots=True)
class Format:
    """How one GGUF type is stored on the device."""

    form: str
    group: int
    width: int  # per group: 1 a scale, 2 a scale and an offset
    pack: Callable[[np.ndarray, np.ndarray, np.ndarray], None]
    steps: bool = False  # its scales are multiples of a step, 256 weights sharing one

    @property
    def dtype(self) -> type[np.generic]:
        """Of the scales."""
        return (np.int8 if self.width == 1 else np.uint8) if self.steps else np.float16

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Of a block's scales."""
        return (4 + 256 // self.group * self.width,) if self.steps else (1, self.width)


FORMATS = {
    "Q4_0": Format("q4", 32, 1, _q4),
    "Q4_1": Format("q4", 32, 2, _q4),
    "Q4_K": Format("q4", 32, 2, _q4_k, steps=True),
    "Q2_K": Format("q4", 16, 2, _q2_k, steps=True),
    "Q3_K": Format("q4", 16, 1, _q3_k, steps=True),
    "Q5_0": Format("q8", 32, 1, _q5),
    "Q5_1": Format("q8", 32, 2, _q5),
    "Q5_K": Format("q8", 32, 2, _q5_k, steps=True),
    "Q6_K": Format("q8", 16, 1, _q6_k, steps=True),
    "Q8_0": Format("q8", 32, 1, _q8),
    "IQ4_NL": Format("q8", 32, 1, _iq4_nl),
    "IQ4_XS": Format("q8", 32, 1, _iq4_xs, steps=True),
}
FLOATS = {"F16": np.float16, "BF16": np.uint16, "F32": np.float32}  # BF16 is the upper half of an f32


def repack(tensor: RawTensor, threads: int = 1) -> Packed:
    """The rows of a matrix; the shapes and sizes are those the GGUF reader has checked."""
    n, k = prod(tensor.shape[:-1]), tensor.shape[-1]
    if tensor.kind in FLOATS:
        return _repack_floats(tensor, n, k, threads)
    fmt = _format(tensor)
    weights, size = BLOCKS[tensor.kind]
    blocks = tensor.data.reshape(-1, size)
    words = np.empty((len(blocks), weights // 2 if fmt.form == "q4" else weights), np.uint8)
    scales = np.empty((len(blocks), *fmt.scale_shape), fmt.dtype)

    def step(start: int, stop: int) -> None:
        fmt.pack(blocks[start:stop], words[start:stop], scales[start:stop])
        floats = _gather(scales[start:stop, :4].view(np.uint8)) if fmt.steps else scales[start:stop]
        finite = np.isfinite(floats.view(np.float16))
        if not finite.all():
            block = start + int(np.argmin(finite.reshape(stop - start, -1).all(axis=1)))
            raise _damaged(tensor, f"the scale of block {block}")

    _in_steps(step, len(blocks), STEP_BYTES // size, threads)
    rows = words.reshape(n, -1).view(np.uint8 if fmt.form == "q4" else np.int8)
    return Packed(fmt.form, n, k, fmt.group, rows, scales.reshape(n, -1, fmt.scale_shape[-1]))


def _repack_floats(tensor: RawTensor, n: int, k: int, threads: int) -> Packed:
    source = tensor.data.view(FLOATS[tensor.kind]).reshape(n, k)
    words = np.empty((n, k + k % 2), np.float16)
    words[:, k:] = 0

    def step(start: int, stop: int) -> None:
        values = _widen(source[start:stop])
        words[start:stop, :k] = values
        # only where f16 came to 65504 (0x7BFF) or beyond does the source need a look
        if (words[start:stop].view(np.uint16) & 0x7FFF).max() >= 0x7BFF:
            _check_finite(tensor, values, start * k)
            worst = float(np.abs(values).max())
            if worst > 65504:
                raise Unsupported(
                    f"tensor {show(tensor.name)} has a weight of {worst:g}, and f16 ends at 65504",
                    "Use a quantised file of this model (Q8_0, Q4_0, ...): its scales reach further.",
                )

    _in_steps(step, n, max(1, STEP_BYTES // (k * source.itemsize)), threads)
    return Packed("f16", n, k, k, words, None)


def _in_steps(step: Callable[[int, int], None], count: int, size: int, threads: int) -> None:
    """step(start, stop) over 0 .. count, `size` at a time; of several errors the lowest start's is raised."""

    def run(first: int, last: int) -> None:
        with np.errstate(all="ignore"):  # damaged scales overflow on their way to being reported
            for start in range(first, last, size):
                step(start, min(start + size, last))

    # Freeing one large block makes glibc keep the steps' temporaries on its heap from here on, where it would
    # map and fault in fresh pages for each of them: 190 instead of 390 ns per Q4_K block.
    np.empty(8 << 20, np.uint8)
    threads = min(threads, -(-count // size))
    if threads <= 1:
        return run(0, count)
    bounds = [count * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, bounds[:-1], bounds[1:]))


def small(tensor: RawTensor) -> np.ndarray:
    """A norm, a bias or rope factors as f32 in the tensor's shape, whatever its type."""
    if tensor.kind not in FLOATS:
        return dequantize(repack(tensor)).astype(np.float32).reshape(tensor.shape)
    values = _widen(tensor.data.view(FLOATS[tensor.kind])).astype(np.float32)
    _check_finite(tensor, values)
    return values.reshape(tensor.shape)


def _widen(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.uint32) << 16).view(np.float32) if values.dtype == np.uint16 else values


def _check_finite(tensor: RawTensor, values: np.ndarray, first: int = 0) -> None:
    finite = np.isfinite(values)
    if not finite.all():
        raise _damaged(tensor, f"value {first + int(np.argmin(finite))}")


def _damaged(tensor: RawTensor, what: str) -> BadFile:
    return BadFile(f"tensor {show(tensor.name)} is damaged: {what} is NaN or infinite", AGAIN)


def _format(tensor: RawTensor) -> Format:
    if tensor.kind not in FORMATS:
        raise Unsupported(
            f"tensor {show(tensor.name)} has type {tensor.kind}, which is not supported",
            f"Types that work: {', '.join([*FORMATS, *FLOATS])}.",
        )
    return FORMATS[tensor.kind]


def row_bytes(kind: str, k: int) -> tuple[int, int]:
    """What one row takes on the device: bytes of words, bytes of scales."""
    if kind in FLOATS:
        return 2 * (k + k % 2), 0
    fmt = FORMATS[kind]
    scales = -(-k // 256) * prod(fmt.scale_shape) if fmt.steps else k // fmt.group * fmt.width * 2
    return k // 2 if fmt.form == "q4" else k, scales


def packed_bytes(kind: str, n: int, k: int) -> int:
    return n * sum(row_bytes(kind, k))


def plain_scales(packed: Packed) -> np.ndarray:
    """[n, k/group, 1 or 2] f16 or f32: scale (, offset). A step of 11 bits times an int8 is exact in f32."""
    records = packed.scales
    assert records is not None  # f16 has none
    if records.itemsize > 1:
        return records
    width = 2 if packed.pair else 1
    steps = np.ascontiguousarray(records[..., :4]).view(np.float16)[..., None, :width].astype(np.float32)
    factors = records[..., 4:].view(np.int8).reshape(*steps.shape[:2], -1, width)
    return (factors * steps).reshape(packed.n, -1, width)


def dequantize(packed: Packed) -> np.ndarray:
    """[n, k] f64, computed as ggml does: an f32 product, then an f32 sum."""
    if packed.scales is None:
        return packed.words[:, : packed.k].astype(np.float64)
    scales = plain_scales(packed).astype(np.float32)
    ints = packed.words
    if packed.form == "q4":
        ints = np.stack([ints & 0x0F, ints >> 4], axis=-1).view(np.int8) - 8 * (scales.shape[2] == 1)
    weights = ints.reshape(packed.n, -1, packed.group).astype(np.float32) * scales[..., :1]
    if scales.shape[2] == 2:
        weights += scales[..., 1:]
    return weights.reshape(packed.n, packed.k).astype(np.float64)


def _join(parts: list[Packed], join: Callable[[list[np.ndarray]], np.ndarray]) -> Packed:
    words = join([part.words for part in parts])
    scales = [part.scales for part in parts if part.scales is not None]
    return replace(parts[0], n=len(words), words=words, scales=join(scales) if scales else None)


def take_rows(packed: Packed, rows: np.ndarray) -> Packed:
    return _join([packed], lambda arrays: np.take(arrays[0], rows, axis=0))


def slice_rows(packed: Packed, start: int, stop: int) -> Packed:
    """A view: nothing is copied."""
    return _join([packed], lambda arrays: arrays[0][start:stop])


def concat(parts: Sequence[Packed]) -> list[Packed]:
    """All rows in order; neighbours of one layout become one matrix."""
    runs = [list(run) for _, run in groupby(parts, key=lambda part: part.layout)]
    return [run[0] if len(run) == 1 else _join(run, np.concatenate) for run in runs]


def interleave(a: Packed, b: Packed) -> Packed | None:
    """Rows a0, b0, a1, b1, ...; None when the two do not fit one matrix."""
    if a.layout != b.layout or a.n != b.n:
        return None
    return _join([a, b], lambda arrays: np.stack(arrays, axis=1).reshape(2 * a.n, *arrays[0].shape[1:]))


def rope_rows(heads: int, head_dim: int, rope_dims: int) -> np.ndarray:
    """The row order that brings the neox RoPE pairs of each head (i, i + rope_dims/2) together."""
    head = np.arange(head_dim)
    head[:rope_dims] = head[:rope_dims].reshape(2, -1).T.ravel()
    return (np.arange(heads)[:, None] * head_dim + head).ravel()
