"""The KV cache: keys and values of every layer, and the RoPE table of the same positions."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llamagpu.engine import routes
from llamagpu.engine.options import Backend, KvType, Settings
from llamagpu.errors import DoesNotFit
from llamagpu.files.config import ModelConfig, rope_table
from llamagpu.gpu.buffers import ALIGN, TEXEL_BYTES, Bindable, Buffer, BufferRange, Texture, padded_ranges
from llamagpu.gpu.device import Gpu
from llamagpu.gpu.shaders import constants

TEXTURE_ROWS = constants("attend_texture")["TEXTURE_ROWS"]  # positions below each other in a cache texture
POSITION_MULTIPLE = 4  # a head is whole 16-byte words for every head_dim, and scores are whole texels
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class LayerCache:
    """[slots, kv_heads, capacity, head_dim] each."""

    keys: BufferRange
    values: BufferRange


class KvCache(ABC):
    """Keys and values of `slots` sequences, `capacity` positions each. It grows by copying."""

    def __init__(
        self, gpu: Gpu, config: ModelConfig, settings: Settings, freq_factors: NDArray[np.floating] | None
    ) -> None:
        self.gpu, self.config, self.settings, self.freq_factors = gpu, config, settings, freq_factors
        self.slots = settings.slots
        self.capacity = 0
        self.version = 0  # changes with the buffers: plans that bind them are rebuilt
        self.rope: Buffer  # [capacity, rope_dims/2] (cos, sin)
        self.grow(settings.capacity)

    @property
    def kv_type(self) -> KvType:
        return self.settings.kv_type

    @property
    def position_bytes(self) -> int:
        """Keys and values of one position in all layers."""
        return 2 * self.config.layers * self.config.kv_width * self.kv_type.nbytes

    def reserve(self, length: int) -> None:
        """Reserve `length` positions for a sequence. If the capacity must grow, it at least doubles."""
        if length > self.capacity:
            self.grow(min(self.settings.context, max(length, 2 * self.capacity)))

    def grow(self, positions: int) -> None:
        """Grow the capacity to `positions` and keep the contents."""
        if positions <= self.capacity:
            return
        self.check_positions(positions)
        capacity = -(-positions // POSITION_MULTIPLE) * POSITION_MULTIPLE
        adopt = self._enlarge(capacity)
        rope = self.gpu.zeros(4 * capacity * self.config.rope_dims, "rope")
        if not self.gpu.dry:
            self.gpu.write(rope, rope_table(self.config, self.freq_factors, capacity))
        old = [*self.resources(), self.rope] if self.capacity else []
        adopt()  # and the next line: a Ctrl-C leaves either the old cache or the new one, complete
        self.rope, self.capacity, self.version = rope, capacity, self.version + 1
        self.gpu.free(*old)

    def check_positions(self, positions: int) -> None:
        """Refuse more positions than the adapter's kernels can look back over, or than fit a RoPE table."""
        row_bytes, binding = 4 * self.config.rope_dims, self.gpu.caps.binding_bytes
        if positions * row_bytes > binding:
            cause = f"a context of {positions} needs {positions * row_bytes >> 20} MiB of RoPE table"
            holds = f", and a binding of this adapter holds {binding >> 20} MiB"
            fitting = binding // row_bytes // POSITION_MULTIPLE * POSITION_MULTIPLE
            raise DoesNotFit(cause + holds, f"use -c {fitting} or less")
        textures = self.settings.backend is Backend.TEXTURES
        most = routes.max_positions(self.config.head_dim, self.gpu.caps, textures)
        if most and positions > most:
            cause = f"a context of {positions} is more than a CPU adapter can do with this model"
            raise DoesNotFit(cause, f"use -c {most} or less")

    # Implemented by the backends

    @abstractmethod
    def resources(self) -> Sequence[Bindable]:
        """The buffers or textures of the cache, each once; without the RoPE table."""

    @abstractmethod
    def read(self, slot: int, count: int) -> Iterator[Bytes]:
        """The bytes of the first `count` positions of a sequence, a piece at a time."""

    @abstractmethod
    def write(self, slot: int, count: int, take: Callable[[int], Bytes]) -> None:
        """Restore the bytes of `read`: `take(n)` returns the next n of them."""

    @abstractmethod
    def clear(self, slot: int, first: int) -> None:
        """Zero the positions of a sequence from `first` on: NaN spoils what it is multiplied with."""

    @abstractmethod
    def _enlarge(self, capacity: int) -> Callable[[], None]:
        """Allocate larger buffers and copy the positions. Return a function that switches to them."""


class BufferKvCache(KvCache):
    """Buffers by layer. With `fused`, as many layers as a binding holds are in one buffer, for fused decode."""

    layers: list[LayerCache]

    def __init__(
        self,
        gpu: Gpu,
        config: ModelConfig,
        settings: Settings,
        freq_factors: NDArray[np.floating] | None,
        fused: bool = False,
    ) -> None:
        self.fused = fused
        super().__init__(gpu, config, settings, freq_factors)

    def resources(self) -> Sequence[Bindable]:
        ranges = [cache_range for layer in self.layers for cache_range in (layer.keys, layer.values)]
        return list({id(cache_range.buffer): cache_range.buffer for cache_range in ranges}.values())

    @property
    def row_bytes(self) -> int:
        """Keys, or values, of one position and head."""
        return self.config.head_dim * self.kv_type.nbytes

    def _enlarge(self, capacity: int) -> Callable[[], None]:
        layers = self._allocate(capacity)
        if self.capacity:
            self._copy_to(layers, capacity)

        def adopt() -> None:
            self.layers = layers

        return adopt

    def _allocate(self, capacity: int) -> list[LayerCache]:
        size, binding = self.slots * self.config.kv_heads * capacity * self.row_bytes, self.gpu.caps.binding_bytes
        if size > binding:
            most = binding // (size // capacity) // POSITION_MULTIPLE * POSITION_MULTIPLE
            raise DoesNotFit(
                f"a context of {capacity} needs {size >> 20} MiB of cache per layer, "
                f"and a binding of this adapter holds {binding >> 20} MiB",
                f"use -c {most} or less" + (", or an f16 cache (-ctk f16)" if self.kv_type is KvType.F32 else ""),
            )
        found: list[LayerCache] = []
        largest = min(binding, self.gpu.limits["max-buffer-size"] - 2 * ALIGN)
        layers_per_buffer = max(1, largest // size) if self.fused else 1
        for start in range(0, self.config.layers, layers_per_buffer):
            sizes = [size] * min(layers_per_buffer, self.config.layers - start)
            keys, values = (padded_ranges(self.gpu, sizes, label) for label in ("k_cache", "v_cache"))
            found += [LayerCache(k, v) for k, v in zip(keys, values, strict=True)]
        return found

    def _copy_to(self, layers: list[LayerCache], capacity: int) -> None:
        size, target_size = self.capacity * self.row_bytes, capacity * self.row_bytes
        copies = []
        for before, after in zip(self.layers, layers, strict=True):
            for source, target in ((before.keys, after.keys), (before.values, after.values)):
                for head in range(self.slots * self.config.kv_heads):
                    from_range = BufferRange(source.buffer, source.offset + head * size, size)
                    to_range = BufferRange(target.buffer, target.offset + head * target_size, size)
                    copies.append((from_range, to_range))
        self.gpu.copy(copies)

    def read(self, slot: int, count: int) -> Iterator[Bytes]:
        for cache_range, offset in self._heads(slot):
            yield self.gpu.read(cache_range, np.uint8, count * self.row_bytes, offset)

    def write(self, slot: int, count: int, take: Callable[[int], Bytes]) -> None:
        for cache_range, offset in self._heads(slot):
            self.gpu.write(cache_range, take(count * self.row_bytes), offset)

    def clear(self, slot: int, first: int) -> None:
        size = (self.capacity - first) * self.row_bytes
        start = first * self.row_bytes
        heads = ((cache_range.buffer, cache_range.offset + offset) for cache_range, offset in self._heads(slot))
        self.gpu.clear([BufferRange(buffer, offset + start, size) for buffer, offset in heads] if size else [])

    def _heads(self, slot: int) -> Iterator[tuple[BufferRange, int]]:
        """Where the positions of each head begin: range, offset in it."""
        for layer in self.layers:
            for cache_range in (layer.keys, layer.values):
                for head in range(self.config.kv_heads):
                    yield cache_range, (slot * self.config.kv_heads + head) * self.capacity * self.row_bytes


class TextureKvCache(KvCache):
    """One f32 texture for each layer: a position is a row; after TEXTURE_ROWS rows the next columns follow."""

    textures: list[Texture]
    scores: Texture  # [heads, capacity] of one token

    @property
    def texels(self) -> int:
        """Keys and values of one position."""
        return 2 * self.config.kv_width // 4

    def resources(self) -> Sequence[Bindable]:
        return [*self.textures, self.scores]

    def _enlarge(self, capacity: int) -> Callable[[], None]:
        blocks = self.slots * -(-capacity // TEXTURE_ROWS)
        size = blocks * self.texels, min(capacity, TEXTURE_ROWS)
        textures = [self.gpu.texture(*size, f"cache {i}") for i in range(self.config.layers)]
        vec4s = capacity // 4
        width, height = min(vec4s, TEXTURE_ROWS), -(-vec4s // TEXTURE_ROWS) * self.config.heads
        scores = self.gpu.texture(width, height, "scores")
        if self.capacity:
            assert self.slots == 1, "columns of several slots would have to move apart"
            self.gpu.copy_textures(list(zip(self.textures, textures, strict=True)))

        def adopt() -> None:
            self.textures, self.scores = textures, scores

        return adopt

    def read(self, slot: int, count: int) -> Iterator[Bytes]:
        for texture, x, rows in self._columns(slot, count):
            yield self.gpu.read_texture(texture, x, self.texels, rows)

    def write(self, slot: int, count: int, take: Callable[[int], Bytes]) -> None:
        for texture, x, rows in self._columns(slot, count):
            data = take(TEXEL_BYTES * self.texels * rows).view(np.uint32)
            self.gpu.write_texture(texture, data.reshape(rows, self.texels, 4), x)

    def clear(self, slot: int, first: int) -> None:
        """Nothing to do: only fused decode leaves such numbers, and textures are not fused."""

    def _columns(self, slot: int, count: int) -> Iterator[tuple[Texture, int, int]]:
        """The regions of the first `count` positions: texture, first column, rows."""
        first = slot * -(-self.capacity // TEXTURE_ROWS)
        for texture in self.textures:
            for start in range(0, count, TEXTURE_ROWS):
                yield texture, (first + start // TEXTURE_ROWS) * self.texels, min(TEXTURE_ROWS, count - start)
