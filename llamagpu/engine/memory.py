"""The memory that a model needs, and the memory that the device may use."""

import os
from dataclasses import dataclass

from llamagpu.errors import LlamaGpuError
from llamagpu.gpu.device import Gpu


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose. engine/load.py computes them with the code that allocates."""

    weights: int
    cache: int  # keys and values of `context` positions, and their RoPE table
    scratch: int
    context: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.scratch

    def lines(self) -> list[str]:
        rows = (
            ("weights", self.weights),
            (f"KV cache ({self.context})", self.cache),
            ("scratch", self.scratch),
            ("total", self.total),
        )
        return [f"{name:<20}{size / 2**20:10.1f} MiB" for name, size in rows]


def memory_limit(gpu: Gpu) -> int:
    """Bytes that the device may use; 0 if that is unknown.

    WebGPU does not report the memory of a GPU. A software adapter uses the machine's: what is available, and what the
    device holds already. LLAMAGPU_MAX_MEMORY (MiB) sets the limit.
    """
    wanted = os.environ.get("LLAMAGPU_MAX_MEMORY")
    if wanted:
        if not wanted.isdigit():
            raise LlamaGpuError(f"LLAMAGPU_MAX_MEMORY is {wanted!r}", "it takes a whole number of MiB")
        return int(wanted) << 20
    available = available_host_bytes() if gpu.software else 0
    return available + gpu.allocated_bytes if available else 0


def available_host_bytes() -> int:
    """Available memory on Linux; 0 elsewhere."""
    try:
        with open("/proc/meminfo") as lines:
            fields = {line.split(":")[0]: line.split()[1] for line in lines}
        return int(fields["MemAvailable"]) << 10
    except (OSError, LookupError, ValueError):
        return 0
