"""Orders adapters and selects one."""

import ctypes
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from llamagpu.errors import NoAdapter
from llamagpu.gpu.caps import Library, below_minimum
from llamagpu.gpu.webgpu import Adapter

ADAPTER_TYPES = ("DiscreteGPU", "IntegratedGPU", "VirtualGPU", "Unknown", "CPU")  # in order of preference
BACKENDS = ("Metal", "Vulkan", "D3D12")  # preferred to OpenGL
REMEDY_NO_ADAPTER = (
    "install a Vulkan driver: your GPU vendor's, or Mesa's software one (apt-get install mesa-vulkan-drivers)"
)


def in_order(found: Sequence[Adapter]) -> list[Adapter]:
    """The adapters in order of preference."""
    return sorted(found, key=_preference)


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


def identity(info: Mapping[str, Any]) -> str:
    """What is remembered of an adapter is kept by it: another driver or implementation of WebGPU has another."""
    parts = (info["device"], info["backend_type"], info["description"])
    return "|".join(map(str, parts if info["library"] == Library.WGPU else (*parts, info["library"], info["version"])))


def missing_vulkan() -> str:
    """What is missing for Vulkan, if that can be found out."""
    if sys.platform != "linux":
        return ""
    try:
        ctypes.CDLL("libvulkan.so.1")
    except OSError:
        return ": there is no Vulkan loader (libvulkan.so.1)"
    return ": the Vulkan loader finds no driver that works"
