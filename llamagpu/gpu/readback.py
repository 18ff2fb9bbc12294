"""Submits commands and maps buffers on wgpu's cffi handles. All of it may abort: it runs in a GuardedThread."""

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from wgpu.backends.wgpu_native import ffi, lib

from llamagpu.gpu.guard import device_lost


def submit(device: Any, *commands: Any) -> Any:
    """Submit command buffers; the index of the submission."""
    index = ffi.new("WGPUSubmissionIndex *")
    handles = ffi.new("WGPUCommandBuffer[]", [command._internal for command in commands])
    index[0] = lib.wgpuQueueSubmitForIndex(device.queue._internal, len(commands), handles)
    return index


def wait_idle(device: Any) -> None:
    """Wait until everything that was submitted has completed; nothing is copied or mapped for it."""
    lib.wgpuDevicePoll(device._internal, True, ffi.NULL)


def read_staging(device: Any, staging: Any, index: Any, block: bool = True) -> NDArray[np.uint8]:
    """The bytes of a mappable buffer, once the submission `index` has completed; later submissions may still run.

    Without `block` the device is asked 20,000 times a second: a blocking poll keeps other threads from the device.
    """
    handle, size = staging._internal, staging.size
    status, info = ffi.new("int *", -1), ffi.new("WGPUBufferMapCallbackInfo *")
    info.mode = lib.WGPUCallbackMode_AllowProcessEvents
    info.callback = on_mapped
    info.userdata1 = status
    lib.wgpuBufferMapAsync(handle, lib.WGPUMapMode_Read, 0, size, info[0])
    while status[0] < 0:
        lib.wgpuDevicePoll(device._internal, block, index if block else ffi.NULL)
        if not block and status[0] < 0:
            time.sleep(5e-5)
    if status[0] != lib.WGPUMapAsyncStatus_Success:
        raise device_lost()
    mapped = ffi.buffer(lib.wgpuBufferGetConstMappedRange(handle, 0, size), size)
    data = np.frombuffer(mapped, np.uint8).copy()
    lib.wgpuBufferUnmap(handle)
    return data


@ffi.callback("void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)")  # type: ignore[untyped-decorator]
def on_mapped(status: int, message: Any, result: Any, _: Any) -> None:
    ffi.cast("int *", result)[0] = status
