"""The KV cache: keys and values of every layer in pages that sequences share, and the RoPE table.

All pages are allocated at once. A position of a sequence is a cell of one of its pages, in all layers the same one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from llamagpu.engine import routes
from llamagpu.engine.options import Backend, KvType, Settings
from llamagpu.engine.page_table import PageTable
from llamagpu.engine.pages import PAGE, PagePool
from llamagpu.engine.sequence import Sequence
from llamagpu.errors import DoesNotFit
from llamagpu.files.config import LayerKind, ModelConfig, rope_table
from llamagpu.gpu.buffers import ALIGN, TEXEL_BYTES, Bindable, Buffer, BufferRange, Texture, padded_ranges
from llamagpu.gpu.device import Dispatch, Gpu, Texels
from llamagpu.gpu.recorder import Plan, Recorder, Step
from llamagpu.gpu.shaders import Const, constants
from llamagpu.gpu.webgpu import BufferUsage

TEXTURE_ROWS = constants("attend_texture")["TEXTURE_ROWS"]  # cells below each other in a cache texture
SMALLER = {KvType.F32: ", or an f16 cache (-ctk f16)", KvType.F16: ", or a q8_0 cache (-ctk q8_0)"}
# Positions of a page that are worth a copy, where most of the prompt is computed anyway: it takes a submission. The
# number is an estimate.
MIN_COPIED = 8
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class LayerCache:
    """[heads, capacity, head_dim] each; q8_0: [heads, pages], a page with all numbers, then all scales.

    A short convolution keeps the first half of its inputs as keys and the second one as values.
    """

    keys: BufferRange
    values: BufferRange
    heads: int
    kv_type: KvType


class KvCache(ABC):
    """`capacity` cells, in pages. The backends allocate them and move their contents."""

    def __init__(
        self, gpu: Gpu, config: ModelConfig, settings: Settings, freq_factors: NDArray[np.floating] | None
    ) -> None:
        self.gpu, self.config, self.settings = gpu, config, settings
        self.pool = PagePool(-(-settings.capacity // PAGE))
        self.capacity = self.pool.count * PAGE
        self.positions = min(settings.context, self.capacity)  # that a sequence can have
        self.sequences: set[Sequence] = set()  # that hold pages
        self.check_positions()
        self._allocate()
        self.table = PageTable(gpu, settings.slots, self.positions, self.capacity)
        size = 4 * self.positions * config.rope_dims
        stride = -(-size // ALIGN) * ALIGN
        self.rope_tables = gpu.zeros((len(config.ropes) - 1) * stride + size, "rope")
        self.ropes = {  # [positions, rope_dims/2] (cos, sin)
            rope: BufferRange(self.rope_tables, i * stride, size) for i, rope in enumerate(config.ropes)
        }
        if not gpu.dry:
            for rope, table in self.ropes.items():
                gpu.write(table, rope_table(config, freq_factors, self.positions, rope))

    @property
    def kv_type(self) -> KvType:
        return self.settings.kv_type

    def rope(self, kind: LayerKind) -> BufferRange:
        """The RoPE table of a layer; any one for a layer that does not rotate, since a kernel binds one."""
        return self.ropes.get(kind.rope) or next(iter(self.ropes.values()))

    @property
    def position_bytes(self) -> int:
        """Keys and values of one position in all layers."""
        return position_bytes(self.config, self.kv_type)

    @property
    def attention_bytes(self) -> int:
        """Keys and values of one position in a layer that attends."""
        return 2 * self.config.kv_heads * self.kv_type.head_bytes(self.config.head_dim)

    def resources(self) -> list[Bindable]:
        """Every buffer and texture, once."""
        return [*self._storage(), self.rope_tables, self.table.buffer]

    def check_positions(self) -> None:
        """Refuse more positions than the adapter's kernels can look back over, or than fit a RoPE table."""
        row_bytes, binding = 4 * self.config.rope_dims, self.gpu.caps.binding_bytes
        if self.positions * row_bytes > binding:
            cause = f"a context of {self.positions} needs {self.positions * row_bytes >> 20} MiB of RoPE table"
            holds = f", and a binding of this adapter holds {binding >> 20} MiB"
            raise DoesNotFit(cause + holds, f"use -c {binding // row_bytes // PAGE * PAGE} or less")
        textures = self.settings.backend is Backend.TEXTURES
        most = routes.max_positions(self.config.head_dim, self.gpu.caps, textures)
        if most and self.positions > most:
            cause = f"a context of {self.positions} is more than a CPU adapter can do with this model"
            raise DoesNotFit(cause, f"use -c {most} or less")

    # Pages of sequences

    def begin(self, sequence: Sequence, ids: Items[int]) -> int:
        """Start the sequence anew with the longest prefix of `ids` that pages hold; return its length.

        The last id is left to be computed, for its logits.
        """
        self.end(sequence)
        prefix = self.pool.find(ids[:-1])
        found, used = prefix.positions, prefix.positions % PAGE
        pages = list(prefix.pages[: found // PAGE])
        self.pool.hold(pages)
        if used:
            last = self._unfinished(prefix.pages[-1], used, used >= MIN_COPIED or 2 * used >= len(ids) - found)
            pages += last
            found -= 0 if last else used
        sequence.ids, sequence.pages, sequence.checked = list(ids[:found]), pages, found
        self.sequences.add(sequence)
        return found

    def _unfinished(self, page: int, used: int, worth_copy: bool) -> list[int]:
        """A page to go on writing to after the first `used` positions of this one; none if there is no room.

        It is this one if nobody holds it, and what else is in it need not stay; or a copy, if that is worth it.
        """
        pool = self.pool
        diverges = len(pool.contents[page].ids) > used
        if not pool.holders[page] and not (diverges and pool.free):
            pool.hold([page])
            if diverges:
                pool.forget(page)
            return [page]
        taken = (pool.take(1) or []) if worth_copy else []
        for copy in taken:
            self.copy_page(page, copy)
        return taken

    def reserve(self, sequence: Sequence, positions: int) -> bool:
        """Pages for so many positions of the sequence, and their places in the page table; whether there were enough.

        What is written next, after the ids of the sequence, is in pages that no other sequence reads or finds.
        """
        self.sequences.add(sequence)
        if not self._make_writable(sequence):
            return False
        missing = -(-positions // PAGE) - len(sequence.pages)
        if missing > 0:
            if missing > self.pool.available:
                self.pool.recount(page for other in self.sequences for page in other.pages)
            taken = self.pool.take(missing)
            if taken is None:
                return False
            sequence.pages += taken
        self.table.assign(sequence.slot, sequence.pages)
        return True

    def has_room(self, positions: int, ids: Items[int] = ()) -> bool:
        """Whether a new sequence could have so many positions, with the full pages that hold the beginning of `ids`."""
        prefix = self.pool.find(ids[:-1])
        shared = prefix.pages[: prefix.positions // PAGE]
        unheld = sum(not self.pool.holders[page] for page in shared)
        return -(-positions // PAGE) - len(shared) <= self.pool.available - unheld

    def _make_writable(self, sequence: Sequence) -> bool:
        """Needed where the sequence was cut short, or can be found: its pages may hold more than its ids."""
        pool, pages = self.pool, sequence.pages
        first, used = divmod(len(sequence), PAGE)
        for number in range(first, len(pages)):
            page, kept = pages[number], used if number == first else 0
            if pool.holders[page] > 1:
                taken = pool.take(1)
                if taken is None:
                    return False
                if kept:
                    self.copy_page(page, taken[0])
                pages[number] = taken[0]
                pool.release([page])
            elif page in pool.contents and len(pool.contents[page].ids) > kept:
                pool.forget(page)
        return True

    def record(self, sequence: Sequence, rests: bool = False) -> None:
        """Let others find the full pages of a sequence; if it rests, the last one too."""
        length = sequence.checked if rests else sequence.checked // PAGE * PAGE
        self.pool.record(sequence.pages, sequence.ids[:length])

    def end(self, sequence: Sequence) -> None:
        """Give its pages back. What they hold can be found until their place is needed."""
        self.record(sequence, rests=True)
        self.sequences.discard(sequence)
        pages, sequence.pages = sequence.pages, []
        self.pool.release(pages)
        sequence.truncate(0)

    def recover(self, sequences: Items[Sequence]) -> None:
        """These sequences have pages and no others do, wherever a Ctrl-C came. Prompts are computed anew."""
        for other in self.sequences.difference(sequences):
            other.pages = []
            other.truncate(0)
        self.sequences = set(sequences)
        for sequence in sequences:
            sequence.truncate(len(sequence.pages) * PAGE)
        self.pool.forget_all(page for sequence in sequences for page in sequence.pages)

    def runs(self, sequence: Sequence, count: int) -> list[tuple[int, int]]:
        """The first `count` positions as runs of neighbouring cells: (first cell, cells)."""
        found: list[tuple[int, int]] = []
        for number in range(-(-count // PAGE)):
            cell, cells = sequence.pages[number] * PAGE, min(PAGE, count - number * PAGE)
            if found and sum(found[-1]) == cell and cell % TEXTURE_ROWS:
                found[-1] = found[-1][0], found[-1][1] + cells
            else:
                found.append((cell, cells))
        return found

    def own_runs(self, sequence: Sequence, first: int) -> list[tuple[int, int]]:
        """The cells from position `first` on in pages that no other sequence holds, as runs."""
        numbers = range(first // PAGE, len(sequence.pages))
        starts = ((sequence.pages[number], max(0, first - number * PAGE)) for number in numbers)
        return [(page * PAGE + start, PAGE - start) for page, start in starts if self.pool.holders[page] == 1]

    # Implemented by the backends

    @abstractmethod
    def _allocate(self) -> None: ...

    @abstractmethod
    def _storage(self) -> Items[Bindable]:
        """The buffers or textures of keys and values, and what copying them needs."""

    @abstractmethod
    def copy_page(self, source: int, target: int) -> None: ...

    @abstractmethod
    def read(self, sequence: Sequence, count: int) -> Iterator[Bytes]:
        """The bytes of the first `count` positions of a sequence, a piece at a time."""

    @abstractmethod
    def write(self, sequence: Sequence, count: int, take: Callable[[int], Bytes]) -> None:
        """Restore the bytes of `read` into reserved pages: `take(n)` returns the next n of them."""

    @abstractmethod
    def clear(self, sequence: Sequence, first: int) -> None:
        """Zero the cells of a sequence from position `first` on: NaN spoils what it is multiplied with."""


class BufferKvCache(KvCache):
    """Buffers by layer. With `fused`, as many layers as a binding holds are in one buffer, for fused decode."""

    layers: list[LayerCache]
    copied: Buffer  # the pages of `copy_page`

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

    def _storage(self) -> Items[Bindable]:
        ranges = [cache_range for layer in self.layers for cache_range in (layer.keys, layer.values)]
        return [*{id(cache_range.buffer): cache_range.buffer for cache_range in ranges}.values(), self.copied]

    def _allocate(self) -> None:
        c, binding, cells = self.config, self.gpu.caps.binding_bytes, cell_sizes(self.config, self.kv_type)
        cell_bytes = max(cells)
        size = cell_bytes * self.capacity
        if size > binding:
            raise DoesNotFit(
                f"a context of {self.settings.capacity} needs {size >> 20} MiB of cache per layer, "
                f"and a binding of this adapter holds {binding >> 20} MiB",
                f"use -c {binding // cell_bytes // PAGE * PAGE} or less" + SMALLER.get(self.kv_type, ""),
            )
        self.layers = []
        largest = min(binding, self.gpu.limits["max-buffer-size"] - 2 * ALIGN)
        layers_per_buffer = max(1, largest // size) if self.fused else 1
        for start in range(0, c.layers, layers_per_buffer):
            kinds = c.kinds[start : start + layers_per_buffer]
            sizes = [cell * self.capacity for cell in cells[start : start + len(kinds)]]
            keys, values = (padded_ranges(self.gpu, sizes, label) for label in ("k_cache", "v_cache"))
            shapes = [(c.cache_heads(kind), layer_kv_type(kind, self.kv_type)) for kind in kinds]
            self.layers += [LayerCache(k, v, *shape) for k, v, shape in zip(keys, values, shapes, strict=True)]
        self.copied = self.gpu.zeros(16, "pages to copy", BufferUsage.UNIFORM)

    def copy_page(self, source: int, target: int) -> None:
        self.gpu.write(self.copied, np.array([source, target], np.uint32))
        Recorder(self.gpu).submit([Step(self._copy_plan)])

    @cached_property
    def _copy_plan(self) -> Plan:
        return Plan(self.copy_dispatches())

    def copy_dispatches(self) -> list[Dispatch]:
        """A kernel: WebGPU copies no buffer to itself, and a page has a piece for every layer and head."""
        dispatches = []
        for layer in self.layers:
            vec4s = PAGE * layer.kv_type.head_bytes(self.config.head_dim) // 16
            consts: dict[str, Const] = {"PAGES": self.pool.count, "PAGE_VEC4S": vec4s}
            bound: dict[str, Bindable] = {"k_cache": layer.keys, "v_cache": layer.values, "pair": self.copied}
            dispatches.append(self.gpu.dispatch("copy_page", (), consts, bound, (layer.heads, 2, 1)))
        return dispatches

    def read(self, sequence: Sequence, count: int) -> Iterator[Bytes]:
        for parts in self._cells(self.runs(sequence, count)):
            yield self.gpu.gather(parts)

    def read_values(self, sequence: Sequence, count: int) -> Iterator[NDArray[np.float32]]:
        """The same as numbers."""
        types = (layer.kv_type for layer in self.layers for _ in range(2 * layer.heads))
        for data, kv_type in zip(self.read(sequence, count), types, strict=True):
            yield head_values(data, kv_type, self.config.head_dim)

    def write(self, sequence: Sequence, count: int, take: Callable[[int], Bytes]) -> None:
        for parts in self._cells(self.runs(sequence, count)):
            for part in parts:
                self.gpu.write(part, take(part.size))

    def clear(self, sequence: Sequence, first: int) -> None:
        self.gpu.clear([part for parts in self._cells(self.own_runs(sequence, first)) for part in parts])

    def _cells(self, runs: Items[tuple[int, int]]) -> Iterator[list[BufferRange]]:
        """The runs of cells in each layer, keys and values, and head."""
        types = {layer.kv_type for layer in self.layers}
        places = {kv_type: [place for run in runs for place in self._places(kv_type, *run)] for kv_type in types}
        for layer in self.layers:
            row_bytes = layer.kv_type.head_bytes(self.config.head_dim)
            for cache_range in (layer.keys, layer.values):
                for head in range(layer.heads):
                    first, here = cache_range.offset + head * self.capacity * row_bytes, places[layer.kv_type]
                    yield [BufferRange(cache_range.buffer, first + offset, size) for offset, size in here]

    def _places(self, kv_type: KvType, cell: int, cells: int) -> Iterator[tuple[int, int]]:
        """Offset and size of a run of cells that begins a page or lies in one; of part of a page, in every plane."""
        whole, row_bytes = cells // PAGE * PAGE, kv_type.head_bytes(self.config.head_dim)
        if whole:
            yield cell * row_bytes, whole * row_bytes
        page, start = divmod(cell + whole, PAGE)
        offset = page * PAGE * row_bytes
        for size in kv_type.planes(self.config.head_dim):
            if cells > whole:
                yield offset + start * size, (cells - whole) * size
            offset += PAGE * size


class TextureKvCache(KvCache):
    """One f32 texture for each layer: a cell is a row; after TEXTURE_ROWS rows the next columns follow."""

    textures: list[Texture]
    texels: list[int]  # of one cell: keys and values, for each layer
    scores: Texture  # [heads, positions] of one token
    spare: Texture  # a page of one layer: no texture can be copied to itself

    def _storage(self) -> Items[Bindable]:
        return [*self.textures, self.scores, self.spare]

    def _allocate(self) -> None:
        self.texels = cell_texels(self.config)
        columns, rows = -(-self.capacity // TEXTURE_ROWS), min(self.capacity, TEXTURE_ROWS)
        self.textures = [self.gpu.texture(columns * n, rows, f"cache {i}") for i, n in enumerate(self.texels)]
        vec4s = -(-self.positions // 4)
        width, height = min(vec4s, TEXTURE_ROWS), -(-vec4s // TEXTURE_ROWS) * self.config.heads
        self.scores = self.gpu.texture(width, height, "scores")
        self.spare = self.gpu.texture(max(self.texels), PAGE, "spare page")

    def _layers(self) -> Iterator[tuple[Texture, int]]:
        return zip(self.textures, self.texels, strict=True)

    def copy_page(self, source: int, target: int) -> None:
        for texels in set(self.texels):
            copies: list[tuple[Texels, Texels]] = []
            for texture in (texture for texture, own in self._layers() if own == texels):
                copies.append(((texture, *place(source * PAGE, texels)), (self.spare, 0, 0)))
                copies.append(((self.spare, 0, 0), (texture, *place(target * PAGE, texels))))
            self.gpu.copy_texels(copies, texels, PAGE)

    def read(self, sequence: Sequence, count: int) -> Iterator[Bytes]:
        for texture, texels in self._layers():
            for cell, rows in self.runs(sequence, count):
                x, y = place(cell, texels)
                yield self.gpu.read_texture(texture, x, texels, rows, y)

    def write(self, sequence: Sequence, count: int, take: Callable[[int], Bytes]) -> None:
        for texture, texels in self._layers():
            for cell, rows in self.runs(sequence, count):
                data = take(TEXEL_BYTES * texels * rows).view(np.uint32)
                self.gpu.write_texture(texture, data.reshape(rows, texels, 4), *place(cell, texels))

    def clear(self, sequence: Sequence, first: int) -> None:
        for cell, rows in self.own_runs(sequence, first):
            for texture, texels in self._layers():
                self.gpu.write_texture(texture, np.zeros((rows, texels, 4), np.uint32), *place(cell, texels))


def place(cell: int, texels: int) -> tuple[int, int]:
    """Column and row of a cell of a cache texture."""
    return cell // TEXTURE_ROWS * texels, cell % TEXTURE_ROWS


def cell_texels(config: ModelConfig) -> list[int]:
    """Texels of keys and values of one position, for each layer."""
    return [2 * size // TEXEL_BYTES for size in cell_sizes(config, KvType.F32)]


def layer_kv_type(kind: LayerKind, kv_type: KvType) -> KvType:
    """A short convolution stores single inputs, which have no scale to share: they stay f16."""
    return KvType.F16 if kind.is_conv and kv_type is KvType.Q8_0 else kv_type


def cell_sizes(config: ModelConfig, kv_type: KvType) -> list[int]:
    """Bytes of the keys, or values, of one position, for each layer."""
    c = config
    return [c.cache_heads(kind) * layer_kv_type(kind, kv_type).head_bytes(c.head_dim) for kind in c.kinds]


def position_bytes(config: ModelConfig, kv_type: KvType) -> int:
    """Keys and values of one position in all layers."""
    return 2 * sum(cell_sizes(config, kv_type))


def most_cells(config: ModelConfig, kv_type: KvType, backend: Backend, gpu: Gpu) -> int:
    """Cells that bindings and textures of the adapter can hold, in whole pages."""
    if backend is Backend.TEXTURES:
        return gpu.limits["max-texture-dimension-2d"] // max(cell_texels(config)) * TEXTURE_ROWS
    int8 = config.kv_heads * routes.int8_position_bytes(config.head_dim)
    return gpu.caps.binding_bytes // max(int8, *cell_sizes(config, kv_type)) // PAGE * PAGE


def head_values(data: Bytes, kv_type: KvType, head_dim: int) -> NDArray[np.float32]:
    """Keys, or values, [cells, head_dim] of one KV head from the bytes of a page of it, or of its first cells."""
    if kv_type is not KvType.Q8_0:
        return data.view(np.float16 if kv_type is KvType.F16 else np.float32).reshape(-1, head_dim).astype(np.float32)
    cells = len(data) // kv_type.head_bytes(head_dim)
    numbers = data[: cells * head_dim].view(np.int8).reshape(cells, -1, 32)
    scales = data[cells * head_dim :].view(np.float16).reshape(cells, -1)[:, : head_dim // 32]
    return (numbers * scales.astype(np.float32)[:, :, None]).reshape(cells, head_dim)
