"""The model's hyper-parameters, read once from GGUF metadata, and the tensor shapes and RoPE table that they imply.

Nothing else reads the architecture's metadata keys.
"""

import math
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamagpu.errors import BadFile, Unsupported
from llamagpu.files.architectures import ARCHITECTURES, BIASES, REMEDY_ARCHITECTURE
from llamagpu.files.gguf_file import BLOCKS, REMEDY_REFETCH, RawTensor, shown, unsupported_type

TABLE_ROWS = 4096  # positions that rope_table computes at once: keeps its float64 scratch at 8 MB for head_dim 128


@dataclass(frozen=True, slots=True)
class ModelConfig:
    arch: str  # a key of ARCHITECTURES
    name: str
    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab: int  # rows of the embedding table; the tokenizer may have fewer
    context: int  # trained context length
    rope_theta: float
    rope_dims: int  # leading dimensions of a head that rotate
    rope_scaling: str  # "none" | "linear" | "yarn"; llama3 scaling is in rope_freqs.weight
    rope_factor: float  # positions are divided by it
    rope_orig_context: int  # before scaling; yarn only
    yarn_ext_factor: float
    yarn_attn_factor: float  # multiplies cos and sin
    yarn_beta_fast: float
    yarn_beta_slow: float
    neox: bool  # RoPE pairs (i, i + rope_dims/2); else (2i, 2i + 1)
    norm_eps: float
    sliding_window: int  # 0: none
    tied: bool  # no output.weight: the embedding table is the output matrix

    @property
    def attn_scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)

    @property
    def q_width(self) -> int:
        """Values of all query heads of one token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Keys, or values, of all KV heads of one token."""
        return self.kv_heads * self.head_dim

    @property
    def heads_per_kv(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @classmethod
    def from_gguf(cls, metadata: dict[str, Any], tensors: dict[str, RawTensor]) -> "ModelConfig":
        keys = _Keys(metadata)
        arch = keys.arch
        dim = keys.integer("embedding_length", 1 << 24)
        heads = keys.integer("attention.head_count", 1 << 16)
        kv_heads = keys.integer("attention.head_count_kv", 1 << 16, default=heads)
        head_dim = _head_dim(keys, dim, heads)
        if heads % kv_heads:
            raise _bad(f"{heads} attention heads cannot share {kv_heads} key/value heads evenly")
        rope_dims = keys.integer("rope.dimension_count", head_dim, default=head_dim)
        if rope_dims % 2:
            raise _bad(f"{arch}.rope.dimension_count is {rope_dims}, which is not even")
        context = keys.integer("context_length", 1 << 28)
        record, window = ARCHITECTURES[arch], 0
        if record.sliding_window:
            window = keys.integer("attention.sliding_window", 1 << 32, default=0, least=0)
        scaling, factor = _rope_scaling(keys)
        return cls(
            arch=arch,
            name=keys.name(),
            layers=keys.integer("block_count", 4096),
            dim=dim,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn_dim=keys.integer("feed_forward_length", 1 << 24),
            vocab=_vocab(metadata, tensors, dim),
            context=context,
            rope_theta=keys.real("rope.freq_base", 1.001, 1e15, default=10_000.0),
            rope_dims=rope_dims,
            rope_scaling=scaling,
            rope_factor=factor,
            rope_orig_context=keys.integer("rope.scaling.original_context_length", 1 << 28, default=context),
            yarn_ext_factor=keys.real("rope.scaling.yarn_ext_factor", 0.0, 1.0, default=1.0),
            yarn_attn_factor=keys.real("rope.scaling.attn_factor", 1e-3, 1e3, default=1.0),
            yarn_beta_fast=keys.real("rope.scaling.yarn_beta_fast", 1e-3, 1e6, default=32.0),
            yarn_beta_slow=keys.real("rope.scaling.yarn_beta_slow", 1e-3, 1e6, default=1.0),
            neox=record.neox,
            norm_eps=keys.real("attention.layer_norm_rms_epsilon", 1e-12, 1.0),
            sliding_window=window if window < context else 0,  # a longer window hides no position
            tied="output.weight" not in tensors,
        )


class _Keys:
    """Typed, range-checked access to `<arch>.*`."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self.metadata = metadata
        arch = metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise _bad("metadata key general.architecture is missing or not a string")
        self.arch = arch
        if self.arch not in ARCHITECTURES:
            raise Unsupported(f"architecture {shown(self.arch)} is not supported", REMEDY_ARCHITECTURE)
        experts = self.integer("expert_count", 1 << 32, default=0, least=0)
        if experts:
            raise Unsupported(f"a mixture of {experts} experts ({self.arch}) is not supported", REMEDY_ARCHITECTURE)

    def name(self) -> str:
        """general.name without characters that could disturb a terminal."""
        name = self.metadata.get("general.name")
        return "".join(c for c in name[:100] if c.isprintable()) if isinstance(name, str) else ""

    def get(self, key: str, default: Any) -> Any:
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if value is None:
            raise _bad(f"metadata key {self.arch}.{key} is missing")
        return value

    def integer(self, key: str, most: int, default: int | None = None, least: int = 1) -> int:
        value = self.get(key, default)
        if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu":  # one value per layer
            if (value != value[0]).any():
                raise Unsupported(f"a model whose {self.arch}.{key} differs between layers", REMEDY_ARCHITECTURE)
            value = int(value[0])
        if type(value) is not int or not least <= value <= most:
            raise _bad(f"{self.arch}.{key} is {shown(value)}, not a whole number in {least}..{most:,}")
        return value

    def real(self, key: str, least: float, most: float, default: float | None = None) -> float:
        value = self.get(key, default)
        if type(value) is not float or not least <= value <= most:  # NaN fails both
            raise _bad(f"{self.arch}.{key} is {shown(value)}, not a number in {least:g}..{most:g}")
        return value


def _bad(cause: str) -> BadFile:
    return BadFile(cause, REMEDY_REFETCH)


def _head_dim(keys: _Keys, dim: int, heads: int) -> int:
    if f"{keys.arch}.attention.key_length" not in keys.metadata and dim % heads:
        raise _bad(f"{keys.arch}.embedding_length {dim} does not divide into {heads} heads")
    head_dim = keys.integer("attention.key_length", 1 << 16, default=dim // heads)
    if head_dim % 2:
        raise _bad(f"heads of {head_dim} dimensions: the number must be even")
    values = keys.integer("attention.value_length", 1 << 16, default=head_dim)
    if values != head_dim:
        raise Unsupported(f"values of {values} beside keys of {head_dim} dimensions", REMEDY_ARCHITECTURE)
    return head_dim


def _rope_scaling(keys: _Keys) -> tuple[str, float]:
    """Type and factor, as llama.cpp reads them: a factor without a type means linear, 0 or no factor means 1."""
    scaling = keys.get("rope.scaling.type", "linear")
    old = keys.real("rope.scale_linear", 0.0, 1e6, default=1.0)  # the key before rope.scaling.factor
    factor = keys.real("rope.scaling.factor", 0.0, 1e6, default=old) or 1.0
    if not isinstance(scaling, str) or scaling not in ("none", "linear", "yarn"):
        raise Unsupported(
            f"RoPE scaling {shown(scaling)} is not supported",
            "None, linear, yarn and llama3 (in rope_freqs.weight) work: use another file of the model.",
        )
    if scaling == "none" or (scaling == "linear" and factor == 1.0):
        return "none", 1.0
    return scaling, factor


def _vocab(metadata: dict[str, Any], tensors: dict[str, RawTensor], dim: int) -> int:
    table = tensors.get("token_embd.weight")
    if table is None:
        raise BadFile("tensor token_embd.weight is missing", "Use a whole model, not a vocabulary-only file.")
    if len(table.shape) != 2 or table.shape[1] != dim:
        raise _bad(f"tensor token_embd.weight has shape {list(table.shape)}, not [vocabulary, {dim}]")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > table.shape[0]:
        raise _bad(f"{len(tokens):,} tokens but only {table.shape[0]:,} rows in token_embd.weight")
    return table.shape[0]


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model must have, [n, k]."""
    c, q, kv = config, config.q_width, config.kv_width
    block: dict[str, tuple[int, ...]] = {
        "attn_norm": (c.dim,),
        "attn_q": (q, c.dim),
        "attn_k": (kv, c.dim),
        "attn_v": (kv, c.dim),
        "attn_output": (c.dim, q),
        "ffn_norm": (c.dim,),
        "ffn_gate": (c.ffn_dim, c.dim),
        "ffn_up": (c.ffn_dim, c.dim),
        "ffn_down": (c.dim, c.ffn_dim),
    }
    return {
        "token_embd.weight": (c.vocab, c.dim),
        **{f"blk.{i}.{name}.weight": shape for i in range(c.layers) for name, shape in block.items()},
        "output_norm.weight": (c.dim,),
        **({} if c.tied else {"output.weight": (c.vocab, c.dim)}),
    }


def used_shapes(config: ModelConfig, tensors: Container[str]) -> dict[str, tuple[int, ...]]:
    """Every tensor that is used: the required ones, and the optional ones that the file has."""
    shapes = tensor_shapes(config)
    optional = {f"blk.{i}.{name}.bias": name for i in range(config.layers) for name in BIASES}
    shapes |= {bias: shapes[f"blk.0.{name}.weight"][:1] for bias, name in optional.items() if bias in tensors}
    if "rope_freqs.weight" in tensors:
        shapes["rope_freqs.weight"] = (config.rope_dims // 2,)
    return shapes


def check_tensors(config: ModelConfig, tensors: dict[str, RawTensor]) -> None:
    """Refuse a file that lacks a tensor, or has one of another shape or of an unsupported type."""
    missing = [name for name in tensor_shapes(config) if name not in tensors]
    if missing:
        more = f" and {len(missing) - 3:,} more" if len(missing) > 3 else ""
        raise _bad(f"missing tensors: {', '.join(missing[:3])}{more}")
    for name, shape in used_shapes(config, tensors).items():
        tensor = tensors[name]
        if tensor.shape != shape:
            raise _bad(f"tensor {name} has shape {list(tensor.shape)}, not {list(shape)}")
        if tensor.ggml_type not in BLOCKS:
            raise unsupported_type(tensor)


def rope_table(
    config: ModelConfig, freq_factors: NDArray[np.floating[Any]] | None, context: int
) -> NDArray[np.float32]:
    """[context, rope_dims/2, 2]: cos and sin of position * frequency, in float64 until the last rounding.

    `freq_factors` is rope_freqs.weight (llama3 scaling): it divides the frequencies.
    """
    pairs = config.rope_dims // 2
    frequency = config.rope_theta ** (-np.arange(pairs, dtype=np.float64) / pairs)
    if freq_factors is not None:
        factors = np.asarray(freq_factors, np.float64).reshape(-1)
        if factors.shape != (pairs,) or not (np.isfinite(factors) & (factors > 0)).all():
            raise _bad(f"rope_freqs.weight does not hold {pairs} positive numbers")
        frequency /= factors
    magnitude = config.yarn_attn_factor
    if config.rope_scaling == "yarn":
        unscaled = yarn_ramp(config) * config.yarn_ext_factor  # share of each frequency that stays unscaled
        frequency *= (1 - unscaled) / config.rope_factor + unscaled
        if config.yarn_ext_factor:
            magnitude *= 1 + 0.1 * math.log(max(config.rope_factor, 1.0))
    else:
        frequency /= config.rope_factor
    table = np.empty((context, pairs, 2), np.float32)
    for start in range(0, context, TABLE_ROWS):
        angle = np.arange(start, min(start + TABLE_ROWS, context))[:, None] * frequency
        table[start : start + TABLE_ROWS, :, 0] = np.cos(angle) * magnitude
        table[start : start + TABLE_ROWS, :, 1] = np.sin(angle) * magnitude
    return table


def yarn_ramp(config: ModelConfig) -> NDArray[np.float64]:
    """For each pair: 1 where it rotates more than beta_fast times in the original context, 0 below beta_slow."""

    def pair_with(rotations: float) -> float:
        length = config.rope_orig_context / (rotations * 2 * math.pi)
        return config.rope_dims * math.log(length) / (2 * math.log(config.rope_theta))

    low = max(0.0, math.floor(pair_with(config.yarn_beta_fast)))
    high = min(config.rope_dims - 1.0, math.ceil(pair_with(config.yarn_beta_slow)))
    ramp = (np.arange(config.rope_dims // 2) - low) / max(0.001, high - low)
    return np.asarray(1 - np.clip(ramp, 0, 1), np.float64)
