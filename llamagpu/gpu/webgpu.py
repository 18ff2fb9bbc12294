"""WebGPU as the rest of this package sees it: names, and what its two implementations have in common.

`wgpu_native.py` is wgpu, `dawn.py` is Dawn. The devices of both have wgpu-py's methods under the same names; what goes
past wgpu-py, for speed or because it has no such call, is `Native`.
"""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence, Set
from threading import Event
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from wgpu import BufferUsage, GPUError, GPUOutOfMemoryError, GPUValidationError, TextureUsage

__all__ = ["BufferUsage", "GPUError", "GPUOutOfMemoryError", "GPUValidationError", "TextureUsage"]

Launch = tuple[Any, Any, int, int, int]  # pipeline and bind group handles, grid


class Native(Protocol):
    """An open device. `submit`, `wait_idle` and `read_staging` run in a GuardedThread."""

    device: Any  # with wgpu.GPUDevice's methods

    def create_module(self, source: str, label: str) -> Any: ...

    def record(self, work: Any, launches: Sequence[Launch]) -> None:
        """Record dispatches in a compute pass, about 1 us each; errors come when the pass is finished."""

    def write_timestamp(self, work: Any, queries: Any, index: int) -> None: ...

    def timestamp_period(self) -> float:
        """Nanoseconds of a tick."""

    def submit(self, *commands: Any) -> Any:
        """Submit command buffers; the index of the submission, for `read_staging`."""

    def wait_idle(self) -> None:
        """Wait until everything that was submitted has completed; nothing is copied or mapped for it."""

    def read_staging(self, staging: Any, index: Any, block: bool = True) -> NDArray[np.uint8]:
        """The bytes of a mappable buffer, once the submission `index` has completed; later submissions may still run.

        Without `block` the device is asked 20,000 times a second: a wait keeps other threads from the device.
        """


class Adapter(Protocol):
    """An adapter of one implementation."""

    @property
    def info(self) -> Mapping[str, Any]:
        """As wgpu's, and "library" ("wgpu" or "dawn") and its "version"."""

    @property
    def limits(self) -> Mapping[str, int]: ...
    @property
    def features(self) -> Set[str]: ...
    @property
    def matrices(self) -> Sequence[str]:
        """Which of caps.MATRICES it has."""

    def open(self, features: Sequence[str], limits: Mapping[str, int], unchecked: bool, lost: Event) -> Native:
        """`unchecked` drops bounds checks from shaders; `lost` is set when the device is."""


def quiet_mesa() -> None:
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())  # Mesa complains on stderr without one


def record_launches(
    work: Any,
    launches: Sequence[Launch],
    set_pipeline: Callable[..., Any],
    set_bind_group: Callable[..., Any],
    dispatch: Callable[..., Any],
    null: Any,
) -> None:
    """Record through the C functions of an implementation; `work` is the handle of a compute pass."""
    for pipeline, bind_group, x, y, z in launches:
        set_pipeline(work, pipeline)
        set_bind_group(work, 0, bind_group, 0, null)
        dispatch(work, x, y, z)
