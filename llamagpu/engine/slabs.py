"""Slab allocator: weights of the same type of many layers share one buffer, so that a fused kernel can bind them at
once.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from llamagpu.gpu.buffers import ALIGN, AnyBuffer, BufferRange
from llamagpu.gpu.device import Gpu


def in_slab(size: int) -> int:
    """Bytes that a buffer of a layer takes of a slab: none if a binding could not begin after it."""
    return 0 if size % ALIGN else size


def aligned(size: int) -> int:
    """Bytes of a short vector of a layer, with what makes a binding begin at the next layer's."""
    return -(-size // ALIGN) * ALIGN


class Slabs:
    """Allocates buffers. A buffer of a layer is a range of the slab that layers with the same storage share."""

    def __init__(
        self,
        gpu: Gpu,
        storages: Sequence[Mapping[str, object]] = (),
        most: int = 1,
        pools: Mapping[tuple[str, int | None], int] | None = None,
    ) -> None:
        """`storages`: for each layer, the storage of its matrices by name; equal values share slabs.

        A fused kernel binds whole slabs, so each binding range of at most `most` layers has its own slabs. Without
        storages there are no slabs. `pools`: bytes of the buffers that small slabs share, by name and binding range, or
        None where all ranges share one.
        """
        self.gpu, self.storages, self.most = gpu, storages, most
        self.slabs: dict[tuple[object, ...], BufferRange] = {}
        self.allocated: Counter[str] = Counter()
        self.pools = {
            key: BufferRange(gpu.zeros(size, key[0]), 0, size)
            for key, size in (pools or {}).items()
            if 0 < size <= gpu.caps.binding_bytes
        }

    def alloc(self, size: int, label: str, layer: int | None = None, pool: str = "", padded: bool = False) -> AnyBuffer:
        """A buffer, or a range of a slab. A layer may use one label several times: once for each shard.

        The slab is in the pool of that name, if there is one. `padded`: a range of a slab may be larger.
        """
        self.allocated[label] += 1
        if padded and layer is not None and self.storages:
            size = aligned(size)
        if layer is None or not self.storages or not in_slab(size):
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
            self.slabs[key] = self._slab(len(same) * size, label, (pool, binding_range))
        slab = self.slabs[key]
        return BufferRange(slab.buffer, slab.offset + same.index(layer) * size, size)

    def _slab(self, size: int, label: str, pool: tuple[str, int | None]) -> BufferRange:
        pool = pool if pool in self.pools else (pool[0], None)
        left = self.pools.get(pool)
        if left is None:
            return BufferRange(self.gpu.zeros(size, label), 0, size)
        self.pools[pool] = BufferRange(left.buffer, left.offset + size, left.size - size)
        assert self.pools[pool].size >= 0, f"the pool of {pool[0]} is too small"
        return BufferRange(left.buffer, left.offset, size)
