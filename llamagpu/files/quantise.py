"""Floats to GGUF blocks: plain rounding, bit for bit as gguf does it, or a search for each group's best scale.
The search weighs a column's errors by how large the inputs are that meet it, where that is known."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[Any]  # of f32
Groups = tuple[Floats, Floats, Floats]  # q [b, 32] whole numbers, scale [b, 1], offset [b, 1]: q * scale + offset

# The step that a group's largest weight is tried on: -8 is plain rounding; a positive one turns the sign, so
# that the other side gets the eighth step; a small one cuts the largest weight off for finer steps.
STEPS_0 = (-9.2, -8.8, -8.4, -8.0, -7.6, -7.2, -6.8, -6.4, -6.0, 6.2, 6.6, 7.0, 7.4, 7.8, 8.2)
CUTS_1 = (0.0, 0.02, 0.05, 0.09, 0.14)  # of the range, from either end


def quantise(
    kind: str, x: Floats, importance: Floats | None = None, best: bool = False
) -> tuple[NDArray[np.uint8], float]:
    """[rows, k] -> [rows, bytes] blocks, and the sum of squared errors; `importance` [k] is for `best`."""
    if kind == "F32":
        return x.view(np.uint8), 0.0
    if kind == "F16":
        halves = x.astype(np.float16)
        return halves.view(np.uint8), squares(halves - x)
    if kind == "Q6_K":
        blocks, y = _q6_k(x.reshape(-1, 16, 16))
        return blocks.reshape(len(x), -1), squares(y.reshape(x.shape) - x)
    groups = x.reshape(-1, 32)
    if best and kind in SEARCH:
        q, scale, offset = SEARCH[kind](groups, weights_of(groups, importance))
    else:
        q, scale, offset = PLAIN[kind](groups)
    blocks = encode_blocks(kind, q, scale, offset)
    return blocks.reshape(len(x), -1), squares(q * scale + offset - groups)


def weights_of(groups: Floats, importance: Floats | None) -> Floats:
    """How much the error of each weight counts. Large weights count more, in llama.cpp's measure: on SmolLM2 that
    takes 0.8 off a Q4_0 perplexity of 26.7, and `importance` another 2.0."""
    square = groups * groups
    weights: Floats = np.sqrt(square.mean(axis=-1, keepdims=True) + square)
    if importance is not None:
        weights *= np.tile(importance, groups.size // len(importance)).reshape(-1, 32)
    return weights


def encode_blocks(kind: str, q: NDArray[np.generic], scale: Floats, offset: Floats) -> NDArray[np.uint8]:
    """Q4_0, Q4_1 or Q8_0 blocks [b, bytes]; Q4_0's q go from -8 to 7."""
    parts = [scale.astype(np.float16).view(np.uint8)]
    if kind == "Q8_0":
        return np.hstack([*parts, q.astype(np.int8).view(np.uint8)])
    if kind == "Q4_1":
        parts.append(offset.astype(np.float16).view(np.uint8))
    nibbles = (q + 8 if kind == "Q4_0" else q).astype(np.uint8)
    return np.hstack([*parts, nibbles[:, :16] | nibbles[:, 16:] << 4])


def squares(errors: NDArray[Any]) -> float:
    """Their sum."""
    flat = errors.reshape(-1).astype(np.float32, copy=False)
    return float(np.einsum("i,i->", flat, flat))


def _half(values: Floats) -> Floats:
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
    return np.minimum(q, 15) - 8, _half(d), np.zeros_like(d)


def _q4_1(x: Floats) -> Groups:
    low = x.min(axis=-1, keepdims=True)
    d = (x.max(axis=-1, keepdims=True) - low) / 15
    q = np.trunc((x - low) * _inverse(d) + np.float32(0.5))
    return np.minimum(q, 15), _half(d), _half(low)


def _q8_0(x: Floats) -> Groups:
    d = np.abs(x).max(axis=-1, keepdims=True) / 127
    scaled = x * _inverse(d)
    size = np.abs(scaled)
    floor = np.floor(size)
    q = np.copysign(floor + np.floor(2 * (size - floor)), scaled)  # a half goes away from zero
    return q, _half(d), np.zeros_like(d)


PLAIN: dict[str, Callable[[Floats], Groups]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}


def _sum(a: Floats, b: Floats) -> Floats:
    total: Floats = np.einsum("ij,ij->i", a, b)
    return total[:, None]


def _nearest(x: Floats, inverse: Floats, low: int, high: int) -> Floats:
    q: Floats = x * inverse
    np.rint(q, out=q)
    return np.clip(q, low, high, out=q)


def _search_q4_0(x: Floats, w: Floats) -> Groups:
    """Round with many scales; the best scale for each rounding is a quotient of sums; keep the least error."""
    wx, inverse = w * x, _inverse(_extreme(x))
    plain_q, plain_d, zero = _q4_0(x)
    d, least = plain_d, np.full_like(plain_d, np.inf)

    def consider(q: Floats) -> None:
        nonlocal d, least
        xq, qq = _sum(wx, q), _sum(w * q, q)
        fitted = _half(xq * _inverse(qq))
        error = fitted * (fitted * qq - 2 * xq)  # less sum(w x x), which all have in common
        better = error < least
        d, least = np.where(better, fitted, d), np.where(better, error, least)

    for step in STEPS_0:
        consider(_nearest(x, np.float32(step) * inverse, -8, 7))
    for _ in range(2):  # the best scale rounds a little differently than the one it came from
        consider(_nearest(x, _inverse(d), -8, 7))
    q = _nearest(x, _inverse(d), -8, 7)
    worse = _error(x, w, q, d, zero) > _error(x, w, plain_q, plain_d, zero)
    return np.where(worse, plain_q, q), np.where(worse, plain_d, d), zero


def _search_q4_1(x: Floats, w: Floats) -> Groups:
    """As for Q4_0 with two unknowns: each rounding's best scale and offset solve a 2 x 2 system."""
    plain_q, plain_d, plain_m = _q4_1(x)
    wx, low = w * x, x.min(axis=-1, keepdims=True)
    width = x.max(axis=-1, keepdims=True) - low
    sum_w, sum_x = w.sum(axis=-1, keepdims=True), wx.sum(axis=-1, keepdims=True)
    d, m, least = plain_d, plain_m, np.full_like(plain_d, np.inf)

    def consider(q: Floats) -> None:
        nonlocal d, m, least
        wq = w * q
        sum_q, qq, xq = wq.sum(axis=-1, keepdims=True), _sum(wq, q), _sum(wx, q)
        fit_d = _half((sum_w * xq - sum_x * sum_q) * _inverse(sum_w * qq - sum_q * sum_q))
        fit_m = _half((sum_x - fit_d * sum_q) * _inverse(sum_w))
        error = fit_d * (fit_d * qq - 2 * xq + 2 * fit_m * sum_q) + fit_m * (fit_m * sum_w - 2 * sum_x)
        better = error < least
        d, m, least = np.where(better, fit_d, d), np.where(better, fit_m, m), np.where(better, error, least)

    for below in CUTS_1:
        for above in CUTS_1:
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
    """[b, 16, 16] -> blocks [b, 210] and what they dequantise to: 16 weights share an int8 scale, 256 its unit."""
    scale = _extreme(x) / -32  # [b, 16, 1]
    unit = _half(_extreme(scale[..., 0]) / -128)[..., None]
    steps = _nearest(scale, _inverse(unit), -128, 127)
    d = unit * steps
    q = _nearest(x, _inverse(d), -32, 31)
    levels = (q.reshape(-1, 2, 4, 32) + 32).astype(np.uint8)  # halves, quarters of a half
    low = levels[:, :, :2] & 15 | (levels[:, :, 2:] & 15) << 4
    high = np.bitwise_or.reduce(levels >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=2)
    parts = low.reshape(-1, 128), high.reshape(-1, 64), steps[..., 0].astype(np.int8).view(np.uint8)
    return np.hstack([*parts, unit[..., 0].astype(np.float16).view(np.uint8)]), q * d
