"""WebGPU as the rest of this package sees it: names, and what its two implementations have in common.

`wgpu_native.py` is wgpu, `dawn.py` is Dawn. The devices of both have wgpu-py's methods under the same names; what goes
past wgpu-py, for speed or because it has no such call, is `Native`.
"""

import os
import tempfile
from collections.abc import Mapping, Sequence, Set
from ctypes import PYFUNCTYPE, c_size_t, c_void_p
from threading import Event
from typing import Any, Protocol

import numpy as np
from cffi import FFI
from numpy.typing import NDArray
from wgpu import BufferUsage, GPUError, GPUOutOfMemoryError, GPUValidationError, TextureUsage

__all__ = ["BufferUsage", "GPUError", "GPUOutOfMemoryError", "GPUValidationError", "TextureUsage"]

Launch = tuple[c_void_p, c_void_p, int, int, int]  # handles of pipeline and bind group, grid
ffi = FFI()


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

    @property
    def half_sums(self) -> bool:
        """Whether it has the first of them with f16 sums."""

    def open(self, features: Sequence[str], limits: Mapping[str, int], unchecked: bool, lost: Event) -> Native:
        """`unchecked` drops bounds checks from shaders, and checks of calls; `lost` is set when the device is."""


def records_safely() -> bool:
    """Whether every recorded call is validated (LLAMAGPU_SAFE=1). With wgpu it raises where it is made."""
    return os.environ.get("LLAMAGPU_SAFE") == "1"


def quiet_mesa() -> None:
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())  # Mesa complains on stderr without one


def bare(handle: Any) -> c_void_p:
    """A handle of cffi for `ctypes`."""
    return c_void_p(int(ffi.cast("uintptr_t", handle)))


class LaunchFunctions:
    """The C functions of an implementation that record a dispatch, called with Python's lock held.

    cffi gives the lock up for every call, and another thread may keep it for half a millisecond each time: while
    `serve` wrote to 64 clients, the slowest tenth of its steps took 12 ms to submit, and 1.3 since (H200, wgpu).
    """

    def __init__(self, set_pipeline: Any, set_bind_group: Any, dispatch: Any) -> None:
        functions = (set_pipeline, set_bind_group, dispatch)
        # without the types of their arguments: with them a call takes twice as long
        self.functions = [PYFUNCTYPE(None)(int(ffi.cast("uintptr_t", function))) for function in functions]

    def record(self, work: Any, launches: Sequence[Launch]) -> None:
        """`work` is the handle of a compute pass."""
        set_pipeline, set_bind_group, dispatch = self.functions
        encoder, none = bare(work), c_size_t(0)
        for pipeline, bind_group, x, y, z in launches:
            set_pipeline(encoder, pipeline)
            set_bind_group(encoder, 0, bind_group, none, None)
            dispatch(encoder, x, y, z)
