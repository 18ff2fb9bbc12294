"""A Hugging Face folder: config.json as GGUF metadata, the shards' tensors by GGUF name, the tokenizer."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamagpu.errors import BadFile, Unsupported
from llamagpu.files.config import WORKING
from llamagpu.files.gguf_file import AGAIN, show
from llamagpu.files.repack import rope_rows
from llamagpu.files.safetensors_file import Stored, read_header
from llamagpu.tools.convert.fourbit import FourBit, Method
from llamagpu.tools.convert.source import Source, Tensor, float_tensor
from llamagpu.tools.convert.vocab import read_json, vocabulary

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2"}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
BLOCK = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
MOST = 1 << 24  # of anything that config.json counts
FOUR_BIT = ("qweight", "qzeros", "scales", "g_idx")
DERIVED = re.compile(r"rotary_emb\.inv_freq$|masked_bias$")  # follow from config.json


def from_folder(folder: Path, name: str = "") -> Source:
    config = read_json(folder / "config.json")
    if not config:
        raise BadFile(f"{folder} has no config.json", "Give a Hugging Face model folder, or a .gguf file.")
    with sound("config.json"):
        metadata = metadata_of(config, name or folder.name)
    with sound("the index of the shards"):
        arrays = find_arrays(folder)
    with sound("config.json"):
        tensors = name_tensors(arrays, config, metadata)
    if (table := tensors.get("token_embd.weight")) and len(table.shape) == 2:
        metadata[f"{metadata['general.architecture']}.vocab_size"] = table.shape[0]
        with sound("one of the tokenizer's files"):
            metadata |= vocabulary(folder, table.shape[0], config)
    return Source(name or folder.name, metadata, tensors, sorted({array.path for array in arrays.values()}))


@contextmanager
def sound(what: str) -> Iterator[None]:
    """JSON may hold a list where a number should be, and so on: all that follows from it comes out here."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise BadFile(f"{what} is not as it should be: {error}", AGAIN) from error


def metadata_of(config: dict[str, Any], name: str) -> dict[str, Any]:
    arch = ARCHITECTURES.get(config.get("model_type", ""))
    if arch is None:
        raise Unsupported(f"architecture {show(config.get('model_type'))} is not supported", WORKING)
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise Unsupported(f"activation {show(config['hidden_act'])} is not supported", WORKING)
    if real(config, "partial_rotary_factor", 1) != 1:  # llama.cpp has none in these architectures either
        raise Unsupported("RoPE on a part of each head is not supported", WORKING)
    if arch == "qwen2" and config.get("use_sliding_window"):
        raise Unsupported("a qwen2 model with a sliding window is not supported", WORKING)
    if arch == "qwen2" and rope_of(config)[0] == "llama3":  # llama.cpp has no place for its factors
        raise Unsupported("a qwen2 model with llama3 RoPE scaling is not supported", WORKING)

    def whole(key: str, default: Any = None) -> int:
        value = default if config.get(key) is None else config[key]
        if type(value) is not int or not 1 <= value <= MOST:
            raise BadFile(f"config.json: {key} is {show(value)}, not a number from 1 to {MOST}", AGAIN)
        return value

    heads = whole("num_attention_heads")
    head_dim = whole("head_dim", whole("hidden_size") // heads)
    keys = {
        "block_count": whole("num_hidden_layers"),
        "context_length": whole("max_position_embeddings"),
        "embedding_length": whole("hidden_size"),
        "feed_forward_length": whole("intermediate_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": whole("num_key_value_heads", heads),
        "attention.layer_norm_rms_epsilon": real(config, "rms_norm_eps"),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        **rope_keys(config),
    }
    if arch == "llama" and config.get("sliding_window"):
        keys["attention.sliding_window"] = whole("sliding_window")
    general = {"general.architecture": arch, "general.type": "model", "general.name": name}
    return general | {f"{arch}.{key}": value for key, value in keys.items()}


def real(config: dict[str, Any], key: str, default: Any = None) -> float:
    value = default if config.get(key) is None else config[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadFile(f"config.json: {key} is {show(value)}, not a number", AGAIN)
    return float(value)


def rope_of(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The kind of scaling and its numbers; newer files keep rope_theta among them."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise BadFile(f"config.json: rope_scaling is {show(rope)}", AGAIN)
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    return kind, {"rope_theta": config.get("rope_theta", 1e4), **rope}


def rope_keys(config: dict[str, Any]) -> dict[str, Any]:
    kind, rope = rope_of(config)
    keys: dict[str, Any] = {"rope.freq_base": real(rope, "rope_theta")}
    if kind in ("default", "llama3"):  # llama3: see rope_factors
        return keys
    if kind not in ("linear", "yarn"):
        raise Unsupported(f"RoPE scaling {show(kind)} is not supported", "None, linear, yarn and llama3 work.")
    factor = real(rope, "factor")
    keys |= {"rope.scaling.type": kind, "rope.scaling.factor": factor}
    if kind == "linear":
        return keys
    trained = config["max_position_embeddings"]
    keys["rope.scaling.original_context_length"] = int(real(rope, "original_max_position_embeddings", trained))
    if rope.get("attention_factor") is not None:  # GGUF's multiplies what yarn would take without it
        usual = 1 + 0.1 * math.log(factor)
        keys["rope.scaling.attn_factor"] = real(rope, "attention_factor") / usual
    for beta in ("beta_fast", "beta_slow"):
        if rope.get(beta) is not None:
            keys[f"rope.scaling.yarn_{beta}"] = real(rope, beta)
    return keys


def rope_factors(config: dict[str, Any], dims: int) -> NDArray[np.float32] | None:
    """llama3 scaling: what each frequency is divided by. Slow ones by `factor`, fast ones by 1, a ramp between."""
    kind, rope = rope_of(config)
    if kind != "llama3":
        return None
    factor, low, high = (real(rope, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = real(rope, "original_max_position_embeddings")
    with np.errstate(divide="raise", invalid="raise", over="raise"):
        frequency = real(rope, "rope_theta") ** (-np.arange(0, dims, 2) / dims)
        turns = original * frequency / (2 * math.pi)  # within the context it was trained with first
        keep = np.clip((turns - low) / (high - low), 0, 1)
        return (1 / ((1 - keep) / factor + keep)).astype(np.float32)


def find_arrays(folder: Path) -> dict[str, Stored]:
    """Every array of the checkpoint; of several sets of files, the one that the index names."""
    index = read_json(folder / "model.safetensors.index.json").get("weight_map")
    if isinstance(index, dict):
        names = sorted({str(name) for name in index.values()})
    elif (folder / "model.safetensors").is_file():
        names = ["model.safetensors"]
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if not names:
        raise BadFile(f"{folder} has no .safetensors file", "PyTorch .bin weights must be saved as safetensors first.")
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if missing:
        raise BadFile(f"{folder}: {len(missing)} of {len(names)} shards missing: {show(missing[0])}", "Fetch the rest.")
    found: dict[str, Stored] = {}
    for name in names:
        found |= read_header(folder / name)[0]
    if absent := sorted(set(index or ()) - found.keys()):
        raise BadFile(f"{folder}: the index names {show(absent[0])}, which no shard has", AGAIN)
    return found


def name_tensors(stored: dict[str, Stored], config: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Tensor]:
    arch = metadata["general.architecture"]
    quantised = config.get("quantization_config")
    method = Method.read(quantised) if isinstance(quantised, dict) else None
    found: dict[str, Tensor] = {}
    for name, array in stored.items():
        place, part = gguf_name(name)
        if place is None or (place == "output" and config.get("tie_word_embeddings")):
            continue
        if part in ("weight", "bias"):
            rows = head_rows(place, array.shape[:1], metadata)
            found[f"{place}.{part}"] = float_tensor(f"{place}.{part}", array, rows)
        elif part == "qweight" and method:
            matrix = FourBit.find(f"{place}.weight", name.removesuffix(".qweight"), stored, method)
            rows = head_rows(place, matrix.shape[:1], metadata)
            found[matrix.name] = four_bit_tensor(replace(matrix, rows=rows))
        elif part not in FOUR_BIT or not method:
            raise Unsupported(f"tensor {show(name)} has no place in a {arch} model", WORKING)
    if not config.get("tie_word_embeddings") and "output.weight" not in found:
        raise BadFile("missing tensors: lm_head.weight", "Fetch the checkpoint again; config.json says it has one.")
    factors = rope_factors(config, metadata[f"{arch}.rope.dimension_count"])
    if factors is not None:
        found["rope_freqs.weight"] = Tensor(
            "rope_freqs.weight", factors.shape, factors.nbytes, lambda: lambda start, stop: factors[None]
        )
    return in_layer_order(found)


def gguf_name(name: str) -> tuple[str | None, str]:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up, weight; None for what is not needed."""
    if DERIVED.search(name):
        return None, ""
    prefix, _, part = name.rpartition(".")
    if layer := LAYER.fullmatch(prefix):
        prefix = f"blk.{int(layer[1])}.{BLOCK.get(layer[2], '?')}"
    place = TOP.get(prefix, prefix)
    if place == name.rpartition(".")[0] or place.endswith("?"):
        raise Unsupported(f"tensor {show(name)} has no place in a llama or qwen2 model", WORKING)
    return place, part


def head_rows(place: str, n: tuple[int, ...], metadata: dict[str, Any]) -> NDArray[np.int64] | None:
    """GGUF keeps the two numbers that RoPE turns together side by side in a llama model, Hugging Face half a head
    apart. None also where there are not as many rows, `n`: the shape is refused later."""
    kind = {"attn_q": "head_count", "attn_k": "head_count_kv"}.get(place.rpartition(".")[2])
    if kind is None or metadata["general.architecture"] != "llama":
        return None
    heads, head_dim = metadata[f"llama.attention.{kind}"], metadata["llama.attention.key_length"]
    return rope_rows(heads, head_dim, metadata["llama.rope.dimension_count"]) if n == (heads * head_dim,) else None


def four_bit_tensor(matrix: FourBit) -> Tensor:
    return Tensor(matrix.name, matrix.shape, matrix.nbytes, matrix.reader, four_bit=matrix)


def in_layer_order(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Embedding, layers, output: the order in which they are used."""

    def place(name: str) -> tuple[int, str]:
        layer = re.match(r"blk\.(\d+)\.", name)
        return (int(layer[1]), name) if layer else (-1 if name.startswith(("token", "rope")) else 1 << 30, name)

    return {name: tensors[name] for name in sorted(tensors, key=place)}
