"""Finds the adapters of this machine and selects one."""

import ctypes
import os
import sys
import tempfile
from collections.abc import Sequence

from llamagpu.errors import BadArgument, NoAdapter
from llamagpu.gpu.caps import Library, below_minimum
from llamagpu.gpu.webgpu import Adapter

ADAPTER_TYPES = ("DiscreteGPU", "IntegratedGPU", "VirtualGPU", "Unknown", "CPU")  # in order of preference
BACKENDS = ("Metal", "Vulkan", "D3D12")  # preferred to OpenGL
REMEDY_NO_ADAPTER = (
    "install a Vulkan driver: your GPU vendor's, or Mesa's software one (apt-get install mesa-vulkan-drivers)"
)


def list_adapters(library: Library = Library.WGPU) -> list[Adapter]:
    """All adapters of wgpu or Dawn, in order of preference."""
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())  # Mesa complains on stderr without one
    return sorted(_all_adapters(library), key=_preference)


def _all_adapters(library: Library) -> Sequence[Adapter]:
    if library is Library.DAWN:
        from llamagpu.gpu.dawn import dawn_adapters, library_path

        return dawn_adapters(library_path())
    from llamagpu.gpu.wgpu_native import wgpu_adapters

    return wgpu_adapters()


def choose_adapter(wanted: str | None) -> Adapter:
    """The adapter that LLAMAGPU_BACKEND and `wanted` name."""
    library = Library.DAWN if wanted_library() is Library.DAWN else Library.WGPU
    return select_adapter(list_adapters(library), wanted)


def wanted_library() -> Library:
    wanted = os.environ.get("LLAMAGPU_BACKEND", Library.AUTO)
    if wanted not in list(Library):
        raise BadArgument(f"LLAMAGPU_BACKEND is {wanted!r}", f"choose {', '.join(Library)}")
    return Library(wanted)


def _preference(adapter: Adapter) -> tuple[bool, bool, int]:
    adapter_type = adapter.info["adapter_type"]
    known = adapter_type if adapter_type in ADAPTER_TYPES else "Unknown"
    other = adapter.info["backend_type"] not in BACKENDS
    return bool(below_minimum(adapter.limits)), other, ADAPTER_TYPES.index(known)


def select_adapter(found: list[Adapter], wanted: str | None) -> Adapter:
    """The first adapter, or the one that `wanted` names: its number in `llamagpu devices`, or part of its name."""
    if not found:
        raise NoAdapter(f"no WebGPU adapter was found{missing_vulkan()}", REMEDY_NO_ADAPTER)
    if wanted is None:
        return found[0]
    if wanted.isdigit() and int(wanted) < len(found):
        return found[int(wanted)]
    matches = [adapter for adapter in found if wanted.lower() in adapter.info["device"].lower()]
    if not matches or wanted.isdigit():
        names = ", ".join(f"{i}: {adapter.info['device']}" for i, adapter in enumerate(found))
        raise NoAdapter(f"no adapter matches {wanted!r}", f"choose one of {names}")
    return matches[0]


def missing_vulkan() -> str:
    """What is missing for Vulkan, if that can be found out."""
    if sys.platform != "linux":
        return ""
    try:
        ctypes.CDLL("libvulkan.so.1")
    except OSError:
        return ": there is no Vulkan loader (libvulkan.so.1)"
    return ": the Vulkan loader finds no driver that works"
