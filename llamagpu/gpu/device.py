"""The adapter and its device: chosen, probed, and wrapped in the few calls the engine needs."""

import contextlib
import ctypes
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import wgpu

from llamagpu.errors import DoesNotFit, LlamaGpuError, NoAdapter
from llamagpu.gpu import shaders
from llamagpu.gpu.join import Stage, join
from llamagpu.gpu.routes import Caps

FEATURES = ("subgroup", "shader-f16", "timestamp-query", "timestamp-query-inside-passes")
# What every WebGPU implementation offers. LLAMAGPU_FLOOR=1 asks for no more than this (and no feature), for tests.
FLOOR = {
    "max-storage-buffer-binding-size": 128 << 20,
    "max-buffer-size": 256 << 20,
    "max-compute-workgroup-storage-size": 16384,
    "max-compute-invocations-per-workgroup": 256,
    "max-compute-workgroup-size-x": 256,
    "max-storage-buffers-per-shader-stage": 8,
    "max-compute-workgroups-per-dimension": 65535,
    "max-texture-dimension-2d": 8192,
}
KINDS = {"DiscreteGPU": 0, "IntegratedGPU": 1, "VirtualGPU": 2, "Unknown": 3, "CPU": 4}  # first choice first
BACKENDS = {"Metal": 0, "Vulkan": 0, "D3D12": 0, "OpenGL": 1}
IMAGE = wgpu.TextureUsage.STORAGE_BINDING | wgpu.TextureUsage.COPY_SRC | wgpu.TextureUsage.COPY_DST
STAGING = 64 << 20  # bytes on their way to the device at a time
STORAGE = wgpu.BufferUsage.STORAGE | wgpu.BufferUsage.COPY_SRC | wgpu.BufferUsage.COPY_DST


def adapters() -> list[Any]:
    """Every adapter, best first. OpenGL is asked for only where nothing else is there: it talks on stderr."""
    from wgpu.backends.wgpu_native.extras import set_instance_extras

    quicken_types()
    logging.getLogger("wgpu").setLevel(logging.ERROR)  # naga's and the drivers' advice to developers
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())  # Mesa complains on stderr without one
    with contextlib.suppress(RuntimeError):  # there is one instance per process, and this is not the first call
        set_instance_extras(backends=("Vulkan", "Metal", "DX12"))
    found = list(wgpu.gpu.enumerate_adapters_sync())
    return sorted(
        found, key=lambda a: (BACKENDS.get(a.info["backend_type"], 1), KINDS.get(a.info["adapter_type"], 3))
    )


def quicken_types() -> None:
    """wgpu-py names C types in strings. cffi parses each after a declaration of all 432 names it knows, 25 ms a time
    and 1.2 s until the first token; only the names in the string matter to its parser."""
    from wgpu.backends.wgpu_native import ffi

    parser = ffi._parser
    if "_parse" in vars(parser):
        return
    with contextlib.suppress(AttributeError):  # another cffi: slower, that is all
        parse, known = parser._parse, parser._declarations

        def parse_few(source: str) -> Any:
            words = set(re.findall(r"\w+", source))
            parser._declarations = {name: known[name] for name in known if name.rpartition(" ")[2] in words}
            try:
                return parse(source)
            except Exception:  # whatever it missed is among the others
                parser._declarations = known
                return parse(source)
            finally:
                parser._declarations = known

        parser._parse = parse_few


def choose(found: list[Any], wanted: str | None) -> Any:
    """The adapter to use: the best, or the one that `wanted` names (its number in `devices`, or part of its name)."""
    if not found:
        raise NoAdapter(
            f"no WebGPU adapter was found{missing()}",
            "install a Vulkan driver: your GPU vendor's, or Mesa's software one (apt-get install mesa-vulkan-drivers)",
        )
    if wanted is None:
        return found[0]
    if wanted.isdigit() and int(wanted) < len(found):
        return found[int(wanted)]
    matches = [a for a in found if wanted.lower() in a.info["device"].lower()]
    if not matches or wanted.isdigit():
        names = ", ".join(f"{i}: {a.info['device']}" for i, a in enumerate(found))
        raise NoAdapter(f"no adapter matches {wanted!r}", f"choose one of {names}")
    return matches[0]


def missing() -> str:
    """What of Vulkan is not there, where that can be told."""
    if sys.platform != "linux":
        return ""
    try:
        ctypes.CDLL("libvulkan.so.1")
    except OSError:
        return ": there is no Vulkan loader (libvulkan.so.1)"
    return ": the Vulkan loader finds no driver that works"


@dataclass(frozen=True)
class Dispatch:
    """One kernel launch; compiled and bound when it is first asked for. `grid` holds workgroup counts for the plan's
    tokens and position."""

    gpu: "Gpu" = field(repr=False)
    label: str  # the kernel's name
    source: str = field(repr=False)
    consts: dict[str, shaders.Const]  # what it was made of: `profile` counts from it
    buffers: dict[str, Any]
    grid: Any  # (x, y, z) or a function of (m, pos) that gives them

    @cached_property
    def pipeline(self) -> Any:
        return self.gpu.pipeline(self.source, self.label)

    @cached_property
    def bind_group(self) -> Any:
        numbers = shaders.bindings(self.source)
        entries = [{"binding": number, "resource": resource(self.buffers[name])} for name, number in numbers.items()]
        layout = self.pipeline.get_bind_group_layout(0)
        return self.gpu.device.create_bind_group(layout=layout, entries=entries, label=self.label)


class Gpu:
    """An open device. Buffers are counted, pipelines cached, every object labelled."""

    def __init__(self, adapter: Any) -> None:
        self.adapter = adapter
        self.info = dict(adapter.info)
        floor = os.environ.get("LLAMAGPU_FLOOR") == "1"
        features = [] if floor else [f for f in FEATURES if f in adapter.features]
        limits = FLOOR if floor else {name: adapter.limits[name] for name in FLOOR}
        self.device = adapter.request_device_sync(required_features=features, required_limits=limits)
        self.limits = limits
        self.features = set(features)
        self.trusted = os.environ.get("LLAMAGPU_TRUSTED", "1") != "0"
        self.worker = ThreadPoolExecutor(1, "submit")  # hands in passes (see Recorder); starts with the first of them
        self.closed = False
        self.allocated_bytes = 0
        self.staged_bytes = 0
        self.peak_bytes = 0
        self.compile_seconds = 0.0
        self.pipelines: dict[str, Any] = {}
        self.staging: list[Any] = []
        self.caps = Caps(
            cpu=self.info["adapter_type"] == "CPU",
            half=self.halves_work(),
            subgroup=self.subgroup_size(),
            workgroups=limits["max-compute-workgroups-per-dimension"],
            binding_bytes=min(limits["max-storage-buffer-binding-size"], limits["max-buffer-size"]),
            workgroup_bytes=limits["max-compute-workgroup-storage-size"],
            invocations=limits["max-compute-invocations-per-workgroup"],
            storage_buffers=limits["max-storage-buffers-per-shader-stage"],
            image_side=limits["max-texture-dimension-2d"],
            scalar=os.environ.get("LLAMAGPU_SCALAR") == "1",
            f16="shader-f16" in self.features,
            join=self.may_join(),
        )

    @classmethod
    def open(cls, wanted: str | None = None) -> "Gpu":
        return cls(choose(adapters(), wanted or os.environ.get("LLAMAGPU_DEVICE")))

    def close(self) -> None:
        """Give the device's memory back; nothing of it can be used afterwards."""
        self.closed = True
        self.worker.shutdown()  # what is on its way to the queue gets there first
        self.pipelines.clear()
        self.staging.clear()
        self.device.destroy()

    @property
    def software(self) -> bool:
        return self.caps.cpu

    def may_join(self) -> bool:
        """Whether workgroups of one kernel may wait for each other. Nobody promises that they run at the same time, and
        WebGPU not even that they see each other's stores; with Vulkan drivers of GPUs they do in practice, and a model
        tries it out. LLAMAGPU_JOIN=0 says no, 1 says yes on any adapter."""
        wanted = os.environ.get("LLAMAGPU_JOIN", "")
        gpu = self.info["adapter_type"] != "CPU" and self.info["backend_type"] == "Vulkan"
        return wanted == "1" or (gpu and wanted != "0")

    # Buffers

    def zeros(self, nbytes: int, label: str, usage: int = 0) -> Any:
        """A buffer of zeros, whole 16-byte words so that every kernel may bind it as vec4."""
        size = max(16, -(-nbytes // 16) * 16)
        if size > self.limits["max-buffer-size"]:
            raise DoesNotFit(f"{label} needs {size} bytes; a buffer holds {self.limits['max-buffer-size']}")
        try:
            buffer = self.device.create_buffer(size=size, usage=STORAGE | usage, label=label)
        except (wgpu.GPUOutOfMemoryError, wgpu.GPUValidationError) as error:
            raise DoesNotFit(
                f"{label}: the device could not allocate {size} bytes ({first_line(error)})"
            ) from error
        self.allocated_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return buffer

    def upload(self, data: np.ndarray[Any, Any], label: str, usage: int = 0) -> Any:
        buffer = self.zeros(data.nbytes, label, usage)
        self.write(buffer, data)
        return buffer

    def write(self, buffer: Any, data: np.ndarray[Any, Any], offset: int = 0) -> None:
        if isinstance(buffer, Slice):
            buffer, offset = buffer.buffer, buffer.offset + offset
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        whole = raw.size // 4 * 4
        for start in range(0, whole, STAGING):
            piece = raw[start : min(start + STAGING, whole)]
            self.device.queue.write_buffer(buffer, offset + start, piece)
            self.staged(piece.size)
        if whole < raw.size:
            self.device.queue.write_buffer(
                buffer, offset + whole, np.pad(raw[whole:], (0, 4 - raw.size + whole))
            )

    def staged(self, nbytes: int) -> None:
        """wgpu holds a copy of all that is written until it has been submitted and is through."""
        self.staged_bytes += nbytes
        if self.staged_bytes >= STAGING:
            self.staged_bytes = 0
            self.device.queue.submit([])
            self.device._poll_wait()

    def read(self, buffer: Any, dtype: Any, count: int, offset: int = 0) -> np.ndarray[Any, Any]:
        size = count * np.dtype(dtype).itemsize
        if isinstance(buffer, Slice):
            buffer, offset = buffer.buffer, buffer.offset + offset
        return np.frombuffer(self.device.queue.read_buffer(buffer, offset, -(-size // 4) * 4), dtype, count)

    def staging_for(self, size: int) -> Any:
        """A mappable buffer of this size: one that has been read already, or a new one."""
        for i, buffer in enumerate(self.staging):
            if buffer.size == size:
                return self.staging.pop(i)
        usage = wgpu.BufferUsage.COPY_DST | wgpu.BufferUsage.MAP_READ
        return self.device.create_buffer(size=size, usage=usage, label="staging")

    def free(self, *buffers: Any) -> None:
        for buffer in buffers:
            self.allocated_bytes -= nbytes(buffer)
            buffer.destroy()

    # Images: a CPU adapter reads them far faster than buffers

    def image(self, width: int, height: int, label: str, form: str = "rgba32float") -> Any:
        """A storage texture of zeros, 16 bytes a texel."""
        side = self.limits["max-texture-dimension-2d"]
        if max(width, height) > side:
            raise DoesNotFit(f"{label} needs {width} x {height} texels; an image holds {side} a side")
        try:
            texture = self.device.create_texture(size=(width, height, 1), format=form, usage=IMAGE, label=label)
        except (wgpu.GPUOutOfMemoryError, wgpu.GPUValidationError) as error:
            raise DoesNotFit(
                f"{label}: the device could not allocate {16 * width * height} bytes ({first_line(error)})"
            ) from error
        self.allocated_bytes += nbytes(texture)
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return texture

    def upload_image(self, data: np.ndarray[Any, Any], label: str) -> Any:
        """[height, width, 4] f32 or u32."""
        height, width, _ = data.shape
        texture = self.image(width, height, label, "rgba32float" if data.dtype == np.float32 else "rgba32uint")
        self.write_image(texture, data)
        return texture

    def write_image(self, texture: Any, data: np.ndarray[Any, Any], x: int = 0) -> None:
        """[height, width, 4] 32-bit words, from column x of the first row on."""
        height, width, _ = data.shape
        most = max(1, STAGING // (16 * width))  # rows
        for y in range(0, height, most):
            piece = np.ascontiguousarray(data[y : y + most])
            to = {"texture": texture, "origin": (x, y, 0)}
            self.device.queue.write_texture(to, piece, {"bytes_per_row": 16 * width}, (width, len(piece), 1))
            self.staged(piece.nbytes)

    def read_image(self, texture: Any, x: int, width: int, height: int) -> np.ndarray[Any, Any]:
        """The bytes of these columns of the first rows."""
        source = {"texture": texture, "origin": (x, 0, 0)}
        raw = self.device.queue.read_texture(source, {"bytes_per_row": 16 * width}, (width, height, 1))
        return np.frombuffer(raw, np.uint8)

    # Pipelines

    def pipeline(self, source: str, label: str) -> Any:
        if source not in self.pipelines:
            started = time.perf_counter()
            module = shaders.create_module(self.device, source, label, self.trusted)
            stage = {"module": module, "entry_point": "main"}
            self.pipelines[source] = self.device.create_compute_pipeline(layout="auto", compute=stage, label=label)
            self.compile_seconds += time.perf_counter() - started
        return self.pipelines[source]

    def dispatch(
        self,
        kernel: str,
        parts: tuple[str, ...],
        consts: dict[str, shaders.Const],
        buffers: dict[str, Any],
        grid: Any,
    ) -> Dispatch:
        source = shaders.compose(kernel, parts, consts)
        numbers = shaders.bindings(source)
        if missing := set(numbers) - set(buffers):
            raise LlamaGpuError(f"{kernel}: no buffer for {', '.join(sorted(missing))}")
        return Dispatch(self, kernel, source, consts, {name: buffers[name] for name in numbers}, grid)

    def joined(self, stages: Sequence[Stage], workgroups: int, meeting: Any, layers: Any) -> Dispatch:
        """One dispatch that does the work of several, all of the same workgroup size, for each of the layers."""
        source, buffers = join(stages, workgroups, self.caps.subgroup, meeting, layers)
        return Dispatch(self, "layers", source, {}, buffers, (workgroups, 1, 1))

    # Probes: what the adapter says of itself is not always true or there at all

    def halves_work(self) -> bool:
        """Whether f16 can be converted, also the smallest: steps of scales are often below what is normal."""
        source = (
            shaders.read("half_native")
            + "\n@group(0) @binding(0) var<storage, read_write> y: array<u32>;\n@compute @workgroup_size(1) fn main() "
            "{ let two = halves(y[0]); y[0] = pack_halves(two); y[1] = bitcast<u32>(two.x); }"
        )
        try:
            return bool(self.probe(source, 1)[1:2].view(np.float32) == 2.0**-24)
        except wgpu.GPUError:
            return False

    def subgroup_size(self) -> int:
        """Lanes of a subgroup, 0 without the feature (adapter.info gives placeholders, so a kernel is asked)."""
        if "subgroup" not in self.features:
            return 0
        source = (
            "@group(0) @binding(0) var<storage, read_write> y: array<u32>;\n"
            "@compute @workgroup_size(128) fn main(@builtin(subgroup_size) s: u32) { y[0] = s; }"
        )
        return int(self.probe(source)[0])

    def probe(self, source: str, first: int = 0) -> np.ndarray[Any, Any]:
        """Two words that a kernel leaves, of which it was given the first."""
        module = self.device.create_shader_module(code=source, label="probe")
        stage = {"module": module, "entry_point": "main"}
        pipeline = self.device.create_compute_pipeline(layout="auto", compute=stage)
        buffer = self.device.create_buffer(size=16, usage=STORAGE)
        self.device.queue.write_buffer(buffer, 0, np.array([first], np.uint32))
        entries = [{"binding": 0, "resource": {"buffer": buffer}}]
        group = self.device.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries)
        encoder = self.device.create_command_encoder()
        work = encoder.begin_compute_pass()
        work.set_pipeline(pipeline)
        work.set_bind_group(0, group)
        work.dispatch_workgroups(1)
        work.end()
        self.device.queue.submit([encoder.finish()])
        return np.frombuffer(self.device.queue.read_buffer(buffer), np.uint32)


@dataclass(frozen=True, slots=True)
class Slice:
    """Some bytes of a buffer, where a binding may begin: at a multiple of ALIGN."""

    buffer: Any
    offset: int
    size: int

    @property
    def label(self) -> str:
        return str(self.buffer.label)


ALIGN = 256  # what every WebGPU implementation takes


def with_gaps(gpu: Gpu, sizes: Sequence[int], label: str) -> list[Slice]:
    """Slices of a new buffer, one behind the other, that share no line of memory with another buffer: where in a line
    this one begins is not known."""
    starts = list(accumulate((-(-size // ALIGN) * ALIGN for size in sizes), initial=ALIGN))
    buffer = gpu.zeros(starts[-1] + ALIGN, label)
    return [Slice(buffer, start, size) for start, size in zip(starts, sizes, strict=False)]


def whole(buffer: Any) -> Any:
    return buffer.buffer if isinstance(buffer, Slice) else buffer


def resource(buffer: Any) -> Any:
    if isinstance(buffer, Slice):
        return {"buffer": buffer.buffer, "offset": buffer.offset, "size": buffer.size}
    return buffer.create_view() if isinstance(buffer, wgpu.GPUTexture) else {"buffer": buffer}


def nbytes(buffer: Any) -> int:
    return 16 * buffer.width * buffer.height if isinstance(buffer, wgpu.GPUTexture) else int(buffer.size)


def first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
