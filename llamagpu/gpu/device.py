"""An open device, wrapped in the few calls that the engine needs."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import DTypeLike, NDArray

from llamagpu.errors import DoesNotFit, LlamaGpuError, NoAdapter, WrongState
from llamagpu.gpu import shaders
from llamagpu.gpu.buffers import (
    TEXEL_BYTES,
    AnyBuffer,
    Bindable,
    Buffer,
    BufferRange,
    Texture,
    bind_group_resource,
    nbytes,
)
from llamagpu.gpu.caps import (
    Caps,
    Grid,
    barrier_is_measured,
    below_minimum,
    grid_barrier_allowed,
    requested_features,
    requested_limits,
)
from llamagpu.gpu.choice import choose_adapter
from llamagpu.gpu.fuse import Stage, fuse, storage_bindings
from llamagpu.gpu.guard import GuardedThread, device_lost
from llamagpu.gpu.webgpu import (
    Adapter,
    BufferUsage,
    GPUError,
    GPUOutOfMemoryError,
    GPUValidationError,
    Native,
    TextureUsage,
)

TEXTURE_USAGE = TextureUsage.STORAGE_BINDING | TextureUsage.COPY_SRC | TextureUsage.COPY_DST
STORAGE_USAGE = BufferUsage.STORAGE | BufferUsage.COPY_SRC | BufferUsage.COPY_DST
COPY_STRIDE = 256  # of the bytes of a row, where a texture is copied to a buffer
REMEDY_MEMORY = "use a smaller model; smaller -c and -ub need less"
STAGING_BYTES = 64 << 20  # most bytes in flight to the device

MAX_BOUND = 8  # storage buffers of a kernel; one that relies on subgroups has its status besides

GridFunction = Callable[[int, int], Grid]  # of the rows of a step and its first position
Texels = tuple[Texture, int, int]  # a region of a texture begins at this column and row


@dataclass(frozen=True)
class Dispatch:
    """One kernel launch, compiled and bound at its first use."""

    gpu: "Gpu" = field(repr=False)
    kernel: str  # name of the kernel file
    source: str = field(repr=False)
    consts: Mapping[str, shaders.Const]
    bindings: Mapping[str, Bindable]
    grid: Grid | GridFunction  # workgroups: fixed, or computed for each step
    needs: str = "-"  # the route's condition
    shape: object = None  # what it computes: routes.Linear, routes.Attention, ...; `profile` counts its work
    op: str = ""  # its purpose in the model: "qkv", "attention", ...
    layer: int | None = None  # None: before the first layer or after the last

    def grid_for(self, rows: int, position: int) -> Grid:
        return self.grid(rows, position) if callable(self.grid) else self.grid

    @cached_property
    def checked_source(self) -> str:
        """With a check of the subgroup size, for a kernel that relies on it. A fused kernel has one of its own."""
        uses = self.kernel != "fused_layers" and shaders.uses_subgroups(self.source)
        return shaders.check_subgroups(self.source, self.gpu.caps.subgroup) if uses else self.source

    @cached_property
    def pipeline(self) -> Any:
        return self.gpu.pipeline(self.checked_source, self.kernel)

    @cached_property
    def bind_group(self) -> Any:
        """Plans of other widths share it, where they bind the same to the same kernel: making it takes 0.1 ms."""
        numbers, bindings = shaders.binding_numbers(self.checked_source), {"status": self.gpu.status, **self.bindings}
        key = (self.pipeline, *(bindings[name] for name in numbers))
        if (group := self.gpu.bind_groups.get(key)) is None:
            entries = [
                {"binding": number, "resource": bind_group_resource(bindings[name])} for name, number in numbers.items()
            ]
            layout = self.pipeline.get_bind_group_layout(0)
            group = self.gpu.device.create_bind_group(layout=layout, entries=entries, label=self.kernel)
            self.gpu.bind_groups[key] = group
        return group


class Gpu:
    """An open device. Allocations are counted, pipelines cached, every object labelled."""

    dry = False  # DryGpu: allocations are only counted

    def __init__(self, adapter: Adapter) -> None:
        _processes.add(os.getpid())
        self.info: dict[str, Any] = dict(adapter.info)
        if short := below_minimum(adapter.limits):
            raise NoAdapter(f"{self.name} cannot run the kernels: {short}", "choose another one: llamagpu devices")
        self.limits = requested_limits(adapter.limits)
        features = requested_features(adapter.features)
        self.features = set(features)
        self.matrices = adapter.matrices if "subgroup-matrix" in features else ()
        self.half_sums = adapter.half_sums
        self.lost = threading.Event()
        self.unchecked = may_be_unchecked(self.info["backend_type"])
        self.native = open_device(adapter, features, self.limits, self.unchecked, self.lost)
        self.device = self.native.device
        self.submitter = GuardedThread("submit", self.lost)  # see Recorder
        self.poller = GuardedThread("poll", self.lost)
        self.closed = False
        self.allocated_bytes = 0
        self.peak_bytes = 0
        self.staged_bytes = 0
        self.compile_seconds = 0.0
        self.pipelines: dict[str, Any] = {}
        self.bind_groups: WeakValueDictionary[Any, Any] = WeakValueDictionary()  # by the pipeline and what it binds
        self.staging: list[Any] = []
        self.status: Buffer = self.device.create_buffer(size=16, usage=STORAGE_USAGE, label="status")
        self.unproven = False  # kernels that may rely on the subgroup size have run, and nobody has looked at `status`
        try:
            self.caps = self._probe_caps()
        except BaseException:
            self.close()
            raise

    def _probe_caps(self) -> Caps:
        limits, coherent = self.limits, "memory-decoration-coherent" in self.features
        storage_buffers = limits["max-storage-buffers-per-shader-stage"]
        return Caps(
            cpu=self.info["adapter_type"] == "CPU",
            native_f16=self._probe_native_f16(),
            subgroup=self._probe_subgroup_size() if storage_buffers > MAX_BOUND else 0,
            workgroups=limits["max-compute-workgroups-per-dimension"],
            binding_bytes=min(limits["max-storage-buffer-binding-size"], limits["max-buffer-size"]),
            shared_bytes=limits["max-compute-workgroup-storage-size"],
            invocations=limits["max-compute-invocations-per-workgroup"],
            storage_buffers=storage_buffers,
            texture_side=limits["max-texture-dimension-2d"],
            scalar=os.environ.get("LLAMAGPU_SCALAR") == "1",
            shader_f16="shader-f16" in self.features,
            coherent=coherent,
            measured_barrier=barrier_is_measured(self.info),
            fuses_all=os.environ.get("LLAMAGPU_FUSED") == "1",
            compares_fused=not barrier_is_measured(self.info),
            grid_barrier=grid_barrier_allowed(self.info, coherent),
            tint=self.info["library"] == "dawn",
            matrix=next(iter(self.matrices), ""),
            half_sums="16x16" in self.matrices and self.half_sums and barrier_is_measured(self.info),
        )

    @classmethod
    def open(cls, wanted: str | None = None, sequences: int = 1) -> "Gpu":
        """The adapter that is wanted; `sequences` may decide between implementations of WebGPU."""
        check_process()
        adapter, _ = choose_adapter(wanted or os.environ.get("LLAMAGPU_DEVICE"), sequences=sequences)
        return cls(adapter)

    def close(self) -> None:
        """Free the device. Nothing that was made with it can be used afterwards."""
        self.closed = True
        self.submitter.stop()
        self.poller.stop()
        self.pipelines.clear()
        self.staging.clear()
        self._check_lost()
        self.device.destroy()

    def _check_lost(self) -> None:
        """Note a loss that no call has met yet: a lost device makes no buffers, and must not be released."""
        try:
            self._create_staging(16).destroy()
        except GPUError:
            self.lost.set()

    @property
    def name(self) -> str:
        return str(self.info["device"])

    @property
    def software(self) -> bool:
        return self.caps.cpu

    # Buffers

    def zeros(self, size: int, label: str, usage: int = 0) -> Buffer:
        """A buffer of zeros, a multiple of 16 bytes, so that every kernel may bind it as vec4."""
        size = max(16, -(-size // 16) * 16)
        if size > self.limits["max-buffer-size"]:
            raise DoesNotFit(f"{label} needs {size} bytes; a buffer holds {self.limits['max-buffer-size']}")
        try:
            buffer: Buffer = self._create_buffer(size, STORAGE_USAGE | usage, label)
        except (GPUOutOfMemoryError, GPUValidationError) as error:
            raise allocation_failed(label, size, error) from error
        self._count(size)
        return buffer

    def _create_buffer(self, size: int, usage: int, label: str) -> Any:
        return self.device.create_buffer(size=size, usage=usage, label=label)

    def _count(self, size: int) -> None:
        self.allocated_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)

    def upload(self, data: NDArray[Any], label: str, usage: int = 0) -> Buffer:
        buffer = self.zeros(data.nbytes, label, usage)
        self.write(buffer, data)
        return buffer

    def write(self, buffer: AnyBuffer, data: NDArray[Any], offset: int = 0) -> None:
        buffer, offset = _locate(buffer, offset)
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        words = raw.size // 4 * 4
        for start in range(0, words, STAGING_BYTES):
            piece = raw[start : min(start + STAGING_BYTES, words)]
            self.device.queue.write_buffer(buffer, offset + start, piece)
            self._staged(piece.size)
        if words < raw.size:
            last = np.pad(raw[words:], (0, 4 - raw.size + words))
            self.device.queue.write_buffer(buffer, offset + words, last)

    def _staged(self, size: int) -> None:
        """Count written bytes and flush at STAGING_BYTES: wgpu copies them until a submission has completed."""
        self.staged_bytes += size
        if self.staged_bytes >= STAGING_BYTES:
            self.staged_bytes = 0
            self.submit()
            self.wait_idle()

    def submit(self, *commands: Any) -> Any:
        """Submit command buffers; the index of the submission."""
        return self.submitter.call(self.native.submit, *commands)

    def wait_idle(self) -> None:
        """Wait until everything that was submitted has completed."""
        self.poller.call(self.native.wait_idle)

    def read(self, buffer: AnyBuffer, dtype: DTypeLike, count: int, offset: int = 0) -> NDArray[Any]:
        buffer, offset = _locate(buffer, offset)
        size = -(-count * np.dtype(dtype).itemsize // 4) * 4
        encoder, staging = self.device.create_command_encoder(), self._create_staging(size)
        encoder.copy_buffer_to_buffer(buffer, offset, staging, 0, size)
        return np.frombuffer(self._read_staging(encoder, staging), dtype, count)

    def gather(self, ranges: Sequence[BufferRange]) -> NDArray[np.uint8]:
        """The bytes of several ranges, one after another."""
        size = sum(part.size for part in ranges)
        encoder, staging, at = self.device.create_command_encoder(), self._create_staging(size), 0
        for part in ranges:
            encoder.copy_buffer_to_buffer(part.buffer, part.offset, staging, at, part.size)
            at += part.size
        return self._read_staging(encoder, staging)

    def _read_staging(self, encoder: Any, staging: Any) -> NDArray[np.uint8]:
        """The bytes that the encoder's commands copy to this buffer, which is freed."""
        index = self.submit(encoder.finish())
        data: NDArray[np.uint8] = self.poller.call(self.native.read_staging, staging, index)
        staging.destroy()
        return data

    def copy(self, copies: Sequence[tuple[BufferRange, BufferRange]]) -> None:
        """Copy ranges of equal size, (source, target) each, in one submission."""
        encoder = self.device.create_command_encoder()
        for source, target in copies:
            encoder.copy_buffer_to_buffer(source.buffer, source.offset, target.buffer, target.offset, source.size)
        self.submit(encoder.finish())

    def clear(self, ranges: Sequence[BufferRange]) -> None:
        encoder = self.device.create_command_encoder()
        for zeroed in ranges:
            encoder.clear_buffer(zeroed.buffer, zeroed.offset, zeroed.size)
        self.submit(encoder.finish())

    def staging_buffer(self, size: int) -> Any:
        """A mappable buffer of this size, reused if possible."""
        for i, buffer in enumerate(self.staging):
            if buffer.size == size:
                return self.staging.pop(i)
        return self._create_staging(size)

    def _create_staging(self, size: int) -> Any:
        usage = BufferUsage.COPY_DST | BufferUsage.MAP_READ
        return self.device.create_buffer(size=size, usage=usage, label="staging")

    def free(self, *resources: Bindable) -> None:
        """Free buffers and textures; of a range, the buffer that it is cut from. Nothing that is recorded and not yet
        submitted may use them: Dawn does not check it."""
        for resource in resources:
            owner = resource.buffer if isinstance(resource, BufferRange) else resource
            self.allocated_bytes -= nbytes(owner)
            owner.destroy()

    # Storage textures: a CPU adapter reads them far faster than buffers

    def texture(self, width: int, height: int, label: str, dtype: DTypeLike = np.float32) -> Texture:
        """A storage texture of zeros with four channels of f32 or u32."""
        side = self.limits["max-texture-dimension-2d"]
        if max(width, height) > side:
            raise DoesNotFit(f"{label} needs {width} x {height} texels; a texture holds {side} in each direction")
        texel_format = "rgba32float" if np.dtype(dtype) == np.float32 else "rgba32uint"
        size = TEXEL_BYTES * width * height
        try:
            texture: Texture = self._create_texture(width, height, texel_format, label)
        except (GPUOutOfMemoryError, GPUValidationError) as error:
            raise allocation_failed(label, size, error) from error
        self._count(size)
        return texture

    def _create_texture(self, width: int, height: int, texel_format: str, label: str) -> Any:
        size = (width, height, 1)
        return self.device.create_texture(size=size, format=texel_format, usage=TEXTURE_USAGE, label=label)

    def upload_texture(self, data: NDArray[Any], label: str) -> Texture:
        """[height, width, 4] f32 or u32."""
        height, width, _ = data.shape
        texture = self.texture(width, height, label, data.dtype)
        self.write_texture(texture, data)
        return texture

    def write_texture(self, texture: Texture, data: NDArray[Any], x: int = 0, y: int = 0) -> None:
        """[height, width, 4] 32-bit words, from column x of row y on."""
        height, width, _ = data.shape
        rows = max(1, STAGING_BYTES // (TEXEL_BYTES * width))
        for row in range(0, height, rows):
            piece = np.ascontiguousarray(data[row : row + rows])
            target = {"texture": texture, "origin": (x, y + row, 0)}
            layout = {"bytes_per_row": TEXEL_BYTES * width}
            self.device.queue.write_texture(target, piece, layout, (width, len(piece), 1))
            self._staged(piece.nbytes)

    def read_texture(self, texture: Texture, x: int, width: int, height: int, y: int = 0) -> NDArray[np.uint8]:
        """The bytes of `width` columns from x on, of `height` rows from y on."""
        stride = -(-TEXEL_BYTES * width // COPY_STRIDE) * COPY_STRIDE
        encoder, staging = self.device.create_command_encoder(), self._create_staging(stride * height)
        source, target = {"texture": texture, "origin": (x, y, 0)}, {"buffer": staging, "bytes_per_row": stride}
        encoder.copy_texture_to_buffer(source, target, (width, height, 1))
        rows = self._read_staging(encoder, staging).reshape(height, stride)
        return rows[:, : TEXEL_BYTES * width].reshape(-1)

    def copy_texels(self, copies: Sequence[tuple[Texels, Texels]], width: int, height: int) -> None:
        """Copy regions of this size, (source, target) each, in one submission."""
        encoder = self.device.create_command_encoder()
        for (source, x, y), (target, u, v) in copies:
            start, end = {"texture": source, "origin": (x, y, 0)}, {"texture": target, "origin": (u, v, 0)}
            encoder.copy_texture_to_texture(start, end, (width, height, 1))
        self.submit(encoder.finish())

    # Kernels

    def pipeline(self, source: str, label: str) -> Any:
        if source not in self.pipelines:
            started = time.perf_counter()
            module = self.native.create_module(source, label)
            stage = {"module": module, "entry_point": "main"}
            self.pipelines[source] = self.device.create_compute_pipeline(layout="auto", compute=stage, label=label)
            self.compile_seconds += time.perf_counter() - started
        return self.pipelines[source]

    def dispatch(
        self,
        kernel: str,
        parts: Sequence[str],
        consts: Mapping[str, shaders.Const],
        bindings: Mapping[str, Bindable],
        grid: Grid | GridFunction,
        needs: str = "-",
        shape: object = None,
    ) -> Dispatch:
        """Compose a kernel and bind it by name; `bindings` may hold more than the kernel declares."""
        source = shaders.compose(kernel, tuple(parts), consts)
        numbers = shaders.binding_numbers(source)
        if missing := set(numbers) - set(bindings):
            raise LlamaGpuError(f"{kernel}: no buffer for {', '.join(sorted(missing))}")
        bound = {name: bindings[name] for name in numbers}
        return Dispatch(self, kernel, source, consts, bound, grid, needs, shape)

    def fused(
        self,
        stages: Sequence[Stage],
        workgroups: int,
        barrier: AnyBuffer,
        layers: Buffer,
        rows: int = 1,
        copies: Buffer | None = None,
    ) -> Dispatch:
        """One dispatch that runs the stages, all of the same workgroup size, for each layer of the table `layers`."""
        fused = partial(fuse, stages, workgroups, self.caps, barrier, layers, rows, copies)
        source, bindings = fused()
        if storage_bindings(source) > self.caps.storage_buffers:
            source, bindings = fused(by_buffer=True)
        return Dispatch(self, "fused_layers", source, {}, bindings, (workgroups, 1, 1), op="layers")

    def prove_subgroups(self) -> None:
        """Give subgroups up for good if a kernel has found them to be of another size than it was made for."""
        self.unproven = False
        if self.read(self.status, np.uint32, 1)[0]:
            self.caps = replace(self.caps, subgroup=0, grid_barrier=False)

    # Probes: adapter.info and adapter.features are not always true

    def _probe_native_f16(self) -> bool:
        """Whether f16 converts to f32 exactly, subnormals included: super-block scales are often subnormal."""
        source = (
            shaders.read("f16_native")
            + "\n@group(0) @binding(0) var<storage, read_write> y: array<u32>;\n@compute @workgroup_size(1) fn main() "
            "{ let two = unpack_f16(y[0]); y[0] = pack_f16(two); y[1] = bitcast<u32>(two.x); }"
        )
        try:
            return bool(self._probe(source, 1)[1:2].view(np.float32) == 2.0**-24)
        except GPUValidationError:
            return False

    def _probe_subgroup_size(self) -> int:
        """Lanes of a subgroup, 0 without the feature. adapter.info gives placeholders, so a kernel measures it."""
        if "subgroup" not in self.features:
            return 0
        source = (
            "@group(0) @binding(0) var<storage, read_write> y: array<u32>;\n"
            "@compute @workgroup_size(128) fn main(@builtin(subgroup_size) s: u32) { y[0] = s; }"
        )
        return int(self._probe(source)[0])

    @cached_property
    def exact_int8_sums(self) -> bool:
        """Whether fma(MAGIC + n, d, -MAGIC * d) is n * d (parts/dot_int8.wgsl): WGSL lets fma round twice.

        llvmpipe's fma does, but its compiler turns this one into (MAGIC + n - MAGIC) * d.
        """
        d = 0x3F800004  # 1 + 2^-21, times MAGIC + 1: rounded it loses 2^-21
        source = (
            "@group(0) @binding(0) var<storage, read_write> y: array<f32>;\n@compute @workgroup_size(1) fn main() "
            "{ let sum = bitcast<f32>(bitcast<u32>(y[1]) + 0x4B400001u); y[0] = fma(sum, y[0], y[0] * -12582912.0); }"
        )
        return bool(self._probe(source, d)[0] == d)

    def _probe(self, source: str, first: int = 0) -> NDArray[np.uint32]:
        """Run a kernel on four words, of which the first is given; return the words."""
        module = self.device.create_shader_module(code=source, label="probe")
        stage = {"module": module, "entry_point": "main"}
        pipeline = self.device.create_compute_pipeline(layout="auto", compute=stage)
        buffer = self.device.create_buffer(size=16, usage=STORAGE_USAGE)
        self.device.queue.write_buffer(buffer, 0, np.array([first], np.uint32))
        entries = [{"binding": 0, "resource": {"buffer": buffer}}]
        group = self.device.create_bind_group(layout=pipeline.get_bind_group_layout(0), entries=entries)
        encoder = self.device.create_command_encoder()
        work = encoder.begin_compute_pass()
        work.set_pipeline(pipeline)
        work.set_bind_group(0, group)
        work.dispatch_workgroups(1)
        work.end()
        self.submit(encoder.finish())
        return self.read(buffer, np.uint32, 4)


def may_be_unchecked(backend: str) -> bool:
    """Whether shaders go without bounds checks, and recorded calls without Dawn's. Not on Metal, where an index out of
    bounds can stop the machine."""
    return backend != "Metal" and os.environ.get("LLAMAGPU_UNCHECKED", "1") != "0"


def _locate(buffer: AnyBuffer, offset: int) -> tuple[Buffer, int]:
    """The buffer behind a range, and the offset in it."""
    if isinstance(buffer, BufferRange):
        return buffer.buffer, buffer.offset + offset
    return buffer, offset


def allocation_failed(label: str, size: int, error: GPUError) -> LlamaGpuError:
    if "lost" in str(error):
        return device_lost()
    return DoesNotFit(f"{label}: the device could not allocate {size} bytes ({last_line(error)})", REMEDY_MEMORY)


def open_device(
    adapter: Adapter, features: Sequence[str], limits: Mapping[str, int], unchecked: bool, lost: threading.Event
) -> Native:
    try:
        return adapter.open(features, limits, unchecked, lost)
    except (GPUError, RuntimeError) as error:
        raise open_failed(str(adapter.info["device"]), error) from error


def open_failed(name: str, error: Exception) -> LlamaGpuError:
    text = str(error).lower()
    if "lost" in text:
        return device_lost()
    if "memory" in text:
        return DoesNotFit(f"{name} could not be opened: it has no memory left", REMEDY_MEMORY)
    return NoAdapter(f"{name} could not be opened: {last_line(error)}", "choose another device with --device")


_processes: set[int] = set()  # that have opened a device, this one and those that it is forked from


def is_forked() -> bool:
    return bool(_processes) and os.getpid() not in _processes


def check_process() -> None:
    """Refuse to go on in a child by fork(): the driver's threads do not come along, and it would hang."""
    if is_forked():
        raise WrongState(
            "this process was forked from one that uses a GPU",
            "start processes by multiprocessing's spawn method, or load models in them alone",
        )


@contextmanager
def map_device_lost() -> Iterator[None]:
    """Raise DeviceLost if the device is lost, DoesNotFit if it has no memory left: wgpu reports both in its texts."""
    try:
        yield
    except GPUError as error:
        if "lost" in str(error):
            raise device_lost() from error
        if "memory" in str(error):
            raise DoesNotFit("the device has no memory left", REMEDY_MEMORY) from error
        raise


def last_line(error: Exception) -> str:
    """wgpu's texts begin with the call and end with the cause."""
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)


def first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
