"""Finds the adapters of this machine and selects one."""

import contextlib
import ctypes
import logging
import os
import re
import sys
import tempfile
from typing import Any

import wgpu

from llamagpu.errors import NoAdapter
from llamagpu.gpu.caps import below_minimum

ADAPTER_TYPES = ("DiscreteGPU", "IntegratedGPU", "VirtualGPU", "Unknown", "CPU")  # in order of preference
BACKENDS = ("Metal", "Vulkan", "D3D12")  # preferred to OpenGL
REMEDY_NO_ADAPTER = (
    "install a Vulkan driver: your GPU vendor's, or Mesa's software one (apt-get install mesa-vulkan-drivers)"
)


def list_adapters() -> list[Any]:
    """All adapters, in order of preference. OpenGL's only with LLAMAGPU_OPENGL=1, for tests: it logs to stderr."""
    from wgpu.backends.wgpu_native.extras import set_instance_extras

    speed_up_cffi_parser()
    logging.getLogger("wgpu").setLevel(logging.ERROR)  # naga and the drivers log advice for developers
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())  # Mesa complains on stderr without one
    with contextlib.suppress(RuntimeError):  # one instance per process; this is not the first call
        opengl = os.environ.get("LLAMAGPU_OPENGL") == "1"
        set_instance_extras(backends=("GL",) if opengl else ("Vulkan", "Metal", "DX12"))
    return sorted(wgpu.gpu.enumerate_adapters_sync(), key=_preference)


def _preference(adapter: Any) -> tuple[bool, bool, int]:
    adapter_type = adapter.info["adapter_type"]
    known = adapter_type if adapter_type in ADAPTER_TYPES else "Unknown"
    other = adapter.info["backend_type"] not in BACKENDS
    return bool(below_minimum(adapter.limits)), other, ADAPTER_TYPES.index(known)


def select_adapter(found: list[Any], wanted: str | None) -> Any:
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


def speed_up_cffi_parser() -> None:
    """Make wgpu-py start 1.2 s sooner.

    wgpu-py names C types in strings. cffi parses each string after declarations of all 432 type names that it knows,
    25 ms a time. Its parser needs only the names that appear in the string.
    """
    from wgpu.backends.wgpu_native import ffi

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
