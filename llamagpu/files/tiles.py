"""Packed matrices as images for CPU adapters: 8 rows side by side (kernels/parts/tile_*.wgsl)."""

import numpy as np

from llamagpu.files.repack import Packed, plain_scales

ROWS = 8  # of a tile: one row of the image
STRIDE = 32  # the most k that a kernel takes in one turn


def tile(packed: Packed) -> Packed:
    """words: [n / 8, texels, 4] u32. Every form becomes int * scale + offset with an unsigned int and f32
    scales, which follow each group's words; f16 becomes f32, filled up with 0 to whole strides."""
    n, k = -(-packed.n // ROWS), packed.k
    words = _pad_rows(packed.words)
    if packed.scales is None:
        values = np.zeros((n * ROWS, -(-k // STRIDE) * STRIDE), np.float32)
        values[:, :k] = words[:, :k]
        texels = values.view(np.uint32).reshape(n, ROWS, -1, 2, 4).swapaxes(1, 2).reshape(n, -1, 4)
        return Packed("tile_f32", packed.n, k, packed.group, texels, None)
    scales = np.zeros((n * ROWS, k // packed.group, 2), np.float32)
    scales[: packed.n, :, : 1 + packed.pair] = plain_scales(packed)
    zero = 128 if packed.form == "q8" else 0 if packed.pair else 8
    scales[..., 1] -= zero * scales[..., 0]
    if packed.form == "q8":
        words = words.view(np.uint8) ^ 0x80
    groups = (n, ROWS, k // packed.group, -1)
    both = [words.view(np.uint32).reshape(groups), scales.view(np.uint32).reshape(groups)]
    texels = np.concatenate(both, axis=3).transpose(0, 2, 3, 1).reshape(n, -1, 4)
    return Packed(f"tile_{packed.form}", packed.n, k, packed.group, texels, None)


def _pad_rows(rows: np.ndarray) -> np.ndarray:
    missing = -len(rows) % ROWS
    return np.concatenate([rows, np.zeros((missing, rows.shape[1]), rows.dtype)]) if missing else rows
