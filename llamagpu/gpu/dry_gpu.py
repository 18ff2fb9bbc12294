"""A device that counts allocations instead of making them: the memory plan runs the code that allocates."""

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from llamagpu.gpu.buffers import AnyBuffer, Texture
from llamagpu.gpu.device import Gpu


@dataclass(frozen=True)
class PlannedBuffer:
    size: int
    label: str

    def destroy(self) -> None: ...


@dataclass(frozen=True)
class PlannedTexture:
    width: int
    height: int
    label: str

    def destroy(self) -> None: ...
    def create_view(self) -> None: ...


class DryGpu(Gpu):
    """Has the limits of an open device. Writes go nowhere, and nothing can be dispatched."""

    dry = True

    def __init__(self, gpu: Gpu) -> None:
        vars(self).update(vars(gpu))
        self.allocated_bytes = self.peak_bytes = 0

    def _create_buffer(self, size: int, usage: int, label: str) -> Any:
        return PlannedBuffer(size, label)

    def _create_texture(self, width: int, height: int, texel_format: str, label: str) -> Any:
        return PlannedTexture(width, height, label)

    def write(self, buffer: AnyBuffer, data: NDArray[Any], offset: int = 0) -> None: ...

    def write_texture(self, texture: Texture, data: NDArray[Any], x: int = 0, y: int = 0) -> None: ...
