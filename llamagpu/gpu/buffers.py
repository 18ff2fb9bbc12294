"""Buffers, ranges of buffers and textures: what a kernel binds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, cast

if TYPE_CHECKING:
    from llamagpu.gpu.device import Gpu

ALIGN = 256  # bytes; every WebGPU implementation accepts a binding offset that is a multiple of it
TEXEL_BYTES = 16  # all textures have four 32-bit channels


class Buffer(Protocol):
    """The attributes of wgpu.GPUBuffer that this package uses."""

    @property
    def size(self) -> int: ...
    @property
    def label(self) -> str: ...
    def destroy(self) -> None: ...


class Texture(Protocol):
    """The attributes of wgpu.GPUTexture that this package uses."""

    @property
    def width(self) -> int: ...
    @property
    def height(self) -> int: ...
    @property
    def label(self) -> str: ...
    def destroy(self) -> None: ...
    def create_view(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class BufferRange:
    """Some bytes of a buffer. `offset` is a multiple of ALIGN, so that a binding may begin there."""

    buffer: Buffer
    offset: int
    size: int

    @property
    def label(self) -> str:
        return self.buffer.label


AnyBuffer = Buffer | BufferRange
Bindable = Buffer | BufferRange | Texture


def padded_ranges(gpu: "Gpu", sizes: Sequence[int], label: str) -> list[BufferRange]:
    """Allocate one buffer and cut it into ranges with cache-line padding before, between and after them.

    No range shares a cache line with another one or with another buffer. The offset of the buffer
    in a line is unknown, so both ends have ALIGN bytes of padding.
    """
    return cut(BufferRange(gpu.zeros(padded_size(sizes) + 2 * ALIGN, label), ALIGN, padded_size(sizes)), sizes)


def padded_size(sizes: Iterable[int]) -> int:
    """Bytes of such ranges, without the padding at both ends."""
    return sum(-(-size // ALIGN) * ALIGN for size in sizes)


def cut(whole: BufferRange, sizes: Sequence[int]) -> list[BufferRange]:
    """Ranges that share no cache line, from the beginning of this one on."""
    starts = accumulate((-(-size // ALIGN) * ALIGN for size in sizes), initial=whole.offset)
    return [BufferRange(whole.buffer, start, size) for start, size in zip(starts, sizes, strict=False)]


def base_buffer(buffer: AnyBuffer) -> Buffer:
    """The buffer that a range is cut from; a plain buffer itself."""
    return buffer.buffer if isinstance(buffer, BufferRange) else buffer


def is_texture(binding: Bindable) -> TypeGuard[Texture]:
    return hasattr(binding, "create_view")


def as_buffer(binding: Bindable) -> AnyBuffer:
    """The binding, which must not be a texture."""
    assert not is_texture(binding)
    return cast(AnyBuffer, binding)


def nbytes(binding: Bindable) -> int:
    """Device memory of a binding."""
    if is_texture(binding):
        return TEXEL_BYTES * binding.width * binding.height
    return as_buffer(binding).size


def bind_group_resource(binding: Bindable) -> Any:
    """The binding as wgpu's create_bind_group takes it."""
    if isinstance(binding, BufferRange):
        return {"buffer": binding.buffer, "offset": binding.offset, "size": binding.size}
    return binding.create_view() if is_texture(binding) else {"buffer": binding}
