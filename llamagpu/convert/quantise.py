"""Floats to GGUF blocks: plain rounding, bit for bit as gguf does it, or a search for the best scale of each group.

Where calibration has measured the inputs of a matrix, the search weights the error of a column by their mean square.
gguf.quants is not used: it has no search, and rounding rows of 576 takes 1.5 times as long with the error.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamagpu.files.storage import widen

Floats = NDArray[Any]  # of f32
Groups = tuple[Floats, Floats, Floats]  # q [b, 32] whole numbers, scale [b, 1], offset [b, 1]: q * scale + offset

# Q4_0: the values of q that the largest weight of a group is tried at. -8 is plain rounding. A positive one changes the
# sign of the scale, so that the other side reaches -8. A smaller magnitude clips the largest weight for a finer scale.
Q4_0_EXTREMES = (-9.2, -8.8, -8.4, -8.0, -7.6, -7.2, -6.8, -6.4, -6.0, 6.2, 6.6, 7.0, 7.4, 7.8, 8.2)
Q4_1_CLIPS = (0.0, 0.02, 0.05, 0.09, 0.14)  # of the range, from either end


def quantise(
    ggml_type: str, x: Floats, importance: Floats | None = None, best: bool = False
) -> tuple[NDArray[np.uint8], float]:
    """[rows, k] -> [rows, bytes] blocks, and the sum of squared errors; `importance` [k] is for `best`."""
    if ggml_type == "F32":
        return x.view(np.uint8), 0.0
    if ggml_type == "F16":
        rounded = x.astype(np.float16)
        return rounded.view(np.uint8), sum_of_squares(rounded - x)
    if ggml_type == "BF16":
        bits = x.view(np.uint32)
        upper = (bits + (0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)  # ties round to even
        return upper.view(np.uint8), sum_of_squares(widen(upper) - x)
    if ggml_type == "Q6_K":
        blocks, y = _q6_k(x.reshape(-1, 16, 16))
        return blocks.reshape(len(x), -1), sum_of_squares(y.reshape(x.shape) - x)
    groups = x.reshape(-1, 32)
    if best and ggml_type in SEARCH:
        q, scale, offset = SEARCH[ggml_type](groups, error_weights(groups, importance))
    else:
        q, scale, offset = ROUND_TO_NEAREST[ggml_type](groups)
    blocks = encode_blocks(ggml_type, q, scale, offset)
    return blocks.reshape(len(x), -1), sum_of_squares(q * scale + offset - groups)


def error_weights(groups: Floats, importance: Floats | None) -> Floats:
    """The weight of each squared error. Large weights count more, as in llama.cpp: on SmolLM2 that takes 0.8 off a
    Q4_0 perplexity of 26.7, and `importance` takes off another 2.0."""
    square = groups * groups
    weights: Floats = np.sqrt(square.mean(axis=-1, keepdims=True) + square)
    if importance is not None:
        weights *= np.tile(importance, groups.size // len(importance)).reshape(-1, 32)
    return weights


def encode_blocks(ggml_type: str, q: NDArray[np.generic], scale: Floats, offset: Floats) -> NDArray[np.uint8]:
    """Q4_0, Q4_1 or Q8_0 blocks [b, bytes]; Q4_0's q go from -8 to 7."""
    fields = [scale.astype(np.float16).view(np.uint8)]
    if ggml_type == "Q8_0":
        return np.hstack([*fields, q.astype(np.int8).view(np.uint8)])
    if ggml_type == "Q4_1":
        fields.append(offset.astype(np.float16).view(np.uint8))
    nibbles = (q + 8 if ggml_type == "Q4_0" else q).astype(np.uint8)
    return np.hstack([*fields, nibbles[:, :16] | nibbles[:, 16:] << 4])


def sum_of_squares(values: NDArray[Any]) -> float:
    flat = values.reshape(-1).astype(np.float32, copy=False)
    return float(np.einsum("i,i->", flat, flat))


def _to_f16(values: Floats) -> Floats:
    """Rounded to f16, as f32."""
    return values.astype(np.float16).astype(np.float32)


def _inverse(values: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        return np.where(values == 0, np.float32(0), 1 / values)


def _extreme(x: Floats) -> Floats:
    """[b, k] -> [b, 1]: the value of the largest magnitude, with its sign."""
    return np.take_along_axis(x, np.abs(x).argmax(axis=-1, keepdims=True), axis=-1)


def _q4_0(x: Floats) -> Groups:
    d = _extreme(x) / -8
    q = np.trunc(x * _inverse(d) + np.float32(8.5))
    return np.minimum(q, 15) - 8, _to_f16(d), np.zeros_like(d)


def _q4_1(x: Floats) -> Groups:
    low = x.min(axis=-1, keepdims=True)
    d = (x.max(axis=-1, keepdims=True) - low) / 15
    q = np.trunc((x - low) * _inverse(d) + np.float32(0.5))
    return np.minimum(q, 15), _to_f16(d), _to_f16(low)


def _q8_0(x: Floats) -> Groups:
    d = np.abs(x).max(axis=-1, keepdims=True) / 127
    scaled = x * _inverse(d)
    size = np.abs(scaled)
    floor = np.floor(size)
    q = np.copysign(floor + np.floor(2 * (size - floor)), scaled)  # ties round away from zero
    return q, _to_f16(d), np.zeros_like(d)


ROUND_TO_NEAREST: dict[str, Callable[[Floats], Groups]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}


def _sum(a: Floats, b: Floats) -> Floats:
    total: Floats = np.einsum("ij,ij->i", a, b)
    return total[:, None]


def _nearest(x: Floats, inverse: Floats, low: int, high: int) -> Floats:
    q: Floats = x * inverse
    np.rint(q, out=q)
    return np.clip(q, low, high, out=q)


def _search_q4_0(x: Floats, w: Floats) -> Groups:
    """Round with many scales. The best scale for each rounding is a quotient of sums; the least error wins."""
    wx, inverse = w * x, _inverse(_extreme(x))
    plain_q, plain_d, zero = _q4_0(x)
    d, least = plain_d, np.full_like(plain_d, np.inf)

    def consider(q: Floats) -> None:
        nonlocal d, least
        xq, qq = _sum(wx, q), _sum(w * q, q)
        fitted = _to_f16(xq * _inverse(qq))
        error = fitted * (fitted * qq - 2 * xq)  # without sum(w x x), which is the same for all
        better = error < least
        d, least = np.where(better, fitted, d), np.where(better, error, least)

    for extreme in Q4_0_EXTREMES:
        consider(_nearest(x, np.float32(extreme) * inverse, -8, 7))
    for _ in range(2):  # the best scale rounds some weights differently than the scale that it came from
        consider(_nearest(x, _inverse(d), -8, 7))
    q = _nearest(x, _inverse(d), -8, 7)
    worse = _error(x, w, q, d, zero) > _error(x, w, plain_q, plain_d, zero)
    return np.where(worse, plain_q, q), np.where(worse, plain_d, d), zero


def _search_q4_1(x: Floats, w: Floats) -> Groups:
    """As for Q4_0 with two unknowns: the best scale and offset for a rounding solve a 2 x 2 system."""
    plain_q, plain_d, plain_m = _q4_1(x)
    wx, low = w * x, x.min(axis=-1, keepdims=True)
    width = x.max(axis=-1, keepdims=True) - low
    sum_w, sum_x = w.sum(axis=-1, keepdims=True), wx.sum(axis=-1, keepdims=True)
    d, m, least = plain_d, plain_m, np.full_like(plain_d, np.inf)

    def consider(q: Floats) -> None:
        nonlocal d, m, least
        wq = w * q
        sum_q, qq, xq = wq.sum(axis=-1, keepdims=True), _sum(wq, q), _sum(wx, q)
        fit_d = _to_f16((sum_w * xq - sum_x * sum_q) * _inverse(sum_w * qq - sum_q * sum_q))
        fit_m = _to_f16((sum_x - fit_d * sum_q) * _inverse(sum_w))
        error = fit_d * (fit_d * qq - 2 * xq + 2 * fit_m * sum_q) + fit_m * (fit_m * sum_w - 2 * sum_x)
        better = error < least
        d, m, least = np.where(better, fit_d, d), np.where(better, fit_m, m), np.where(better, error, least)

    for below in Q4_1_CLIPS:
        for above in Q4_1_CLIPS:
            inverse = _inverse(width * np.float32((1 - below - above) / 15))
            consider(_nearest(x - (low + np.float32(below) * width), inverse, 0, 15))
    for _ in range(2):
        consider(_nearest(x - m, _inverse(d), 0, 15))
    q = _nearest(x - m, _inverse(d), 0, 15)
    worse = _error(x, w, q, d, m) > _error(x, w, plain_q, plain_d, plain_m)
    return np.where(worse, plain_q, q), np.where(worse, plain_d, d), np.where(worse, plain_m, m)


def _error(x: Floats, w: Floats, q: Floats, d: Floats, m: Floats) -> Floats:
    e = q * d + m - x
    return _sum(w * e, e)


SEARCH: dict[str, Callable[[Floats, Floats], Groups]] = {"Q4_0": _search_q4_0, "Q4_1": _search_q4_1}


def _q6_k(x: Floats) -> tuple[NDArray[np.uint8], Floats]:
    """[b, 16, 16] -> blocks [b, 210] and what they dequantise to: 16 weights share an int8 sub-scale, 256 the f16
    super-block scale."""
    scale = _extreme(x) / -32  # [b, 16, 1]
    super_scale = _to_f16(_extreme(scale[..., 0]) / -128)[..., None]
    sub_scales = _nearest(scale, _inverse(super_scale), -128, 127)
    d = super_scale * sub_scales
    q = _nearest(x, _inverse(d), -32, 31)
    levels = (q.reshape(-1, 2, 4, 32) + 32).astype(np.uint8)  # 2 x 128 weights, 4 x 32 of each
    low = levels[:, :, :2] & 15 | (levels[:, :, 2:] & 15) << 4
    high = np.bitwise_or.reduce(levels >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=2)
    bits, scales = (low.reshape(-1, 128), high.reshape(-1, 64)), sub_scales[..., 0].astype(np.int8).view(np.uint8)
    return np.hstack([*bits, scales, super_scale[..., 0].astype(np.float16).view(np.uint8)]), q * d
