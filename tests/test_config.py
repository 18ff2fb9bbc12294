"""ModelConfig: what it reads, what it refuses, and its RoPE table against a scalar reference."""

import math
from dataclasses import replace

import numpy as np
import pytest
from gguf_builder import Tensors, tiny_parts
from package_data import default_model

from llamagpu.errors import BadFile, LlamaGpuError, Unsupported
from llamagpu.files.config import LayerKind, ModelConfig, check_tensors, rope_table, tensor_shapes
from llamagpu.files.gguf_file import GgufFile, RawTensor


def raw(tensors: Tensors) -> dict[str, RawTensor]:
    def tensor_of(name: str, ggml_type: str | int, shape: tuple[int, ...], data: bytes) -> RawTensor:
        label = ggml_type if isinstance(ggml_type, str) else f"type {ggml_type}"
        return RawTensor(name, label, shape, np.frombuffer(data, np.uint8))

    return {name: tensor_of(name, *tensor) for name, tensor in tensors.items()}


def tiny(**options) -> tuple[ModelConfig, dict[str, RawTensor]]:
    keys, tensors = tiny_parts(**options)
    config = ModelConfig.from_gguf(keys, raw(tensors))
    check_tensors(config, raw(tensors))
    return config, raw(tensors)


def refusal(error: type[LlamaGpuError] = BadFile, **options) -> str:
    with pytest.raises(error) as caught:
        tiny(**options)
    assert type(caught.value) is error and caught.value.remedy and caught.value.cause.isprintable()
    return caught.value.cause


def test_llama():
    config, _ = tiny(layers=3, dim=96, heads=6, kv_heads=3, ffn=160, vocab=300, context=512, rope_theta=5e5)
    assert config == ModelConfig(
        arch="llama", name="tiny", layers=3, dim=96, heads=6, kv_heads=3, head_dim=16, ffn_dim=160, vocab=300,
        context=512, rope_theta=5e5, rope_dims=16, rope_scaling="none", rope_factor=1.0,
        rope_orig_context=512, yarn_ext_factor=1.0, yarn_attn_factor=1.0, yarn_beta_fast=32.0,
        yarn_beta_slow=1.0, neox=False, norm_eps=1e-5, attn_scale=0.25, tied=True, kinds=(LayerKind(),) * 3,
        local_rope_theta=5e5,
    )  # fmt: skip
    assert config.attn_scale == 0.25


def test_qwen2():
    config, tensors = tiny(arch="qwen2", metadata={"qwen2.attention.sliding_window": 32})
    assert config.neox and config.arch == "qwen2"
    assert config.window == 0  # llama.cpp runs qwen2 without it
    assert tensors["blk.1.attn_k.bias"].shape == (32,)


def test_variants():
    assert tiny(head_dim=24)[0].head_dim == 24
    assert not tiny(tied=False)[0].tied
    for window, used in ((32, 32), (255, 255), (256, 0), (2**32, 0)):  # one as long as the context hides nothing
        assert tiny(metadata={"llama.attention.sliding_window": window})[0].window == used
    assert tiny(kv_heads=4, metadata={"llama.attention.head_count_kv": None})[0].kv_heads == 4
    assert tiny(metadata={"llama.rope.freq_base": None})[0].rope_theta == 10_000
    assert tiny(metadata={"llama.rope.dimension_count": None})[0].rope_dims == 16
    assert tiny(metadata={"llama.attention.head_count_kv": np.array([2, 2], np.int32)})[0].kv_heads == 2
    assert tiny(metadata={"general.name": "a\x1b[31mb\n"})[0].name == "a[31mb"
    assert tiny(tokenizer=False)[0].vocab == 288
    tiny(biases=True, rope_freqs=np.ones(8))


def test_rope_scaling_keys():
    linear, _ = tiny(metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    assert (linear.rope_scaling, linear.rope_factor) == ("linear", 4.0)
    old, _ = tiny(metadata={"llama.rope.scale_linear": 2.0})
    assert (old.rope_scaling, old.rope_factor) == ("linear", 2.0)
    none, _ = tiny(metadata={"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0})
    assert (none.rope_scaling, none.rope_factor) == ("none", 1.0)
    yarn, _ = tiny(
        metadata={
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 8.0,
            "llama.rope.scaling.original_context_length": 32,
            "llama.rope.scaling.attn_factor": 0.5,
        }
    )
    assert (yarn.rope_scaling, yarn.rope_factor, yarn.rope_orig_context) == ("yarn", 8.0, 32)
    assert "'dynamic'" in refusal(Unsupported, metadata={"llama.rope.scaling.type": "dynamic"})
    assert "an array of 2" in refusal(Unsupported, metadata={"llama.rope.scaling.type": np.array([1, 2])})


@pytest.mark.parametrize(
    "key",
    [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ],
)
def test_a_missing_key_is_named(key):
    assert refusal(metadata={f"llama.{key}": None}) == f"metadata key llama.{key} is missing"


def test_other_models_are_unsupported():
    assert "'gemma'" in refusal(Unsupported, arch="gemma")
    assert "8 experts" in refusal(Unsupported, arch="qwen2", metadata={"qwen2.expert_count": 8})
    assert "values of 32" in refusal(Unsupported, metadata={"llama.attention.value_length": 32})
    uneven = {"llama.attention.head_count_kv": np.array([2, 4], np.int32)}
    assert "differs between layers" in refusal(Unsupported, metadata=uneven)
    assert "general.architecture" in refusal(metadata={"general.architecture": None})
    assert "general.architecture" in refusal(metadata={"general.architecture": np.array([1, 2])})


def test_experts_are_counted():
    keys = {"olmoe.expert_count": 8, "olmoe.expert_used_count": 2}
    for key, bad in (("expert_count", None), ("expert_used_count", None), ("expert_count", 0), ("expert_count", 1025),
                     ("expert_used_count", 9)):  # fmt: skip
        assert f"olmoe.{key}" in refusal(arch="olmoe", metadata=keys | {f"olmoe.{key}": bad})
    shared = keys | {"olmoe.expert_shared_feed_forward_length": 64}
    assert "shared expert" in refusal(Unsupported, arch="olmoe", metadata=shared)
    assert "ffn_gate_inp" in refusal(arch="olmoe", metadata=keys)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, bad)
          for key in ("block_count", "context_length", "embedding_length", "feed_forward_length",
                      "attention.head_count", "attention.head_count_kv", "attention.key_length",
                      "rope.dimension_count")
          for bad in (0, -1, 2**40, "8", 8.0, True, ["8"], np.array([8.0]))),
        *((key, bad)
          for key in ("rope.freq_base", "attention.layer_norm_rms_epsilon", "rope.scaling.factor",
                      "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_beta_fast",
                      "rope.scaling.attn_factor")
          for bad in (-1.0, math.nan, math.inf, 2**40, "1")),
        ("rope.freq_base", 0.0), ("rope.dimension_count", 18), ("rope.dimension_count", 7),
        ("attention.head_count", 5), ("attention.head_count_kv", 3), ("attention.key_length", 15),
        ("attention.sliding_window", -1), ("attention.sliding_window", 2**40),
    ],
)  # fmt: skip
def test_senseless_values_are_refused(key, value):
    assert refusal(metadata={f"llama.{key}": value})


def damaged(name: str, *, ggml_type=None, shape=None, drop=False, **options) -> str:
    keys, tensors = tiny_parts(**options)
    old = tensors.pop(name, ("F32", (1,), b"0000"))
    if not drop:
        tensors[name] = (ggml_type or old[0], shape or old[1], old[2])
    with pytest.raises(LlamaGpuError) as caught:
        check_tensors(ModelConfig.from_gguf(keys, raw(tensors)), raw(tensors))
    assert type(caught.value) is (Unsupported if ggml_type else BadFile)
    return caught.value.cause + caught.value.remedy


@pytest.mark.parametrize("name", tensor_shapes(tiny(layers=1)[0]))
def test_each_missing_or_misshapen_tensor_is_named(name):
    assert name in damaged(name, drop=True)
    assert name in damaged(name, shape=(3, 5))
    assert name in damaged(name, ggml_type=37) and "type 37" in damaged(name, ggml_type=37)


def test_optional_tensors_must_fit_when_present():
    for name in ("blk.0.attn_q.bias", "blk.1.ffn_down.bias", "blk.0.attn_output.bias"):
        assert name in damaged(name, biases=True, shape=(3,))
    assert "rope_freqs.weight" in damaged("rope_freqs.weight", rope_freqs=np.ones(9))
    assert "output.weight" in damaged("output.weight", tied=False, shape=(287, 64))


def test_unsupported_types_name_number_and_alternatives():
    said = damaged("blk.1.ffn_up.weight", ggml_type="Q8_K")
    assert "'blk.1.ffn_up.weight' is Q8_K (type 15)" in said and "Q4_0" in said and "BF16" in said


def test_extra_tensors_are_ignored_whatever_they_are():
    keys, tensors = tiny_parts()
    tensors["blk.0.mystery.weight"] = (37, (5,), b"")
    tensors["blk.99.attn_q.weight"] = ("F32", (5,), bytes(20))
    check_tensors(ModelConfig.from_gguf(keys, raw(tensors)), raw(tensors))


def test_many_missing_tensors_are_counted():
    assert refusal(metadata={"llama.block_count": 4000}).endswith("and 35,979 more")


def test_more_tokens_than_rows_is_refused():
    keys, tensors = tiny_parts(vocab=288)
    keys["tokenizer.ggml.tokens"] = keys["tokenizer.ggml.tokens"] + ["x"]
    with pytest.raises(BadFile, match="289 tokens but only 288 rows"):
        ModelConfig.from_gguf(keys, raw(tensors))


def test_default_model():
    file = GgufFile(default_model())
    config = ModelConfig.from_gguf(file.metadata, file.tensors)
    check_tensors(config, file.tensors)
    assert (config.layers, config.dim, config.heads, config.kv_heads, config.tied) == (30, 576, 9, 3, True)
    assert (config.head_dim, config.ffn_dim, config.vocab, config.rope_theta) == (64, 1536, 49152, 1e5)


def reference_angle(c: ModelConfig, factors, position: int, pair: int) -> tuple[float, float]:
    """One entry as ggml computes it, step by step: the angle, and the length of the (cos, sin) vector."""
    full = position * c.rope_theta ** (-2 * pair / c.rope_dims)
    if factors is not None:
        full /= factors[pair]
    scaled = full / c.rope_factor
    if c.rope_scaling != "yarn":
        return scaled, c.yarn_attn_factor

    def corrected(rotations: float) -> float:
        inverse_frequency = c.rope_orig_context / (rotations * 2 * math.pi)
        return c.rope_dims * math.log(inverse_frequency) / (2 * math.log(c.rope_theta))

    low = max(0, math.floor(corrected(c.yarn_beta_fast)))
    high = min(c.rope_dims - 1, math.ceil(corrected(c.yarn_beta_slow)))
    y = (pair - low) / max(0.001, high - low)
    mix = (1 - min(1, max(0, y))) * c.yarn_ext_factor
    mscale = 1 + 0.1 * math.log(c.rope_factor) if c.yarn_ext_factor else 1.0
    return scaled * (1 - mix) + full * mix, c.yarn_attn_factor * mscale


LLAMA3 = np.concatenate([np.ones(20), np.linspace(1, 32, 12), np.full(32, 32.0)])
ROPES = {
    "plain": ({}, None),
    "linear": ({"rope_scaling": "linear", "rope_factor": 4.0}, None),
    "llama3": ({"rope_theta": 5e5}, LLAMA3),
    "yarn": ({"rope_scaling": "yarn", "rope_factor": 16.0, "rope_orig_context": 4096}, None),
    "yarn, tuned": (
        {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_orig_context": 8192, "rope_theta": 1e6,
         "yarn_ext_factor": 0.5, "yarn_attn_factor": 0.7, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0},
        LLAMA3,
    ),
    "yarn, all scaled": ({"rope_scaling": "yarn", "rope_factor": 4.0, "yarn_ext_factor": 0.0}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", ROPES)
def test_rope_table(case):
    changes, factors = ROPES[case]
    config = replace(tiny(head_dim=128)[0], **changes)
    table = rope_table(config, factors, 5000)
    assert table.shape == (5000, 64, 2) and table.dtype == np.float32
    for position in (0, 1, 2, 77, 4095, 4096, 4999):
        for pair in range(64):
            angle, length = reference_angle(config, factors, position, pair)
            expected = np.float32([math.cos(angle) * length, math.sin(angle) * length])
            # float64 throughout: at 5,000 radians the two ways differ by 1e-12, far below float32's 6e-8
            assert np.abs(table[position, pair] - expected).max() <= 1.2e-7, (position, pair)


def test_yarn_keeps_fast_pairs_and_slows_slow_ones():
    config = replace(tiny(head_dim=128)[0], rope_scaling="yarn", rope_factor=16.0, rope_orig_context=4096)
    unscaled = rope_table(replace(config, rope_scaling="none", rope_factor=1.0), None, 64)
    table = rope_table(config, None, 64) / (1 + 0.1 * math.log(16))
    assert np.allclose(table[:, 0], unscaled[:, 0], atol=1e-6)
    assert np.allclose(table[48, 63], unscaled[3, 63], atol=1e-6)  # 48 / 16 = 3
    assert not np.allclose(table[:, 30], unscaled[:, 30], atol=1e-3)


def test_partial_rotation_has_fewer_pairs():
    config, _ = tiny(head_dim=32, metadata={"llama.rope.dimension_count": 20})
    assert rope_table(config, None, 7).shape == (7, 10, 2)


@pytest.mark.parametrize("last", [[], [0.0], [-1.0], [math.nan], [math.inf], [1.0, 1.0]])
def test_rope_freqs_must_be_positive_numbers(last):
    with pytest.raises(BadFile, match=r"rope_freqs\.weight"):
        rope_table(tiny()[0], np.array([1.0] * 7 + last, np.float32), 4)
