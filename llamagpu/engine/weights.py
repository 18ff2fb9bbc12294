"""The model's weights on the device: each tensor repacked, joined with its neighbours, uploaded, and dropped.

Repacking runs in threads a few tensors ahead of the upload, so the host never holds more than those few.
"""

import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from llamagpu.engine.shelves import Shelves
from llamagpu.files.config import LlamaConfig, tensor_shapes
from llamagpu.files.gguf_file import RawTensor
from llamagpu.files.packed_file import PackedTensors
from llamagpu.files.repack import (
    Packed,
    concat,
    interleave,
    plain_scales,
    repack,
    rope_rows,
    row_bytes,
    slice_rows,
    small,
    take_rows,
)
from llamagpu.gpu import routes
from llamagpu.gpu.device import Gpu, nbytes
from llamagpu.gpu.routes import Linear
from llamagpu.gpu.shaders import Const

Progress = Callable[[int, int], None]  # (tensors done, tensors in all)
Upload = Callable[[np.ndarray[Any, Any], str], Any]  # (data, label) to a buffer
Tensors = dict[str, RawTensor]


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive rows of a matrix in one storage format and one pair of buffers."""

    row0: int
    n: int
    k: int
    group: int
    form: str  # "q4" | "q6" | "q8" | "f16"
    pair: bool  # each scale is followed by an offset
    scale_bits: int  # f32, f16, or 8: multiples of a step (see repack.Packed); 0 without scales
    words: Any
    scales: Any  # None for f16

    def shape(self, m: int, inputs: str = "f32", out: str = "out_store") -> Linear:
        return Linear(m, self.n, self.k, self.group, self.form, inputs, out)

    @property
    def consts(self) -> dict[str, Const]:
        """What the weight parts of a kernel need to know."""
        if self.form == "f16":
            return {"K": self.k}
        return {"K": self.k, "GROUP": self.group, "PAIR": self.pair, "SCALE_BITS": self.scale_bits}

    @property
    def buffers(self) -> dict[str, Any]:
        return {"w": self.words} | ({} if self.scales is None else {"scales": self.scales})


@dataclass(frozen=True, slots=True)
class Matrix:
    """W [n, k]: one part, or several where the storage format changes or a binding's limit cuts it."""

    n: int
    k: int
    parts: tuple[Part, ...]
    bias: Any = None  # [n] f32

    @property
    def nbytes(self) -> int:
        return sum(nbytes(buffer) for p in self.parts for buffer in p.buffers.values())


@dataclass(frozen=True, slots=True)
class Layer:
    attn_norm: Any  # [dim] f32
    qkv: Matrix  # rows q | k | v, RoPE pairs adjacent
    attn_output: Matrix
    ffn_norm: Any  # [dim] f32
    gate_up: tuple[Matrix, ...]  # one, rows interleaved; or (gate, up) when their formats differ
    ffn_down: Matrix


@dataclass(frozen=True, slots=True)
class Weights:
    token_embd: Matrix
    layers: tuple[Layer, ...]
    output_norm: Any
    output: Matrix  # the same object as token_embd when tied

    @property
    def token_bytes(self) -> int:
        """Bytes of weights that one decoded token reads."""
        per_layer = sum(
            sum(m.nbytes for m in (x.qkv, x.attn_output, *x.gate_up, x.ffn_down)) for x in self.layers
        )
        return per_layer + self.output.nbytes


def upload_matrix(
    gpu: Gpu, packed: Iterable[Packed], label: str, bias: np.ndarray[Any, Any] | None = None, fast: bool = False,
    upload: Upload | None = None,
) -> Matrix:  # fmt: skip
    upload = upload or gpu.upload
    parts: list[Part] = []
    row0 = 0
    for whole in packed:
        fitting = gpu.caps.binding_bytes // whole.words[:1].nbytes  # scales take no more
        # whole blocks of 32 gate/up pairs (int8 records), or at least pairs
        most = max(2, fitting // 64 * 64 or fitting // 2 * 2)
        for start in range(0, whole.n, most):
            piece = slice_rows(whole, start, min(start + most, whole.n))
            parts.append(upload_part(gpu, piece, row0, label, fast, upload))
            row0 += piece.n
    bias_buffer = None if bias is None else upload(bias.astype(np.float32), f"{label}.bias")
    return Matrix(row0, parts[0].k, tuple(parts), bias_buffer)


def upload_part(
    gpu: Gpu, packed: Packed, row0: int, label: str, fast: bool = False, upload: Upload | None = None
) -> Part:
    upload, scales = upload or gpu.upload, packed.scales
    if scales is not None and not gpu.caps.half:
        scales = plain_scales(packed).astype(np.float32)  # decoding f16 by hand would cost more than the bytes
    elif scales is not None and fast and scales.dtype == np.float32:
        scales = scales.astype(np.float16)  # a rounding of 2^-11, far below that of int8 activations
    return Part(
        row0=row0,
        n=packed.n,
        k=packed.k,
        group=packed.group,
        form=packed.form,
        pair=packed.pair,
        scale_bits=0 if scales is None else 8 * scales.itemsize,
        words=upload(split_planes(packed.words) if packed.form == "q8" else packed.words, label),
        scales=None if scales is None else upload(scales, f"{label}.scales"),
    )


def to_q6(packed: Packed) -> Packed:
    """Q6_K, which repack gives as int8, in 6 bits: per row the low nibbles as q4 has them, then the high bit pairs,
    of each 32 a word of the even weights and a word of the odd ones (byte j, bits 2i: weight 4i + j of the plane)."""
    n, k = packed.n, packed.k
    values = (packed.words + np.int8(32)).view(np.uint8)
    pairs, words = values.view(np.uint16), np.empty((n, 3 * k // 4), np.uint8)
    words[:, : k // 2] = pairs & 0x0F | pairs >> 4 & 0xF0
    high = split_planes(values).view(np.uint32) >> 4 & 0x03030303  # [n * k / 32, 2, 4]
    joined = high[..., 0] | high[..., 1] << 2 | high[..., 2] << 4 | high[..., 3] << 6
    words[:, k // 2 :] = joined.view(np.uint8).reshape(n, k // 4)
    return Packed("q6", n, k, packed.group, words, packed.scales)


def from_q6(packed: Packed) -> Packed:
    """The way back: Q6_K as int8."""
    n, k = packed.n, packed.k
    low, high = packed.words[:, : k // 2].reshape(-1, 16), packed.words[:, k // 2 :].reshape(-1, 2, 1, 4)
    pairs = (high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(-1, 2, 16) << 4  # even, odd
    values = np.stack([low & 15 | pairs[:, 0], low >> 4 | pairs[:, 1]], axis=-1).reshape(n, k)
    return Packed("q8", n, k, packed.group, values.view(np.int8) - np.int8(32), packed.scales)


def split_planes(words: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[n, k] int8 with the 16 even and then the 16 odd ones of each 32: the order in which q4's nibbles come apart,
    so that int8 activations are stored in one order for both."""
    pairs = words.reshape(-1, 16, 2).view(np.uint16)[..., 0]
    planes = np.empty((len(pairs), 2, 16), np.uint8)
    np.bitwise_and(pairs, 0xFF, out=planes[:, 0], casting="unsafe")
    np.right_shift(pairs, 8, out=planes[:, 1], casting="unsafe")
    return planes


def load_weights(
    tensors: Tensors, config: LlamaConfig, gpu: Gpu, progress: Progress | None = None, fast: bool = False
) -> Weights:
    """Everything on the device; `fast` rounds f32 scales to f16."""
    jobs = list(matrix_jobs(tensors, config, repack if gpu.caps.cpu else repack_small))
    shelves = Shelves(gpu, *kinds_of(tensors, config, gpu)) if joinable(config, gpu) else Shelves(gpu)
    done: dict[str, Any] = {}
    for count, (label, (packed, bias)) in enumerate(ahead(jobs)):
        done[label] = upload_matrix(gpu, packed, label, bias, fast, partial(shelves.upload, layer=layer_of(label)))
        if progress:
            progress(count + 1, len(jobs))
    for name in norm_names(config):
        done[name] = shelves.upload(small(tensors[name]), name.removesuffix(".weight"), layer_of(name))
    return assemble(done, config)


def layer_of(label: str) -> int | None:
    """Of "blk.3.qkv" it is 3."""
    return int(label.split(".")[1]) if label.startswith("blk.") else None


def joinable(config: LlamaConfig, gpu: Gpu, fast: bool | None = None) -> bool:
    """Whether the layers of one token can be one kernel (see engine/layers.py), in one precision or in any."""
    c, heads = config, routes.Heads(config.heads, config.kv_heads, config.head_dim)
    ways = (True, False) if fast is None else (fast,)
    return any(routes.joinable(c.dim, c.ffn_dim, heads, way, gpu.caps) for way in ways)


MATRIX_OF = {"attn_q": "qkv", "attn_k": "qkv", "attn_v": "qkv", "ffn_gate": "gate_up", "ffn_up": "gate_up"}


def kinds_of(tensors: Tensors, config: LlamaConfig, gpu: Gpu) -> tuple[list[dict[str, tuple[Any, ...]]], int]:
    """For each layer the types of its matrices, and of how many layers a binding holds the largest."""
    kinds: list[dict[str, tuple[Any, ...]]] = [{} for _ in range(config.layers)]
    sizes: Counter[tuple[int, str]] = Counter()
    for name, shape in tensor_shapes(config).items():
        if (layer := layer_of(name)) is None or len(shape) < 2:
            continue
        part, kind = name.split(".")[2], tensors[name].kind
        matrix = MATRIX_OF.get(part, part)
        kinds[layer][matrix] = (*kinds[layer].get(matrix, ()), kind, f"blk.{layer}.{part}.bias" in tensors)
        sizes[layer, matrix] += shape[0] * row_bytes(kind, shape[1])[0]
    for found in kinds:  # which are no one matrix where their types differ
        found |= dict.fromkeys(("ffn_gate", "ffn_up"), found["gate_up"])
    return kinds, max(1, gpu.caps.binding_bytes // max(sizes.values()))


def norm_names(config: LlamaConfig) -> list[str]:
    return ["output_norm.weight", *(f"blk.{i}.{n}_norm.weight" for i in range(config.layers) for n in ("attn", "ffn"))]


def assemble(done: dict[str, Any], config: LlamaConfig) -> Weights:
    """What has been uploaded, by name, as the model's weights."""
    layers = tuple(
        Layer(
            attn_norm=done[f"blk.{i}.attn_norm.weight"],
            qkv=done[f"blk.{i}.qkv"],
            attn_output=done[f"blk.{i}.attn_output"],
            ffn_norm=done[f"blk.{i}.ffn_norm.weight"],
            gate_up=tuple(
                done[f"blk.{i}.{n}"] for n in ("gate_up", "ffn_gate", "ffn_up") if f"blk.{i}.{n}" in done
            ),
            ffn_down=done[f"blk.{i}.ffn_down"],
        )
        for i in range(config.layers)
    )
    return Weights(
        done["token_embd"], layers, done["output_norm.weight"], done.get("output", done["token_embd"])
    )


JobResult = tuple[list[Packed], np.ndarray[Any, Any] | None]  # parts one below the other, bias
Job = tuple[str, Callable[[], JobResult]]


def ahead(jobs: list[Job]) -> Iterator[tuple[str, Any]]:
    """Run the jobs in threads, in order, at most two per thread before the consumer."""
    threads = max(1, os.cpu_count() or 1)
    waiting: deque[tuple[str, Future[Any]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for label, job in jobs:
            waiting.append((label, pool.submit(job)))
            if len(waiting) > 2 * threads:
                label, future = waiting.popleft()
                yield label, future.result()
        for label, future in waiting:
            yield label, future.result()


def repack_small(tensor: RawTensor) -> Packed:
    """As repack, with Q6_K in 6 bits: a GPU is short of bandwidth, not of shifts."""
    packed = repack(tensor)
    return to_q6(packed) if packed.form == "q8" and packed.group == 16 and packed.k % 64 == 0 else packed


def without_q6(job: Callable[[], JobResult]) -> JobResult:
    packed, bias = job()
    return [from_q6(part) if part.form == "q6" else part for part in packed], bias


def matrix_jobs(tensors: Tensors, config: LlamaConfig, pack: Callable[[RawTensor], Packed] = repack) -> Iterator[Job]:
    """Every matrix of the model in order of use, as work that a thread can do."""
    if isinstance(tensors, PackedTensors):  # joined when the file was written
        for label, job in tensors.jobs(config):
            yield label, job if pack is repack_small else partial(without_q6, job)
        return

    def plain(name: str) -> Job:
        return name, lambda: ([pack(tensors[f"{name}.weight"])], bias_of(tensors, name))

    yield plain("token_embd")
    for i in range(config.layers):
        yield f"blk.{i}.qkv", lambda i=i: qkv(tensors, config, i, pack)  # type: ignore[misc]
        yield plain(f"blk.{i}.attn_output")
        gate, up = (f"blk.{i}.ffn_gate", f"blk.{i}.ffn_up")
        if tensors[f"{gate}.weight"].kind == tensors[f"{up}.weight"].kind:
            yield f"blk.{i}.gate_up", lambda g=gate, u=up: gate_up(tensors, g, u, pack)  # type: ignore[misc]
        else:
            yield plain(gate)
            yield plain(up)
        yield plain(f"blk.{i}.ffn_down")
    if not config.tied:
        yield plain("output")


def bias_of(tensors: Tensors, name: str) -> np.ndarray[Any, Any] | None:
    bias = tensors.get(f"{name}.bias")
    return None if bias is None else small(bias)


def qkv(
    tensors: Tensors, config: LlamaConfig, i: int, pack: Callable[[RawTensor], Packed]
) -> tuple[list[Packed], np.ndarray[Any, Any] | None]:
    """q | k | v as one matrix; where RoPE pairs lie half a head apart, their rows are brought together."""
    packed, biases = [], []
    for part, heads in (("q", config.heads), ("k", config.kv_heads), ("v", config.kv_heads)):
        name = f"blk.{i}.attn_{part}"
        matrix, bias = pack(tensors[f"{name}.weight"]), bias_of(tensors, name)
        bias = np.zeros(matrix.n, np.float32) if bias is None else bias
        if config.neox and part != "v":
            rows = rope_rows(heads, config.head_dim, config.rope_dims)
            matrix, bias = take_rows(matrix, rows), bias[rows]
        packed.append(matrix)
        biases.append(bias)
    joined = np.concatenate(biases)
    return concat(packed), joined if joined.any() else None


def gate_up(
    tensors: Tensors, gate: str, up: str, pack: Callable[[RawTensor], Packed]
) -> tuple[list[Packed], np.ndarray[Any, Any] | None]:
    joined = interleave(pack(tensors[f"{gate}.weight"]), pack(tensors[f"{up}.weight"]))
    assert joined is not None  # same kind, same layout
    biases = bias_of(tensors, gate), bias_of(tensors, up)
    if biases[0] is None and biases[1] is None:
        return [joined], None
    both = [np.zeros(joined.n // 2, np.float32) if b is None else b for b in biases]
    return [joined], np.stack(both, 1).reshape(-1)
