"""Buffers of layers that are alike, one behind the other, so that a kernel can bind those of many layers at once."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from llamagpu.errors import BadFile
from llamagpu.files.gguf_file import AGAIN
from llamagpu.gpu.device import ALIGN, Gpu, Slice


class Shelves:
    """Where buffers come from: those of a layer from the shelf of all layers that have the same there, any others by
    themselves. A kernel binds whole shelves, so layers come in sections of at most `most`."""

    def __init__(self, gpu: Gpu, kinds: Sequence[Mapping[str, Hashable]] = (), most: int = 1) -> None:
        self.gpu, self.kinds, self.most = gpu, kinds, most  # kinds: by layer, what its matrices are made of
        self.shelves: dict[tuple[Hashable, ...], Any] = {}
        self.given: Counter[str] = Counter()

    def room(self, nbytes: int, label: str, layer: int | None = None) -> Any:
        """A buffer, or a slice of a shelf; a layer may ask several times for one label."""
        self.given[f"{layer} {label}"] += 1
        if layer is None or not self.kinds or nbytes % ALIGN:
            return self.gpu.zeros(nbytes, label)
        section, name = layer // self.most, label.removeprefix(f"blk.{layer}.")
        kinds = [kind.get(name.split(".")[0]) for kind in self.kinds]
        alike = [i for i, kind in enumerate(kinds) if i // self.most == section and kind == kinds[layer]]
        if len(alike) * nbytes > self.gpu.caps.binding_bytes:
            return self.gpu.zeros(nbytes, label)
        key = section, name, self.given[f"{layer} {label}"], kinds[layer]
        if key not in self.shelves:
            self.shelves[key] = self.gpu.zeros(len(alike) * nbytes, label)
        if self.shelves[key].size != len(alike) * nbytes:
            raise BadFile(f"{label} is not of the type that the file says", AGAIN)
        return Slice(self.shelves[key], alike.index(layer) * nbytes, nbytes)

    def upload(self, data: np.ndarray[Any, Any], label: str, layer: int | None = None) -> Any:
        buffer = self.room(data.nbytes, label, layer)
        self.gpu.write(buffer, data)
        return buffer
