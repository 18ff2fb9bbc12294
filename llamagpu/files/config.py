"""The model's hyper-parameters, read once from GGUF metadata, and the tensor shapes and RoPE table that they imply.

Nothing else reads the architecture's metadata keys.
"""

import math
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamagpu.errors import BadFile, Unsupported
from llamagpu.files.architectures import (
    ARCHITECTURES,
    BIASES,
    REMEDY_ARCHITECTURE,
    Activation,
    Architecture,
    Experts,
    QkNorm,
)
from llamagpu.files.gguf_file import BLOCKS, REMEDY_REFETCH, RawTensor, shown, unsupported_type

MAX_EXPERTS = 1024  # whose logits fit into the workgroup memory that every adapter has
MAX_TAPS = 64  # of a short convolution
MAX_EXPERTS_USED = 16  # so that a dimension of a grid counts those of the rows of any step
TABLE_ROWS = 4096  # positions that rope_table computes at once: keeps its float64 scratch at 8 MB for head_dim 128


class Rope(StrEnum):
    """How the queries and keys of a layer are rotated."""

    NONE = "none"
    GLOBAL = "global"
    LOCAL = "local"  # by a base of its own


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What differs between the layers of a model."""

    window: int = 0  # a token sees the last `window` positions, its own included; 0: all
    rope: Rope = Rope.GLOBAL
    is_conv: bool = False  # a short convolution instead of attention


@dataclass(frozen=True, slots=True)
class ModelConfig:
    arch: str  # a key of ARCHITECTURES
    name: str
    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int  # of one expert, where there are experts
    vocab: int  # rows of the embedding table; the tokenizer may have fewer
    context: int  # trained context length
    rope_theta: float
    rope_dims: int  # leading dimensions of a head that rotate
    rope_scaling: str  # "none" | "linear" | "yarn" | "longrope"; llama3 scaling is in rope_freqs.weight
    rope_factor: float  # positions are divided by it
    rope_orig_context: int  # before scaling; yarn only
    yarn_ext_factor: float
    yarn_attn_factor: float  # multiplies cos and sin
    yarn_beta_fast: float
    yarn_beta_slow: float
    neox: bool  # RoPE pairs (i, i + rope_dims/2); else (2i, 2i + 1)
    norm_eps: float
    attn_scale: float  # of the scores of attention
    tied: bool  # no output.weight: the embedding table is the output matrix
    kinds: tuple[LayerKind, ...]  # of each layer
    local_rope_theta: float = 10_000.0
    yarn_log_mul: float = 0.0  # 0: yarn multiplies cos and sin by 1 + 0.1 ln(factor)
    qk_norm: QkNorm = QkNorm.NONE
    norms_before: bool = True
    norms_after: bool = False
    activation: Activation = Activation.SILU
    fused_tensors: bool = False  # attn_qkv is q | k | v, ffn_up is gate | up
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of the results of attention and feed forward
    logit_scale: float = 1.0
    attn_soft_cap: float = 0.0  # scores s become c tanh(s / c); 0: they do not
    logit_soft_cap: float = 0.0
    experts: int = 0  # matrices of the feed forward in a layer; 0: one, and no router
    experts_used: int = 1  # by a token
    whole_weights: bool = False  # the weights of the experts that a token uses add up to 1
    ffn_norm: str = "ffn_norm"  # the tensor of the norm before feed forward
    output_norm: str = "output_norm"  # the tensor of the last norm
    conv_taps: int = 0  # positions that a short convolution sees, its own included; 0: no layer is one
    biases: bool = False  # every matrix of a layer has one
    sinks: bool = False  # the softmax of a head has one score more, without a value
    temperature: float = 0.0  # queries times 1 + temperature * ln(1 + position // rope_orig_context)

    # The residual stream is stored in a unit of its own, which norms do not see: so its scales cost nothing. Norms
    # after attention and feed forward scale their results for it; without them, the results are the unit.

    @property
    def stream_unit(self) -> float:
        """What a 1 of the stored residual stream stands for."""
        return self.embedding_scale if self.norms_after else self.residual_scale

    @property
    def stored_embedding_scale(self) -> float:
        return self.embedding_scale / self.stream_unit

    @property
    def norm_after_scale(self) -> float:
        """What the weights of norms after attention and feed forward are multiplied by."""
        return self.residual_scale / self.stream_unit

    @property
    def stream_eps(self) -> float:
        """The epsilon of norms of the stored residual stream."""
        return self.norm_eps / self.stream_unit**2

    @property
    def rotates_apart(self) -> bool:
        """Whether queries and keys need more than a rotation: a norm of whole heads, or a temperature."""
        return self.qk_norm is not QkNorm.NONE or self.temperature > 0

    @property
    def window(self) -> int:
        """The longest window of a layer; 0: a layer sees all positions."""
        windows = {kind.window for kind in self.kinds if not kind.is_conv}
        return 0 if 0 in windows else max(windows)

    @property
    def ropes(self) -> list[Rope]:
        """The rotations that layers have; one where none rotates, since kernels bind a table."""
        return sorted({kind.rope for kind in self.kinds} - {Rope.NONE}) or [Rope.GLOBAL]

    @property
    def qk_norm_widths(self) -> tuple[int, int]:
        """Weights of the norms of queries and of keys."""
        if self.qk_norm is QkNorm.NONE:
            return 0, 0
        return (self.head_dim, self.head_dim) if self.qk_norm is QkNorm.HEAD else (self.q_width, self.kv_width)

    @property
    def q_width(self) -> int:
        """Values of all query heads of one token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Keys, or values, of all KV heads of one token."""
        return self.kv_heads * self.head_dim

    def mixer_rows(self, kind: LayerKind) -> int:
        """Rows of the matrix q | k | v of a layer; before a short convolution, of b | c | x."""
        return 3 * self.dim if kind.is_conv else self.q_width + 2 * self.kv_width

    def mixer_width(self, kind: LayerKind) -> int:
        """Results of attention, or of a short convolution, of one token."""
        return self.dim if kind.is_conv else self.q_width

    @property
    def raw_width(self) -> int:
        """The most values of a token that a kernel reads between such a matrix and attention, or a convolution."""
        kinds = (kind for kind in self.kinds if kind.is_conv or self.rotates_apart)
        return max((self.mixer_rows(kind) for kind in kinds), default=0)

    def cache_heads(self, kind: LayerKind) -> int:
        """KV heads of a layer. A short convolution keeps half of its inputs as keys and half as values."""
        return self.dim // (2 * self.head_dim) if kind.is_conv else self.kv_heads

    @property
    def hidden_width(self) -> int:
        """Values between the matrices of the feed forward of one token."""
        return self.ffn_dim * self.experts_used

    @property
    def widest(self) -> int:
        """The most values that a token has between two kernels."""
        branches = self.dim * self.experts_used
        return max(branches, self.q_width, self.hidden_width, 3 * self.dim if self.conv_taps else 0)

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
        record, layers = ARCHITECTURES[arch], keys.integer("block_count", 4096)
        kv_heads, convs = _kv_heads(keys, record, heads, layers)
        head_dim = _head_dim(keys, dim, heads)
        if heads % kv_heads:
            raise _bad(f"{heads} attention heads cannot share {kv_heads} key/value heads evenly")
        rope_dims = keys.integer("rope.dimension_count", head_dim, default=head_dim)
        if rope_dims % 2:
            raise _bad(f"{arch}.rope.dimension_count is {rope_dims}, which is not even")
        context = keys.integer("context_length", 1 << 28)
        if any(convs) and dim % (2 * head_dim):
            raise _bad(f"the inputs of a short convolution, {dim}, do not divide into pairs of heads of {head_dim}")
        scaling, factor = _rope_scaling(keys)
        theta = keys.real("rope.freq_base", 1.001, 1e15, default=10_000.0)
        return cls(
            arch=arch,
            name=keys.name(),
            layers=layers,
            dim=dim,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn_dim=_ffn_dim(keys, record),
            vocab=_vocab(metadata, tensors, dim),
            context=context,
            rope_theta=theta,
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
            attn_scale=_attn_scale(keys, record, layers, dim, heads, head_dim),
            tied="output.weight" not in tensors,
            kinds=_kinds(keys, record, convs, context),
            local_rope_theta=keys.real("rope.freq_base_swa", 1.001, 1e15, default=record.local_theta or theta),
            yarn_log_mul=keys.real("rope.scaling.yarn_log_multiplier", 0.0, 1e3, default=0.0),
            qk_norm=record.qk_norm,
            norms_before=record.norms_before,
            norms_after=record.norms_after,
            activation=record.activation,
            fused_tensors=record.fused_tensors,
            ffn_norm=record.ffn_norm,
            output_norm=record.output_norm,
            conv_taps=keys.integer("shortconv.l_cache", MAX_TAPS) if any(convs) else 0,
            biases=record.biases,
            sinks=record.sinks,
            **_experts(keys, record),
            **_scales(keys, record, dim),
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
        if self.get("attention.causal", True) is not True:
            raise Unsupported(f"a {arch} model whose tokens see later ones is not supported", REMEDY_ARCHITECTURE)
        experts = self.integer("expert_count", 1 << 32, default=0, least=0)
        if experts and ARCHITECTURES[arch].experts is Experts.NONE:
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


def _kv_heads(keys: _Keys, record: Architecture, heads: int, layers: int) -> tuple[int, list[bool]]:
    """KV heads, and which layers have none and are short convolutions."""
    counts = keys.get("attention.head_count_kv", heads)
    if not record.short_convs or not isinstance(counts, np.ndarray):
        return keys.integer("attention.head_count_kv", 1 << 16, default=heads), [False] * layers
    found = set(counts.tolist()) - {0} if counts.dtype.kind in "iu" and len(counts) == layers else set()
    if len(found) != 1 or not 0 < (kv_heads := found.pop()) <= 1 << 16:
        raise _bad(f"{keys.arch}.attention.head_count_kv, {shown(counts)}, is not 0 or one number for {layers} layers")
    return kv_heads, [count == 0 for count in counts.tolist()]


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


def _ffn_dim(keys: _Keys, record: Architecture) -> int:
    """Some files have the width of an expert in a key of its own."""
    ffn_dim = keys.integer("feed_forward_length", 1 << 24)
    if not _experts(keys, record):
        return ffn_dim
    return keys.integer("expert_feed_forward_length", 1 << 24, default=ffn_dim)


def _experts(keys: _Keys, record: Architecture) -> dict[str, Any]:
    if record.experts is Experts.NONE:
        return {}
    if keys.integer("expert_shared_feed_forward_length", 1 << 24, default=0, least=0):
        raise Unsupported(f"a {keys.arch} model with a shared expert is not supported", REMEDY_ARCHITECTURE)
    experts = keys.integer("expert_count", MAX_EXPERTS, *([0, 0] if record.may_lack_experts else []))
    if not experts:
        return {}
    used = keys.integer("expert_used_count", min(experts, MAX_EXPERTS_USED))
    return {"experts": experts, "experts_used": used, "whole_weights": record.experts is Experts.WHOLE}


def _rope_scaling(keys: _Keys) -> tuple[str, float]:
    """Type and factor, as llama.cpp reads them: a factor without a type means linear, 0 or no factor means 1."""
    scaling = keys.get("rope.scaling.type", "linear")
    old = keys.real("rope.scale_linear", 0.0, 1e6, default=1.0)  # the key before rope.scaling.factor
    factor = keys.real("rope.scaling.factor", 0.0, 1e6, default=old) or 1.0
    if not isinstance(scaling, str) or scaling not in ("none", "linear", "yarn", "longrope"):
        raise Unsupported(
            f"RoPE scaling {shown(scaling)} is not supported",
            "None, linear, yarn, longrope and llama3 (in rope_freqs.weight) work: use another file of the model.",
        )
    if scaling == "none" or (scaling == "linear" and factor == 1.0):
        return "none", 1.0
    return scaling, factor


def _attn_scale(keys: _Keys, record: Architecture, layers: int, dim: int, heads: int, head_dim: int) -> float:
    if record.scales and (scale := keys.real("attention.scale", 0.0, 1e6, default=0.0)):
        return scale
    return 1 / math.sqrt(dim / heads if layers == record.unscaled_layers else head_dim)


def _kinds(keys: _Keys, record: Architecture, convs: list[bool], context: int) -> tuple[LayerKind, ...]:
    window, layers = 0, len(convs)
    if record.sliding_window:
        window = keys.integer("attention.sliding_window", 1 << 32, default=record.default_window, least=0)
    hidden = [True] * layers  # whether a layer has the window
    if window and record.window_period:
        hidden = _window_pattern(keys, record.window_period, layers)
    rotates = not record.may_not_rotate or keys.get("rope.scaling.finetuned", True) is not False
    found = []
    for i, is_conv in enumerate(convs):
        if is_conv:
            found.append(LayerKind(rope=Rope.NONE, is_conv=True))
            continue
        rotated = rotates and (not record.unrotated_period or (i + 1) % record.unrotated_period)
        rope = Rope.LOCAL if record.local_rope and window and hidden[i] else Rope.GLOBAL
        # a window longer than the context hides no position
        seen = window if hidden[i] and window < context else 0
        found.append(LayerKind(seen, rope if rotated else Rope.NONE))
    return tuple(found)


def _window_pattern(keys: _Keys, period: int, layers: int) -> list[bool]:
    """Whether each layer has the window: the file has a flag for each, or the period, whose last layer has none."""
    pattern = keys.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, np.ndarray) and pattern.dtype.kind in "biu" and len(pattern) == layers:
        return [bool(flag) for flag in pattern]
    if type(pattern) is not int or not 0 <= pattern <= 4096:
        raise _bad(f"{keys.arch}.attention.sliding_window_pattern is {shown(pattern)}")
    return [not pattern or i % pattern < pattern - 1 for i in range(layers)]


def _scales(keys: _Keys, record: Architecture, dim: int) -> dict[str, Any]:
    """Scales, soft caps and attention temperature; 0 in a file means none."""

    def positive(key: str, default: float) -> float:
        return keys.real(key, 0.0, 1e6, default=default)

    found = {"embedding_scale": math.sqrt(dim) if record.embedding_root else 1.0}
    if record.scales:
        found["embedding_scale"] = positive("embedding_scale", 1.0) or 1.0
        found["residual_scale"] = positive("residual_scale", 1.0) or 1.0
        found["logit_scale"] = 1 / (positive("logit_scale", 1.0) or 1.0)
    if record.attn_soft_cap:
        found["attn_soft_cap"] = positive("attn_logit_softcapping", record.attn_soft_cap)
    if record.caps_logits:
        found["logit_soft_cap"] = positive("final_logit_softcapping", record.logit_soft_cap)
    if record.temperature:
        found["temperature"] = positive("attention.temperature_scale", 0.0)
    return found


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


QK_NORMS = ("attn_q_norm", "attn_k_norm")
CONV_IN, CONV, CONV_OUT = "shortconv.in_proj", "shortconv.conv", "shortconv.out_proj"


def is_vector(name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor stays a vector of f32: a norm, or the taps of a short convolution."""
    return len(shape) == 1 or name.endswith(f"{CONV}.weight")


def norms_of_layer(config: ModelConfig) -> tuple[str, ...]:
    """The norms of the residual stream in a layer: before attention and feed forward, and after them."""
    before = ("attn_norm", "ffn_norm") if config.norms_before else ()
    return *before, *(("post_attention_norm", "post_ffw_norm") if config.norms_after else ())


def norm_tensor(name: str, config: ModelConfig) -> str:
    """The tensor of a norm."""
    return {"ffn_norm": config.ffn_norm, "output_norm": config.output_norm}.get(name, name)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model must have, [n, k]; taps of a short convolution [dim, taps]."""
    c = config
    layers = {kind: _layer_shapes(c, kind) for kind in set(c.kinds)}
    return {
        "token_embd.weight": (c.vocab, c.dim),
        **{f"blk.{i}.{name}": shape for i, kind in enumerate(c.kinds) for name, shape in layers[kind].items()},
        f"{c.output_norm}.weight": (c.dim,),
        **({} if c.tied else {"output.weight": (c.vocab, c.dim)}),
    }


def _layer_shapes(config: ModelConfig, kind: LayerKind) -> dict[str, tuple[int, ...]]:
    """Without `blk.N.`"""
    c = config
    block: dict[str, tuple[int, ...]] = {norm_tensor(name, c): (c.dim,) for name in norms_of_layer(config)}
    block |= _conv_shapes(c) if kind.is_conv else _attention_shapes(c)
    block |= _feed_forward_shapes(c)
    named = {f"{name}.weight": shape for name, shape in block.items()}
    if c.biases:
        named |= {f"{name}.bias": shape[:-1] for name, shape in block.items() if len(shape) > 1}
    return named


def _attention_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    c, q, kv = config, config.q_width, config.kv_width
    found: dict[str, tuple[int, ...]] = {"attn_sinks": (c.heads,)} if c.sinks else {}
    if c.qk_norm is not QkNorm.NONE:
        found |= {name: (width,) for name, width in zip(QK_NORMS, c.qk_norm_widths, strict=True)}
    if c.fused_tensors:
        found |= {"attn_qkv": (q + 2 * kv, c.dim)}
    else:
        found |= {"attn_q": (q, c.dim), "attn_k": (kv, c.dim), "attn_v": (kv, c.dim)}
    return found | {"attn_output": (c.dim, q)}


def _conv_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    c = config
    return {CONV: (c.dim, c.conv_taps), CONV_IN: (3 * c.dim, c.dim), CONV_OUT: (c.dim, c.dim)}


def _feed_forward_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    c = config
    if c.experts:
        inside, out = (c.experts, c.ffn_dim, c.dim), (c.experts, c.dim, c.ffn_dim)
        shapes = {"ffn_gate_inp": (c.experts, c.dim), "ffn_gate_exps": inside, "ffn_up_exps": inside}
        return {**shapes, "ffn_down_exps": out}
    if c.fused_tensors:
        return {"ffn_up": (2 * c.ffn_dim, c.dim), "ffn_down": (c.dim, c.ffn_dim)}
    return {"ffn_gate": (c.ffn_dim, c.dim), "ffn_up": (c.ffn_dim, c.dim), "ffn_down": (c.dim, c.ffn_dim)}


# Divisors of the frequencies of RoPE: llama3 scaling, longrope within the original context and beyond it.
FREQ_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


def freq_factors_name(config: ModelConfig, tensors: Container[str], context: int) -> str | None:
    """The tensor with the divisors of the frequencies for a context of this length."""
    freqs, short, long = FREQ_FACTORS
    if freqs in tensors:
        return freqs
    name = long if context > config.rope_orig_context else short
    return name if name in tensors else None


def used_shapes(config: ModelConfig, tensors: Container[str]) -> dict[str, tuple[int, ...]]:
    """Every tensor that is used: the required ones, and the optional ones that the file has."""
    shapes = tensor_shapes(config)
    optional = {f"blk.{i}.{name}.bias": f"blk.{i}.{name}.weight" for i in range(config.layers) for name in BIASES}
    optional = {bias: weight for bias, weight in optional.items() if bias in tensors and weight in shapes}
    shapes |= {bias: shapes[weight][:-1] for bias, weight in optional.items()}
    return shapes | {name: (config.rope_dims // 2,) for name in FREQ_FACTORS if name in tensors}


SURPLUS = re.compile(r"blk\.(\d{1,9})\.(?:attn_|ffn_|shortconv\.)\w{1,40}\.(?:bias|scale)")
AFTER_OUTPUT = ("cls.", "cls_", "dense_")  # of tensors that make something else than tokens of the hidden states


def check_tensors(config: ModelConfig, tensors: dict[str, RawTensor]) -> None:
    """Refuse a file that lacks a tensor, or has one of another shape or of an unsupported type, or a bias, a scale or a
    layer after the last that nobody would use."""
    missing = [name for name in tensor_shapes(config) if name not in tensors]
    if missing:
        more = f" and {len(missing) - 3:,} more" if len(missing) > 3 else ""
        raise _bad(f"missing tensors: {', '.join(missing[:3])}{more}")
    used = used_shapes(config, tensors)
    for name, shape in used.items():
        tensor = tensors[name]
        if tensor.shape != shape:
            raise _bad(f"tensor {name} has shape {list(tensor.shape)}, not {list(shape)}")
        if tensor.ggml_type not in BLOCKS:
            raise unsupported_type(tensor)
    for name in tensors:
        if (found := SURPLUS.fullmatch(name)) and int(found[1]) < config.layers and name not in used:
            raise Unsupported(f"a {config.arch} model with {name} is not supported", REMEDY_ARCHITECTURE)
        if name.startswith(AFTER_OUTPUT):
            raise Unsupported(f"a {config.arch} model with {shown(name)} is not supported", REMEDY_ARCHITECTURE)


def rope_table(
    config: ModelConfig,
    freq_factors: NDArray[np.floating[Any]] | None,
    context: int,
    rope: Rope = Rope.GLOBAL,
) -> NDArray[np.float32]:
    """[context, rope_dims/2, 2]: cos and sin of position * frequency, in float64 until the last rounding.

    `freq_factors` (FREQ_FACTORS) divide the frequencies.
    """
    pairs, local = config.rope_dims // 2, rope is Rope.LOCAL
    theta = config.local_rope_theta if local else config.rope_theta
    frequency = theta ** (-np.arange(pairs, dtype=np.float64) / pairs)
    magnitude = 1.0
    if not local:
        frequency *= frequency_scale(config, freq_factors)
        magnitude = rope_magnitude(config)
    table = np.empty((context, pairs, 2), np.float32)
    for start in range(0, context, TABLE_ROWS):
        angle = np.arange(start, min(start + TABLE_ROWS, context))[:, None] * frequency
        table[start : start + TABLE_ROWS, :, 0] = np.cos(angle) * magnitude
        table[start : start + TABLE_ROWS, :, 1] = np.sin(angle) * magnitude
    return table


def frequency_scale(config: ModelConfig, freq_factors: NDArray[np.floating[Any]] | None) -> NDArray[np.float64]:
    """[rope_dims/2]: what RoPE scaling multiplies the frequencies by."""
    pairs = config.rope_dims // 2
    scale = np.full(pairs, 1 / config.rope_factor)
    if config.rope_scaling == "yarn":
        unscaled = yarn_ramp(config) * config.yarn_ext_factor  # share of each frequency that stays unscaled
        scale = (1 - unscaled) * scale + unscaled
    if freq_factors is not None:
        factors = np.asarray(freq_factors, np.float64).reshape(-1)
        if factors.shape != (pairs,) or not (np.isfinite(factors) & (factors > 0)).all():
            raise _bad(f"rope_freqs.weight (or rope_factors_*) does not hold {pairs} positive numbers")
        scale /= factors
    return scale


def rope_magnitude(config: ModelConfig) -> float:
    """What RoPE scaling multiplies cos and sin by."""
    magnitude = config.yarn_attn_factor
    if config.rope_scaling == "yarn" and config.yarn_ext_factor:
        growth = 0.1 * math.log(max(config.rope_factor, 1.0))
        magnitude *= (1 + growth) / (1 + config.yarn_log_mul * growth)
    return magnitude


def yarn_ramp(config: ModelConfig) -> NDArray[np.float64]:
    """For each pair: 1 where it rotates more than beta_fast times in the original context, 0 below beta_slow."""

    def pair_with(rotations: float) -> float:
        length = config.rope_orig_context / (rotations * 2 * math.pi)
        return config.rope_dims * math.log(length) / (2 * math.log(config.rope_theta))

    low = max(0.0, math.floor(pair_with(config.yarn_beta_fast)))
    high = min(config.rope_dims - 1.0, math.ceil(pair_with(config.yarn_beta_slow)))
    ramp = (np.arange(config.rope_dims // 2) - low) / max(0.001, high - low)
    return np.asarray(1 - np.clip(ramp, 0, 1), np.float64)
