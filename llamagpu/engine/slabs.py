"""Slab allocator: weights of the same type of many layers share one buffer, so that a fused kernel can bind them at
once.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from llamagpu.gpu.buffers import ALIGN, AnyBuffer, Buffer, BufferRange
from llamagpu.gpu.device import Gpu


class Slabs:
    """Allocates buffers. A buffer of a layer is a range of the slab that layers with the same storage share."""

    def __init__(self, gpu: Gpu, storages: Sequence[Mapping[str, object]] = (), most: int = 1) -> None:
        """`storages`: for each layer, the storage of its matrices by name; equal values share slabs.

        A fused kernel binds whole slabs, so each binding range of at most `most` layers has its own slabs. Without
        storages there are no slabs.
        """
        self.gpu, self.storages, self.most = gpu, storages, most
        self.slabs: dict[tuple[object, ...], Buffer] = {}
        self.allocated: Counter[str] = Counter()

    def alloc(self, size: int, label: str, layer: int | None = None) -> AnyBuffer:
        """A buffer, or a range of a slab. A layer may use one label several times: once for each shard."""
        self.allocated[label] += 1
        if layer is None or not self.storages or size % ALIGN:
            return self.gpu.zeros(size, label)
        binding_range, name = layer // self.most, label.removeprefix(f"blk.{layer}.")
        storages = [storage.get(name.split(".")[0]) for storage in self.storages]
        same = [
            i for i, storage in enumerate(storages) if i // self.most == binding_range and storage == storages[layer]
        ]
        if len(same) * size > self.gpu.caps.binding_bytes:
            return self.gpu.zeros(size, label)
        key = binding_range, name, self.allocated[label], storages[layer]
        if key not in self.slabs:
            self.slabs[key] = self.gpu.zeros(len(same) * size, label)
        return BufferRange(self.slabs[key], same.index(layer) * size, size)
