"""Synthetic models for benchmarks: shapes of real models, with random weights that the device generates."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamagpu.engine.weights import MatrixShard, Weights, in_order, norms_in_order, upload_norm
from llamagpu.errors import LlamaGpuError
from llamagpu.files.config import ModelConfig, tensor_shapes
from llamagpu.files.gguf_file import BLOCKS, RawTensor
from llamagpu.files.matrices import MatrixSource, matrix_sources
from llamagpu.files.storage import Layout, PackedMatrix, Storage
from llamagpu.files.texture_layout import to_texture
from llamagpu.gpu.buffers import AnyBuffer, as_buffer, is_texture
from llamagpu.gpu.device import Gpu
from llamagpu.gpu.recorder import Plan, Recorder, Step


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int
    dim: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    context: int = 131072
    arch: str = "llama"


SHAPES = {
    "llama-3.2-1b": Shape(16, 2048, 8192, 32, 8, 64, 128256, True),
    "llama-3.2-3b": Shape(28, 3072, 8192, 24, 8, 128, 128256, True),
    "llama-3.1-8b": Shape(32, 4096, 14336, 32, 8, 128, 128256, False),
    "smollm2": Shape(30, 576, 1536, 9, 3, 64, 49152, True, 8192),
    "tinyllama": Shape(22, 2048, 5632, 32, 4, 64, 32000, False, 2048),
    "llama-2-7b": Shape(32, 4096, 11008, 32, 32, 128, 32000, False, 4096),
    "mistral-7b": Shape(32, 4096, 14336, 32, 8, 128, 32000, False, 32768),
    "qwen2.5-0.5b": Shape(24, 896, 4864, 14, 2, 64, 151936, True, 32768, "qwen2"),
    "tiny": Shape(2, 128, 256, 4, 2, 64, 512, True, 1024),  # for tests
}


@dataclass(frozen=True, slots=True)
class QuantMix:
    """How llama-quantize mixes types."""

    most: str
    half_of_layers: str  # attn_v and ffn_down of half of the layers
    output: str  # the output matrix, or the tied embedding


MIXES = {
    "q4_0": QuantMix("Q4_0", "Q4_0", "Q6_K"),
    "q4_1": QuantMix("Q4_1", "Q4_1", "Q6_K"),
    "q4_k_m": QuantMix("Q4_K", "Q6_K", "Q6_K"),
    "q8_0": QuantMix("Q8_0", "Q8_0", "Q8_0"),
    "f16": QuantMix("F16", "F16", "F16"),
}
FALLBACK = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}  # for rows that are no whole blocks, as llama-quantize does it
SMALL_SCALE = 0.004  # keeps activations of random weights finite
SMALL_F16_WEIGHTS = 0x1C001C00  # two f16 of 0.0039
SMALL_SUPER_BLOCK = 0x0D0D0D0D  # about the same scale: f16 of 0.00031 times sub-scales of 13


def parse(spec: str) -> tuple[str, str]:
    """Split NAME[:QUANT] and check both."""
    name, _, quant = spec.partition(":")
    quant = quant or "q4_0"
    if name not in SHAPES:
        raise LlamaGpuError(f"no synthetic model is called {name!r}", f"choose one of {', '.join(SHAPES)}")
    if quant not in MIXES:
        raise LlamaGpuError(f"no synthetic quantisation is called {quant!r}", f"choose one of {', '.join(MIXES)}")
    return name, quant


def synthetic_config(name: str) -> ModelConfig:
    s = SHAPES[name]
    return ModelConfig(
        arch=s.arch,
        name=name,
        layers=s.layers,
        dim=s.dim,
        heads=s.heads,
        kv_heads=s.kv_heads,
        head_dim=s.head_dim,
        ffn_dim=s.ffn,
        vocab=s.vocab,
        context=s.context,
        rope_theta=500000.0,
        rope_dims=s.head_dim,
        rope_scaling="none",
        rope_factor=1.0,
        rope_orig_context=s.context,
        yarn_ext_factor=1.0,
        yarn_attn_factor=1.0,
        yarn_beta_fast=32.0,
        yarn_beta_slow=1.0,
        neox=False,
        norm_eps=1e-5,
        sliding_window=0,
        tied=s.tied,
    )


def fitting_type(ggml_type: str, k: int) -> str:
    """The type that rows of k weights have in a file of this type."""
    return ggml_type if k % BLOCKS[ggml_type][0] == 0 else FALLBACK[ggml_type]


def tensor_types(config: ModelConfig, quant: str) -> dict[str, str]:
    """The type of every tensor, as llama-quantize chooses them."""
    c, mix, last = config, MIXES[quant], "token_embd.weight" if config.tied else "output.weight"

    def ggml_type(name: str) -> str:
        if "norm" in name:
            return "F32"
        if name == last:
            return mix.output
        special = name.split(".")[2] in ("attn_v", "ffn_down") if name.startswith("blk.") else False
        layer = int(name.split(".")[1]) if special else 0
        first, final = c.layers // 8, 7 * c.layers // 8
        if special and (layer < first or layer >= final or (layer - first) % 3 == 2):
            return mix.half_of_layers
        return mix.most

    shapes = tensor_shapes(config)
    return {
        name: "F32" if len(shape) == 1 else fitting_type(ggml_type(name), shape[1]) for name, shape in shapes.items()
    }


class SyntheticFile:
    """Has the interface of a model file: types and shapes, but no data."""

    def __init__(self, spec: str, config: ModelConfig | None = None) -> None:
        """`config` replaces that of the name, for tests."""
        self.name, self.quant = parse(spec)
        self.config = config or synthetic_config(self.name)
        types, none = tensor_types(self.config, self.quant), np.zeros(0, np.uint8)
        self.tensors = {
            name: RawTensor(name, types[name], shape, none) for name, shape in tensor_shapes(self.config).items()
        }
        self.metadata: dict[str, Any] = {}

    def matrices(self) -> list[MatrixSource]:
        return matrix_sources(self.tensors, self.config)

    def contents(self) -> Iterator[tuple[str, NDArray[np.uint8]]]:
        """No tensor has data."""
        return iter(())

    def close(self) -> None: ...

    def fill(self, weights: Weights, gpu: Gpu) -> None:
        """Random words, and scales that keep activations finite."""
        recorder = Recorder(gpu)
        for matrix in in_order(weights):
            for shard in matrix.shards:
                fill_shard(gpu, recorder, shard)
        for norm in norms_in_order(weights):
            upload_norm(gpu, norm, np.ones(self.config.dim, np.float32))


def fill_shard(gpu: Gpu, recorder: Recorder, shard: MatrixShard) -> None:
    layout = shard.layout
    if is_texture(shard.words):
        gpu.write_texture(shard.words, random_texture(shard))
        return
    value = SMALL_F16_WEIGHTS if layout.storage is Storage.F16 else 0
    fill_buffer(gpu, recorder, as_buffer(shard.words), value)
    if shard.scales is not None:
        f16 = int(np.float16(SMALL_SCALE).view(np.uint16))
        f32 = int(np.float32(SMALL_SCALE).view(np.uint32))
        value = {32: f32, 16: f16 | f16 << 16, 8: SMALL_SUPER_BLOCK}[layout.scale_bits]
        fill_buffer(gpu, recorder, shard.scales, value)


def fill_buffer(gpu: Gpu, recorder: Recorder, buffer: AnyBuffer, value: int) -> None:
    """Fill with one word, or with random words where it is 0."""
    consts = {"WORDS": buffer.size // 4, "VALUE": value, "SEED": len(buffer.label) + buffer.size % 1000003}
    grid = (min(1024, -(-buffer.size // 1024)), 1, 1)
    recorder.submit([Step(Plan([gpu.dispatch("fill_random", (), consts, {"y": buffer}, grid)]))])


def random_texture(shard: MatrixShard) -> NDArray[np.uint32]:
    """Random on the host: no kernel fills textures."""
    k, group, rng = shard.k, shard.layout.group, np.random.default_rng(shard.n * shard.k)
    source = _buffer_layout(shard)
    if source.storage is Storage.F16:
        return to_texture(PackedMatrix(source, np.full((shard.n, k + k % 2), 0.0039, np.float16)))
    words = rng.integers(0, 256, (shard.n, source.row_bytes), np.uint8)
    scales = np.full((shard.n, k // group, 1), SMALL_SCALE, np.float16)
    return to_texture(PackedMatrix(source, words if source.storage is Storage.Q4 else words.view(np.int8), scales))


def _buffer_layout(shard: MatrixShard) -> Layout:
    storage = {
        Storage.TEXTURE_Q4: Storage.Q4,
        Storage.TEXTURE_Q8: Storage.Q8,
        Storage.TEXTURE_F32: Storage.F16,
    }[shard.layout.storage]
    return Layout(storage, shard.k, shard.layout.group, scale_bits=0 if storage is Storage.F16 else 16)
