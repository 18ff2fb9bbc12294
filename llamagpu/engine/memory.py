"""What a model will need on the device, computed before anything is allocated."""

import os
from dataclasses import dataclass
from math import prod

from llamagpu.engine.layers import handed_on, layer_stride
from llamagpu.engine.weights import joinable
from llamagpu.errors import DoesNotFit, LlamaGpuError
from llamagpu.files.config import LlamaConfig, used_shapes
from llamagpu.files.gguf_file import RawTensor
from llamagpu.files.packed_file import PackedTensors
from llamagpu.files.repack import FORMATS, row_bytes
from llamagpu.gpu import routes
from llamagpu.gpu.device import Gpu


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    weights: int
    cache: int  # keys and values of `context` positions
    scratch: int
    context: int
    position: int  # bytes of all this that each position of the context takes
    cache_layer: int  # a layer's keys or values

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

    def check(self, gpu: Gpu) -> None:
        """WebGPU does not tell how much memory a GPU has; a software adapter's is the machine's."""
        binding = gpu.caps.binding_bytes
        if self.cache_layer > binding:
            raise DoesNotFit(
                f"a context of {self.context} needs {self.cache_layer >> 20} MiB of cache per layer, "
                f"and a binding of this adapter holds {binding >> 20} MiB",
                f"use -c {self.context * binding // self.cache_layer} or less",
            )
        limit = memory_limit(gpu)
        if limit and self.total > limit:
            fits = self.context + (limit - self.total) // self.position
            raise DoesNotFit(
                f"the model needs {self.total / 2**20:,.1f} MiB and there are {limit / 2**20:,.1f} MiB",
                f"use -c {fits} or less" if fits >= 64 else "use a smaller model or quantisation",
            )


def memory_limit(gpu: Gpu) -> int:
    """Bytes the device may use, 0 when nobody knows. LLAMAGPU_MAX_MEMORY (MiB) sets it."""
    wanted = os.environ.get("LLAMAGPU_MAX_MEMORY")
    if wanted:
        if not wanted.isdigit():
            raise LlamaGpuError(f"LLAMAGPU_MAX_MEMORY is {wanted!r}", "it takes a whole number of MiB")
        return int(wanted) << 20
    return available_host_bytes() if gpu.software else 0


def available_host_bytes() -> int:
    """What Linux could still give out; 0 elsewhere."""
    try:
        with open("/proc/meminfo") as lines:
            fields = {line.split(":")[0]: line.split()[1] for line in lines}
        return int(fields["MemAvailable"]) << 10
    except (OSError, LookupError, ValueError):
        return 0


def plan_memory(
    config: LlamaConfig, tensors: dict[str, RawTensor], gpu: Gpu, context: int, chunk: int, kv_f32: bool,
    tiled: bool = False, fast: bool = False,
) -> MemoryPlan:  # fmt: skip
    c, heads = config, config.heads * config.head_dim
    cache_layer = c.kv_heads * -(-context // 4) * 4 * c.head_dim * (4 if kv_f32 else 2)
    widest = max(c.dim, heads)
    row = 4 * (c.dim + heads)  # x and q of the transformer
    used = [tensors[name] for name in used_shapes(config, tensors)]
    quantised = all(t.kind in FORMATS for t in used if len(t.shape) == 2 and t.name.startswith("blk."))
    records = fast and quantised and not tiled  # f16 weights have no kernel for int8 records of many tokens
    if not records:
        row += 4 * c.ffn_dim  # act
    if not records or not routes.attention_records(c.head_dim, c.heads // c.kv_heads, gpu.caps):
        row += 4 * widest  # h
    if tiled:
        row += 4 * c.dim  # mid
    elif records:
        row += 48 * (widest + c.ffn_dim) // 32  # h and act as int8 records
    once = c.vocab * 2 + context * c.rope_dims + heads * routes.MOST_SPLITS  # logits, choices, rope, partial
    scratch = min(chunk, context) * row + 4 * once
    if not tiled and joinable(c, gpu, fast):
        scratch += c.layers * sum(map(layer_stride, handed_on(c)))
    cache = 2 * c.layers * cache_layer
    six = not gpu.caps.cpu
    weights = sum(tile_bytes(t) if tiled else tensor_bytes(t, gpu.caps.half, six) for t in used)
    if isinstance(tensors, PackedTensors) and not tiled:
        weights = tensors.device_bytes(gpu.caps.half, fast)
    return MemoryPlan(weights, cache, scratch, context, cache // context + 4 * c.rope_dims, cache_layer)


def tile_bytes(tensor: RawTensor) -> int:
    """As an image: f16 as f32, and a scale and an offset of 4 bytes for every group."""
    if len(tensor.shape) < 2 or tensor.kind not in FORMATS:
        return 4 * prod(tensor.shape)
    (n, k), form = tensor.shape, FORMATS[tensor.kind]
    return n * (row_bytes(tensor.kind, k)[0] + k // form.group * 8)


def tensor_bytes(tensor: RawTensor, half: bool, six: bool) -> int:
    """As load_weights stores it: scales as f32 where the device cannot convert f16; with `six`, Q6_K in 6 bits."""
    if len(tensor.shape) < 2:
        return 4 * tensor.shape[0]
    (n, k), form = tensor.shape, FORMATS.get(tensor.kind)
    words, scales = row_bytes(tensor.kind, k)
    if form:
        scales = scales if half else k // form.group * form.width * 4
        words = 3 * k // 4 if six and form.form == "q8" and form.group == 16 and k % 64 == 0 else words
    return n * (words + scales)
