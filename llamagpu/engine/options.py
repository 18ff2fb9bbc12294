"""The options for opening a model, and the settings that follow from them on one adapter."""

from dataclasses import dataclass
from enum import StrEnum

from llamagpu.errors import BadArgument


class Precision(StrEnum):
    FAST = "fast"  # activations of quantised linears in int8
    HIGH = "high"  # activations in f32


class KvType(StrEnum):
    F16 = "f16"
    F32 = "f32"
    Q8_0 = "q8_0"  # int8, with an f16 scale for every 32 dimensions of a head

    def planes(self, head_dim: int) -> tuple[int, ...]:
        """Bytes of a cell of one KV head in each plane of a page: numbers, and scales in whole words."""
        if self is KvType.Q8_0:
            return head_dim, 4 * -(-head_dim // 64)
        return (head_dim * (4 if self is KvType.F32 else 2),)

    def head_bytes(self, head_dim: int) -> int:
        """Keys, or values, of one position and KV head."""
        return sum(self.planes(head_dim))


class Backend(StrEnum):
    BUFFERS = "buffers"
    TEXTURES = "textures"  # CPU adapters, which read textures far faster than buffers


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to open a model. None lets the adapter, or the model, decide."""

    device: str | None = None  # number or part of the name of an adapter, as in `llamagpu devices`
    context: int | None = None  # most positions of a sequence; None: what the KV cache holds, up to the model's context
    chunk: int | None = None  # most token rows of one step
    kv_type: KvType | None = None
    precision: Precision | None = None
    backend: Backend | None = None
    parallel: int = 1  # sequences that a step may have
    kv_positions: int | None = None  # of all sequences together, in place of kv_memory
    kv_sequences: int = 1  # of full context that the KV cache holds, as far as its default memory goes
    kv_memory: int | None = None  # MiB of the KV cache in all; None: of one sequence of `context`, or a default

    def __post_init__(self) -> None:
        for name, values in (("kv_type", KvType), ("precision", Precision), ("backend", Backend)):
            value = getattr(self, name)
            if value is None:
                continue
            if value not in list(values):
                raise BadArgument(f"{name} is {value!r}", f"choose {' or '.join(values)}")
            object.__setattr__(self, name, values(value))  # accepts a string too


@dataclass(frozen=True, slots=True)
class Settings:
    """The options, resolved for one model on one adapter."""

    precision: Precision
    kv_type: KvType
    backend: Backend
    chunk: int  # most token rows of one step
    context: int  # most positions of a sequence
    capacity: int  # positions that the KV cache holds, of all sequences together
    slots: int = 1  # sequences that a step may have
