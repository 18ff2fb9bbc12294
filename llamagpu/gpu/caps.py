"""Capabilities of an adapter: the features and limits that this package requests, and the facts that routes read."""

import os
from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from llamagpu.errors import BadArgument

NVIDIA = 0x10DE  # vendor id


class Library(StrEnum):
    """The implementation of WebGPU: `--backend`."""

    AUTO = "auto"
    WGPU = "wgpu"
    DAWN = "dawn"


Grid = tuple[int, int, int]  # workgroups of a dispatch

FEATURES = (
    "subgroup",
    "shader-f16",
    "timestamp-query",
    "timestamp-query-inside-passes",
    "memory-decoration-coherent",
    "subgroup-matrix",
)
# The limits that every WebGPU implementation guarantees. LLAMAGPU_MINIMUM_LIMITS=1 requests no more than these and no
# feature, for tests.
MINIMUM_LIMITS = {
    "max-storage-buffer-binding-size": 128 << 20,
    "max-buffer-size": 256 << 20,
    "max-compute-workgroup-storage-size": 16384,
    "max-compute-invocations-per-workgroup": 256,
    "max-compute-workgroup-size-x": 256,
    "max-storage-buffers-per-shader-stage": 8,
    "max-compute-workgroups-per-dimension": 65535,
    "max-texture-dimension-2d": 8192,
}
KERNEL_LIMITS = (  # no kernel is planned with less; the others are planned around
    "max-compute-workgroup-storage-size",
    "max-compute-invocations-per-workgroup",
    "max-compute-workgroup-size-x",
    "max-storage-buffers-per-shader-stage",
)


# f16 subgroup matrices with f32 sums that kernels use: M, N and K by their names in kernels/parts. The best is first.
MATRICES = {"16x16": (16, 16, 16), "16x8": (16, 8, 16), "8x8": (8, 8, 8)}


@dataclass(frozen=True, slots=True)
class Caps:
    """The facts about an open device that decide which kernels run."""

    cpu: bool  # a software adapter
    native_f16: bool  # converts f16 to f32 exactly, subnormals included
    subgroup: int  # lanes of a subgroup; 0: no subgroups
    workgroups: int  # per dimension of a dispatch
    binding_bytes: int  # of one storage binding, never more than a buffer
    shared_bytes: int  # workgroup memory
    invocations: int = 256  # of one workgroup
    storage_buffers: int = 8  # of one kernel
    texture_side: int = 8192  # texels of a storage texture, in both directions
    scalar: bool = False  # LLAMAGPU_SCALAR=1: take the kernels for every shape, as a baseline
    shader_f16: bool = False  # computes in f16
    coherent: bool = False  # has buffers whose stores the workgroups of a dispatch see of each other
    measured_barrier: bool = False  # measured: fused decode without fences; subgroups store and load in order
    fuses_all: bool = False  # LLAMAGPU_FUSED=1: also what is known to be faster unfused
    compares_fused: bool = False  # fused decode is compared with unfused before it is used
    grid_barrier: bool = False  # workgroups of one dispatch may wait for each other
    tint: bool = False  # Dawn's compiler: its barriers must be seen to be uniform, and none is for all workgroups
    matrix: str = ""  # the best of MATRICES that it has; empty: none
    half_sums: bool = False  # measured: it has 16 x 16 matrices with f16 sums, too

    @property
    def matrices(self) -> bool:
        """Whether there are kernels for its matrices."""
        return self.matrix != "" and self.subgroup == 32


def requested_features(offered: Set[str]) -> list[str]:
    return [] if minimum_limits_only() else [feature for feature in FEATURES if feature in offered]


def requested_limits(offered: Mapping[str, int]) -> dict[str, int]:
    return dict(MINIMUM_LIMITS) if minimum_limits_only() else {name: offered[name] for name in MINIMUM_LIMITS}


def below_minimum(offered: Mapping[str, int]) -> str:
    """Why the kernels cannot run with these limits; empty if they can."""
    short = (name for name in KERNEL_LIMITS if offered[name] < MINIMUM_LIMITS[name])
    return "; ".join(f"{name} is {offered[name]}, and kernels need {MINIMUM_LIMITS[name]}" for name in short)


def minimum_limits_only() -> bool:
    return os.environ.get("LLAMAGPU_MINIMUM_LIMITS") == "1"


def barrier_is_measured(info: Mapping[str, Any]) -> bool:
    """NVIDIA's Vulkan driver: thousands of tokens of several models equalled unfused decode's on an H200, by wgpu and
    by Dawn."""
    return (info["backend_type"], info["vendor_id"]) == ("Vulkan", NVIDIA)


def grid_barrier_allowed(info: Mapping[str, Any], coherent: bool) -> bool:
    """Whether workgroups of one dispatch may wait for each other.

    WebGPU promises neither that they run at the same time nor that they see each other's stores. NVIDIA's Vulkan driver
    does both, as measured. On other GPUs with coherent buffers a model compares before it relies on it
    (engine/fused_check.py). LLAMAGPU_FUSED=0 disables it, 1 lets it be tried on any adapter.
    """
    wanted = os.environ.get("LLAMAGPU_FUSED", "")
    if wanted not in ("", "0", "1"):
        raise BadArgument(f"LLAMAGPU_FUSED is {wanted!r}", "it takes 0 (unfused decode) or 1 (tried on any adapter)")
    vulkan_gpu = info["adapter_type"] != "CPU" and info["backend_type"] == "Vulkan"
    return wanted == "1" or (wanted != "0" and (barrier_is_measured(info) or (vulkan_gpu and coherent)))
