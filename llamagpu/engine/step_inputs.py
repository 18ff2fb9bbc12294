"""The inputs of a step: sequence slot, position, token and cell of the KV cache of each token row.

`struct Step` in the kernels is this buffer. Nothing in it assumes that the rows belong to one sequence.
"""

import re
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from llamagpu.engine.page_table import PageTable
from llamagpu.gpu import shaders
from llamagpu.gpu.buffers import Buffer
from llamagpu.gpu.device import Gpu
from llamagpu.gpu.webgpu import BufferUsage

_SIZES = re.search(r"segment: array<vec4<u32>, (\d+)>, row: array<Row, (\d+)>", shaders.read("attend"))
assert _SIZES, "attend.wgsl declares struct Step"
MAX_SEGMENTS, MAX_ROWS = int(_SIZES[1]), int(_SIZES[2])
HEADER_WORDS = 4
STEP_BYTES = 4 * (HEADER_WORDS + 4 * MAX_SEGMENTS + 4 * MAX_ROWS)


@dataclass(frozen=True, slots=True)
class Segment:
    """Token rows of one sequence in a step: consecutive positions from `position` on. A sequence has one segment."""

    slot: int  # of the sequence, in the page table
    position: int
    tokens: Items[int]


class StepInputs:
    """The uniform buffer that describes a step. Sampling kernels write the next step's rows into it."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.buffer: Buffer = gpu.zeros(STEP_BYTES, "step", BufferUsage.UNIFORM)

    def write(self, segments: Items[Segment], table: PageTable | None = None) -> None:
        """Without a page table for kernels that do not use the KV cache."""
        self.gpu.write(self.buffer, encode(segments, table))


def encode(segments: Items[Segment], table: PageTable | None = None) -> NDArray[np.uint32]:
    """The words of `struct Step`."""
    counts = [len(segment.tokens) for segment in segments]
    slots, positions = [segment.slot for segment in segments], [segment.position for segment in segments]
    firsts = np.cumsum(counts) - counts
    words = np.zeros(HEADER_WORDS + 4 * MAX_SEGMENTS + 4 * sum(counts), np.uint32)
    words[:HEADER_WORDS] = sum(counts), len(segments), table.capacity if table else 0, table.pages if table else 0
    heads = words[HEADER_WORDS : HEADER_WORDS + 4 * len(segments)].reshape(-1, 4)  # first row, rows, slot, position
    heads[:] = np.transpose([firsts, counts, slots, positions])
    rows = words[HEADER_WORDS + 4 * MAX_SEGMENTS :].reshape(-1, 4)  # slot, position, token, cell
    rows[:, 0] = np.repeat(slots, counts)
    rows[:, 1] = np.arange(sum(counts)) + np.repeat(positions - firsts, counts)
    rows[:, 2] = list(chain.from_iterable(segment.tokens for segment in segments))
    if table:
        rows[:, 3] = table.cells(rows[:, 0], rows[:, 1])
    return words
