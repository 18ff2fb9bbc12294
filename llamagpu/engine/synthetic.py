"""Synthetic models for benchmarks: shapes of real models, with random weights that the device generates."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamagpu.engine.weights import MatrixShard, Weights, in_order, upload_vector, vectors_in_order
from llamagpu.errors import LlamaGpuError
from llamagpu.files.config import CONV, ModelConfig, tensor_shapes
from llamagpu.files.gguf_file import BLOCKS, RawTensor
from llamagpu.files.matrices import MatrixSource, matrix_sources, vector_widths
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
    keys: Mapping[str, Any] = field(default_factory=dict)  # further metadata, without the prefix


AS_LLAMA = "@llama"
GRANITE = {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.015625, "logit_scale": 8.0}
MINISTRAL = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 16.0,
    "rope.scaling.original_context_length": 16384,
    "rope.scaling.yarn_log_multiplier": 1.0,
    "attention.temperature_scale": 0.1,
}
QWEN3_EXPERTS = {"expert_count": 128, "expert_used_count": 8, "expert_feed_forward_length": 768}
OLMO_EXPERTS = {"expert_count": 64, "expert_used_count": 8}
GRANITE_EXPERTS = {"expert_count": 32, "expert_used_count": 8, "logit_scale": 6.0}
LFM2: dict[str, Any] = {
    "shortconv.l_cache": 3,
    "attention.head_count_kv": np.array([8 * (i in (2, 5, 8, 10, 12, 14)) for i in range(16)]),  # 0: a convolution
    "rope.freq_base": 1e6,
}
GPT_OSS = {
    "expert_count": 32,
    "expert_used_count": 4,
    "expert_feed_forward_length": 2880,
    "attention.sliding_window": 128,
    "rope.freq_base": 150000.0,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 32.0,
    "rope.scaling.original_context_length": 4096,
}
SHAPES = {
    "llama-3.2-1b": Shape(16, 2048, 8192, 32, 8, 64, 128256, True),
    "llama-3.2-3b": Shape(28, 3072, 8192, 24, 8, 128, 128256, True),
    "llama-3.1-8b": Shape(32, 4096, 14336, 32, 8, 128, 128256, False),
    "smollm2": Shape(30, 576, 1536, 9, 3, 64, 49152, True, 8192),
    "tinyllama": Shape(22, 2048, 5632, 32, 4, 64, 32000, False, 2048),
    "llama-2-7b": Shape(32, 4096, 11008, 32, 32, 128, 32000, False, 4096),
    "mistral-7b": Shape(32, 4096, 14336, 32, 8, 128, 32000, False, 32768),
    "qwen2.5-0.5b": Shape(24, 896, 4864, 14, 2, 64, 151936, True, 32768, "qwen2"),
    "qwen3-0.6b": Shape(28, 1024, 3072, 16, 8, 128, 151936, True, 40960, "qwen3"),
    "qwen3-4b": Shape(36, 2560, 9728, 32, 8, 128, 151936, True, 40960, "qwen3"),
    "qwen3-8b": Shape(36, 4096, 12288, 32, 8, 128, 151936, False, 40960, "qwen3"),
    "qwen3-30b-a3b": Shape(48, 2048, 6144, 32, 4, 128, 151936, False, 40960, "qwen3moe", QWEN3_EXPERTS),
    "smollm3-3b": Shape(36, 2048, 11008, 16, 4, 128, 128256, True, 65536, "smollm3"),
    "granite-3.3-2b": Shape(40, 2048, 8192, 32, 8, 64, 49159, True, 131072, "granite", GRANITE),
    "granite-3.1-1b-a400m": Shape(
        24, 1024, 512, 16, 8, 64, 49155, True, 131072, "granitemoe", GRANITE | GRANITE_EXPERTS
    ),
    "ministral-3-3b": Shape(26, 3072, 9216, 32, 8, 128, 131072, True, 262144, "mistral3", MINISTRAL),
    "phi-4-mini": Shape(32, 3072, 8192, 24, 8, 128, 200064, True, 131072, "phi3", {"rope.dimension_count": 96}),
    "olmo-2-1b": Shape(16, 2048, 8192, 16, 16, 128, 100352, False, 4096, "olmo2"),
    "olmoe-1b-7b": Shape(16, 2048, 1024, 16, 16, 128, 50304, False, 4096, "olmoe", OLMO_EXPERTS),
    "lfm2-350m": Shape(16, 1024, 4608, 16, 8, 64, 65536, True, 128000, "lfm2", LFM2),
    "lfm2-1.2b": Shape(16, 2048, 8192, 32, 8, 64, 65536, True, 128000, "lfm2", LFM2),
    "gpt-oss-20b": Shape(24, 2880, 2880, 64, 8, 64, 201088, False, 131072, "gpt-oss", GPT_OSS),
    "gemma-2-2b": Shape(26, 2304, 9216, 8, 4, 256, 256000, True, 8192, "gemma2", {"attention.sliding_window": 4096}),
    "gemma-3-1b": Shape(26, 1152, 6912, 4, 1, 256, 262144, True, 32768, "gemma3", {"attention.sliding_window": 512}),
    "gemma-3-4b": Shape(34, 2560, 10240, 8, 4, 256, 262208, True, 131072, "gemma3", {"attention.sliding_window": 1024}),
    "tiny": Shape(2, 128, 256, 4, 2, 64, 512, True, 1024),  # for tests
}


@dataclass(frozen=True, slots=True)
class QuantMix:
    """How llama-quantize mixes types."""

    most: str
    half_of_layers: str  # attn_v and ffn_down of half of the layers
    output: str  # the output matrix, or the tied embedding
    experts: str = ""  # if not as the others


MIXES = {
    "q4_0": QuantMix("Q4_0", "Q4_0", "Q6_K"),
    "q4_1": QuantMix("Q4_1", "Q4_1", "Q6_K"),
    "q4_k_m": QuantMix("Q4_K", "Q6_K", "Q6_K"),
    "q6_k": QuantMix("Q6_K", "Q6_K", "Q6_K"),
    "q8_0": QuantMix("Q8_0", "Q8_0", "Q8_0"),
    "mxfp4": QuantMix("Q8_0", "Q8_0", "Q8_0", "MXFP4"),  # as gpt-oss
    "f16": QuantMix("F16", "F16", "F16"),
    "bf16": QuantMix("BF16", "BF16", "BF16"),
}
FALLBACK = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}  # for rows that are no whole blocks, as llama-quantize does it
# Random weights have a standard deviation of 0.036 to 0.07, and as many are negative as positive, so that scores of
# attention spread as those of trained models: Llama 1B 4 bits, SmolLM2 with its own weights 4.4. The mean of a nibble
# is -0.5: with scales of one sign all dimensions soon had the same value, and scores spread over 19 bits.
SCALES = {Storage.Q4: 2.0**-7, Storage.Q6: 2.0**-9, Storage.Q8: 2.0**-11}
ALL_BITS = 0xFFFFFFFF
SIGNS = {16: 0x80008000, 32: 0x80000000}  # by the bits of a scale
# Random bits and fixed ones, of words
FLOATS = {Storage.F16: (0x83FF83FF, 0x28002800), Storage.BF16: (0x807F807F, 0x3D003D00)}  # two from 1/32 to 1/16
SUPER_BLOCKS = {Storage.Q6: 0x0AF60AF6, Storage.Q8: 0x06FA06FA}  # f16 of 0.0002 and 0.0001, sub-scales of +-10 and +-6
SUPER_BLOCK_OFFSETS = 0x00FF00FF, 0x04000400  # f16 from 0.00006 on, any sub-scales, sub-offsets of 4


def parse(spec: str) -> tuple[str, str]:
    """Split NAME[@llama][:QUANT] and check all."""
    name, _, quant = spec.partition(":")
    quant = quant or "q4_0"
    if name.removesuffix(AS_LLAMA) not in SHAPES:
        raise LlamaGpuError(f"no synthetic model is called {name!r}", f"choose one of {', '.join(SHAPES)}")
    if quant not in MIXES:
        raise LlamaGpuError(f"no synthetic quantisation is called {quant!r}", f"choose one of {', '.join(MIXES)}")
    return name, quant


def shape_of(name: str) -> Shape:
    """With @llama the same sizes as a Llama model, without experts and as wide as those that a token uses: the baseline
    of what an architecture's own operations cost."""
    own = SHAPES[name.removesuffix(AS_LLAMA)]
    if not name.endswith(AS_LLAMA):
        return own
    ffn = own.keys.get("expert_feed_forward_length", own.ffn) * own.keys.get("expert_used_count", 1)
    return replace(own, ffn=ffn, arch="llama", keys={})


def synthetic_metadata(name: str) -> dict[str, Any]:
    """What a file of these shapes says of them."""
    s = shape_of(name)
    own = {
        "block_count": s.layers,
        "context_length": s.context,
        "embedding_length": s.dim,
        "feed_forward_length": s.ffn,
        "attention.head_count": s.heads,
        "attention.head_count_kv": s.kv_heads,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 500000.0,
        **s.keys,
    }
    return {"general.architecture": s.arch, "general.name": name} | {f"{s.arch}.{key}": own[key] for key in own}


def synthetic_config(name: str) -> ModelConfig:
    s = shape_of(name)
    outside = ("token_embd.weight",) if s.tied else ("token_embd.weight", "output.weight")
    tables = {name: RawTensor(name, "F16", (s.vocab, s.dim), np.zeros(0, np.uint8)) for name in outside}
    return ModelConfig.from_gguf(synthetic_metadata(name), tables)


def fitting_type(ggml_type: str, k: int) -> str:
    """The type that rows of k weights have in a file of this type."""
    return ggml_type if k % BLOCKS[ggml_type][0] == 0 else FALLBACK[ggml_type]


def tensor_types(config: ModelConfig, quant: str) -> dict[str, str]:
    """The type of every tensor, as llama-quantize chooses them."""
    c, mix, last = config, MIXES[quant], "token_embd.weight" if config.tied else "output.weight"

    def ggml_type(name: str) -> str:
        if "norm" in name or "ffn_gate_inp" in name or name.endswith((".bias", f"{CONV}.weight")):
            return "F32"
        if mix.experts and "_exps." in name:
            return mix.experts
        if name == last:
            return mix.output
        special = name.split(".")[2] in ("attn_v", "ffn_down", "ffn_down_exps") if name.startswith("blk.") else False
        layer = int(name.split(".")[1]) if special else 0
        first, final = c.layers // 8, 7 * c.layers // 8
        if special and (layer < first or layer >= final or (layer - first) % 3 == 2):
            return mix.half_of_layers
        return mix.most

    shapes = tensor_shapes(config)
    return {
        name: "F32" if len(shape) == 1 else fitting_type(ggml_type(name), shape[-1]) for name, shape in shapes.items()
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
        """Random words, and scales that keep activations small."""
        recorder = Recorder(gpu)
        for matrix in in_order(weights):
            for shard in matrix.shards:
                fill_shard(gpu, recorder, shard)
        widths = vector_widths(self.config).values()
        for norm, width in zip(vectors_in_order(weights), widths, strict=True):
            upload_vector(gpu, norm, np.ones(width, np.float32))


def fill_shard(gpu: Gpu, recorder: Recorder, shard: MatrixShard) -> None:
    layout = shard.layout
    if is_texture(shard.words):
        gpu.write_texture(shard.words, random_texture(shard))
        return
    fill_buffer(gpu, recorder, as_buffer(shard.words), *FLOATS.get(layout.storage, ()))
    if shard.scales is None:
        return
    if layout.scale_bits == 8:
        fill = SUPER_BLOCK_OFFSETS if layout.has_offset else (0, SUPER_BLOCKS[layout.storage])
        fill_buffer(gpu, recorder, shard.scales, *fill)
        return
    scale = SCALES[layout.storage]
    f16, f32 = int(np.float16(scale).view(np.uint16)), int(np.float32(scale).view(np.uint32))
    value = f16 | f16 << 16 if layout.scale_bits == 16 else f32
    fill_buffer(gpu, recorder, shard.scales, SIGNS[layout.scale_bits], value)


def fill_buffer(gpu: Gpu, recorder: Recorder, buffer: AnyBuffer, mask: int = ALL_BITS, value: int = 0) -> None:
    """Fill with random words, of which the bits of the mask are kept, and the bits of a value."""
    consts = {"WORDS": buffer.size // 4, "MASK": mask, "VALUE": value}
    consts |= {"SEED": len(buffer.label) + buffer.size % 1000003}
    grid = (min(1024, -(-buffer.size // 1024)), 1, 1)
    recorder.submit([Step(Plan([gpu.dispatch("fill_random", (), consts, {"y": buffer}, grid)]))])


def random_texture(shard: MatrixShard) -> NDArray[np.uint32]:
    """Random on the host: no kernel fills textures."""
    k, group, rng = shard.k, shard.layout.group, np.random.default_rng(shard.n * shard.k)
    source = _buffer_layout(shard)
    if source.storage is Storage.F16:
        weights = rng.standard_normal((shard.n, k + k % 2), np.float32) * 0.036
        return to_texture(PackedMatrix(source, weights.astype(np.float16)))
    words = rng.integers(0, 256, (shard.n, source.row_bytes), np.uint8)
    signs = rng.choice([-1, 1], (shard.n, k // group, 1))
    scales = (signs * SCALES[source.storage]).astype(np.float16)
    return to_texture(PackedMatrix(source, words if source.storage is Storage.Q4 else words.view(np.int8), scales))


def _buffer_layout(shard: MatrixShard) -> Layout:
    storage = {
        Storage.TEXTURE_Q4: Storage.Q4,
        Storage.TEXTURE_Q8: Storage.Q8,
        Storage.TEXTURE_F32: Storage.F16,
    }[shard.layout.storage]
    return Layout(storage, shard.k, shard.layout.group, scale_bits=0 if storage is Storage.F16 else 16)
