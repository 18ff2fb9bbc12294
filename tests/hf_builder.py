"""Writes Hugging Face folders for tests: safetensors, a tiny random Llama, AWQ and GPTQ, tokenizers."""

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from gguf_builder import spm_vocab

TYPES = {"float32": "F32", "float16": "F16", "int32": "I32", "uint8": "U8", "float64": "F64"}
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
Arrays = dict[str, np.ndarray]


def write_safetensors(path: Path, arrays: Arrays, dtype: str | None = None) -> Path:
    """With `dtype` "BF16" f32 arrays are cut to their upper halves."""
    header, data = {}, b""
    for name, array in arrays.items():
        stored = TYPES[array.dtype.name]
        if dtype == "BF16" and stored == "F32":
            array, stored = (array.view(np.uint32) >> 16).astype(np.uint16), "BF16"
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": stored, "shape": array.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def hf_config(**changes: Any) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": 288,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return config | changes


def hf_weights(config: dict[str, Any], seed: int = 0, biases: bool = False) -> Arrays:
    rng = np.random.default_rng(seed)
    dim, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    hd = config.get("head_dim") or dim // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * hd, config["num_key_value_heads"] * hd
    shapes = {
        "self_attn.q_proj": (q, dim),
        "self_attn.k_proj": (kv, dim),
        "self_attn.v_proj": (kv, dim),
        "self_attn.o_proj": (dim, q),
        "mlp.gate_proj": (ffn, dim),
        "mlp.up_proj": (ffn, dim),
        "mlp.down_proj": (dim, ffn),
    }

    def matrix(n: int, k: int) -> np.ndarray:  # f16 holds the values, so that F16 files lose nothing
        return (rng.standard_normal((n, k)) / np.sqrt(k)).astype(np.float16).astype(np.float32)

    found = {"model.embed_tokens.weight": matrix(vocab, dim)}
    for i in range(config["num_hidden_layers"]):
        for name, shape in shapes.items():
            found[f"model.layers.{i}.{name}.weight"] = matrix(*shape)
            if biases and name[:11] in ("self_attn.q", "self_attn.k", "self_attn.v"):
                found[f"model.layers.{i}.{name}.bias"] = matrix(1, shape[0])[0]
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{i}.{name}.weight"] = 1 + matrix(1, dim)[0]
    found["model.norm.weight"] = 1 + matrix(1, dim)[0]
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = matrix(vocab, dim)
    return found


def hf_folder(folder: Path, config: dict[str, Any], weights: Arrays, dtype: str | None = None, shards: int = 1) -> Path:
    """With a SentencePiece tokenizer of config's vocab_size."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.model").write_bytes(spm_model(spm_vocab(config["vocab_size"])))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ messages }}"})
    )
    names = np.array_split(np.array(list(weights), dtype=object), shards)
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    if shards == 1:
        files = ["model.safetensors"]
    else:
        index = {name: file for file, some in zip(files, names, strict=True) for name in some}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for file, some in zip(files, names, strict=True):
        write_safetensors(folder / file, {name: weights[name] for name in some}, dtype)
    return folder


def quantise_linears(
    weights: Arrays, method: str, group: int, zeros: str, act_order: bool = False, zero_shift: int = 1
) -> tuple[Arrays, Arrays]:
    """Every linear with random weights, as AWQ or GPTQ stores it; and the f32 weights that the arrays stand for.

    `zeros`: all zero points are "8", "even" (powers of two: times a scale they fit f16) or "any". GPTQ stores them
    less `zero_shift`. With `act_order` the columns of a group are spread over the row.
    """
    rng = np.random.default_rng(7)
    arrays, exact = {}, {}
    for name, array in weights.items():
        if "_proj.weight" not in name:
            arrays[name] = exact[name] = array.astype(np.float16).astype(np.float32)
            continue
        n, k = array.shape
        g = k if group == -1 else group
        q = rng.integers(0, 16, (n, k))
        z = rng.integers(1, 16, (n, k // g)) if zeros == "any" else 2 ** rng.integers(1, 4, (n, k // g))
        z = np.full_like(z, 8) if zeros == "8" else z
        s = (rng.uniform(0.5, 1.5, (n, k // g)) * 0.02).astype(np.float16)
        groups = np.arange(k) // g
        if act_order:
            groups = rng.permutation(groups)
        exact[name] = (q - z[:, groups]).astype(np.float32) * s.astype(np.float32)[:, groups]
        prefix = name.removesuffix(".weight")
        if method == "awq":
            arrays[f"{prefix}.qweight"] = awq_words(q.T)
            arrays[f"{prefix}.qzeros"] = awq_words(z.T)
        else:
            arrays[f"{prefix}.qweight"] = gptq_words(q).T.copy()
            arrays[f"{prefix}.qzeros"] = gptq_words(z.T - zero_shift)
            arrays[f"{prefix}.g_idx"] = groups.astype(np.int32)
        arrays[f"{prefix}.scales"] = np.ascontiguousarray(s.T)
    return arrays, exact


def pack_words(values: np.ndarray, order: Iterable[int]) -> np.ndarray:
    """[r, 8c] -> [r, c]: nibble i of a word, from the lowest, is the word's value order[i]."""
    words = np.zeros((len(values), values.shape[1] // 8), np.uint32)
    for i, column in enumerate(order):
        words |= values[:, column::8].astype(np.uint32) << np.uint32(4 * i)
    return words.view(np.int32)


def awq_words(values: np.ndarray) -> np.ndarray:
    return pack_words(values, [0, 2, 4, 6, 1, 3, 5, 7])


def gptq_words(values: np.ndarray) -> np.ndarray:
    return pack_words(values, range(8))


# Tokenizers


def spm_model(metadata: dict[str, Any], prefix: bool = True, model_type: int = 2) -> bytes:
    """A SentencePiece protobuf with the tokens of GGUF metadata."""

    def varint(value: int) -> bytes:
        out = b""
        while value > 127:
            out, value = out + bytes([value & 127 | 128]), value >> 7
        return out + bytes([value])

    def field(number: int, value: int | bytes | float) -> bytes:
        if isinstance(value, bytes):
            return varint(number << 3 | 2) + varint(len(value)) + value
        if isinstance(value, float):
            return varint(number << 3 | 5) + struct.pack("<f", value)
        return varint(number << 3) + varint(value)

    out = b""
    columns = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "scores", "token_type"))
    for text, score, token_type in zip(*columns, strict=True):
        piece = field(1, text.encode()) + field(2, float(score))
        out += field(1, piece + (field(3, int(token_type)) if token_type != 1 else b""))
    return out + field(2, field(3, model_type)) + field(3, field(1, b"nfkc") + field(3, int(prefix)))


def bpe_json(metadata: dict[str, Any], splits: list[dict[str, Any]], **model: Any) -> dict[str, Any]:
    """tokenizer.json of a byte-level GGUF vocabulary."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    added = {i for i, token_type in enumerate(types) if token_type in (3, 4)}
    vocab = {token: i for i, token in enumerate(tokens) if i not in added}
    return {
        "version": "1.0",
        "added_tokens": [added_token(i, tokens[i], bool(types[i] == 3)) for i in sorted(added)],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": metadata["tokenizer.ggml.merges"], **model},
    }


def added_token(id: int, content: str, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": content, "special": special, **flags}


def byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
