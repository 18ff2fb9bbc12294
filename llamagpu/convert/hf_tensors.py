"""The arrays of a Hugging Face checkpoint as tensors with the names, shapes and row orders of GGUF."""

import math
import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from gguf import MODEL_ARCH_NAMES, Keys, TensorNameMap, get_tensor_name_map
from numpy.typing import NDArray

from llamagpu.convert.awq_gptq import QuantisationConfig, QuantisedMatrix
from llamagpu.convert.hf_config import metadata_key, rope_factors
from llamagpu.convert.source import Rows, Tensor, alternate_tensor, expert_tensor, float_tensor, mxfp4_tensor
from llamagpu.errors import BadFile, Unsupported
from llamagpu.files.architectures import REMEDY_ARCHITECTURE, Architecture
from llamagpu.files.config import CONV
from llamagpu.files.gguf_file import REMEDY_REFETCH, shown
from llamagpu.files.safetensors_file import Stored
from llamagpu.files.storage import rope_rows

# The names of Llama-like models in the transformers library, with the number of the layer. gguf's map also has the
# names of other libraries, whose q and k have another row order, and of parts that are not supported.
HF_NAME = re.compile(
    r"(?:model\.(?:embed_tokens|norm)|lm_head|"
    r"model\.layers\.(0|[1-9][0-9]*)\.(?:self_attn\.(?:\w+_(?:proj|norm)|sinks)|mlp\.\w+_proj|\w+_layernorm))"
)
# Those that models with short convolutions have beside them.
CONV_NAME = re.compile(
    r"(?:model\.embedding_norm|model\.layers\.(0|[1-9][0-9]*)\."
    r"(?:conv\.(?:conv|in_proj|out_proj)|self_attn\.[qk]_layernorm|feed_forward\.w[123]|\w+_norm))"
)
ROUTER_NAME = re.compile(
    r"model\.layers\.(0|[1-9][0-9]*)\.(?:mlp\.(?:gate|router)|block_sparse_moe\.(?:gate|router\.layer))"
)
# The matrices of experts are arrays of their own, or one array for all, in which gate and up are halves of the input.
EXPERT_NAME = re.compile(
    r"model\.layers\.([0-9]+)\.(?:mlp|block_sparse_moe)\.experts\.([0-9]+)\.(gate_proj|up_proj|down_proj|w[123])\.weight"
)
MIXTRAL = {"w1": "gate", "w2": "down", "w3": "up"}
EXPERTS_NAME = re.compile(r"model\.layers\.([0-9]+)\.block_sparse_moe\.(input|output)_linear\.weight")
# Those of gpt-oss are MXFP4; the rows of gate and up alternate.
MXFP4_NAME = re.compile(r"model\.layers\.([0-9]+)\.mlp\.experts\.(gate_up|down)_proj_(blocks|scales|bias)")
# Tensors of a model of images and text that are not the text model's.
NOT_TEXT = re.compile(r"(?:model\.)?(?:vision_\w+|multi_modal_projector|mm_\w+)\.")
QUANTISED_ARRAYS = ("qweight", "qzeros", "scales", "g_idx")
DERIVED = re.compile(r"rotary_emb\.inv_freq$|masked_bias$")  # arrays that follow from config.json


def name_tensors(
    stored: dict[str, Stored], config: dict[str, Any], record: Architecture, metadata: dict[str, Any]
) -> dict[str, Tensor]:
    settings = config.get("quantization_config")
    quantisation = None
    if isinstance(settings, dict) and settings.get("quant_method") != "mxfp4":  # see expert_tensors
        quantisation = QuantisationConfig.read(settings)
    has_head = any(name.startswith("lm_head.") or ".lm_head." in name for name in stored)
    tied, names = bool(config.get("tie_word_embeddings", not has_head)), name_map(record)
    found: dict[str, Tensor] = {}
    experts = metadata_key(Keys.LLM.EXPERT_COUNT, record) in metadata
    if experts:
        found, stored = expert_tensors(stored)
    for name, array in stored.items():
        if DERIVED.search(name) or ("text_config" in config and NOT_TEXT.match(name)):
            continue
        named = f"{name}.weight" if name.endswith(".sinks") else name
        prefix, _, suffix = named.replace("language_model.", "").rpartition(".")
        prefix = prefix if prefix.startswith(("model.", "lm_head")) else f"model.{prefix}"
        base = gguf_name(names, prefix, experts, record)
        if base == "output" and tied and suffix != "bias":
            continue
        known = suffix in ("weight", "bias") or (quantisation and suffix in QUANTISED_ARRAYS)
        if base is None or not known:
            raise Unsupported(f"tensor {shown(name)} has no place in a {record.name} model", REMEDY_ARCHITECTURE)
        if suffix in ("weight", "bias"):
            order = row_order(base, array.shape[:1], record, metadata)
            shift = record.norm_shift if base.endswith("norm") else 0
            if base.endswith(CONV) and len(array.shape) == 3 and array.shape[1] == 1:  # [dim, 1, taps]
                array = replace(array, shape=array.shape[::2])
            tensor = float_tensor(f"{base}.{suffix}", array, order, shift)
        elif suffix == "qweight" and quantisation:
            matrix = QuantisedMatrix.find(f"{base}.weight", prefix, stored, quantisation)
            tensor = quantised_tensor(replace(matrix, row_order=row_order(base, matrix.shape[:1], record, metadata)))
        else:
            continue  # QuantisedMatrix reads it
        if tensor.name in found:
            raise BadFile(f"tensor {shown(name)} is there under another name too", REMEDY_REFETCH)
        found[tensor.name] = tensor
    if not tied and "output.weight" not in found:
        raise BadFile("missing tensors: lm_head.weight", "Fetch the checkpoint again; config.json says it has one.")
    dims = metadata[metadata_key(Keys.Rope.DIMENSION_COUNT, record)]
    for name, factors in rope_factors(config, dims).items():
        found[name] = Tensor(name, factors.shape, factors.nbytes, partial(constant_rows, factors))
    return in_layer_order(found)


def constant_rows(values: NDArray[np.float32]) -> Rows:
    return lambda start, stop: values[None]


def name_map(record: Architecture) -> TensorNameMap:
    """gguf's map of tensor names, for one layer only: a file may give layers any number, so `gguf_name` inserts it."""
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == record.name)
    return get_tensor_name_map(arch, 1)


def expert_tensors(stored: dict[str, Stored]) -> tuple[dict[str, Tensor], dict[str, Stored]]:
    """The matrices of experts by GGUF name, and the arrays that are left."""
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Stored]] = {}
    rest: dict[str, Stored] = {}
    for name, array in stored.items():
        if match := MXFP4_NAME.fullmatch(name):
            parts = ("gate", "up") if match[2] == "gate_up" else ("down",)
            for i, part in enumerate(parts):
                base = f"blk.{int(match[1])}.ffn_{part}_exps"
                if match[3] == "blocks":
                    scales = find(stored, name.removesuffix("blocks") + "scales")
                    found[f"{base}.weight"] = mxfp4_tensor(f"{base}.weight", array, scales, i, len(parts))
                elif match[3] == "bias":
                    found[f"{base}.bias"] = alternate_tensor(f"{base}.bias", array, i, len(parts))
        elif match := EXPERT_NAME.fullmatch(name):
            part = MIXTRAL.get(match[3], match[3].removesuffix("_proj"))
            experts.setdefault(f"blk.{int(match[1])}.ffn_{part}_exps.weight", {})[int(match[2])] = array
        elif (match := EXPERTS_NAME.fullmatch(name)) and len(array.shape) == 3:
            parts = ("gate", "up") if match[2] == "input" else ("down",)
            for i, part in enumerate(parts):
                pieces = [rows_of_expert(array, expert, i, len(parts)) for expert in range(array.shape[0])]
                experts[f"blk.{int(match[1])}.ffn_{part}_exps.weight"] = dict(enumerate(pieces))
        else:
            rest[name] = array
    for name, arrays in experts.items():
        if sorted(arrays) != list(range(len(arrays))):
            raise BadFile(f"tensor {name} lacks experts", REMEDY_REFETCH)
    found |= {name: expert_tensor(name, [each[i] for i in sorted(each)]) for name, each in experts.items()}
    return found, rest


def find(stored: dict[str, Stored], name: str) -> Stored:
    if name not in stored:
        raise BadFile(f"missing tensors: {shown(name)}", REMEDY_REFETCH)
    return stored[name]


def rows_of_expert(array: Stored, expert: int, part: int, parts: int) -> Stored:
    """The rows of one expert in an array [experts, n, k], or one of `parts` equal parts of them."""
    _, n, k = array.shape
    row = array.nbytes // math.prod(array.shape) * k
    return replace(array, shape=(n // parts, k), offset=array.offset + (expert * n + part * (n // parts)) * row)


def gguf_name(names: TensorNameMap, prefix: str, experts: bool, record: Architecture) -> str | None:
    """model.layers.3.mlp.up_proj -> blk.3.ffn_up; None for a tensor that GGUF does not have."""
    if experts and (router := ROUTER_NAME.fullmatch(prefix)):
        return f"blk.{int(router[1])}.ffn_gate_inp"
    match = HF_NAME.fullmatch(prefix) or (CONV_NAME.fullmatch(prefix) if record.short_convs else None)
    if match is None:
        return None
    if match[1] is None:
        return names.get_name(prefix)
    first = names.get_name(f"{prefix[: match.start(1)]}0{prefix[match.end(1) :]}")
    return first and first.replace("blk.0.", f"blk.{int(match[1])}.")


def row_order(
    base: str, n: tuple[int, ...], record: Architecture, metadata: dict[str, Any]
) -> NDArray[np.int64] | None:
    """The GGUF order of the rows of q and k. None: the rows stay in their order.

    In Hugging Face's order the rows of a RoPE pair are half a head apart. GGUF keeps this order for NeoX architectures;
    for others the rows of a pair are neighbours. None also if the number of rows `n` is wrong: `check_tensors` refuses
    the shape.
    """
    counts = {"attn_q": Keys.Attention.HEAD_COUNT, "attn_k": Keys.Attention.HEAD_COUNT_KV}
    count = counts.get(base.rpartition(".")[2])
    if count is None or record.neox:
        return None
    wanted = (count, Keys.Attention.KEY_LENGTH, Keys.Rope.DIMENSION_COUNT)
    heads, head_dim, rope_dims = (metadata[metadata_key(template, record)] for template in wanted)
    return rope_rows(heads, head_dim, rope_dims) if n == (heads * head_dim,) else None


def quantised_tensor(matrix: QuantisedMatrix) -> Tensor:
    return Tensor(matrix.name, matrix.shape, matrix.nbytes, matrix.reader, quantised=matrix)


def in_layer_order(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sort by use: embedding, layers, output."""

    def sort_key(name: str) -> tuple[int, str]:
        layer = re.match(r"blk\.(\d+)\.", name)
        return (int(layer[1]), name) if layer else (-1 if name.startswith(("token", "rope")) else 1 << 30, name)

    return {name: tensors[name] for name in sorted(tensors, key=sort_key)}
