"""The page table: which page of the KV cache holds which positions of a sequence, on the host and on the device."""

from collections.abc import Sequence as Items

import numpy as np
from numpy.typing import NDArray

from llamagpu.engine.pages import PAGE
from llamagpu.gpu.buffers import Buffer
from llamagpu.gpu.device import Gpu

UNKNOWN = 2**32 - 1  # no page


class PageTable:
    """A row of page numbers for each of `slots` sequences of at most `positions`. A cache has `capacity` cells."""

    def __init__(self, gpu: Gpu, slots: int, positions: int, capacity: int) -> None:
        self.gpu, self.capacity = gpu, capacity
        self.pages = -(-positions // PAGE)
        self.entries: NDArray[np.uint32] = np.zeros((slots, self.pages), np.uint32)
        self.assigned: list[list[int]] = [[] for _ in range(slots)]  # the beginning of each row
        # one more: sampling kernels look up the position after the last
        self.buffer: Buffer = gpu.zeros(4 * (self.entries.size + 1), "table")

    def assign(self, slot: int, pages: Items[int]) -> None:
        """These are the first pages of the slot's sequence. Only what changes is written to the device."""
        if self.assigned[slot][: len(pages)] == pages:
            return  # numpy would take ten times as long, for every sequence of every step
        self.assigned[slot] = []  # until all is written, as the entries: a Ctrl-C may come
        wanted = np.array(pages, np.uint32)
        changed = np.flatnonzero(self.entries[slot, : len(pages)] != wanted)
        if len(changed):
            first, end = int(changed[0]), int(changed[-1]) + 1
            self.entries[slot, first:end] = UNKNOWN
            self.gpu.write(self.buffer, wanted[first:end], offset=4 * (slot * self.pages + first))
            self.entries[slot, first:end] = wanted[first:end]
        self.assigned[slot] = list(pages)

    def cells(self, slots: NDArray[np.integer], positions: NDArray[np.integer]) -> NDArray[np.uint32]:
        """Where positions of the slots' sequences are in the cache."""
        return np.asarray(self.entries[slots, positions // PAGE] * PAGE + positions % PAGE, np.uint32)


def in_order(gpu: Gpu, capacity: int) -> PageTable:
    """The table of one sequence whose pages are in order, for kernels that run alone."""
    table = PageTable(gpu, 1, capacity, capacity)
    table.assign(0, range(table.pages))
    return table
