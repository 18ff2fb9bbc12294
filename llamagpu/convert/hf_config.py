"""Reads config.json of a Hugging Face folder as GGUF metadata."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf import Keys
from numpy.typing import NDArray

from llamagpu.errors import BadFile, Unsupported
from llamagpu.files.architectures import REMEDY_ARCHITECTURE, Activation, Architecture, Experts, from_hf_type
from llamagpu.files.config import FREQ_FACTORS
from llamagpu.files.gguf_file import REMEDY_REFETCH, shown

LONGROPE = ("longrope", "su")
ACTIVATIONS = {
    Activation.SILU: ("silu", "swish"),
    Activation.GELU: ("gelu_pytorch_tanh",),
    Activation.SWIGLU_OAI: ("silu",),
}
# Fields of config.json as metadata
SCALES = {
    "embedding_multiplier": Keys.LLM.EMBEDDING_SCALE,
    "residual_multiplier": Keys.LLM.RESIDUAL_SCALE,
    "attention_multiplier": Keys.Attention.SCALE,
    "logits_scaling": Keys.LLM.LOGIT_SCALE,
}
EXPERTS = {
    "num_experts": Keys.LLM.EXPERT_COUNT,
    "num_local_experts": Keys.LLM.EXPERT_COUNT,
    "num_experts_per_tok": Keys.LLM.EXPERT_USED_COUNT,
}
SOFT_CAPS = {
    "attn_logit_softcapping": Keys.LLM.ATTN_LOGIT_SOFTCAPPING,
    "final_logit_softcapping": Keys.LLM.FINAL_LOGIT_SOFTCAPPING,
}
YARN = {
    "beta_fast": Keys.Rope.SCALING_YARN_BETA_FAST,
    "beta_slow": Keys.Rope.SCALING_YARN_BETA_SLOW,
    "mscale_all_dim": Keys.Rope.SCALING_YARN_LOG_MUL,
    "llama_4_scaling_beta": Keys.Attention.TEMPERATURE_SCALE,
}
MAX_COUNT = 1 << 24  # of anything that config.json counts


def metadata_key(template: str, record: Architecture) -> str:
    """A metadata key of the architecture: `template` is one of gguf.Keys."""
    return template.format(arch=record.name)


def find_architecture(config: dict[str, Any]) -> tuple[Architecture, dict[str, Any]]:
    """The record of the model, which must support everything that config.json asks for, and the config of its text.

    A model of images and text has the text model's config inside its own.
    """
    inner = config.get("text_config")
    config = config | inner if isinstance(inner, dict) else config
    model_type = config.get("model_type", "")
    if isinstance(model_type, list | dict):
        raise BadFile(f"config.json: model_type is {shown(model_type)}", REMEDY_REFETCH)
    record = from_hf_type(model_type)
    if record is None:
        raise Unsupported(f"architecture {shown(config.get('model_type'))} is not supported", REMEDY_ARCHITECTURE)
    config = {**record.hf_defaults, **config}
    if record.short_convs:
        config = conv_config(config)
    check_features(config, record)
    return record, config


def check_features(config: dict[str, Any], record: Architecture) -> None:
    activation = config.get("hidden_activation") or config.get("hidden_act", "silu")
    if activation not in ACTIVATIONS[record.activation]:
        raise Unsupported(f"activation {shown(activation)} is not supported", REMEDY_ARCHITECTURE)
    if rotary_share(config) != 1 and not record.partial_rotary:  # nor has llama.cpp any in these architectures
        raise Unsupported("RoPE on a part of each head is not supported", REMEDY_ARCHITECTURE)
    rotated = config.get("no_rope_layers")  # 1 for each layer that rotates
    period = record.unrotated_period
    if rotated is not None and list(rotated) != [int(not period or (i + 1) % period > 0) for i in range(len(rotated))]:
        raise Unsupported("layers without RoPE in another order are not supported", REMEDY_ARCHITECTURE)
    architectures = config.get("architectures")
    if config.get("use_bidirectional_attention") or "Bidirectional" in str(architectures):
        raise Unsupported(f"a {record.name} model whose tokens see later ones is not supported", REMEDY_ARCHITECTURE)
    if config.get("use_sliding_window") and not record.sliding_window:
        raise Unsupported(f"a {record.name} model with a sliding window is not supported", REMEDY_ARCHITECTURE)
    if record.experts is not Experts.NONE:
        check_experts(config, record)
    if not record.rope_freqs and rope_scaling(config)[0] == "llama3":
        raise Unsupported(f"a {record.name} model with llama3 RoPE scaling is not supported", REMEDY_ARCHITECTURE)


def check_experts(config: dict[str, Any], record: Architecture) -> None:
    whole = config.get("norm_topk_prob")
    if whole is not None and whole != (record.experts is Experts.WHOLE):
        raise Unsupported(
            f"a {record.name} model with norm_topk_prob {shown(whole)} is not supported", REMEDY_ARCHITECTURE
        )
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise Unsupported("layers without experts beside layers with experts are not supported", REMEDY_ARCHITECTURE)
    if record.activation is Activation.SWIGLU_OAI and config.get("swiglu_limit", 7.0) != 7.0:
        raise Unsupported("other bounds of SwiGLU than 7 are not supported", REMEDY_ARCHITECTURE)
    if config.get("clip_qkv"):
        raise Unsupported("bounds of queries, keys and values are not supported", REMEDY_ARCHITECTURE)


def rotary_share(config: dict[str, Any]) -> float:
    """The part of each head that RoPE rotates."""
    return real(rope_scaling(config)[1], "partial_rotary_factor", real(config, "partial_rotary_factor", 1))


def read_metadata(config: dict[str, Any], record: Architecture, name: str) -> dict[str, Any]:
    def integer(field: str, default: int | None = None) -> int:
        value = default if config.get(field) is None else config[field]
        if type(value) is not int or not 1 <= value <= MAX_COUNT:
            cause = f"config.json: {field} is {shown(value)}, not a number from 1 to {MAX_COUNT}"
            raise BadFile(cause, REMEDY_REFETCH)
        return value

    heads = integer("num_attention_heads")
    head_dim = integer("head_dim", integer("hidden_size") // heads)
    keys: dict[str, Any] = {
        Keys.General.ARCHITECTURE: record.name,
        Keys.General.TYPE: "model",
        Keys.General.NAME: name,
        Keys.LLM.BLOCK_COUNT: integer("num_hidden_layers"),
        Keys.LLM.CONTEXT_LENGTH: integer("max_position_embeddings"),
        Keys.LLM.EMBEDDING_LENGTH: integer("hidden_size"),
        Keys.LLM.FEED_FORWARD_LENGTH: integer("intermediate_size"),
        Keys.Attention.HEAD_COUNT: heads,
        Keys.Attention.HEAD_COUNT_KV: integer("num_key_value_heads", heads),
        Keys.Attention.LAYERNORM_RMS_EPS: real(config, "rms_norm_eps"),
        Keys.Attention.KEY_LENGTH: head_dim,
        Keys.Attention.VALUE_LENGTH: head_dim,
        Keys.Rope.DIMENSION_COUNT: int(rotary_share(config) * head_dim),
        **rope_keys(config),
    }
    if record.sliding_window and config.get("sliding_window"):
        keys |= window_keys(config, record, integer("sliding_window"), integer("num_hidden_layers"))
    elif record.default_window and "sliding_window" in config:
        keys[Keys.Attention.SLIDING_WINDOW] = 0
    if record.may_not_rotate and config.get("position_embedding_type") == "nope":
        keys[Keys.Rope.SCALING_FINETUNED] = False
    check_attention_scale(config, record, head_dim, integer("hidden_size") / heads, integer("num_hidden_layers"))
    if record.experts is not Experts.NONE:
        keys |= {template: integer(field) for field, template in EXPERTS.items() if config.get(field)}
    if Keys.LLM.EXPERT_COUNT in keys:
        width = integer("moe_intermediate_size", integer("intermediate_size"))
        keys[Keys.LLM.EXPERT_FEED_FORWARD_LENGTH] = width
    if record.short_convs:
        kinds = conv_kinds(config, keys[Keys.LLM.BLOCK_COUNT])
        counts = [0 if is_conv else keys[Keys.Attention.HEAD_COUNT_KV] for is_conv in kinds]
        keys |= {Keys.Attention.HEAD_COUNT_KV: np.array(counts, np.int32)}
        keys |= {Keys.ShortConv.L_CACHE: integer("conv_L_cache")}
    fields = (SCALES if record.scales else {}) | (SOFT_CAPS if record.caps_logits else {})
    keys |= {template: real(config, field) for field, template in fields.items() if config.get(field)}
    for field in SOFT_CAPS if record.attn_soft_cap else ():
        if field in config and not config[field]:
            raise Unsupported(f"config.json: {field} is {shown(config[field])}", f"{record.models} has soft caps.")
    return {metadata_key(template, record): value for template, value in keys.items()}


def conv_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """LFM2's own fields under their usual names. The width of the feed forward is given before an adjustment."""
    width = real(config, "block_ff_dim", real(config, "intermediate_size", 0))
    if flag(config, "block_auto_adjust_ff_dim"):
        width = int(2 * width / 3)
        if config["block_ffn_dim_multiplier"] is not None:
            multiplier, multiple = (real(config, f"block_{name}") for name in ("ffn_dim_multiplier", "multiple_of"))
            width = math.ceil(int(multiplier * width) / multiple) * multiple
    own = {"intermediate_size": int(width), "rms_norm_eps": config["norm_eps"], "sliding_window": None}  # it has none
    if "tie_embedding" in config:
        own["tie_word_embeddings"] = flag(config, "tie_embedding")
    return {**config, **own, "rope_theta": config.get("theta", config["rope_theta"])}


def conv_kinds(config: Mapping[str, Any], layers: int) -> list[bool]:
    """Whether each layer is a short convolution."""
    kinds, attends = config.get("layer_types"), config.get("full_attn_idxs")
    if kinds is None:
        kinds = ["full_attention" if attends is None or i in attends else "conv" for i in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise BadFile(f"config.json: layer_types is {shown(kinds)}, and there are {layers} layers", REMEDY_REFETCH)
    if others := {str(kind) for kind in kinds} - {"conv", "full_attention"}:
        raise Unsupported(f"layers of type {shown(min(others))} are not supported", REMEDY_ARCHITECTURE)
    return [kind == "conv" for kind in kinds]


def flag(config: Mapping[str, Any], field: str) -> bool:
    value = config[field]
    if not isinstance(value, bool | None):
        raise BadFile(f"config.json: {field} is {shown(value)}, not true or false", REMEDY_REFETCH)
    return bool(value)


def window_keys(config: Mapping[str, Any], record: Architecture, window: int, layers: int) -> dict[str, Any]:
    """The window, and which layers have it; none if no layer has."""
    has_window = None
    if isinstance(kinds := config.get("layer_types"), list):
        has_window = [kind == "sliding_attention" for kind in kinds]
    elif isinstance(period := config.get("sliding_window_pattern"), int) and period > 0:
        has_window = [(i + 1) % period > 0 for i in range(layers)]
    if not record.window_period or has_window is None:
        return {Keys.Attention.SLIDING_WINDOW: window}
    if not any(has_window):
        return {Keys.Attention.SLIDING_WINDOW: 0} if record.default_window else {}
    return {Keys.Attention.SLIDING_WINDOW: window, Keys.Attention.SLIDING_WINDOW_PATTERN: np.array(has_window)}


def check_attention_scale(
    config: Mapping[str, Any], record: Architecture, head_dim: int, dim_per_head: float, layers: int
) -> None:
    """GGUF has no key for what scores are divided by: it follows from the number of layers."""
    wanted = dim_per_head if layers == record.unscaled_layers else head_dim
    if record.unscaled_layers and real(config, "query_pre_attn_scalar", wanted) != wanted:
        given = shown(config["query_pre_attn_scalar"])
        raise Unsupported(f"config.json: query_pre_attn_scalar is {given}, not {wanted:g}", REMEDY_ARCHITECTURE)


def real(config: Mapping[str, Any], field: str, default: float | None = None) -> float:
    value = default if config.get(field) is None else config[field]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadFile(f"config.json: {field} is {shown(value)}, not a number", REMEDY_REFETCH)
    return float(value)


def rope_scaling(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The type of scaling and its numbers; newer files keep rope_theta among them."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise BadFile(f"config.json: rope_scaling is {shown(rope)}", REMEDY_REFETCH)
    rope = rope.get("full_attention", rope)
    scaling = str(rope.get("rope_type", rope.get("type", "default")))
    return scaling, {"rope_theta": config.get("rope_theta", 1e4), **rope}


def local_theta(config: dict[str, Any]) -> float | None:
    """The base of RoPE in layers with a window, where it is another."""
    local = (config.get("rope_parameters") or {}).get("sliding_attention", {})
    found = local.get("rope_theta", config.get("rope_local_base_freq"))
    return None if found is None else real({"rope_local_base_freq": found}, "rope_local_base_freq")


def rope_keys(config: dict[str, Any]) -> dict[str, Any]:
    scaling, rope = rope_scaling(config)
    keys: dict[str, Any] = {Keys.Rope.FREQ_BASE: real(rope, "rope_theta")}
    if (local := local_theta(config)) is not None:
        keys[Keys.Rope.FREQ_BASE_SWA] = local
    if scaling in ("default", "llama3"):  # llama3: see rope_factors
        return keys
    if scaling in LONGROPE:
        return keys | longrope_keys(config, rope)
    if scaling not in ("linear", "yarn"):
        remedy = "None, linear, yarn, longrope and llama3 work."
        raise Unsupported(f"RoPE scaling {shown(scaling)} is not supported", remedy)
    factor = real(rope, "factor")
    keys |= {Keys.Rope.SCALING_TYPE: scaling, Keys.Rope.SCALING_FACTOR: factor}
    if scaling == "linear":
        return keys
    trained = config["max_position_embeddings"]
    keys[Keys.Rope.SCALING_ORIG_CTX_LEN] = int(real(rope, "original_max_position_embeddings", trained))
    if rope.get("attention_factor") is not None:  # in GGUF it is relative to yarn's default factor
        default = 1 + 0.1 * math.log(factor)
        keys[Keys.Rope.SCALING_ATTN_FACTOR] = real(rope, "attention_factor") / default
    return keys | {gguf: real(rope, field) for field, gguf in YARN.items() if rope.get(field) is not None}


def longrope_keys(config: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """The factors of the frequencies are tensors, see rope_factors."""
    trained = real(config, "max_position_embeddings")
    original = real(rope, "original_max_position_embeddings", real(config, "original_max_position_embeddings", trained))
    growth = math.log(max(1.0, trained / original)) / math.log(original)
    return {Keys.Rope.SCALING_ORIG_CTX_LEN: int(original), Keys.Rope.SCALING_ATTN_FACTOR: math.sqrt(1 + growth)}


def rope_factors(config: dict[str, Any], dims: int) -> dict[str, NDArray[np.float32]]:
    """Tensors with the divisor of each frequency.

    In llama3 scaling it is `factor` for low frequencies, 1 for high ones, a ramp between.
    """
    scaling, rope = rope_scaling(config)
    if scaling in LONGROPE:
        fields = zip(FREQ_FACTORS[1:], ("short_factor", "long_factor"), strict=True)
        return {name: np.array(rope[field], np.float32) for name, field in fields}
    if scaling != "llama3":
        return {}
    factor, low, high = (real(rope, field) for field in ("factor", "low_freq_factor", "high_freq_factor"))
    original = real(rope, "original_max_position_embeddings")
    with np.errstate(divide="raise", invalid="raise", over="raise"):
        frequency = real(rope, "rope_theta") ** (-np.arange(0, dims, 2) / dims)
        rotations = original * frequency / (2 * math.pi)  # within the original context
        unscaled = np.clip((rotations - low) / (high - low), 0, 1)
        return {FREQ_FACTORS[0]: (1 / ((1 - unscaled) / factor + unscaled)).astype(np.float32)}
