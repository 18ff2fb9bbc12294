"""One record for each GGUF architecture: how it differs from Llama.

The model builder reads these fields through ModelConfig, never an architecture's name. A new architecture is a record
here (CONTRIBUTING.md).
"""

from dataclasses import dataclass

# The tensors of a layer that may have a bias, without `blk.N.` and `.bias`.
BIASES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


@dataclass(frozen=True, slots=True)
class Architecture:
    name: str  # general.architecture, and the prefix of the metadata keys
    models: str  # which models have it, for messages and documents
    hf_types: tuple[str, ...]  # model_type in the config.json of Hugging Face checkpoints
    neox: bool = False  # RoPE pairs (i, i + rope_dims/2); else (2i, 2i + 1)
    sliding_window: bool = False  # attention.sliding_window counts; qwen2 files carry one that llama.cpp ignores
    rope_freqs: bool = False  # GGUF can store llama3 RoPE scaling, in the tensor rope_freqs.weight


ARCHITECTURES = {
    record.name: record
    for record in (
        Architecture(
            "llama",
            models="Llama 1 to 3.2, TinyLlama, Mistral, SmolLM2",
            hf_types=("llama", "mistral"),
            sliding_window=True,
            rope_freqs=True,
        ),
        Architecture("qwen2", models="Qwen2, Qwen2.5", hf_types=("qwen2",), neox=True),
    )
}
REMEDY_ARCHITECTURE = "These work: " + ", ".join(f"{a.name} ({a.models})" for a in ARCHITECTURES.values()) + "."


def from_hf_type(model_type: object) -> Architecture | None:
    return next((a for a in ARCHITECTURES.values() if model_type in a.hf_types), None)
