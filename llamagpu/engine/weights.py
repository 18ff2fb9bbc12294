"""The model's weights on the device: described, allocated, then loaded tensor by tensor.

The description (MatrixSource) gives the layout of every matrix before any data is read, so that the memory plan and the
allocation cannot differ. Repacking runs in threads a few tensors ahead of the upload, so that the host never holds more
than those few.
"""

import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from llamagpu.engine.options import Backend, Precision
from llamagpu.engine.routes import Epilogue, Inputs, Linear, Prologue
from llamagpu.engine.slabs import Slabs, aligned, in_slab
from llamagpu.errors import BadFile
from llamagpu.files.config import ModelConfig
from llamagpu.files.gguf_file import REMEDY_REFETCH
from llamagpu.files.matrices import LoadedMatrix, MatrixSource, Tensors, layer_of, vector_values, vector_widths
from llamagpu.files.storage import (
    TEXTURE_ROWS,
    Layout,
    PackedMatrix,
    Storage,
    expand_scales,
    fits_q6,
    from_q6,
    q6_layout,
    slice_rows,
    split_planes,
    to_q6,
)
from llamagpu.files.texture_layout import texture_layout, to_texture
from llamagpu.gpu.buffers import AnyBuffer, Bindable, BufferRange, as_buffer, is_texture, nbytes
from llamagpu.gpu.caps import Caps
from llamagpu.gpu.device import Gpu
from llamagpu.gpu.shaders import Const

Progress = Callable[[int, int], None]  # (matrices done, matrices in all)


@dataclass(frozen=True, slots=True)
class MatrixShard:
    """Consecutive rows of a matrix in one layout: one buffer of words and one of scales, or one texture."""

    row0: int
    n: int
    layout: Layout
    words: Bindable
    scales: AnyBuffer | None = None

    @property
    def k(self) -> int:
        return self.layout.k

    def shape(
        self,
        m: int,
        inputs: Inputs = Inputs.F32,
        prologue: Prologue = Prologue.NONE,
        epilogue: Epilogue = Epilogue.STORE,
    ) -> Linear:
        own = self.layout
        shape = Linear(m, self.n, own.k, own.group, own.storage, inputs, prologue, epilogue)
        return replace(shape, f16_scales=own.f16_scales, sub_scales=own.sub_scales)

    @property
    def consts(self) -> dict[str, Const]:
        """The constants of the kernel part that reads the weights."""
        layout = self.layout
        if layout.storage in (Storage.TEXTURE_Q4, Storage.TEXTURE_Q8):
            return {"GROUP": layout.group}
        if layout.storage is Storage.TEXTURE_F32:
            return {}
        if layout.storage.two_bytes:
            return {"K": layout.k}
        scales: dict[str, Const] = {"HAS_OFFSET": layout.has_offset, "SCALE_BITS": layout.scale_bits}
        return {"K": layout.k, "GROUP": layout.group} | scales

    @property
    def bindings(self) -> dict[str, Bindable]:
        return {"w": self.words} if self.scales is None else {"w": self.words, "scales": self.scales}


@dataclass(frozen=True, slots=True)
class Matrix:
    """W [n, k]: one shard, or several where the layout changes or a binding's limit cuts it.

    Of experts [experts, n, k]: the rows of shards count through all of them, and an expert is in one shard.
    """

    n: int
    k: int
    shards: tuple[MatrixShard, ...]
    bias: AnyBuffer | None = None  # [n] f32
    experts: int = 1
    used: int = 1  # experts that a token uses

    @property
    def nbytes(self) -> int:
        return sum(nbytes(binding) for shard in self.shards for binding in shard.bindings.values())

    @property
    def token_bytes(self) -> int:
        """Bytes that one token reads."""
        return self.nbytes * self.used // self.experts


@dataclass(frozen=True, slots=True)
class Layer:
    qkv: Matrix  # rows q | k | v, RoPE pairs adjacent; of a short convolution b | c | x
    attn_output: Matrix  # of attention, or of a short convolution
    gate_up: tuple[Matrix, ...]  # one, rows interleaved; or (gate, up) where their types differ
    ffn_down: Matrix
    attn_norm: Bindable | None = None  # [dim] f32, as the next three
    ffn_norm: Bindable | None = None
    post_attention_norm: Bindable | None = None
    post_ffw_norm: Bindable | None = None
    qk_norm: Bindable | None = None  # of queries, then of keys
    attn_sinks: Bindable | None = None  # [heads] f32
    conv: Bindable | None = None  # [taps, dim] f32, of a short convolution
    router: Matrix | None = None  # whose results choose the experts

    @property
    def vectors(self) -> tuple[Bindable, ...]:
        """In the order of vector_widths."""
        found = self.attn_norm, self.ffn_norm, self.post_attention_norm, self.post_ffw_norm, self.qk_norm
        return tuple(norm for norm in (*found, self.attn_sinks, self.conv) if norm is not None)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        router = () if self.router is None else (self.router,)
        return self.qkv, self.attn_output, *self.gate_up, self.ffn_down, *router

    @property
    def layouts(self) -> tuple[object, ...]:
        """What a layer's kernels depend on, besides `config.kinds`."""
        return tuple((m.bias is None, *((s.layout, s.n) for s in m.shards)) for m in self.matrices)


@dataclass(frozen=True, slots=True)
class Weights:
    token_embd: Matrix
    layers: tuple[Layer, ...]
    output_norm: Bindable
    output: Matrix  # the same object as token_embd when tied

    def resources(self) -> list[Bindable]:
        """Every buffer and texture, once: layers share slabs, and tied matrices are one."""
        matrices = [self.token_embd, self.output, *(matrix for layer in self.layers for matrix in layer.matrices)]
        bound: list[Bindable | None] = [self.output_norm]
        bound += [vector for layer in self.layers for vector in layer.vectors]
        bound += [matrix.bias for matrix in matrices]
        bound += [binding for matrix in matrices for shard in matrix.shards for binding in shard.bindings.values()]
        owners = (each.buffer if isinstance(each, BufferRange) else each for each in bound if each is not None)
        return list(dict.fromkeys(owners))

    @property
    def token_bytes(self) -> int:
        """Bytes of weights that one decoded token reads."""
        return sum(matrix.token_bytes for layer in self.layers for matrix in layer.matrices) + self.output.nbytes


# The layout on the device


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """The properties of a device that decide the layout of weights."""

    backend: Backend
    six_bits: bool  # Q6_K in 6 bits: a GPU is short of bandwidth, not of shifts
    native_f16: bool
    int8: bool

    @classmethod
    def of(cls, backend: Backend, precision: Precision, caps: Caps) -> "WeightTarget":
        return cls(backend, not caps.cpu, caps.native_f16, precision is Precision.FAST)

    def layout(self, layout: Layout) -> Layout:
        if self.backend is Backend.TEXTURES:
            return texture_layout(layout)
        if fits_q6(layout) and self.six_bits:
            layout = q6_layout(layout)
        elif layout.storage is Storage.Q6 and not self.six_bits:
            layout = Layout(Storage.Q8, layout.k, layout.group, layout.has_offset, layout.scale_bits)
        return Layout(layout.storage, layout.k, layout.group, layout.has_offset, self.scale_bits(layout))

    def scale_bits(self, layout: Layout) -> int:
        if layout.scale_bits and not self.native_f16:
            return 32  # decoding f16 in the kernel would cost more than the bytes
        if layout.scale_bits == 32 and self.int8:
            return 16  # a rounding of 2^-11, far below that of int8 activations
        return layout.scale_bits

    def convert(self, matrix: PackedMatrix) -> tuple[NDArray[np.generic], NDArray[np.generic] | None]:
        """Words and scales of a packed matrix in the layout of the device."""
        wanted = self.layout(matrix.layout)
        if self.backend is Backend.TEXTURES:
            return to_texture(matrix), None
        if wanted.storage is not matrix.layout.storage:
            matrix = to_q6(matrix) if wanted.storage is Storage.Q6 else from_q6(matrix)
        words = split_planes(matrix.words) if wanted.storage is Storage.Q8 else matrix.words
        if matrix.scales is None or wanted.scale_bits == matrix.layout.scale_bits:
            return words, matrix.scales
        return words, expand_scales(matrix).astype(np.float32 if wanted.scale_bits == 32 else np.float16)


def shard_rows(layout: Layout, n: int, caps: Caps, expert_rows: int = 1) -> list[int]:
    """Cut n rows of a device layout so that each shard fits a binding, or a texture, and no expert is cut."""
    if layout.storage.startswith("texture"):
        most = TEXTURE_ROWS * caps.texture_side
    else:
        fitting = caps.binding_bytes // layout.row_bytes  # the scales of a row take no more
        most = max(2, fitting // 64 * 64 or fitting // 2 * 2)  # whole int8 blocks of gate/up pairs, or at least pairs
        most = max(expert_rows, fitting // expert_rows * expert_rows) if expert_rows > 1 else most
    return [min(most, n - start) for start in range(0, n, most)]


# Allocation


def allocate_weights(
    sources: Sequence[MatrixSource], config: ModelConfig, gpu: Gpu, target: WeightTarget, in_slabs: bool
) -> Weights:
    """Every buffer or texture of the weights, without data.

    With `in_slabs`, layers of the same layout share buffers.
    """
    slabs = Slabs(gpu, *slab_groups(sources, config, gpu, target)) if in_slabs else Slabs(gpu)
    found: dict[str, Matrix] = {}
    for source in sources:
        matrix = allocate_matrix(source, gpu, target, slabs)
        found[source.label] = replace(matrix, used=config.experts_used) if source.experts > 1 else matrix
    norms: dict[str, Bindable] = {}
    for name, width in vector_widths(config).items():
        if target.backend is Backend.TEXTURES:
            norms[name] = gpu.texture(width // 4, 1, name)
        else:
            norms[name] = slabs.alloc(4 * width, name, layer_of(name), "norms", is_padded(name))
    layers = tuple(
        Layer(
            qkv=found[f"blk.{i}.qkv"],
            attn_output=found[f"blk.{i}.attn_output"],
            gate_up=tuple(
                found[f"blk.{i}.{name}"] for name in ("gate_up", "ffn_gate", "ffn_up") if f"blk.{i}.{name}" in found
            ),
            ffn_down=found[f"blk.{i}.ffn_down"],
            router=found.get(f"blk.{i}.ffn_gate_inp"),
            **{label.split(".")[2]: norm for label, norm in norms.items() if layer_of(label) == i},
        )
        for i in range(config.layers)
    )
    output = found.get("output", found["token_embd"])
    return Weights(found["token_embd"], layers, norms["output_norm"], output)


def allocate_matrix(source: MatrixSource, gpu: Gpu, target: WeightTarget, slabs: Slabs) -> Matrix:
    shards: list[MatrixShard] = []
    row0, label, layer = 0, source.label, source.layer
    for stored, rows in source.rows:
        layout = target.layout(stored)
        for n in shard_rows(layout, rows, gpu.caps, source.n // source.experts if source.experts > 1 else 1):
            words: Bindable
            scales = None
            if target.backend is Backend.TEXTURES:
                words = gpu.texture(layout.texels, -(-n // TEXTURE_ROWS), label, np.uint32)
            else:
                words = slabs.alloc(n * layout.row_bytes, label, layer)
                if layout.scale_bits:
                    scales = slabs.alloc(n * layout.scale_row_bytes, f"{label}.scales", layer, "scales")
            shards.append(MatrixShard(row0, n, layout, words, scales))
            row0 += n
    bias = slabs.alloc(4 * row0, f"{label}.bias", layer, "norms", is_padded(label)) if source.has_bias else None
    return Matrix(row0 // source.experts, shards[0].k, tuple(shards), bias, source.experts)


def is_padded(label: str) -> bool:
    """Whether a vector is so short that it has padding in a slab, which its kernels skip: sinks, a router's bias."""
    return label.endswith(("attn_sinks", "ffn_gate_inp"))


def slab_groups(
    sources: Sequence[MatrixSource], config: ModelConfig, gpu: Gpu, target: WeightTarget
) -> tuple[list[dict[str, object]], int, dict[tuple[str, int | None], int]]:
    """For each layer the storage of its matrices, by name; how many layers of the largest one a binding holds; and the
    bytes of the slabs of norms and biases, and of those of scales, by runs of so many layers if a binding does not
    hold them all."""
    storages: list[dict[str, object]] = [{} for _ in range(config.layers)]
    largest, scales = 1, [0] * config.layers
    vectors = [(name, width) for name, width in vector_widths(config).items() if layer_of(name) is not None]
    vectors += [(source.label, source.n) for source in sources if source.layer is not None and source.has_bias]
    norms = sum(aligned(4 * width) if is_padded(name) else in_slab(4 * width) for name, width in vectors)
    for name, width in vector_widths(config).items():
        if (layer := layer_of(name)) is not None:
            storages[layer][name.split(".")[2]] = width
    for source in sources:
        if source.layer is not None:
            storages[source.layer][source.label.split(".")[2]] = source.rows, source.has_bias
            rows = [(target.layout(layout), n) for layout, n in source.rows]
            largest = max(largest, sum(n * layout.row_bytes for layout, n in rows))
            scales[source.layer] += sum(in_slab(n * layout.scale_row_bytes) for layout, n in rows)
    most, pools = max(1, gpu.caps.binding_bytes // largest), Counter[tuple[str, int | None]]({("norms", None): norms})
    for layer, size in enumerate(scales):
        pools["scales", None if sum(scales) <= gpu.caps.binding_bytes else layer // most] += size
    return storages, most, pools


# Loading


def load_weights(
    weights: Weights,
    sources: Sequence[MatrixSource],
    tensors: Tensors,
    config: ModelConfig,
    gpu: Gpu,
    target: WeightTarget,
    progress: Progress | None = None,
) -> None:
    """Fill the allocated weights."""
    matrices = {source.label: matrix for source, matrix in zip(sources, in_order(weights), strict=True)}
    jobs = [(source.label, partial(convert_source, source, matrices[source.label], target)) for source in sources]
    for count, (label, (pieces, bias)) in enumerate(run_ahead(jobs)):
        matrix = matrices[label]
        for shard, (words, scales) in zip(matrix.shards, pieces, strict=True):
            upload_shard(gpu, shard, words, scales)
        if bias is not None and matrix.bias is not None:
            gpu.write(matrix.bias, bias)
        if progress:
            progress(count + 1, len(jobs))
    for label, norm in zip(vector_widths(config), vectors_in_order(weights), strict=True):
        upload_vector(gpu, norm, vector_values(tensors, config, label))


def in_order(weights: Weights) -> list[Matrix]:
    """The matrices in the order of their sources."""
    inside = [matrix for layer in weights.layers for matrix in layer.matrices]
    return [weights.token_embd, *inside, *([] if weights.output is weights.token_embd else [weights.output])]


def vectors_in_order(weights: Weights) -> list[Bindable]:
    """The norms, and other vectors, in the order of vector_widths."""
    return [weights.output_norm, *(vector for layer in weights.layers for vector in layer.vectors)]


MAX_THREADS = 8  # each holds a matrix or two in memory
Piece = tuple[NDArray[np.generic], NDArray[np.generic] | None]  # words and scales of a shard
Converted = tuple[list[Piece], NDArray[np.float32] | None]  # the shards' data, the bias


def convert_source(source: MatrixSource, matrix: Matrix, target: WeightTarget) -> Converted:
    """Read a matrix and convert it to the layout of the device, shard by shard."""
    loaded = source.load()
    found = [(packed.layout, packed.n) for packed in loaded.matrices]
    if tuple(found) != source.rows or (loaded.bias is not None) != source.has_bias:
        raise BadFile(f"{source.label} is not of the type that the file says", REMEDY_REFETCH)
    return convert_matrix(loaded, matrix, target)


def convert_matrix(loaded: LoadedMatrix, matrix: Matrix, target: WeightTarget) -> Converted:
    pieces: list[Piece] = []
    shards = iter(matrix.shards)
    for packed in loaded.matrices:
        start = 0
        while start < packed.n:
            n = next(shards).n
            pieces.append(target.convert(slice_rows(packed, start, start + n)))
            start += n
    return pieces, loaded.bias


def upload_shard(gpu: Gpu, shard: MatrixShard, words: NDArray[np.generic], scales: NDArray[np.generic] | None) -> None:
    if is_texture(shard.words):
        gpu.write_texture(shard.words, words)
        return
    gpu.write(as_buffer(shard.words), words)
    if shard.scales is not None and scales is not None:
        gpu.write(shard.scales, scales)


def upload_vector(gpu: Gpu, vector: Bindable, values: NDArray[np.float32]) -> None:
    if is_texture(vector):
        gpu.write_texture(vector, values.reshape(1, -1, 4))
    else:
        gpu.write(as_buffer(vector), values)


def run_ahead(jobs: Sequence[tuple[str, Callable[[], Converted]]]) -> Iterator[tuple[str, Converted]]:
    """Run the jobs in threads and yield results in order, at most one per thread ahead of the consumer."""
    threads = max(1, min(os.cpu_count() or 1, MAX_THREADS))
    waiting: deque[tuple[str, Future[Converted]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for label, job in jobs:
            waiting.append((label, pool.submit(job)))
            if len(waiting) > threads:
                label, future = waiting.popleft()
                yield label, future.result()
        for label, future in waiting:
            yield label, future.result()


def upload_matrix(
    gpu: Gpu, packed: Sequence[PackedMatrix], label: str, target: WeightTarget, bias: NDArray[np.float32] | None = None
) -> Matrix:
    """Allocate and fill a matrix that concatenates the rows of packed matrices."""
    loaded = LoadedMatrix(list(packed), bias)
    rows = tuple((matrix.layout, matrix.n) for matrix in packed)
    source = MatrixSource(label, rows, bias is not None, lambda: loaded)
    matrix = allocate_matrix(source, gpu, target, Slabs(gpu))
    pieces, _ = convert_matrix(loaded, matrix, target)
    for shard, (words, scales) in zip(matrix.shards, pieces, strict=True):
        upload_shard(gpu, shard, words, scales)
    if bias is not None and matrix.bias is not None:
        gpu.write(matrix.bias, bias)
    return matrix
