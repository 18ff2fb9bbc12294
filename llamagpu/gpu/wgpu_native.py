"""wgpu: its adapters, and the calls on its cffi handles that go past wgpu-py."""

import contextlib
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from threading import Event
from typing import Any

import numpy as np
import wgpu
from numpy.typing import NDArray
from wgpu.backends.wgpu_native import ffi, lib
from wgpu.backends.wgpu_native._api import GPUShaderModule
from wgpu.backends.wgpu_native.extras import set_instance_extras

from llamagpu.errors import DeviceLost
from llamagpu.gpu.caps import Library
from llamagpu.gpu.guard import GuardedThread, device_lost, ending
from llamagpu.gpu.webgpu import Launch, LaunchFunctions, quiet_mesa


def wgpu_adapters() -> list["WgpuAdapter"]:
    """OpenGL's only with LLAMAGPU_OPENGL=1, for tests: it logs to stderr."""
    quiet_mesa()
    speed_up_cffi_parser()
    logging.getLogger("wgpu").setLevel(logging.ERROR)  # naga and the drivers log advice for developers
    with contextlib.suppress(RuntimeError):  # one instance per process; this is not the first call
        opengl = os.environ.get("LLAMAGPU_OPENGL") == "1"
        set_instance_extras(backends=("GL",) if opengl else ("Vulkan", "Metal", "DX12"))
    return [WgpuAdapter(adapter) for adapter in wgpu.gpu.enumerate_adapters_sync()]


class WgpuAdapter:
    matrices: Sequence[str] = ()
    half_sums: bool = False

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter
        self.info = {**adapter.info, "library": Library.WGPU, "version": wgpu.__version__}
        self.limits: Mapping[str, int] = adapter.limits
        self.features: set[str] = adapter.features

    def open(self, features: Sequence[str], limits: Mapping[str, int], unchecked: bool, lost: Event) -> "WgpuNative":
        device = self.adapter.request_device_sync(required_features=features, required_limits=limits)
        release_guarded(device, lost)
        return WgpuNative(device, unchecked)


class WgpuNative:
    """The calls of an open device. Submitting and waiting may abort: see guard.py."""

    def __init__(self, device: Any, unchecked: bool) -> None:
        self.device, self.unchecked = device, unchecked
        self.launch_functions = LaunchFunctions(
            lib.wgpuComputePassEncoderSetPipeline,
            lib.wgpuComputePassEncoderSetBindGroup,
            lib.wgpuComputePassEncoderDispatchWorkgroups,
        )

    def create_module(self, source: str, label: str) -> Any:
        """A shader module. `unchecked` drops naga's index clamps and loop guards, a quarter of decode time on an H200.

        That is only for kernels whose indices the host keeps in bounds. LLAMAGPU_UNCHECKED=0 turns it off.
        """
        if not self.unchecked:
            return self.device.create_shader_module(code=source, label=label)
        code = source.encode()
        text = ffi.new("char[]", code)
        wgsl = ffi.new("WGPUShaderSourceWGSL *")
        wgsl.chain.sType = lib.WGPUSType_ShaderSourceWGSL
        wgsl.code.data = text
        wgsl.code.length = len(code)
        descriptor = ffi.new("WGPUShaderModuleDescriptor *")
        descriptor.nextInChain = ffi.cast("WGPUChainedStruct *", wgsl)
        handle = lib.wgpuDeviceCreateShaderModuleTrusted(self.device._internal, descriptor, 0)
        return GPUShaderModule(label, handle, self.device)

    def record(self, work: Any, launches: Sequence[Launch]) -> None:
        self.launch_functions.record(work._internal, launches)

    def write_timestamp(self, work: Any, queries: Any, index: int) -> None:
        lib.wgpuComputePassEncoderWriteTimestamp(work._internal, queries._internal, index)

    def timestamp_period(self) -> float:
        return float(lib.wgpuQueueGetTimestampPeriod(self.device.queue._internal))

    def submit(self, *commands: Any) -> Any:
        index = ffi.new("WGPUSubmissionIndex *")
        handles = ffi.new("WGPUCommandBuffer[]", [command._internal for command in commands])
        index[0] = lib.wgpuQueueSubmitForIndex(self.device.queue._internal, len(commands), handles)
        return index

    def wait_idle(self) -> None:
        lib.wgpuDevicePoll(self.device._internal, True, ffi.NULL)

    def read_staging(self, staging: Any, index: Any, block: bool = True) -> NDArray[np.uint8]:
        handle, size = staging._internal, staging.size
        status, info = ffi.new("int *", -1), ffi.new("WGPUBufferMapCallbackInfo *")
        info.mode = lib.WGPUCallbackMode_AllowProcessEvents
        info.callback = on_mapped
        info.userdata1 = status
        lib.wgpuBufferMapAsync(handle, lib.WGPUMapMode_Read, 0, size, info[0])
        while status[0] < 0:
            lib.wgpuDevicePoll(self.device._internal, block, index if block else ffi.NULL)
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


def release_guarded(device: Any, lost: Event) -> None:
    """Let a wgpu device be released in a thread of its own; not if it is lost, nor while the process ends."""
    poller, queue, handle = device._poller, device.queue, device._internal  # not the device: it would never be freed

    def release() -> None:
        poller.stop()
        if not lost.is_set() and not ending.is_set():
            queue._release()
            with contextlib.suppress(DeviceLost):
                GuardedThread("release", lost).call(lib.wgpuDeviceRelease, handle)

    device._release = release


def speed_up_cffi_parser() -> None:
    """Make wgpu-py start 1.2 s sooner.

    wgpu-py names C types in strings. cffi parses each string after declarations of all 432 type names that it knows,
    25 ms a time. Its parser needs only the names that appear in the string.
    """
    parser = ffi._parser
    if "_parse" in vars(parser):
        return
    with contextlib.suppress(AttributeError):  # another version of cffi: it stays slow
        parse, known = parser._parse, parser._declarations

        def parse_few(source: str) -> Any:
            words = set(re.findall(r"\w+", source))
            parser._declarations = {name: known[name] for name in known if name.rpartition(" ")[2] in words}
            try:
                return parse(source)
            except Exception:  # a name that was left out
                parser._declarations = known
                return parse(source)
            finally:
                parser._declarations = known

        parser._parse = parse_few
