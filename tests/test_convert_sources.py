"""What can be converted: Hugging Face folders, AWQ and GPTQ, llama2.c, tokenizers. Weights and ids must be exact."""

import hashlib
import http.server
import json
import math
import os
import struct
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from gguf_builder import spm_vocab, tiny_llama
from hf_builder import (
    LLAMA3_SPLIT,
    added_token,
    bpe_json,
    byte_level,
    hf_config,
    hf_folder,
    hf_weights,
    quantise_linears,
    split,
    spm_model,
    write_safetensors,
)
from llama_cpp_peer import LlamaCpp
from package_data import vectors, vocabulary
from reference import Reference, assert_close

from llamagpu.convert import vocab
from llamagpu.convert.convert import Report, convert, open_source, plan
from llamagpu.errors import BadFile, LlamaGpuError, Unsupported
from llamagpu.files.config import ModelConfig
from llamagpu.files.gguf_file import GgufFile
from llamagpu.files.packed_file import ModelFile, PackedFile, open_model_file
from llamagpu.files.safetensors_file import read_header
from llamagpu.files.storage import PackedMatrix
from llamagpu.files.storage import dequantize as dequantize_packed
from llamagpu.files.tokenizer import Tokenizer

IDS = [1, 70, 5, 280, 33, 9]


def convert_folder(folder: Path, to: str | None = "f16", keep_output: str = "f16") -> tuple[ModelFile, Report]:
    source = open_source(str(folder))
    planned = plan(source, to, keep_output)
    out = folder / f"out-{to}{'.safetensors' if planned.packed else '.gguf'}"
    report = convert(source, out, planned)
    return open_model_file(out), report


def converted(folder: Path, to: str | None = "f16", keep_output: str = "f16") -> ModelFile:
    return convert_folder(folder, to, keep_output)[0]


def values(file: ModelFile, name: str) -> np.ndarray:
    tensor = file.tensors[name]
    return dequantize(tensor.data, GGMLQuantizationType[tensor.ggml_type]).reshape(tensor.shape)


def logits(file: GgufFile) -> np.ndarray:
    return Reference(file, exact=True).forward(IDS)


# Hugging Face


@pytest.mark.parametrize(("dtype", "shards"), [(None, 1), ("BF16", 3)])
def test_weights_are_unchanged(tmp_path, dtype, shards):
    config = hf_config()
    weights = hf_weights(config)
    if dtype:  # what bf16 can hold
        weights = {k: (v.view(np.uint32) & 0xFFFF0000).view(np.float32) for k, v in weights.items()}
    file = converted(hf_folder(tmp_path / "m", config, weights, dtype, shards))
    assert len(file.tensors) == len(weights)
    assert np.array_equal(values(file, "blk.1.ffn_down.weight"), weights["model.layers.1.mlp.down_proj.weight"])
    assert np.array_equal(values(file, "output.weight"), weights["lm_head.weight"])
    assert np.array_equal(values(file, "output_norm.weight"), weights["model.norm.weight"])
    assert file.tensors["output_norm.weight"].ggml_type == "F32"
    # llama.cpp's row order: of each head of 16 the rows 0, 8, 1, 9, ...
    q = weights["model.layers.0.self_attn.q_proj.weight"].reshape(4, 2, 8, 64).swapaxes(1, 2).reshape(64, 64)
    assert np.array_equal(values(file, "blk.0.attn_q.weight"), q)
    k = weights["model.layers.0.self_attn.k_proj.weight"].reshape(2, 2, 8, 64).swapaxes(1, 2).reshape(32, 64)
    assert np.array_equal(values(file, "blk.0.attn_k.weight"), k)


@pytest.mark.parametrize("tied", [True, False])
def test_rope_row_order_gives_the_same_logits(tmp_path, tied):
    """The same weights as llama (rows reordered, adjacent RoPE pairs) and as qwen2 (not reordered, NeoX pairs)."""
    found = {}
    for arch in ("llama", "mistral", "qwen2"):
        config = hf_config(model_type=arch, tie_word_embeddings=tied)
        weights = hf_weights(config, biases=True)
        found[arch] = logits(converted(hf_folder(tmp_path / arch, config, weights)))
    assert_close(found["llama"], found["qwen2"], 1e-25, 1e-12)
    assert np.array_equal(found["llama"], found["mistral"])


def test_metadata_and_types_as_gguf_reads_them(tmp_path):
    config = hf_config(head_dim=32, sliding_window=128)
    file = converted(hf_folder(tmp_path / "Tiny-Model", config, hf_weights(config)), "q4_0", "q8_0")
    expected = {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "Tiny-Model",
        "llama.block_count": 2,
        "llama.context_length": 256,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 32,
        "llama.attention.value_length": 32,
        "llama.attention.sliding_window": 128,
        "llama.rope.dimension_count": 32,
        "llama.rope.freq_base": 10000.0,
        "llama.vocab_size": 288,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages }}",
        "general.file_type": 2,
        "general.quantization_version": 2,
    }
    assert {key: file.metadata.get(key) for key in expected} == expected
    found = {name: t.ggml_type for name, t in file.tensors.items()}
    assert found["token_embd.weight"] == found["output.weight"] == "Q8_0" and found["blk.0.attn_v.weight"] == "Q4_0"
    reader = GGUFReader(file.path)
    assert {t.name: (t.tensor_type.name, bytes(t.data.tobytes())) for t in reader.tensors} == {
        name: (t.ggml_type, t.data.tobytes()) for name, t in file.tensors.items()
    }
    types = {name: [value_type.name for value_type in field.types] for name, field in reader.fields.items()}
    assert types["llama.block_count"] == types["tokenizer.ggml.bos_token_id"] == ["UINT32"]
    assert types["llama.rope.freq_base"] == ["FLOAT32"] and types["tokenizer.ggml.add_bos_token"] == ["BOOL"]
    assert types["tokenizer.ggml.token_type"] == ["ARRAY", "INT32"]


LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_llama3_rope_scaling_becomes_a_tensor(tmp_path):
    config = hf_config(rope_scaling=LLAMA3_ROPE | {"original_max_position_embeddings": 64}, head_dim=32)
    file = converted(hf_folder(tmp_path / "m", config, hf_weights(config)))
    for i, factor in enumerate(values(file, "rope_freqs.weight")):
        wavelength = 2 * math.pi * 10000.0 ** (2 * i / 32)
        smooth = (64 / wavelength - 1) / 3
        wanted = 1 if wavelength < 16 else 8 if wavelength > 64 else 1 / ((1 - smooth) / 8 + smooth)
        assert factor == pytest.approx(wanted, rel=1e-6)


def test_linear_and_yarn_rope_scaling_become_metadata(tmp_path):
    config = hf_config(rope_scaling={"type": "linear", "factor": 2})
    keys = converted(hf_folder(tmp_path / "linear", config, hf_weights(config))).metadata
    assert keys["llama.rope.scaling.type"] == "linear" and keys["llama.rope.scaling.factor"] == 2.0
    yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "attention_factor": 1.5, "beta_fast": 16}
    config = hf_config(rope_parameters=yarn | {"original_max_position_embeddings": 64})
    keys = converted(hf_folder(tmp_path / "yarn", config, hf_weights(config))).metadata
    assert keys["llama.rope.freq_base"] == 5e5 and keys["llama.rope.scaling.original_context_length"] == 64
    assert keys["llama.rope.scaling.yarn_beta_fast"] == 16.0 and "llama.rope.scaling.yarn_beta_slow" not in keys
    assert keys["llama.rope.scaling.attn_factor"] == pytest.approx(1.5 / (1 + 0.1 * math.log(4)))


def fails(folder: Path, *words: str) -> LlamaGpuError:
    with pytest.raises(LlamaGpuError) as caught:
        open_source(str(folder))
    assert all(word in caught.value.cause for word in words), caught.value.cause
    assert caught.value.remedy
    return caught.value


def test_incomplete_and_unsupported_folders_are_refused(tmp_path):
    config = hf_config()
    weights = hf_weights(config)
    folder = tmp_path / "m"

    def make(drop: str = "", shape: str = "", shards: int = 1, **changes) -> Path:
        kept = {k: v[1:] if k == shape else v for k, v in weights.items() if k != drop}
        for file in folder.glob("*.safetensors*"):
            file.unlink()
        return hf_folder(folder, config | changes, kept, shards=shards)

    name = "model.layers.1.mlp.up_proj.weight"
    fails(make(drop=name), "missing tensors", "blk.1.ffn_up.weight")
    fails(make(shape=name), "blk.1.ffn_up.weight", "[95, 64]", "[96, 64]")
    fails(make(drop="lm_head.weight"), "lm_head.weight")
    fails(make(hidden_size="64"), "hidden_size")
    for key in ("num_attention_heads", "head_dim", "num_hidden_layers", "max_position_embeddings"):
        fails(make(**{key: 1 << 31}), key, "2147483648")
    fails(make(num_hidden_layers=1 << 24), "block_count")
    fails(make(num_attention_heads=1 << 24, num_key_value_heads=1 << 24, head_dim=1 << 24), "head_count")
    yarn = {"type": "yarn", "factor": 0, "attention_factor": 1.5}
    for changes in ({"model_type": ["llama"]}, {"partial_rotary_factor": "a"}, {"rope_scaling": yarn}):
        assert fails(make(**changes), "config.json").exit_code == 1
    assert fails(make(model_type="falcon"), "falcon").exit_code == 4
    assert fails(make(model_type=None), "None").exit_code == 4
    assert fails(make(hidden_act="gelu"), "gelu").exit_code == 4
    assert fails(make(partial_rotary_factor=0.5), "a part of each head").exit_code == 4
    assert fails(make(model_type="qwen2", rope_scaling={"type": "llama3"}), "qwen2", "llama3").exit_code == 4
    assert fails(make(model_type="qwen2", use_sliding_window=True), "qwen2", "sliding window").exit_code == 4
    assert fails(make(rope_scaling={"type": "dynamic", "factor": 2.0}), "dynamic").exit_code == 4
    assert fails(make(quantization_config={"quant_method": "bitsandbytes"}), "bitsandbytes").exit_code == 4
    make(shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    fails(folder, "1 of 3 shards missing", "00002")
    make()
    (folder / "2_Dense").mkdir()
    assert fails(folder, "another matrix (2_Dense)").exit_code == 4
    (folder / "2_Dense").rmdir()
    (folder / "model.safetensors").unlink()
    fails(folder, "no .safetensors")
    (folder / "config.json").write_text("{")
    fails(folder, "config.json", "JSON")
    (folder / "config.json").unlink()
    fails(folder, "no config.json")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_norm",
        "model.layers.0.mlp.gate",
        "model.layers.0.mlp.experts.up_proj",
        "model.layers.0.block_sparse_moe.gate",
        "model.layers.0.attention.wq",  # of another library, with another row order
        "model.layers.0.self_attn.q_proj_no_perm",
        "layers.0.attention.wq",
        "tok_embeddings",
        "token_embd",
        "blk.0.attn_q",
        "model.layers.a.mlp.up_proj",
        "weight",
    ],
)
def test_tensors_without_a_place_are_refused(tmp_path, name):
    """gguf's map has a GGUF name for most of these."""
    config = hf_config()
    folder = hf_folder(tmp_path / "m", config, hf_weights(config) | {f"{name}.weight": np.ones(16, np.float32)})
    assert fails(folder, name, "no place in a llama model").exit_code == 4


def test_a_tensor_with_two_names_is_refused(tmp_path):
    config = hf_config()
    weights = hf_weights(config)
    weights["model.layers.0.self_attn.out_proj.weight"] = weights["model.layers.0.self_attn.o_proj.weight"]
    fails(hf_folder(tmp_path / "m", config, weights), "under another name")


def test_derived_tensors_are_left_out(tmp_path):
    config = hf_config()
    weights = hf_weights(config)
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    file = converted(hf_folder(tmp_path / "m", config, weights | more))
    assert len(file.tensors) == len(weights)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.2.mlp.up_proj.weight", (96, 64)),
        (f"model.layers.{1 << 40}.mlp.up_proj.weight", (96, 64)),  # no table of that size is made
        ("model.norm.bias", (64,)),
        ("lm_head.bias", (288,)),
        ("model.layers.00.mlp.up_proj.weight", (96, 64)),
        ("model.layers.\u0660.mlp.up_proj.weight", (96, 64)),
    ],
)
def test_surplus_tensors_are_refused(tmp_path, name, shape):
    """llama.cpp refuses a file with a tensor too many, and the engine would leave it out of its arithmetic."""
    config = hf_config()
    folder = hf_folder(tmp_path / "m", config, hf_weights(config) | {name: np.ones(shape, np.float32)})
    assert fails(folder, "no place in a llama model").exit_code == 4


def test_fewer_layers_than_the_tensors_have_are_refused(tmp_path):
    folder = hf_folder(tmp_path / "m", hf_config(num_hidden_layers=1), hf_weights(hf_config()))
    fails(folder, "blk.1.", "no place in a llama model of 1 layer")


def test_overlapping_tensors_are_refused(tmp_path):
    folder = hf_folder(tmp_path / "m", hf_config(), hf_weights(hf_config()))
    raw = (folder / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    gate = header["model.layers.0.mlp.gate_proj.weight"]["data_offsets"]
    header["model.layers.0.mlp.up_proj.weight"]["data_offsets"] = gate
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + raw[end:])
    fails(folder, "model.safetensors", "overlap")


ENTRIES = (
    '{"dtype":"F32","shape":[2],"data_offsets":[0,80]}',
    '{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}',
    '{"dtype":"F32","shape":[2],"data_offsets":[8,16]}',
    '{"dtype":"F32","shape":2,"data_offsets":[0,8]}',
    '{"dtype":"F8_E4M3","shape":[8],"data_offsets":[0,8]}',
    '{"dtype":["U8"],"shape":[8],"data_offsets":[0,8]}',
    '{"dtype":{},"shape":[8],"data_offsets":[0,8]}',
    '{"shape":[2]}',
    "3",
)
HEADERS = [b"nope", b"[]", *(f'{{"x":{entry}}}'.encode() for entry in ENTRIES)]


@pytest.mark.parametrize("raw", [b"", b"\xff" * 8, *(struct.pack("<Q", len(h)) + h + bytes(8) for h in HEADERS)])
def test_hostile_safetensors_headers_are_refused(tmp_path, raw):
    folder = hf_folder(tmp_path / "m", hf_config(), {})
    (folder / "model.safetensors").write_bytes(raw)
    fails(folder, "model.safetensors")


@pytest.mark.parametrize("name", ["x" * 300, "x\0y", "\ud800", "../model.safetensors", ""])
def test_shards_that_cannot_be_are_missing(tmp_path, name):
    folder = hf_folder(tmp_path / "m", hf_config(), hf_weights(hf_config()))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    assert len(fails(folder, "shards missing").cause) < 500


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs")
def test_a_fifo_in_a_folder_is_refused(tmp_path):
    """Opening it would wait for ever."""
    folder = hf_folder(tmp_path / "m", hf_config(), hf_weights(hf_config()))
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    fails(folder, "config.json", "not a regular file")
    with pytest.raises(BadFile, match="not a regular file"):
        read_header(folder / "config.json")


# AWQ and GPTQ


def quantised(
    folder: Path, method: str, zeros: str, group: int = 32, act_order: bool = False, zero_shift: int = 1, **extra
) -> tuple[Path, dict[str, np.ndarray]]:
    """A folder, and the weights that its arrays stand for."""
    settings = {"quant_method": method, "bits": 4, "group_size": group}
    config = hf_config(intermediate_size=128, quantization_config=settings | extra)
    arrays, weights = quantise_linears(hf_weights(config), method, group, zeros, act_order, zero_shift)
    return hf_folder(folder, config, arrays), weights


def assert_same_weights(file: ModelFile, weights: dict[str, np.ndarray]) -> None:
    want = weights["model.layers.1.mlp.gate_proj.weight"]
    assert np.array_equal(values(file, "blk.1.ffn_gate.weight"), want)
    k = weights["model.layers.0.self_attn.k_proj.weight"].reshape(2, 2, 8, 64).swapaxes(1, 2).reshape(32, 64)
    assert np.array_equal(values(file, "blk.0.attn_k.weight"), k)


@pytest.mark.parametrize("method", ["awq", "gptq"])
@pytest.mark.parametrize(("zeros", "ggml_type"), [("8", "Q4_0"), ("even", "Q4_1")])
def test_awq_and_gptq_are_exact_in_gguf(tmp_path, method, zeros, ggml_type):
    folder, weights = quantised(tmp_path / "m", method, zeros)
    file, report = convert_folder(folder, None)
    assert isinstance(file, GgufFile) and file.tensors["blk.0.ffn_up.weight"].ggml_type == ggml_type
    assert_same_weights(file, weights)
    assert report.nmse < 1e-6  # of the embeddings


def packed_matrix(file: PackedFile, label: str) -> PackedMatrix:
    config = ModelConfig.from_gguf(file.metadata, file.tensors)
    (matrix,) = next(source.load().matrices for source in file.matrix_sources(config) if source.label == label)
    return matrix


@pytest.mark.parametrize("method", ["awq", "gptq"])
@pytest.mark.parametrize("group", [32, 64, -1])
def test_awq_and_gptq_are_exact_in_packed_files(tmp_path, method, group):
    """The product of zero point and scale needs more bits than f16 has."""
    folder, weights = quantised(tmp_path / "m", method, "any", group)
    file, report = convert_folder(folder, None)
    assert isinstance(file, PackedFile) and "packed" in report.notes[0]
    down = packed_matrix(file, "blk.1.ffn_down")
    assert down.scales.dtype == np.float32 and down.layout.group == 32
    assert np.array_equal(dequantize_packed(down), weights["model.layers.1.mlp.down_proj.weight"])
    gate_up = packed_matrix(file, "blk.1.gate_up")
    assert np.array_equal(dequantize_packed(gate_up)[1::2], weights["model.layers.1.mlp.up_proj.weight"])


def test_second_format_of_gptq_stores_zero_points_unchanged(tmp_path):
    folder, weights = quantised(tmp_path / "m", "gptq", "even", zero_shift=0, checkpoint_format="gptq_v2")
    assert_same_weights(converted(folder, None), weights)


def test_offsets_are_rounded_to_f16_for_q4_1(tmp_path):
    folder, weights = quantised(tmp_path / "m", "awq", "any")
    file, report = convert_folder(folder, "q4_1")
    assert isinstance(file, GgufFile) and "rounded to f16" in report.notes[0]
    want = weights["model.layers.1.mlp.gate_proj.weight"]
    assert_close(values(file, "blk.1.ffn_gate.weight"), want, 1e-6, 1e-3)
    assert 0 < next(loss.nmse for loss in report.tensors if loss.name == "blk.1.ffn_gate.weight") < 1e-6


def test_act_order_is_refused_for_4_bits_and_exact_in_f16(tmp_path):
    folder, weights = quantised(tmp_path / "m", "gptq", "any", act_order=True, desc_act=True)
    for to in (None, "packed", "q4_0"):
        with pytest.raises(Unsupported, match="act-order"):
            converted(folder, to)
    file = converted(folder, "f16")
    same = weights["model.layers.1.mlp.gate_proj.weight"].astype(np.float16)
    assert np.array_equal(values(file, "blk.1.ffn_gate.weight"), same)


def test_damaged_and_unsupported_awq_is_refused(tmp_path):
    assert fails(quantised(tmp_path / "a", "awq", "8", bits=3)[0], "3 bits").exit_code == 4
    assert fails(quantised(tmp_path / "b", "awq", "8", version="gemv")[0], "gemv").exit_code == 4
    folder, _ = quantised(tmp_path / "c", "awq", "8")
    config = json.loads((folder / "config.json").read_text())
    arrays, _ = quantise_linears(hf_weights(config), "awq", 32, "8")
    del arrays["model.layers.0.mlp.up_proj.scales"]
    write_safetensors(folder / "model.safetensors", arrays)
    fails(folder, "missing", "up_proj.scales")
    arrays["model.layers.0.mlp.up_proj.scales"] = np.ones((4, 128), np.float16)
    write_safetensors(folder / "model.safetensors", arrays)
    fails(folder, "up_proj", "does not fit")
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert fails(folder, "qweight", "no place").exit_code == 4


# llama2.c


@pytest.mark.parametrize("tied", [True, False])
def test_llama2c_gives_the_gguf_it_was_made_from(tmp_path, tied):
    """A GGUF is written as llama2.c's export does, and converted back."""
    shape = {"dim": 64, "ffn": 172, "layers": 3, "heads": 8, "kv_heads": 4, "vocab": 512}
    original = GgufFile(tiny_llama(tmp_path / "m.gguf", context=512, **shape))
    m, t = original.metadata, original.tensors
    sizes = [*(shape if tied else shape | {"vocab": -512}).values(), 512]
    layer = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_down", "ffn_up"]
    names = ["token_embd", *(f"blk.{i}.{tensor}" for tensor in layer for i in range(3)), "output_norm"]
    raw = struct.pack("<7i", *sizes) + b"".join(t[f"{name}.weight"].data.tobytes() for name in names)
    raw += bytes(2 * 4 * 512 * 4) + (b"" if tied else t["token_embd.weight"].data.tobytes())
    (tmp_path / "stories.bin").write_bytes(raw)
    with pytest.raises(BadFile, match=r"tokenizer\.bin"):
        open_source(str(tmp_path / "stories.bin"))
    tokens, scores = m["tokenizer.ggml.tokens"], m["tokenizer.ggml.scores"]
    texts = [text.replace("\u2581", " ").encode() for text in tokens]
    entries = (struct.pack("<fi", score, len(text)) + text for text, score in zip(texts, scores, strict=True))
    (tmp_path / "tokenizer.bin").write_bytes(struct.pack("<i", 27) + b"".join(entries))
    source = open_source(str(tmp_path / "stories.bin"))
    convert(source, tmp_path / "out.gguf", plan(source, "f16"))
    file = GgufFile(tmp_path / "out.gguf")
    assert ("output.weight" in file.tensors) is not tied
    for name in t:
        wanted = values(original, name) if len(t[name].shape) == 1 else values(original, name).astype(np.float16)
        assert np.array_equal(values(file, name), wanted), name
    assert file.metadata["tokenizer.ggml.tokens"] == tokens
    assert np.array_equal(file.metadata["tokenizer.ggml.token_type"], m["tokenizer.ggml.token_type"])
    text = "once upon a time, there was a little dog."
    assert Tokenizer.from_gguf(file.metadata).encode(text) == Tokenizer.from_gguf(m).encode(text)
    (tmp_path / "stories.bin").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(BadFile, match="promises"):
        open_source(str(tmp_path / "stories.bin"))


def refused_in_little_memory(path: Path, *words: str) -> None:
    tracemalloc.start()
    try:
        fails(path, *words)
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1, 1_000_000), (2, 1, 1_000_000, 1, 1, 32)])
def test_a_llama2c_header_is_not_taken_at_its_word(tmp_path, sizes):
    """16,777,215 tokens, the most that was allowed, took 1.5 GB."""
    (tmp_path / "stories.bin").write_bytes(struct.pack("<7i", *sizes, 8))
    (tmp_path / "tokenizer.bin").write_bytes(bytes(4))
    refused_in_little_memory(tmp_path / "stories.bin", "stories.bin", "promises")


def sparse(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def test_a_large_llama2c_vocabulary_is_refused(tmp_path):
    path = tmp_path / "stories.bin"
    path.write_bytes(struct.pack("<7i", 2, 1, 1, 1, 1, 8_000_000, 8))
    sparse(path, 1 << 30)
    refused_in_little_memory(path, "8,000,000 tokens")


def test_a_large_embedding_table_is_refused(tmp_path):
    config = hf_config(hidden_size=2, num_attention_heads=1, num_key_value_heads=1)
    folder = hf_folder(tmp_path / "m", config, {})
    entry = {"dtype": "F16", "shape": [8_000_000, 2], "data_offsets": [0, 32_000_000]}
    text = json.dumps(
        {"model.embed_tokens.weight": entry, "lm_head.weight": entry | {"data_offsets": [32_000_000, 64_000_000]}}
    )
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text.encode())
    sparse(folder / "model.safetensors", 8 + len(text) + 64_000_000)
    refused_in_little_memory(folder, "8,000,000 tokens")


# Tokenizers


DIGITS = {"type": "Digits", "individual_digits": True}
BPE = {
    "llama-bpe": ("llama-bpe", [split(LLAMA3_SPLIT), byte_level(False)], {"ignore_merges": True}),
    "qwen2": ("qwen2", [split(LLAMA3_SPLIT.replace("{1,3}", "")), byte_level(False)], {}),
    "gpt-2": ("gpt-2", [byte_level(True)], {}),
    "refact": ("smollm", [DIGITS, byte_level(True)], {}),  # the same pattern, under the name that SmolLM has
}


@pytest.mark.parametrize("name", [*BPE])
def test_tokenizer_json_gives_the_ids_of_llama_cpp(tmp_path, name):
    """Real vocabularies, and llama.cpp's own test texts."""
    original = GgufFile(vocabulary(name)).metadata
    pre, splits, model = BPE[name]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(bpe_json(original, splits, **model)))
    found = vocab.bpe(path, len(original["tokenizer.ggml.tokens"]))
    assert found["tokenizer.ggml.pre"] == pre and found["tokenizer.ggml.model"] == "gpt2"
    assert found["tokenizer.ggml.tokens"] == original["tokenizer.ggml.tokens"]
    assert np.array_equal(found["tokenizer.ggml.token_type"], original["tokenizer.ggml.token_type"])
    tokenizer = Tokenizer.from_gguf(found)
    for text, ids in vectors(name):
        assert tokenizer.encode(text, bos=False, special=False) == ids, text


def test_unknown_split_pattern_is_refused(tmp_path):
    original = GgufFile(vocabulary("gpt-2")).metadata
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(bpe_json(original, [split("[aeiou]"), byte_level(False)])))
    with pytest.raises(Unsupported, match="pre-tokenizer"):
        vocab.bpe(path, 50257)


def test_hostile_tokenizer_json_is_refused(tmp_path, capfd):
    """The prefix makes the tokenizers library panic: nothing of that is printed."""
    original = GgufFile(vocabulary("gpt-2")).metadata
    path = tmp_path / "tokenizer.json"
    for model in ({"continuing_subword_prefix": "</s>"}, {"merges": ["\u2603 \u2603"]}, {"vocab": {"a": 1.5}}):
        path.write_text(json.dumps(bpe_json(original, [byte_level(True)], **model)))
        with pytest.raises(BadFile):
            vocab.bpe(path, 50257)
    assert capfd.readouterr() == ("", "")


PADDING = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
PADDING |= {"pad_type_id": 0, "pad_token": "!"}
TRUNCATION = {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}


@pytest.mark.parametrize(
    "settings",
    [
        {"padding": PADDING | {"strategy": {"Fixed": 512}}, "truncation": TRUNCATION},
        {"padding": PADDING | {"strategy": {"Fixed": 2_000_000_000}}},
        {"padding": PADDING | {"pad_to_multiple_of": 2_000_000_000}},
    ],
)
def test_padding_and_truncation_do_not_matter(tmp_path, settings):
    original = GgufFile(vocabulary("gpt-2")).metadata
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(bpe_json(original, [byte_level(True)]) | settings))
    found = vocab.bpe(path, 50257)
    assert found["tokenizer.ggml.pre"] == "gpt-2" and found["tokenizer.ggml.add_eos_token"] is False


def template_processing(uses: int, ids: int) -> dict[str, Any]:
    special = {"x": {"id": "x", "ids": [0] * ids, "tokens": ["!"] * ids}}
    text: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    single = text + [{"SpecialToken": {"id": "x", "type_id": 0}}] * uses
    return {"type": "TemplateProcessing", "single": single, "pair": text, "special_tokens": special}


DOUBLING = [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 33


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the memory of a process")
@pytest.mark.parametrize(
    "settings",
    [
        {"post_processor": template_processing(uses=100_000, ids=10_000)},
        {"post_processor": template_processing(uses=100, ids=10_000)},
        {"normalizer": {"type": "Sequence", "normalizers": DOUBLING}},
    ],
)
def test_tokenizer_json_that_explodes_is_refused(tmp_path, settings, monkeypatch):
    monkeypatch.setattr(vocab, "CPU_SECONDS", 2)
    original = GgufFile(vocabulary("gpt-2")).metadata
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(bpe_json(original, [byte_level(True)]) | settings))
    with pytest.raises(BadFile, match=r"tokenizer\.json"):
        vocab.bpe(path, 50257)


def test_sentencepiece_from_tokenizer_model_and_tokenizer_json(tmp_path):
    """Llama 2's vocabulary as tokenizer.model, and rewritten as BPE in tokenizer.json."""
    original = GgufFile(vocabulary("llama-spm")).metadata
    (tmp_path / "tokenizer.model").write_bytes(spm_model(original))
    (tmp_path / "added_tokens.json").write_text(
        json.dumps({"<|pad|>": 32000, "<new>": 32001, 6 * "\u2581": 32002, "<beyond>": 32003})
    )
    decoder = {"32000": {"content": "<|pad|>", "special": True}, "1": {"content": "<s>", "special": True}}
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "added_tokens_decoder": decoder}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}")
    found = vocab.vocabulary(tmp_path, 32003, {})
    assert found["tokenizer.ggml.tokens"] == [*original["tokenizer.ggml.tokens"], "<|pad|>", "<new>", "      "]
    assert found["tokenizer.ggml.token_type"].tolist() == [*original["tokenizer.ggml.token_type"], 3, 4, 4]
    assert np.array_equal(found["tokenizer.ggml.scores"][:32000], original["tokenizer.ggml.scores"])
    assert found["tokenizer.ggml.eos_token_id"] == 2 and found["tokenizer.ggml.add_space_prefix"] is True
    assert found["tokenizer.chat_template"] == "{{ bos_token }}"
    tokenizer, wanted = Tokenizer.from_gguf(found), Tokenizer.from_gguf(original).encode(vocab.CHECK)
    assert tokenizer.encode(vocab.CHECK) == wanted
    indented = tokenizer.encode("a:\n      b", bos=False)
    assert 32002 in indented and tokenizer.decode(indented) == "a:\n      b"

    (tmp_path / "tokenizer.model").unlink()
    (tmp_path / "tokenizer.json").write_text(json.dumps(spm_json(original)))
    found = vocab.vocabulary(tmp_path, 32000, {})
    assert found["tokenizer.ggml.model"] == "llama" and found["tokenizer.ggml.add_bos_token"] is True
    assert found["tokenizer.ggml.token_type"].tolist() == original["tokenizer.ggml.token_type"].tolist()
    assert Tokenizer.from_gguf(found).encode(vocab.CHECK) == wanted


def spm_json(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    known = {token: i for i, token in enumerate(tokens)}
    merges = []  # every pair that makes a token, in the order of the tokens' scores
    for i in np.argsort(-np.array(scores[259:]), kind="stable") + 259:
        text = tokens[i]
        merges += [f"{text[:j]} {text[j:]}" for j in range(1, len(text)) if text[:j] in known and text[j:] in known]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    steps = [{"type": "Prepend", "prepend": "\u2581"}, replace]
    model = {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    return {
        "version": "1.0",
        "added_tokens": [added_token(i, tokens[i], special=True) for i in range(3)],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "model": model | {"vocab": known, "merges": merges},
    }


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "no tokens"),
        (b"\x0a\xff\xff\xff\xff\x0f", "cut short"),
        (b"\x80" * 20, "not a SentencePiece"),
        (b"\x0b", "cut short"),
        (spm_model(spm_vocab(288), model_type=1), "not BPE"),
    ],
)
def test_damaged_sentencepiece_is_refused(tmp_path, raw, message):
    (tmp_path / "tokenizer.model").write_bytes(raw)
    with pytest.raises(LlamaGpuError, match=message):
        vocab.vocabulary(tmp_path, 288, {})


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("added_tokens.json", '{"<new>": 286, "<s>": 287}', ("token 1 '<s>'", "twice")),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"2_87": {"content": "<new>"}}}', ("<new>", "2_87")),
        ("tokenizer_config.json", '{"added_tokens_decoder": {" 287": {"content": "<new>"}}}', ("<new>", "287")),
    ],
)
def test_added_tokens_that_cannot_be_are_refused(tmp_path, file, text, words):
    folder = hf_folder(tmp_path / "m", hf_config(), hf_weights(hf_config()))
    (folder / file).write_text(text)
    fails(folder, *words)


def test_missing_and_unknown_tokenizers_are_refused(tmp_path):
    with pytest.raises(BadFile, match="neither"):
        vocab.vocabulary(tmp_path, 288, {})
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Unigram", "vocab": []}}')
    with pytest.raises(Unsupported, match="Unigram"):
        vocab.vocabulary(tmp_path, 288, {})


# llama.cpp itself


@pytest.mark.parametrize(
    # llama.cpp rounds the inputs of linears to f16 for f16 weights, else to int8
    ("name", "arch", "to", "nmse"),
    [("llama-spm", "llama", "f16", 1e-6), ("gpt-2", "qwen2", "f16", 1e-6), ("llama-spm", "llama", "q4_0", 5e-3)],
)
def test_llama_cpp_gives_the_same_ids_and_logits(tmp_path, name, arch, to, nmse):
    original = GgufFile(vocabulary(name)).metadata
    llama3 = LLAMA3_ROPE | {"original_max_position_embeddings": 16}
    config = hf_config(model_type=arch, vocab_size=len(original["tokenizer.ggml.tokens"]))
    config |= {"tie_word_embeddings": arch == "qwen2", "rope_scaling": None if arch == "qwen2" else llama3}
    folder = hf_folder(tmp_path / "m", config, hf_weights(config, biases=arch == "qwen2"))
    if name == "llama-spm":
        (folder / "tokenizer.model").write_bytes(spm_model(original))
    else:
        (folder / "tokenizer.model").unlink()
        (folder / "tokenizer.json").write_text(json.dumps(bpe_json(original, BPE[name][1])))
    file = converted(folder, to)
    peer, own = LlamaCpp(file.path), Tokenizer.from_gguf(file.metadata)
    for text in (vocab.CHECK, " a  b\n", "<|im_start|>user\nHi<|im_end|><s>"):
        for special in (True, False):
            assert peer.tokenize(text, special) == own.encode(text, special=special)
    properties = peer.properties()
    assert properties["chat_template"] == "{{ messages }}"
    assert properties["eos_token"] == file.metadata["tokenizer.ggml.tokens"][own.eos_id]
    ids = np.random.default_rng(1).integers(3, 30000, 48).tolist()
    logits = Reference(file).forward(ids)
    for count in (1, 17, 48):
        row = logits[count - 1] - logits[count - 1].max()
        wanted = row - np.log(np.exp(row).sum())
        found = peer.log_probs(ids[:count], len(row))
        assert ((found - wanted) ** 2).mean() < nmse * wanted.var(), f"after {count} tokens"


# hf:user/repo


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves the folder `server.folder` as the repository u/r."""

    commit = "0123456789abcdef0123456789abcdef01234567"

    def do_GET(self):
        path = self.path.split("?")[0]
        if path.startswith("/api/models/u/r"):
            files = {str(p.relative_to(self.server.folder)): p for p in self.server.folder.rglob("*.*")}
            tree = [
                {"type": "file", "path": n, "oid": hashlib.sha1(n.encode()).hexdigest(), "size": p.stat().st_size}
                for n, p in files.items()
            ]
            info = {"id": "u/r", "sha": self.commit, "siblings": [{"rfilename": n} for n in files], "private": False}
            body = json.dumps(tree if "/tree/" in path else info).encode()
            return self.answer(200, body, {"Content-Type": "application/json"})
        file = self.server.folder / path.split(f"/u/r/resolve/{self.commit}/")[-1].lstrip("/")
        if not file.is_file():
            return self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        self.server.seen.add(file.name)
        body = file.read_bytes()
        etag = hashlib.sha256(body).hexdigest()
        return self.answer(200, body, {"ETag": f'"{etag}"', "X-Repo-Commit": self.commit})

    do_HEAD = do_GET  # noqa: N815

    def answer(self, status, body, headers):
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


FETCH = """
import sys
from llamagpu.errors import LlamaGpuError
from llamagpu.convert.convert import open_source
try:
    source = open_source(sys.argv[1], progress=False)
    print(source.name, len(source.tensors), source.metadata["tokenizer.chat_template"])
except LlamaGpuError as error:
    print("error", error.cause)
"""


def test_hub_repository_is_fetched_once_and_found_offline(tmp_path):
    config = hf_config()
    weights = hf_weights(config)
    folder = hf_folder(tmp_path / "repo", config, weights, shards=2)
    for extra in ("original/model.safetensors", "consolidated.safetensors", "pytorch_model.bin"):
        (folder / extra).parent.mkdir(exist_ok=True)
        (folder / extra).write_bytes(b"the same weights once more")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.folder, server.seen = folder, set()
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def fetch(spec: str, **env: str) -> str:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
        clean |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}", "HF_HOME": str(tmp_path / "hf")}
        command = [sys.executable, "-c", FETCH, spec]
        run = subprocess.run(command, env=clean | env, capture_output=True, text=True, timeout=100)
        assert run.returncode == 0, run.stderr
        return run.stdout.strip()

    assert fetch("hf:u/r") == f"r {len(weights)} {{{{ messages }}}}"
    assert "model-00002-of-00002.safetensors" in server.seen
    assert not server.seen & {"model.safetensors", "consolidated.safetensors", "pytorch_model.bin"}
    assert fetch("hf:u/none").startswith("error there is no hf:u/none")
    server.shutdown()
    assert fetch("hf:u/r", HF_HUB_OFFLINE="1") == f"r {len(weights)} {{{{ messages }}}}"
    assert fetch("hf:u/other", HF_HUB_OFFLINE="1").startswith("error")
