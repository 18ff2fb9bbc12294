"""The memory that a model needs, and the memory that the device may use."""

import os
from dataclasses import dataclass

from llamagpu.engine.weights import Weights, in_order
from llamagpu.errors import BadArgument
from llamagpu.gpu.buffers import nbytes
from llamagpu.gpu.device import Gpu

KERNEL_BYTES = 96 << 20  # that a software adapter has compiled after a first text


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose. engine/load.py computes them with the code that allocates."""

    weights: int
    cache: int  # keys and values of `context` positions, and their RoPE table
    scratch: int
    context: int
    loading: int = 0  # on a software adapter, whose memory is the machine's: while the weights are converted

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.scratch

    @property
    def peak(self) -> int:
        return self.total + self.loading

    def lines(self) -> list[str]:
        rows = [
            ("weights", self.weights),
            (f"KV cache ({self.context})", self.cache),
            ("scratch", self.scratch),
            ("total", self.total),
        ]
        if self.loading:
            rows.append(("while it loads", self.peak))
        return [f"{name:<20}{size / 2**20:10.1f} MiB" for name, size in rows]


def loading_bytes(weights: Weights) -> int:
    """Besides the weights: the largest matrix as it is in the file and as it is uploaded; later, compiled kernels.

    Measured: 1.5 to 1.6 times the largest matrix.
    """
    largest = max(sum(nbytes(shard.words) for shard in matrix.shards) for matrix in in_order(weights))
    return max(7 * largest // 4, KERNEL_BYTES)


def memory_limit(gpu: Gpu) -> int:
    """Bytes that the device may use; 0 if that is unknown.

    WebGPU does not report the memory of a GPU. A software adapter uses the machine's: what is available, and what the
    device holds already. LLAMAGPU_MAX_MEMORY (MiB) sets the limit.
    """
    wanted = os.environ.get("LLAMAGPU_MAX_MEMORY")
    if wanted:
        if not wanted.isdecimal():
            raise BadArgument(f"LLAMAGPU_MAX_MEMORY is {wanted!r}", "it takes a whole number of MiB")
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
