"""Dawn, the other implementation of WebGPU: it has subgroup matrices, which wgpu cannot enable.

The declarations are those of Dawn in October 2026, as in the npm package webgpu 0.6.2. Dawn's webgpu.h has kept them
since October 2025, except MatrixConfig, whose last two fields litert-lm-api 0.18.1 does not have (matrix_kinds). Only
what is used is declared. The objects have the methods and attributes of wgpu-py's that this package uses.
"""

import ctypes
import hashlib
import importlib.util
import os
import re
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from cffi import FFI
from numpy.typing import NDArray

from llamagpu.errors import NoAdapter
from llamagpu.gpu.caps import MATRICES, Library
from llamagpu.gpu.guard import device_lost, ending
from llamagpu.gpu.webgpu import (
    GPUError,
    GPUOutOfMemoryError,
    GPUValidationError,
    Launch,
    LaunchFunctions,
    quiet_mesa,
    records_safely,
)

ffi = FFI()
ffi.cdef("""
typedef void *H;
typedef struct { const char *data; size_t length; } Text;
typedef struct Chain { void *next; uint32_t type; } Chain;
typedef struct { Chain chain; size_t on_count; char **on; size_t off_count; char **off; } Toggles;
typedef struct { void *next; size_t feature_count; uint32_t *features; void *limits; } InstanceDescriptor;
typedef struct { void *next; uint32_t level, power, fallback, backend; H surface; } AdapterOptions;
typedef struct { size_t count; uint32_t *list; } Features;
typedef struct { uint32_t component, result, m, n, k, subgroup_min, subgroup_max; } MatrixConfig;
typedef struct { Chain chain; size_t count; MatrixConfig *list; } MatrixConfigs;
typedef struct {
  void *next; Text vendor, architecture, device, description;
  uint32_t backend_type, adapter_type, vendor_id, device_id, subgroup_min, subgroup_max;
} AdapterInfo;
typedef struct {
  void *next;
  uint32_t max_texture_dimension_1d, max_texture_dimension_2d, max_texture_dimension_3d, max_texture_array_layers,
    max_bind_groups, max_bind_groups_plus_vertex_buffers, max_bindings_per_bind_group,
    max_dynamic_uniform_buffers_per_pipeline_layout, max_dynamic_storage_buffers_per_pipeline_layout,
    max_sampled_textures_per_shader_stage, max_samplers_per_shader_stage, max_storage_buffers_per_shader_stage,
    max_storage_textures_per_shader_stage, max_uniform_buffers_per_shader_stage;
  uint64_t max_uniform_buffer_binding_size, max_storage_buffer_binding_size;
  uint32_t min_uniform_buffer_offset_alignment, min_storage_buffer_offset_alignment, max_vertex_buffers;
  uint64_t max_buffer_size;
  uint32_t max_vertex_attributes, max_vertex_buffer_array_stride, max_inter_stage_shader_variables,
    max_color_attachments, max_color_attachment_bytes_per_sample, max_compute_workgroup_storage_size,
    max_compute_invocations_per_workgroup, max_compute_workgroup_size_x, max_compute_workgroup_size_y,
    max_compute_workgroup_size_z, max_compute_workgroups_per_dimension, max_immediate_size;
} Limits;
typedef struct { uint64_t id; } Future;
typedef struct { Future future; uint32_t completed; } WaitInfo;
typedef struct { void *next; uint32_t mode; void (*call)(uint32_t, H, Text, void *, void *); void *user[2]; } OnObject;
typedef struct { void *next; uint32_t mode; void (*call)(uint32_t, Text, void *, void *); void *user[2]; } OnDone;
typedef struct { void *next; uint32_t mode; void (*call)(H *, uint32_t, Text, void *, void *); void *user[2]; } OnLost;
typedef struct { void *next; void (*call)(H *, uint32_t, Text, void *, void *); void *user[2]; } OnError;
typedef struct { void *next; Text label; } Label;
typedef struct {
  void *next; Text label; size_t feature_count; uint32_t *features; Limits *limits; Label queue; OnLost lost;
  OnError error;
} DeviceDescriptor;
typedef struct { void *next; Text label; uint64_t usage, size; uint32_t mapped; } BufferDescriptor;
typedef struct { uint32_t x, y, z; } Size;
typedef struct {
  void *next; Text label; uint64_t usage; uint32_t dimension; Size size; uint32_t format, levels, samples;
  size_t format_count; uint32_t *formats;
} TextureDescriptor;
typedef struct { H texture; uint32_t level; Size origin; uint32_t aspect; } TexturePlace;
typedef struct { uint64_t offset; uint32_t row_bytes, rows; } TexelLayout;
typedef struct { TexelLayout layout; H buffer; } BufferPlace;
typedef struct { Chain chain; Text code; } SourceWGSL;
typedef struct { void *next; H module; Text entry; size_t constant_count; void *constants; } Compute;
typedef struct { void *next; Text label; H layout; Compute compute; } PipelineDescriptor;
typedef struct { void *next; uint32_t binding; H buffer; uint64_t offset, size; H sampler, texture; } Entry;
typedef struct { void *next; Text label; H layout; size_t count; Entry *entries; } BindGroupDescriptor;
typedef struct { void *next; H queries; uint32_t begin, end; } PassTimestamps;
typedef struct { void *next; Text label; PassTimestamps *timestamps; } PassDescriptor;
typedef struct { void *next; Text label; uint32_t type, count; } QuerySetDescriptor;
typedef struct {
  H (*CreateInstance)(InstanceDescriptor *);
  Future (*InstanceRequestAdapter)(H, AdapterOptions *, OnObject);
  uint32_t (*InstanceWaitAny)(H, size_t, WaitInfo *, uint64_t);
  void (*AdapterGetFeatures)(H, Features *);
  uint32_t (*AdapterGetInfo)(H, AdapterInfo *);
  uint32_t (*AdapterGetLimits)(H, Limits *);
  Future (*AdapterRequestDevice)(H, DeviceDescriptor *, OnObject);
  H (*DeviceGetQueue)(H);
  H (*DeviceCreateBuffer)(H, BufferDescriptor *);
  H (*DeviceCreateTexture)(H, TextureDescriptor *);
  H (*TextureCreateView)(H, void *);
  H (*DeviceCreateShaderModule)(H, Label *);
  H (*DeviceCreateComputePipeline)(H, PipelineDescriptor *);
  H (*DeviceCreateBindGroup)(H, BindGroupDescriptor *);
  H (*DeviceCreateCommandEncoder)(H, Label *);
  H (*DeviceCreateQuerySet)(H, QuerySetDescriptor *);
  void (*DeviceDestroy)(H);
  H (*ComputePipelineGetBindGroupLayout)(H, uint32_t);
  H (*CommandEncoderBeginComputePass)(H, PassDescriptor *);
  void (*CommandEncoderCopyBufferToBuffer)(H, H, uint64_t, H, uint64_t, uint64_t);
  void (*CommandEncoderCopyTextureToBuffer)(H, TexturePlace *, BufferPlace *, Size *);
  void (*CommandEncoderCopyTextureToTexture)(H, TexturePlace *, TexturePlace *, Size *);
  void (*CommandEncoderClearBuffer)(H, H, uint64_t, uint64_t);
  void (*CommandEncoderResolveQuerySet)(H, H, uint32_t, uint32_t, H, uint64_t);
  H (*CommandEncoderFinish)(H, Label *);
  void (*ComputePassEncoderSetPipeline)(H, H);
  void (*ComputePassEncoderSetBindGroup)(H, uint32_t, H, size_t, uint32_t *);
  void (*ComputePassEncoderDispatchWorkgroups)(H, uint32_t, uint32_t, uint32_t);
  void (*ComputePassEncoderWriteTimestamp)(H, H, uint32_t);
  void (*ComputePassEncoderEnd)(H);
  void (*QueueSubmit)(H, size_t, H *);
  void (*QueueWriteBuffer)(H, H, uint64_t, void *, size_t);
  void (*QueueWriteTexture)(H, TexturePlace *, void *, size_t, TexelLayout *, Size *);
  Future (*QueueOnSubmittedWorkDone)(H, OnDone);
  Future (*BufferMapAsync)(H, uint64_t, size_t, size_t, OnDone);
  void *(*BufferGetConstMappedRange)(H, size_t, size_t);
  void (*BufferUnmap)(H);
  void (*BufferDestroy)(H);
  void (*TextureDestroy)(H);
  void (*DeviceRelease)(H);
  void (*QueueRelease)(H);
  void (*BufferRelease)(H);
  void (*TextureRelease)(H);
  void (*TextureViewRelease)(H);
  void (*ShaderModuleRelease)(H);
  void (*ComputePipelineRelease)(H);
  void (*BindGroupLayoutRelease)(H);
  void (*BindGroupRelease)(H);
  void (*QuerySetRelease)(H);
  void (*CommandEncoderRelease)(H);
  void (*ComputePassEncoderRelease)(H);
  void (*CommandBufferRelease)(H);
} Functions;
""")

FEATURES = {  # numbers, by wgpu's names
    "subgroup": 0x12,
    "shader-f16": 0xB,
    "timestamp-query": 0x9,
    "timestamp-query-inside-passes": 0x50003,
    "subgroup-matrix": 0x50034,
}
SYNCHRONIZED = 0x50004  # implicit device synchronization: several threads use a device
CHAINED_TOGGLES, CHAINED_MATRICES, CHAINED_WGSL = 0x5000A, 0x5003B, 2
NULL_BACKEND = 1  # compiles, and runs nothing
BACKEND_NUMBERS = {"Null": NULL_BACKEND, "D3D12": 4, "Metal": 5, "Vulkan": 6}
PLATFORM_BACKEND = {"darwin": BACKEND_NUMBERS["Metal"], "win32": BACKEND_NUMBERS["D3D12"]}
ADAPTER_TYPES = {1: "DiscreteGPU", 2: "IntegratedGPU", 3: "CPU"}
F32, F16 = 1, 2  # component types of matrices
INSTANCE_TOGGLES = ("allow_unsafe_apis", "vulkan_enable_f16_on_nvidia", "use_vulkan_memory_model")
DIMENSION_2D, ASPECT_ALL = 2, 1
TEXTURE_FORMATS = {"rgba32float": 0x29, "rgba32uint": 0x2A}
WAIT_ANY_ONLY, SPONTANEOUS = 1, 3  # when a callback is called
SUCCESS, TIMED_OUT = 1, 2
OUT_OF_MEMORY = 3
WAIT_NS = 10**9
WHOLE = 2**64 - 1
REMEDY_LIBRARY = "pip install 'llamagpu[dawn]', or set LLAMAGPU_DAWN to a library"
# What Tint must be told and naga does not parse
SUBGROUPS = re.compile(r"\bsubgroup(_size|_id|_invocation_id|_matrix|[A-Z])")
COMMENT = re.compile(r"//.*")


# The library


def library_path() -> Path:
    """LLAMAGPU_DAWN, or the library of the package litert-lm-api."""
    given = os.environ.get("LLAMAGPU_DAWN")
    if given:
        path = Path(given).expanduser()
        if not path.is_file():
            raise NoAdapter(f"LLAMAGPU_DAWN: there is no file {path}", REMEDY_LIBRARY)
        return path
    package = importlib.util.find_spec("litert_lm")
    folder = Path(package.origin).parent if package and package.origin else None
    for name in ("liblitert-lm.so", "liblitert-lm.dylib"):
        if folder and (folder / name).is_file():
            return folder / name
    raise NoAdapter("no library of Dawn is installed", REMEDY_LIBRARY)


@cache
def library_digest(path: Path) -> str:
    """By the size and the first MiB, which has the build's id: all 130 MB would take a tenth of a second."""
    try:
        with path.open("rb") as file:
            start = file.read(1 << 20)
    except OSError as error:
        raise NoAdapter(f"Dawn ({path}) is not used: {error.strerror}", REMEDY_LIBRARY) from error
    facts = f"{path.stat().st_size}{path.suffix}"  # by which it is loaded, see find_functions
    return hashlib.blake2b(start + facts.encode(), digest_size=8).hexdigest()


@cache
def load_functions(path: Path) -> SimpleNamespace:
    """Dawn's functions, by their names without "wgpu"."""
    try:
        find = find_functions(path)
        members = ffi.typeof("Functions").fields
        return SimpleNamespace(**{name: ffi.cast(member.type, find("wgpu" + name)) for name, member in members})
    except (OSError, AttributeError, KeyError, struct.error) as error:
        raise NoAdapter(f"it has not the functions of Dawn ({error})", REMEDY_LIBRARY) from error


def find_functions(path: Path) -> Any:
    """A function that gives the address of a C function.

    The npm package's dawn.node keeps its functions as local symbols, found in the symbol table, and wants Node's
    functions, which are never called: a copy of it may do without.
    """
    if path.suffix != ".node":
        library = ctypes.CDLL(str(path))
        return lambda name: _address(getattr(library, name))
    data = bytearray(path.read_bytes())
    for at, name, section, _ in elf_symbols(data, 11):
        if not section and name.startswith("napi_"):
            data[at + 4] = 2 << 4 | data[at + 4] & 15  # weak
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(data)
        file.flush()
        library = ctypes.CDLL(file.name)
    places = {name: value for _, name, section, value in elf_symbols(data, 2) if section}
    base = _address(library.napi_register_module_v1) - places["napi_register_module_v1"]
    procs = ctypes.CFUNCTYPE(ctypes.c_void_p)(base + places["_ZN4dawn6native8GetProcsEv"])()
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(base + places["dawnProcSetProcs"])(procs)
    return lambda name: base + places[name]


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def elf_symbols(data: bytearray, table: int) -> Iterator[tuple[int, str, int, int]]:
    """(offset, name, section, value) of the symbols of an ELF file: table 2, or 11 of the dynamic ones."""
    (at,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    heads = [struct.unpack_from("<IIQQQQIIQQ", data, at + i * size) for i in range(count)]
    for _, kind, _, _, first, length, strings, *_ in heads:
        if kind != table:
            continue
        names = heads[strings][4]
        for i, (name, _, _, section, value, _) in enumerate(
            struct.iter_unpack("<IBBHQQ", data[first : first + length])
        ):
            end = data.index(b"\0", names + name)
            yield first + 24 * i, data[names + name : end].decode(), section, value


# Callbacks. Their first user value is the handle of a Python object.


@ffi.callback("void(uint32_t, H, Text, void *, void *)")  # type: ignore[untyped-decorator]
def on_object(status: int, handle: Any, message: Any, found: Any, _: Any) -> None:
    ffi.from_handle(found).append((handle, to_string(message)))


@ffi.callback("void(uint32_t, Text, void *, void *)")  # type: ignore[untyped-decorator]
def on_done(status: int, message: Any, found: Any, _: Any) -> None:
    ffi.from_handle(found).append(status)


@ffi.callback("void(H *, uint32_t, Text, void *, void *)")  # type: ignore[untyped-decorator]
def on_lost(device: Any, reason: int, message: Any, faults: Any, _: Any) -> None:
    ffi.from_handle(faults).lost.set()


@ffi.callback("void(H *, uint32_t, Text, void *, void *)")  # type: ignore[untyped-decorator]
def on_error(device: Any, kind: int, message: Any, faults: Any, _: Any) -> None:
    """Dawn calls it in the thread of the call that failed, before the call returns."""
    ffi.from_handle(faults).errors.setdefault(threading.get_ident(), []).append((kind, to_string(message)))


def to_string(text: Any) -> str:
    return ffi.unpack(text.data, text.length).decode(errors="replace") if text.data else ""


def to_text(string: str) -> tuple[Any, Any]:
    """A Text, and what must live as long."""
    code = ffi.new("char[]", string.encode())
    return (code, len(code) - 1), code


def toggles(on: Sequence[str], off: Sequence[str] = ()) -> tuple[Any, Any]:
    """Chained toggles, and what must live as long."""
    texts = [[ffi.new("char[]", name.encode()) for name in names] for names in (on, off)]
    lists = [ffi.new("char *[]", names) for names in texts]
    found = ffi.new("Toggles *", ((ffi.NULL, CHAINED_TOGGLES), len(on), lists[0], len(off), lists[1]))
    return found, (texts, lists)


# Adapters


class Instance:
    """Dawn in one library; it lives until the process ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.functions = load_functions(path)
        self.toggles, self.kept = toggles(INSTANCE_TOGGLES)
        timed = ffi.new("uint32_t *", 1)  # waits with a timeout
        self.handle = self.functions.CreateInstance(ffi.new("InstanceDescriptor *", (self.toggles, 1, timed, ffi.NULL)))

    def wait(self, future: Any, block: bool = True) -> None:
        info = ffi.new("WaitInfo *", (future, 0))
        while (status := self.functions.InstanceWaitAny(self.handle, 1, info, WAIT_NS if block else 0)) == TIMED_OUT:
            if not block:
                time.sleep(5e-5)
        if status != SUCCESS:
            raise GPUError("Dawn cannot wait: the device is lost")

    def request(self, function: Any, *arguments: Any) -> tuple[Any, str]:
        """The adapter or device that the function gives, NULL if there is none, and a message."""
        found: list[tuple[Any, str]] = []
        handle = ffi.new_handle(found)
        self.wait(function(*arguments, (ffi.NULL, WAIT_ANY_ONLY, on_object, [handle])))
        return found[0]

    def adapter(self, power: int, fallback: bool, backend: int) -> "DawnAdapter | None":
        options = ffi.new("AdapterOptions *", (self.toggles, 2, power, fallback, backend, ffi.NULL))
        handle, _ = self.request(self.functions.InstanceRequestAdapter, self.handle, options)
        return DawnAdapter(self, handle) if handle else None


instance = cache(Instance)


def dawn_adapters(path: Path, backend: int | None = None) -> list["DawnAdapter"]:
    """Dawn's C functions list no adapters: those that it gives for high and low power, and a software one."""
    quiet_mesa()
    number = PLATFORM_BACKEND.get(sys.platform, BACKEND_NUMBERS["Vulkan"]) if backend is None else backend
    wanted = ((2, False), (1, False), (2, True))
    found = [instance(path).adapter(power, fallback, number) for power, fallback in wanted]
    return list({(a.info["vendor_id"], a.info["device_id"], a.info["device"]): a for a in found if a}.values())


class DawnAdapter:
    def __init__(self, instance: Instance, handle: Any) -> None:
        self.instance, self.handle, functions = instance, handle, instance.functions
        offered, info, limits = ffi.new("Features *"), ffi.new("AdapterInfo *"), ffi.new("Limits *")
        functions.AdapterGetFeatures(handle, offered)
        numbers = {offered.list[i] for i in range(offered.count)}
        self.features = {name for name, number in FEATURES.items() if number in numbers}
        self.synchronized = SYNCHRONIZED in numbers
        configs = ffi.new("MatrixConfigs *", ((ffi.NULL, CHAINED_MATRICES),))
        info.next = configs if "subgroup-matrix" in self.features else ffi.NULL
        functions.AdapterGetInfo(handle, info)
        functions.AdapterGetLimits(handle, limits)
        names = [name for name, _ in ffi.typeof("Limits").fields[1:]]
        self.limits: dict[str, int] = {name.replace("_", "-"): getattr(limits, name) for name in names}
        kinds = matrix_kinds(configs)
        self.matrices = [name for name, sizes in MATRICES.items() if (F16, F32, *sizes) in kinds]
        self.half_sums = (F16, F16, *MATRICES["16x16"]) in kinds
        backends = {number: name for name, number in BACKEND_NUMBERS.items()}
        self.info: dict[str, Any] = {
            **{name: to_string(getattr(info, name)) for name in ("vendor", "architecture", "device", "description")},
            "backend_type": backends[info.backend_type],
            "adapter_type": ADAPTER_TYPES.get(info.adapter_type, "Unknown"),
            "vendor_id": info.vendor_id,
            "device_id": info.device_id,
            "library": Library.DAWN,
            "version": library_digest(instance.path),
        }

    def open(
        self, features: Sequence[str], limits: Mapping[str, int], unchecked: bool, lost: threading.Event
    ) -> "DawnNative":
        if not self.synchronized:
            raise GPUError("this Dawn does not let several threads use a device")
        wanted = ffi.new("Limits *")
        ffi.buffer(wanted)[:] = b"\xff" * ffi.sizeof("Limits")  # the default of each
        wanted.next = ffi.NULL
        textures = "max-storage-textures-per-shader-stage"  # 5 are used; wgpu does not count them
        for name, value in {textures: self.limits[textures], **limits}.items():
            setattr(wanted, name.replace("-", "_"), value)
        numbers = ffi.new("uint32_t[]", [SYNCHRONIZED, *(FEATURES[name] for name in features)])
        faults = Faults(lost)
        faults_handle = ffi.new_handle(faults)
        kept.append(faults_handle)
        on = ["disable_workgroup_init"]
        if unchecked:
            on += ["disable_robustness"]
            # of each recorded call: 4 rows of 1B took 919 us of the host for 684 of an H200, without 684
            on += [] if records_safely() else ["skip_validation"]
        chained, texts = toggles(on, ("timestamp_quantization",))
        descriptor = ffi.new("DeviceDescriptor *")
        descriptor.next, descriptor.limits = chained, wanted
        descriptor.feature_count, descriptor.features = len(numbers), numbers
        descriptor.lost = (ffi.NULL, SPONTANEOUS, on_lost, [faults_handle])
        descriptor.error = (ffi.NULL, on_error, [faults_handle])
        functions = self.instance.functions
        handle, message = self.instance.request(functions.AdapterRequestDevice, self.handle, descriptor)
        del texts
        if not handle:
            raise GPUError(message.partition("\n")[0])
        return DawnNative(self.instance, Device(functions, handle, faults))


def matrix_kinds(configs: Any) -> list[tuple[int, ...]]:
    """(component, result, M, N, K) of each configuration.

    Two subgroup sizes follow them in a Dawn newer than August 2026. In an older one, as in litert-lm-api 0.18.1, the
    next configuration does.
    """
    words = ffi.cast("uint32_t *", configs.list)
    found = [tuple(words[5 * i : 5 * i + 5]) for i in range(configs.count)]
    if all(0 < kind[0] <= 6 and 0 < kind[1] <= 6 for kind in found):
        return found
    return [tuple(words[7 * i : 7 * i + 5]) for i in range(configs.count)]


kept: list[Any] = []  # Dawn may call on_lost after the device is gone


# Objects, with wgpu-py's names


class Resource:
    """An object of Dawn's; it is released with this one. It keeps its device alive."""

    def __init__(self, device: "Device", kind: str, handle: Any, label: str = "") -> None:
        self.device, self.functions, self.label = device, device.functions, label
        self._internal, self._release = handle, getattr(device.functions, kind + "Release")

    def __del__(self, ending: threading.Event = ending) -> None:  # at the very end the module's names are None
        if not ending.is_set():
            self._release(self._internal)


class Faults:
    """What went wrong with a device."""

    def __init__(self, lost: threading.Event) -> None:
        self.lost = lost
        self.errors: dict[int, list[tuple[int, str]]] = {}  # kind and message, by thread

    def check(self) -> None:
        """Raise the error of the calls before this one in this thread. A lost device reports none."""
        errors = self.errors.pop(threading.get_ident(), None)
        if self.lost.is_set():
            raise GPUValidationError("the device is lost")
        if errors:
            kind, message = errors[0]
            raise GPUOutOfMemoryError("not enough memory") if kind == OUT_OF_MEMORY else GPUValidationError(message)


class Device:
    def __init__(self, functions: Any, handle: Any, faults: Faults) -> None:
        self.functions, self._internal, self.faults = functions, handle, faults
        self.queue = Queue(functions, functions.DeviceGetQueue(handle), faults)

    def __del__(self, ending: threading.Event = ending) -> None:  # at the very end the module's names are None
        if not ending.is_set():
            self.functions.QueueRelease(self.queue._internal)
            self.functions.DeviceRelease(self._internal)

    def destroy(self) -> None:
        self.functions.DeviceDestroy(self._internal)

    def _made(self, kind: str, handle: Any, label: str = "") -> Any:
        made = Resource(self, kind, handle, label)
        self.faults.check()
        return made

    def create_buffer(self, size: int, usage: int, label: str = "") -> "Buffer":
        text, keep = to_text(label)
        handle = self.functions.DeviceCreateBuffer(
            self._internal, ffi.new("BufferDescriptor *", (ffi.NULL, text, usage, size, False))
        )
        del keep
        if not handle:
            raise GPUOutOfMemoryError("not enough memory")
        buffer = Buffer(self, "Buffer", handle, label)
        buffer.size = size
        self.faults.check()
        return buffer

    def create_texture(self, size: tuple[int, int, int], format: str, usage: int, label: str = "") -> "Texture":
        text, keep = to_text(label)
        fields = (ffi.NULL, text, usage, DIMENSION_2D, size, TEXTURE_FORMATS[format], 1, 1, 0, ffi.NULL)
        handle = self.functions.DeviceCreateTexture(self._internal, ffi.new("TextureDescriptor *", fields))
        del keep
        texture = Texture(self, "Texture", handle, label)
        texture.width, texture.height, _ = size
        self.faults.check()
        return texture

    def create_shader_module(self, code: str, label: str = "") -> Any:
        source, keep_source = to_text(with_directives(code))
        text, keep = to_text(label)
        wgsl = ffi.new("SourceWGSL *", ((ffi.NULL, CHAINED_WGSL), source))
        handle = self.functions.DeviceCreateShaderModule(self._internal, ffi.new("Label *", (wgsl, text)))
        del keep, keep_source
        return self._made("ShaderModule", handle, label)

    def create_compute_pipeline(self, layout: str, compute: Mapping[str, Any], label: str = "") -> "Pipeline":
        text, keep = to_text(label)
        entry, keep_entry = to_text(compute["entry_point"])
        stage = (ffi.NULL, compute["module"]._internal, entry, 0, ffi.NULL)
        descriptor = ffi.new("PipelineDescriptor *", (ffi.NULL, text, ffi.NULL, stage))
        handle = self.functions.DeviceCreateComputePipeline(self._internal, descriptor)
        del keep, keep_entry
        pipeline = Pipeline(self, "ComputePipeline", handle, label)
        self.faults.check()
        return pipeline

    def create_bind_group(self, layout: Any, entries: Sequence[Mapping[str, Any]], label: str = "") -> Any:
        text, keep = to_text(label)
        listed = ffi.new("Entry[]", [bind_entry(**entry) for entry in entries])
        descriptor = ffi.new("BindGroupDescriptor *", (ffi.NULL, text, layout._internal, len(listed), listed))
        handle = self.functions.DeviceCreateBindGroup(self._internal, descriptor)
        del keep
        return self._made("BindGroup", handle, label)

    def create_query_set(self, type: str, count: int, label: str = "") -> Any:
        assert type == "timestamp"
        descriptor = ffi.new("QuerySetDescriptor *", (ffi.NULL, (ffi.NULL, 0), 2, count))
        return self._made("QuerySet", self.functions.DeviceCreateQuerySet(self._internal, descriptor), label)

    def create_command_encoder(self) -> "Encoder":
        return Encoder(self, "CommandEncoder", self.functions.DeviceCreateCommandEncoder(self._internal, ffi.NULL))


def bind_entry(binding: int, resource: Any) -> tuple[Any, ...]:
    if isinstance(resource, Resource):  # the view of a texture
        return ffi.NULL, binding, ffi.NULL, 0, WHOLE, ffi.NULL, resource._internal
    buffer, offset, size = resource["buffer"], resource.get("offset", 0), resource.get("size", WHOLE)
    return ffi.NULL, binding, buffer._internal, offset, size, ffi.NULL, ffi.NULL


def texture_place(given: Mapping[str, Any]) -> Any:
    return ffi.new("TexturePlace *", (given["texture"]._internal, 0, given["origin"], ASPECT_ALL))


def with_directives(source: str) -> str:
    """The kernel, with what Tint must be told and naga does not parse."""
    code = COMMENT.sub("", source)
    subgroups = "enable subgroups; " if SUBGROUPS.search(code) else ""
    matrices = "enable f16; enable chromium_experimental_subgroup_matrix; " if "subgroup_matrix" in code else ""
    return subgroups + matrices + source


class Buffer(Resource):
    size: int

    def destroy(self) -> None:
        self.functions.BufferDestroy(self._internal)


class Texture(Resource):
    width: int
    height: int

    def destroy(self) -> None:
        self.functions.TextureDestroy(self._internal)

    def create_view(self) -> Resource:
        return Resource(self.device, "TextureView", self.functions.TextureCreateView(self._internal, ffi.NULL))


class Pipeline(Resource):
    def get_bind_group_layout(self, index: int) -> Resource:
        handle = self.functions.ComputePipelineGetBindGroupLayout(self._internal, index)
        return Resource(self.device, "BindGroupLayout", handle)


class Encoder(Resource):
    """Its errors come with `finish`, where recorded calls are validated."""

    def copy_buffer_to_buffer(self, source: Buffer, start: int, target: Buffer, at: int, size: int) -> None:
        self.functions.CommandEncoderCopyBufferToBuffer(
            self._internal, source._internal, start, target._internal, at, size
        )

    def copy_texture_to_buffer(self, source: Any, target: Any, size: tuple[int, int, int]) -> None:
        place = ffi.new("BufferPlace *", ((0, target["bytes_per_row"], size[1]), target["buffer"]._internal))
        self.functions.CommandEncoderCopyTextureToBuffer(
            self._internal, texture_place(source), place, ffi.new("Size *", size)
        )

    def copy_texture_to_texture(self, source: Any, target: Any, size: tuple[int, int, int]) -> None:
        self.functions.CommandEncoderCopyTextureToTexture(
            self._internal, texture_place(source), texture_place(target), ffi.new("Size *", size)
        )

    def clear_buffer(self, buffer: Buffer, offset: int, size: int) -> None:
        self.functions.CommandEncoderClearBuffer(self._internal, buffer._internal, offset, size)

    def resolve_query_set(self, queries: Any, first: int, count: int, target: Buffer, offset: int) -> None:
        self.functions.CommandEncoderResolveQuerySet(
            self._internal, queries._internal, first, count, target._internal, offset
        )

    def begin_compute_pass(self, timestamp_writes: Mapping[str, Any] | None = None) -> "Pass":
        descriptor = ffi.NULL
        if timestamp_writes:
            queries, *indices = timestamp_writes.values()
            written = ffi.new("PassTimestamps *", (ffi.NULL, queries._internal, *indices))
            descriptor = ffi.new("PassDescriptor *", (ffi.NULL, (ffi.NULL, 0), written))
        handle = self.functions.CommandEncoderBeginComputePass(self._internal, descriptor)
        return Pass(self.device, "ComputePassEncoder", handle)

    def finish(self) -> Any:
        return self.device._made("CommandBuffer", self.functions.CommandEncoderFinish(self._internal, ffi.NULL))


class Pass(Resource):
    def set_pipeline(self, pipeline: Pipeline) -> None:
        self.functions.ComputePassEncoderSetPipeline(self._internal, pipeline._internal)

    def set_bind_group(self, index: int, group: Any) -> None:
        self.functions.ComputePassEncoderSetBindGroup(self._internal, index, group._internal, 0, ffi.NULL)

    def dispatch_workgroups(self, x: int, y: int = 1, z: int = 1) -> None:
        self.functions.ComputePassEncoderDispatchWorkgroups(self._internal, x, y, z)

    def end(self) -> None:
        self.functions.ComputePassEncoderEnd(self._internal)


class Queue:
    def __init__(self, functions: Any, handle: Any, faults: Faults) -> None:
        self.functions, self._internal, self.faults = functions, handle, faults

    def write_buffer(self, buffer: Buffer, offset: int, data: NDArray[Any]) -> None:
        self.functions.QueueWriteBuffer(self._internal, buffer._internal, offset, ffi.from_buffer(data), data.nbytes)
        self.faults.check()

    def write_texture(self, target: Any, data: NDArray[Any], layout: Any, size: tuple[int, int, int]) -> None:
        texels, extent = ffi.new("TexelLayout *", (0, layout["bytes_per_row"], size[1])), ffi.new("Size *", size)
        self.functions.QueueWriteTexture(
            self._internal, texture_place(target), ffi.from_buffer(data), data.nbytes, texels, extent
        )
        self.faults.check()

    def submit(self, commands: Sequence[Any]) -> None:
        handles = ffi.new("H[]", [command._internal for command in commands])
        self.functions.QueueSubmit(self._internal, len(commands), handles)
        self.faults.check()


class DawnNative:
    """What goes past wgpu-py's API."""

    def __init__(self, instance: Instance, device: Device) -> None:
        self.instance, self.functions, self.device = instance, instance.functions, device
        self.launch_functions = LaunchFunctions(
            self.functions.ComputePassEncoderSetPipeline,
            self.functions.ComputePassEncoderSetBindGroup,
            self.functions.ComputePassEncoderDispatchWorkgroups,
        )

    def create_module(self, source: str, label: str) -> Any:
        return self.device.create_shader_module(source, label)

    def record(self, work: Any, launches: Sequence[Launch]) -> None:
        self.launch_functions.record(work._internal, launches)

    def write_timestamp(self, work: Any, queries: Any, index: int) -> None:
        self.functions.ComputePassEncoderWriteTimestamp(work._internal, queries._internal, index)

    def timestamp_period(self) -> float:
        return 1.0  # Dawn converts ticks when it resolves them

    def submit(self, *commands: Any) -> None:
        self.device.queue.submit(commands)

    def wait_idle(self) -> None:
        self._finish(self.functions.QueueOnSubmittedWorkDone, self.device.queue._internal)

    def read_staging(self, staging: Any, index: Any, block: bool = True) -> NDArray[np.uint8]:
        """The bytes of a mappable buffer, once the submissions that use it have completed."""
        handle, size = staging._internal, staging.size
        self._finish(self.functions.BufferMapAsync, handle, 1, 0, size, block=block)
        mapped = ffi.buffer(self.functions.BufferGetConstMappedRange(handle, 0, size), size)
        data = np.frombuffer(mapped, np.uint8).copy()
        self.functions.BufferUnmap(handle)
        return data

    def _finish(self, function: Any, *arguments: Any, block: bool = True) -> None:
        """Call the function and wait for what it began."""
        statuses: list[int] = []
        handle = ffi.new_handle(statuses)
        self.instance.wait(function(*arguments, (ffi.NULL, WAIT_ANY_ONLY, on_done, [handle])), block)
        if statuses != [SUCCESS] or self.device.faults.lost.is_set():
            raise device_lost()
