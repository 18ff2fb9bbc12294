"""Buffers of layers that are alike, one behind the other, so that a kernel can bind those of many layers at once."""

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from llamagpu.errors import BadFile
from llamagpu.files.gguf_file import AGAIN
from llamagpu.gpu.device import ALIGN, Gpu, Slice


class Shelves:
    """Where buffers come from: those of a layer from the shelf of its run, all others by themselves."""

    def __init__(self, gpu: Gpu, runs: Sequence[range] = ()) -> None:
        self.gpu, self.run_of = gpu, {layer: run for run in runs for layer in run}
        self.shelves: dict[tuple[int, str, int], Any] = {}
        self.given: Counter[str] = Counter()

    def room(self, nbytes: int, label: str, layer: int | None = None) -> Any:
        """A buffer, or a slice of a shelf; a layer may ask several times for one label."""
        self.given[f"{layer} {label}"] += 1
        run = self.run_of.get(layer) if layer is not None else None
        most = min(self.gpu.caps.binding_bytes, self.gpu.limits["max-buffer-size"])
        if layer is None or run is None or nbytes % ALIGN or len(run) * nbytes > most:
            return self.gpu.zeros(nbytes, label)
        key = run.start, label.removeprefix(f"blk.{layer}."), self.given[f"{layer} {label}"]
        if key not in self.shelves:
            self.shelves[key] = self.gpu.zeros(len(run) * nbytes, label)
        if self.shelves[key].size != len(run) * nbytes:
            raise BadFile(f"{label} is not of the type that the file says", AGAIN)
        return Slice(self.shelves[key], (layer - run.start) * nbytes, nbytes)

    def upload(self, data: np.ndarray[Any, Any], label: str, layer: int | None = None) -> Any:
        buffer = self.room(data.nbytes, label, layer)
        self.gpu.write(buffer, data)
        return buffer


def runs_of(kinds: Sequence[Hashable], most: int) -> list[range]:
    """Neighbours of the same kind, at most so many together."""
    found: list[range] = []
    for _, group in groupby(range(len(kinds)), key=lambda i: kinds[i]):
        layers = list(group)
        found += [range(i, min(i + most, layers[-1] + 1)) for i in range(layers[0], layers[-1] + 1, most)]
    return found
