"""One record for each GGUF architecture: how it differs from Llama.

The model builder reads these fields through ModelConfig, never an architecture's name. A new architecture is a record
here (CONTRIBUTING.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

# The tensors of a layer that may have a bias, without `blk.N.` and `.bias`.
BIASES = (
    *("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"),
    *("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
)


class QkNorm(StrEnum):
    """The RMS norm of queries and keys, before they are rotated."""

    NONE = "none"
    HEAD = "head"  # of each head, one weight for all
    ROW = "row"  # of all heads of a token together


class Activation(StrEnum):
    SILU = "silu"
    GELU = "gelu"  # the tanh approximation
    SWIGLU_OAI = "swiglu_oai"  # gate sigmoid(1.702 gate) (up + 1), gate and up between bounds


class Experts(StrEnum):
    """Whether the feed forward is a mixture of experts, and what the weights of those that a token uses are."""

    NONE = "none"
    SHARE = "share"  # their probabilities among all experts
    WHOLE = "whole"  # these divided by their sum


@dataclass(frozen=True, slots=True)
class Architecture:
    name: str  # general.architecture, and the prefix of the metadata keys
    models: str  # which models have it, for messages and documents
    hf_types: tuple[str, ...]  # model_type in the config.json of Hugging Face checkpoints
    neox: bool = False  # RoPE pairs (i, i + rope_dims/2); else (2i, 2i + 1)
    sliding_window: bool = False  # attention.sliding_window counts; some files carry one that llama.cpp ignores
    default_window: int = 0  # attention.sliding_window of files that have none
    window_period: int = 0  # every so many layers one sees all positions, if the file does not say which; 0: none does
    local_rope: bool = False  # layers with a window rotate by rope.freq_base_swa, without scaling
    local_theta: float = 0.0  # rope.freq_base_swa of files that have none; 0: their rope.freq_base
    may_not_rotate: bool = False  # rope.scaling.finetuned = false means that no layer does
    unrotated_period: int = 0  # every so many layers one does not rotate; 0: all rotate
    rope_freqs: bool = False  # GGUF can store llama3 RoPE scaling, in the tensor rope_freqs.weight
    partial_rotary: bool = False  # RoPE may rotate a part of each head
    qk_norm: QkNorm = QkNorm.NONE
    norms_before: bool = True  # of the inputs of attention and feed forward
    norms_after: bool = False  # of their results, before they are added to the residual stream
    ffn_norm: str = "ffn_norm"  # the tensor of the norm before feed forward
    output_norm: str = "output_norm"  # the tensor of the last norm
    short_convs: bool = False  # layers without KV heads have a short convolution instead of attention
    biases: bool = False  # every matrix of a layer has one
    sinks: bool = False  # the softmax of a head has one score more, without a value
    norm_shift: int = 0  # Hugging Face stores norm weights less this
    activation: Activation = Activation.SILU
    fused_tensors: bool = False  # attn_qkv is q | k | v, ffn_up is gate | up
    experts: Experts = Experts.NONE
    may_lack_experts: bool = False  # most of its models do
    embedding_root: bool = False  # embeddings are multiplied by the square root of their width
    scales: bool = False  # embedding, residual, attention and logit scale in the metadata
    attn_soft_cap: float = 0.0  # scores s become c tanh(s / c), unless the file has another c; 0: they do not
    caps_logits: bool = False  # likewise the logits, by final_logit_softcapping
    logit_soft_cap: float = 0.0
    unscaled_layers: int = 0  # a model of so many layers divides scores by sqrt(dim / heads), not sqrt(head_dim)
    temperature: bool = False  # queries grow with the position (attention.temperature_scale)
    hf_defaults: Mapping[str, object] = field(default_factory=dict)  # what config.json need not say


GEMMA_3 = {
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
LFM2 = {
    "tie_word_embeddings": True,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "rope_theta": 1e6,
    "norm_eps": 1e-5,
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
}
ARCHITECTURES = {
    record.name: record
    for record in (
        Architecture(
            "llama",
            models="Llama 1 to 3.2, TinyLlama, Mistral, Mixtral, SmolLM2",
            hf_types=("llama", "mistral", "mixtral"),
            sliding_window=True,
            rope_freqs=True,
            experts=Experts.WHOLE,
            may_lack_experts=True,
        ),
        Architecture("qwen2", models="Qwen2, Qwen2.5", hf_types=("qwen2",), neox=True),
        Architecture("qwen3", models="Qwen3", hf_types=("qwen3",), neox=True, qk_norm=QkNorm.HEAD),
        Architecture(
            "qwen3moe",
            models="Qwen3 with experts",
            hf_types=("qwen3_moe",),
            neox=True,
            qk_norm=QkNorm.HEAD,
            experts=Experts.WHOLE,
        ),
        Architecture("smollm3", models="SmolLM3", hf_types=("smollm3",), unrotated_period=4),
        Architecture(
            "granite", models="Granite 3 and 4 without experts", hf_types=("granite",), scales=True, may_not_rotate=True
        ),
        Architecture(
            "granitemoe",
            models="Granite 3 with experts",
            hf_types=("granitemoe",),
            scales=True,
            may_not_rotate=True,
            experts=Experts.WHOLE,
        ),
        Architecture(
            "mistral3", models="Ministral 3, Mistral Small 3", hf_types=("ministral3", "mistral3"), temperature=True
        ),
        Architecture(
            "phi3",
            models="Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
            hf_types=("phi3",),
            neox=True,
            partial_rotary=True,
            fused_tensors=True,
        ),
        Architecture(
            "olmo2",
            models="OLMo 2 and 3",
            hf_types=("olmo2", "olmo3"),
            neox=True,
            sliding_window=True,
            window_period=4,
            local_rope=True,
            qk_norm=QkNorm.ROW,
            norms_before=False,
            norms_after=True,
        ),
        Architecture(
            "olmoe",
            models="OLMoE",
            hf_types=("olmoe",),
            neox=True,
            qk_norm=QkNorm.ROW,
            experts=Experts.SHARE,
        ),
        Architecture(
            "lfm2",
            models="LFM2 and LFM2.5 without experts",
            hf_types=("lfm2",),
            neox=True,
            sliding_window=True,
            qk_norm=QkNorm.HEAD,
            output_norm="token_embd_norm",
            short_convs=True,
            hf_defaults=LFM2,
        ),
        Architecture(
            "gpt-oss",
            models="gpt-oss",
            hf_types=("gpt_oss",),
            neox=True,
            sliding_window=True,
            window_period=2,
            activation=Activation.SWIGLU_OAI,
            experts=Experts.WHOLE,
            ffn_norm="post_attention_norm",
            biases=True,
            sinks=True,
        ),
        Architecture(
            "gemma2",
            models="Gemma 2",
            hf_types=("gemma2",),
            neox=True,
            sliding_window=True,
            default_window=4096,
            window_period=2,
            norms_after=True,
            norm_shift=1,
            activation=Activation.GELU,
            embedding_root=True,
            attn_soft_cap=50.0,
            caps_logits=True,
            logit_soft_cap=30.0,
            unscaled_layers=46,
            hf_defaults={"tie_word_embeddings": True},
        ),
        Architecture(
            "gemma3",
            models="Gemma 3",
            hf_types=("gemma3_text", "gemma3"),
            neox=True,
            sliding_window=True,
            window_period=6,
            local_rope=True,
            local_theta=10_000.0,
            qk_norm=QkNorm.HEAD,
            norms_after=True,
            norm_shift=1,
            activation=Activation.GELU,
            embedding_root=True,
            caps_logits=True,
            unscaled_layers=62,
            hf_defaults=GEMMA_3,
        ),
    )
}
REMEDY_ARCHITECTURE = "These work: " + ", ".join(f"{a.name} ({a.models})" for a in ARCHITECTURES.values()) + "."


def from_hf_type(model_type: object) -> Architecture | None:
    return next((a for a in ARCHITECTURES.values() if model_type in a.hf_types), None)
