"""Packed matrices as textures for CPU adapters: 8 rows side by side (kernels/parts/texture_*.wgsl)."""

import numpy as np
from numpy.typing import NDArray

from llamagpu.files.storage import (
    TEXTURE_ROWS,
    TEXTURE_STRIDE,
    Layout,
    PackedMatrix,
    Storage,
    expand_scales,
    from_q6,
    slice_rows,
    widen,
)

BLOCK_WEIGHTS = 1 << 20


def texture_layout(layout: Layout) -> Layout:
    """The layout that `to_texture` gives. Scales become f32, in the same texture as the words."""
    if layout.storage.two_bytes:
        return Layout(Storage.TEXTURE_F32, layout.k, layout.group)
    storage = Storage.TEXTURE_Q4 if layout.storage is Storage.Q4 else Storage.TEXTURE_Q8
    return Layout(storage, layout.k, layout.group, has_offset=True, scale_bits=32)


def to_texture(matrix: PackedMatrix) -> NDArray[np.uint32]:
    """[ceil(n / 8), texels, 4], computed in blocks of rows: the steps in between take several times the memory."""
    texture = np.empty((-(-matrix.n // TEXTURE_ROWS), texture_layout(matrix.layout).texels, 4), np.uint32)
    rows = max(1, BLOCK_WEIGHTS // matrix.k // TEXTURE_ROWS) * TEXTURE_ROWS
    for start in range(0, matrix.n, rows):
        piece = slice_rows(matrix, start, min(start + rows, matrix.n))
        first, block = start // TEXTURE_ROWS, _block(from_q6(piece) if piece.layout.storage is Storage.Q6 else piece)
        texture[first : first + len(block)] = block
    return texture


def _block(matrix: PackedMatrix) -> NDArray[np.uint32]:
    """Every storage becomes value * scale + offset with an unsigned value and f32 scales.

    The scales follow each group's words. f16 and BF16 become f32, padded with 0 to a multiple of TEXTURE_STRIDE.
    """
    layout, k, n = matrix.layout, matrix.k, -(-matrix.n // TEXTURE_ROWS)
    words = _pad_rows(matrix.words)
    if matrix.scales is None:
        values = np.zeros((n * TEXTURE_ROWS, -(-k // TEXTURE_STRIDE) * TEXTURE_STRIDE), np.float32)
        values[:, :k] = widen(words[:, :k])
        return values.view(np.uint32).reshape(n, TEXTURE_ROWS, -1, 2, 4).swapaxes(1, 2).reshape(n, -1, 4)
    scales = np.zeros((n * TEXTURE_ROWS, k // layout.group, 2), np.float32)
    scales[: matrix.n, :, : layout.scale_width] = expand_scales(matrix)
    zero = 128 if layout.storage is Storage.Q8 else 0 if layout.has_offset else 8
    scales[..., 1] -= zero * scales[..., 0]
    if layout.storage is Storage.Q8:
        words = words.view(np.uint8) ^ 0x80
    groups = (n, TEXTURE_ROWS, k // layout.group, -1)
    both = [words.view(np.uint32).reshape(groups), scales.view(np.uint32).reshape(groups)]
    return np.concatenate(both, axis=3).transpose(0, 2, 3, 1).reshape(n, -1, 4)


def _pad_rows(rows: NDArray[np.generic]) -> NDArray[np.generic]:
    missing = -len(rows) % TEXTURE_ROWS
    return np.concatenate([rows, np.zeros((missing, rows.shape[1]), rows.dtype)]) if missing else rows
