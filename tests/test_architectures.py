"""Every architecture against llama.cpp: tiny random files, over more positions than their windows."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import WGPU
from gguf_builder import Tensors, spm_vocab, write_gguf
from hf_builder import hf_folder
from llama_cpp_peer import LlamaCpp
from one_sequence import OneSequence, load_one, reserve, token_ids
from reference import assert_close
from test_fused_decode import drop_stores, fused_of, late_reads, load_steps

from llamagpu.convert.convert import convert, open_source, plan
from llamagpu.convert.hf_config import find_architecture, read_metadata, window_keys
from llamagpu.engine import fused_decode, routes
from llamagpu.engine.fused_check import MAX_NMSE, largest_nmse
from llamagpu.engine.model import BufferModel
from llamagpu.engine.ops import attention_shape
from llamagpu.engine.options import Backend, KvType, Precision
from llamagpu.engine.step_inputs import Segment
from llamagpu.engine.synthetic import synthetic_config
from llamagpu.engine.texture_model import suits_textures
from llamagpu.errors import BadFile, Unsupported
from llamagpu.files.architectures import ARCHITECTURES, Architecture, QkNorm
from llamagpu.files.config import CONV, FREQ_FACTORS, ModelConfig, check_tensors, used_shapes
from llamagpu.files.gguf_file import GgufFile, RawTensor
from llamagpu.files.repack import to_f32
from llamagpu.files.storage import rope_rows
from llamagpu.gpu.recorder import Step

VOCAB, EOS = 288, 2
PROMPT, END = 36, 40  # tokens of the prompt, and of the text after steps of one token
STEP = 2.0**-8  # of weights
SINK = 8  # biases make scores that are as large: a sink of 1 was below the bounds
# Of log probabilities, against llama.cpp with the same file. With F32, whose numbers f16 holds, only the order of sums
# differs. With Q8_0 it rounds activations as `fast` does, but others near a tie: Llama itself has 1e-5 to 2e-5 here.
LARGEST_NMSE = {Precision.HIGH: 1e-6, Precision.FAST: 5e-4}


@dataclass(frozen=True)
class Tiny:
    """A random model of an architecture."""

    arch: str
    keys: dict[str, Any] = field(default_factory=dict)  # metadata, without the prefix
    tied: bool = True
    layers: int = 2
    dim: int = 128  # most models share their widths, so that kernels are compiled once
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    ffn: int = 128
    factors: dict[str, list[float]] = field(default_factory=dict)  # tensors that divide frequencies of RoPE
    hf: dict[str, Any] = field(default_factory=dict)  # config.json of the same model, without the sizes

    def metadata(self) -> dict[str, Any]:
        own = {
            "block_count": self.layers,
            "context_length": 256,
            "embedding_length": self.dim,
            "feed_forward_length": self.ffn,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.dimension_count": self.head_dim,
            **self.keys,
        }
        keys = {f"{self.arch}.{key}": value for key, value in own.items() if value is not None}
        return {"general.architecture": self.arch, "general.name": "tiny", **keys, **vocabulary()}

    def write(self, path: Path, matrix_type: str = "F32") -> Path:
        return write_gguf(path, *self.parts(matrix_type))

    def parts(self, matrix_type: str = "F32") -> tuple[dict[str, Any], Tensors]:
        """With the same numbers in each type, F32 or Q8_0; MXFP4: other ones for experts, the rest is Q8_0.

        "Q8_0, up F32" has another type for the up matrices.
        """
        metadata, rng = self.metadata(), np.random.default_rng(1)
        outside = {"token_embd.weight": (VOCAB, self.dim)} | {name: () for name in self.factors}
        outside |= {} if self.tied else {"output.weight": (VOCAB, self.dim)}
        named = {name: RawTensor(name, "F32", shape, np.zeros(0, np.uint8)) for name, shape in outside.items()}
        shapes = used_shapes(ModelConfig.from_gguf(metadata, named), named)
        tensors: Tensors = {}
        for name, shape in shapes.items():
            values = np.array(self.factors[name]) if name in self.factors else random_values(shape, rng)
            values *= SINK if "attn_sinks" in name else 1
            exempt = name.endswith((".bias", "ffn_gate_inp.weight", f"{CONV}.weight"))
            quantised = len(shape) > 1 and not exempt
            if matrix_type == "MXFP4" and len(shape) == 3:
                tensors[name] = ("MXFP4", shape, mxfp4_blocks(values.size // 32, rng).tobytes())
            elif matrix_type != "F32" and quantised and not (matrix_type.endswith("up F32") and "ffn_up" in name):
                tensors[name] = ("Q8_0", shape, q8_blocks(values).tobytes())
            else:
                tensors[name] = ("F32", shape, values.astype("<f4").tobytes())
        return metadata, tensors

    def hf_config(self) -> dict[str, Any]:
        sizes = {
            "num_hidden_layers": self.layers,
            "max_position_embeddings": 256,
            "hidden_size": self.dim,
            "intermediate_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "vocab_size": VOCAB,
            "tie_word_embeddings": self.tied,
        }
        return sizes | self.hf


def vocabulary() -> dict[str, Any]:
    """Words in place of bytes beyond ASCII: llama.cpp gives no probabilities after an incomplete character."""
    found = spm_vocab(VOCAB)
    for i in range(3 + 128, 3 + 256):
        found["tokenizer.ggml.tokens"][i], found["tokenizer.ggml.token_type"][i] = f"\u2581v{i}", 1
    return found


def random_values(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Of a matrix: bytes times STEP, numbers that f16 and Q8_0 hold."""
    if len(shape) == 1:
        return rng.uniform(0.5, 1.5, shape).astype(np.float16)
    values = rng.standard_normal(shape) / np.sqrt(shape[-1])
    if shape[0] == VOCAB:
        values[EOS] = 0.0  # it is never the likeliest: llama.cpp gives no probabilities where a text ends
    return np.clip(np.rint(values / STEP), -127, 127) * STEP


def q8_blocks(values: np.ndarray) -> np.ndarray:
    blocks = np.zeros(values.size // 32, dtype=[("scale", "<f2"), ("bytes", "i1", 32)])
    blocks["scale"], blocks["bytes"] = STEP, (values / STEP).reshape(-1, 32)
    return blocks


def mxfp4_blocks(count: int, rng: np.random.Generator) -> np.ndarray:
    blocks = rng.integers(0, 256, (count, 17), np.uint8)
    blocks[:, 0] = rng.integers(122, 125, count)  # the exponent of a scale of 2^-6 to 2^-4
    return blocks


RAGGED = dict(dim=72, heads=3, kv_heads=3, head_dim=18, ffn=100, tied=False)  # no GQA, no width in whole blocks
EXPERTS = {"expert_count": 6, "expert_used_count": 3}
GRANITE = {"embedding_scale": 12.0, "residual_scale": 0.22, "attention.scale": 0.015625, "logit_scale": 8.0}
HF_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3}
HF_GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.015625,
    "logits_scaling": 8.0,
}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 16.0,
    "rope.scaling.original_context_length": 16,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "rope.scaling.yarn_log_multiplier": 1.0,
}
# Layers 0, 2 and 3 are convolutions: two and one beside each other, before and after attention
LFM2 = {"shortconv.l_cache": 3, "attention.head_count_kv": np.array([0, 1, 0, 0, 1], np.int32)}
GPT_OSS = EXPERTS | YARN | {"expert_feed_forward_length": 96, "attention.sliding_window": 7}
GPT_OSS["rope.scaling.yarn_log_multiplier"] = None
SHORT, LONG = [1.0 + i / 24 for i in range(24)], [1.0 + i / 2 for i in range(24)]
OLMO_3 = YARN | {"rope.scaling.yarn_log_multiplier": None, "attention.sliding_window": 7}
MINISTRAL = {
    "model_type": "mistral3",
    "text_config": {
        "model_type": "ministral3",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
}
MODELS: dict[str, Tiny] = {
    "mixtral": Tiny(
        "llama",
        {"expert_count": 8, "expert_used_count": 2},
        tied=False,
        hf={"model_type": "mixtral", "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen3": Tiny("qwen3", hf={"model_type": "qwen3", "use_sliding_window": False, "sliding_window": None}),
    "qwen3, ragged": Tiny("qwen3", **RAGGED),
    "qwen3moe": Tiny(
        "qwen3moe",
        EXPERTS | {"expert_feed_forward_length": 96},
        hf=HF_EXPERTS
        | {
            "model_type": "qwen3_moe",
            "moe_intermediate_size": 96,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "qwen3moe, ragged": Tiny("qwen3moe", EXPERTS | {"expert_feed_forward_length": 100}, **RAGGED),
    "granitemoe": Tiny(
        "granitemoe",
        EXPERTS | GRANITE,
        hf=HF_GRANITE | {"model_type": "granitemoe", "num_local_experts": 6, "num_experts_per_tok": 3},
    ),
    "olmoe": Tiny(
        "olmoe",
        EXPERTS,
        kv_heads=2,
        tied=False,
        hf=HF_EXPERTS | {"model_type": "olmoe", "norm_topk_prob": False, "clip_qkv": None},
    ),
    "smollm3": Tiny(
        "smollm3",
        layers=4,
        hf={"model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0], "no_rope_layer_interval": 4},
    ),
    "granite": Tiny(
        "granite",
        GRANITE,
        hf=HF_GRANITE | {"model_type": "granite"},
    ),
    "granite, unrotated": Tiny(
        "granite",
        GRANITE | {"residual_scale": 1.0, "attention.scale": 0.25, "rope.scaling.finetuned": False},
        hf=HF_GRANITE
        | {
            "model_type": "granite",
            "residual_multiplier": 1.0,
            "attention_multiplier": 0.25,
            "position_embedding_type": "nope",
        },
    ),
    "mistral3": Tiny("mistral3", YARN | {"attention.temperature_scale": 0.1}, tied=False, hf=MINISTRAL),
    "phi3": Tiny(
        "phi3",
        {
            "rope.dimension_count": 48,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.attn_factor": 1.6**0.5,  # of 1 + ln(256 / 32) / ln(32)
        },
        factors={"rope_factors_short.weight": SHORT, "rope_factors_long.weight": LONG},
        hf={
            "model_type": "phi3",
            "original_max_position_embeddings": 32,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
        },
    ),
    "olmo2": Tiny("olmo2", tied=False, hf={"model_type": "olmo2"}),
    "olmo3": Tiny("olmo2", OLMO_3, layers=4, tied=False),
    "gemma2": Tiny(
        "gemma2",
        {"attention.sliding_window": 7, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        hf={
            "model_type": "gemma2",
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 7,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": Tiny(
        "gemma3",
        {
            "attention.sliding_window": 7,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
        layers=7,
        hf={
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "sliding_window": 7,
                "rope_theta": 1e6,
                "rope_local_base_freq": 10000.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        },
    ),
    "gemma3, capped logits": Tiny(
        "gemma3",
        {"attention.sliding_window": 7, "final_logit_softcapping": 3.0},
        hf={
            "model_type": "gemma3_text",
            "sliding_window": 7,
            "rope_theta": 10000.0,
            "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 64,
            "final_logit_softcapping": 3.0,
        },
    ),
    "lfm2": Tiny(
        "lfm2",
        LFM2,
        layers=5,
        ffn=256,
        hf={
            "model_type": "lfm2",
            "block_auto_adjust_ff_dim": True,
            "block_ff_dim": 255,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 128,
            "conv_L_cache": 3,
            "conv_bias": False,
            "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
        },
    ),
    "lfm2, ragged": Tiny(
        "lfm2",
        {
            "shortconv.l_cache": 4,
            "attention.head_count_kv": np.array([4, 0, 0], np.int32),
            "attention.sliding_window": 7,
        },
        **RAGGED | {"heads": 4, "kv_heads": 4, "layers": 3},
    ),
    "gpt-oss": Tiny(
        "gpt-oss",
        GPT_OSS,
        tied=False,
        ffn=96,
        hf={
            "model_type": "gpt_oss",
            "attention_bias": True,
            "experts_per_token": 3,
            "hidden_act": "silu",
            "initial_context_length": 16,
            "intermediate_size": 96,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_experts_per_tok": 3,
            "num_local_experts": 6,
            "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "rope_type": "yarn",
                "truncate": False,
            },
            "sliding_window": 7,
            "swiglu_limit": 7.0,
        },
    ),
    "gpt-oss, ragged": Tiny("gpt-oss", GPT_OSS | {"expert_feed_forward_length": 100}, **RAGGED),
    "gemma2, ragged": Tiny("gemma2", {"attention.sliding_window": 7}, **RAGGED | {"tied": True}),
}


def test_every_architecture_is_here() -> None:
    assert {tiny.arch for tiny in MODELS.values()} == ARCHITECTURES.keys() - {"qwen2"}  # see test_model


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A file, and llama.cpp's log probabilities after the prompt and after each further token."""

    @cache
    def find(name: str, matrix_type: str = "F32") -> tuple[Path, np.ndarray]:
        path = MODELS[name].write(tmp_path_factory.mktemp("tiny") / "m.gguf", matrix_type)
        peer, ids = LlamaCpp(path), token_ids(END)
        return path, np.array([peer.log_probs(ids[:n], VOCAB) for n in range(PROMPT, END + 1)])

    return find


def log_probs(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def mostly_slow(names: Iterable[str], often: tuple[str, ...]) -> list[Any]:
    """Kernels take long to compile on a CPU: only those that show something new run every time."""
    return [name if name in often else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", mostly_slow(MODELS, tuple(MODELS.keys() - {"olmo3", "gemma2, ragged"})))
def test_logits(gpu: Any, expected: Any, name: str) -> None:
    """A prompt in two chunks, then single tokens."""
    path, want = expected(name)
    check(load_one(gpu, path), want, LARGEST_NMSE[Precision.HIGH])


@pytest.mark.parametrize("name", mostly_slow(("qwen3", "granite", "mistral3", "lfm2"), ("qwen3", "lfm2")))
def test_textures(gpu: Any, expected: Any, name: str) -> None:
    """On a software adapter; the others have parts that textures do not."""
    if not gpu.caps.cpu:
        pytest.skip("textures are for CPU adapters")
    path, want = expected(name)
    run = load_one(gpu, path, backend=Backend.TEXTURES)
    check(run, want, LARGEST_NMSE[Precision.HIGH])


@pytest.mark.parametrize("name", ["qwen3", "lfm2"])
def test_q8_0_cache(gpu: Any, expected: Any, name: str) -> None:
    """`rotate` leaves keys and values as f32, and they are rounded to int8 on their way into the cache. The inputs of
    convolutions are f16."""
    path, want = expected(name)
    check(load_one(gpu, path, kv_type=KvType.Q8_0), want, LARGEST_NMSE[Precision.FAST])


@pytest.mark.slow
def test_scores_of_all_rows(gpu: Any, expected: Any) -> None:
    """The plan that perplexity takes, with a soft cap of the logits."""
    path, want = expected("gemma2")
    ids = token_ids(END)
    got = load_one(gpu, path).log_probs(ids)[PROMPT - 1 :]
    assert np.abs(got - want[np.arange(END - PROMPT), ids[PROMPT:]]).max() < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt-oss", "gemma2"])
def test_long_prompt(gpu: Any, tmp_path: Path, name: str) -> None:
    """In one step, by the attention kernel of many rows."""
    path, ids = MODELS[name].write(tmp_path / "m.gguf"), token_ids(200)
    want = LlamaCpp(path, context=256).log_probs(ids, VOCAB)
    got = log_probs(load_one(gpu, path, context=256, chunk=256).logits_after(ids))
    assert np.square(got - want).sum() < LARGEST_NMSE[Precision.HIGH] * np.square(want).sum()


WHOLE = [name for name in MODELS if "ragged" not in name]  # widths in whole blocks


@pytest.mark.parametrize("name", mostly_slow(WHOLE, ("qwen3", "gemma3", "lfm2")))
def test_logits_in_int8(gpu: Any, expected: Any, name: str) -> None:
    path, want = expected(name, "Q8_0")
    run = load_one(gpu, path, precision=Precision.FAST, chunk=12)
    assert run.model.int8_decode and run.model.int8_prefill
    check(run, want, LARGEST_NMSE[Precision.FAST])


def test_mxfp4_experts(gpu: Any, expected: Any) -> None:
    path, want = expected("gpt-oss", "MXFP4")
    check(load_one(gpu, path, precision=Precision.FAST, chunk=12), want, LARGEST_NMSE[Precision.FAST])


def test_experts_of_several_sequences(gpu: Any, expected: Any) -> None:
    """Prompts of different lengths in one step, then a step of a row of each: as each alone."""
    path, _ = expected("gpt-oss")
    prompts = {2: token_ids(7, seed=1), 0: token_ids(20, seed=2), 1: token_ids(1, seed=3)}
    alone = load_one(gpu, path)
    want = []
    for ids in prompts.values():
        alone.clear()
        want.append([alone.logits_after(ids), alone.logits_after([5])])
    engine = load_one(gpu, path, chunk=32, slots=3).engine
    for slot in prompts:
        reserve(engine, slot, 64)
    for i, ids in enumerate((prompts, {slot: [5] for slot in prompts})):
        segments = [Segment(slot, i * len(prompts[slot]), ids[slot]) for slot in prompts]
        rows, position = sum(len(segment.tokens) for segment in segments), max(s.position for s in segments)
        engine.model.write_step(segments)
        engine.recorder.submit([Step(engine.model.plan(rows, position, segments=3), rows, position)])
        got = gpu.read(engine.model.logits, np.float32, 3 * VOCAB).reshape(3, VOCAB)
        assert_close(got, np.array(want)[:, i], 1e-10, 1e-4)


def test_gate_and_up_of_experts_have_two_types(gpu: Any, expected: Any) -> None:
    path, want = expected("gpt-oss", "Q8_0, up F32")
    run = load_one(gpu, path)
    assert len(run.engine.weights.layers[0].gate_up) == 2
    check(run, want, LARGEST_NMSE[Precision.FAST])  # llama.cpp rounds activations


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_experts_in_shards(gpu: Any, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A packed file, two experts to a binding, and steps of few rows."""
    path, want = expected(name, "Q8_0")
    source, packed = open_source(str(path)), tmp_path / "m.safetensors"
    convert(source, packed, plan(source, "packed"))
    monkeypatch.setattr(gpu, "caps", replace(gpu.caps, binding_bytes=60_000))
    run = load_one(gpu, packed, precision=Precision.FAST, chunk=8)
    gate_up, down = run.engine.weights.layers[0].gate_up[0], run.engine.weights.layers[0].ffn_down
    assert [shard.n // gate_up.n for shard in gate_up.shards] == [2, 2, 2] and len(down.shards) == 2
    assert gate_up.token_bytes == gate_up.nbytes // 2  # three experts of six
    check(run, want, LARGEST_NMSE[Precision.FAST])


def test_packed_convolutions(gpu: Any, expected: Any, tmp_path: Path) -> None:
    path, want = expected("lfm2", "Q8_0")
    source, packed = open_source(str(path)), tmp_path / "m.safetensors"
    convert(source, packed, plan(source, "packed"))
    check(load_one(gpu, packed, precision=Precision.FAST, chunk=12), want, LARGEST_NMSE[Precision.FAST])


def check(run: OneSequence, want: np.ndarray, largest_nmse: float) -> None:
    ids = token_ids(END)
    got = [log_probs(run.logits_after(ids[:PROMPT]))]
    got += [log_probs(run.logits_after([id])) for id in ids[PROMPT:END]]
    nmse = np.square(np.array(got) - want).sum(axis=1) / np.square(want).sum(axis=1)
    print(f"{run.engine.config.arch} {nmse.max():.1e} (at most {largest_nmse})")
    assert nmse.max() < largest_nmse


# Names of the tensors of a layer in Hugging Face checkpoints
HF_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "attn_sinks": "self_attn.sinks",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate": "mlp.gate_proj",
    "ffn_down": "mlp.down_proj",
}
HF_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
}
HF_LFM2 = {
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_down": "feed_forward.w2",
    "ffn_up": "feed_forward.w3",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}


def hf_name(name: str, record: Architecture) -> str:
    if not name.startswith("blk."):
        return HF_OUTSIDE[name]
    _, layer, part = name.split(".", 2)
    second = "pre_feedforward_layernorm" if record.norms_after else "post_attention_layernorm"
    own = {"ffn_norm": second, "ffn_up": "mlp.gate_up_proj" if record.fused_tensors else "mlp.up_proj"}
    own |= {"ffn_gate_inp": "mlp.router"} if record.sinks else {}
    own |= HF_LFM2 if record.short_convs else {}
    return f"model.layers.{layer}.{(HF_NAMES | own)[part]}"


def hf_weights(file: GgufFile, config: ModelConfig) -> dict[str, np.ndarray]:
    """The tensors as a Hugging Face checkpoint has them."""
    record, found = ARCHITECTURES[config.arch], {}
    heads = {"attn_q": config.heads, "attn_k": config.kv_heads}
    for name, tensor in file.tensors.items():
        (base, _, suffix), part = name.rpartition("."), name.split(".")[-2]
        values = to_f32(tensor)
        if part in heads and not record.neox:
            values[rope_rows(heads[part], config.head_dim, config.rope_dims)] = values.copy()
        if part.endswith("norm"):
            values -= record.norm_shift
        if config.biases and part.endswith("_exps"):
            continue  # see mxfp4_arrays
        if name.endswith(f"{CONV}.weight"):
            values = values[:, None]  # [dim, 1, taps]
        elif values.ndim == 3:
            layer = base.split(".")[1]
            for i, expert in enumerate(values):
                found[f"model.layers.{layer}.mlp.experts.{i}.{part.split('_')[1]}_proj.weight"] = expert
            continue
        if name not in FREQ_FACTORS:
            found[f"{hf_name(base, record)}.{suffix}".replace("sinks.weight", "sinks")] = values
    if config.biases:
        return found | mxfp4_arrays(file, config)
    if record.name == "llama":
        parts = {"mlp.gate.": "block_sparse_moe.gate.", "mlp.experts": "block_sparse_moe.experts"}
        parts |= {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
        return {reduce(lambda each, part: each.replace(*part), parts.items(), n): v for n, v in found.items()}
    return found if record.name != "granitemoe" else in_one_array(found, config)


def mxfp4_arrays(file: GgufFile, config: ModelConfig) -> dict[str, np.ndarray]:
    """The arrays of gpt-oss' experts: neighbours share a byte, and the rows of gate and up alternate."""
    found: dict[str, np.ndarray] = {}
    for i in range(config.layers):
        each: dict[tuple[str, str], np.ndarray] = {}
        for part in ("gate", "up", "down"):
            weight, bias = (file.tensors[f"blk.{i}.ffn_{part}_exps.{suffix}"] for suffix in ("weight", "bias"))
            blocks = weight.data.reshape(*bias.shape, -1, 17)
            nibbles = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
            each[part, "blocks"] = nibbles[..., ::2] | nibbles[..., 1::2] << 4
            each[part, "scales"], each[part, "bias"] = blocks[..., 0], to_f32(bias)
        for kind in ("blocks", "scales", "bias"):
            gate, up = each["gate", kind], each["up", kind]
            layer = f"model.layers.{i}.mlp.experts"
            found[f"{layer}.gate_up_proj_{kind}"] = np.stack([gate, up], axis=2).reshape(len(gate), -1, *gate.shape[2:])
            found[f"{layer}.down_proj_{kind}"] = each["down", kind]
    return found


def in_one_array(tensors: dict[str, np.ndarray], config: ModelConfig) -> dict[str, np.ndarray]:
    """The names and arrays of Granite, which has all experts of a layer in one array."""
    found = {name.replace("mlp.gate.", "block_sparse_moe.router.layer."): v for name, v in tensors.items()}
    for i in range(config.layers):
        each = {
            part: np.stack(
                [found.pop(f"model.layers.{i}.mlp.experts.{e}.{part}_proj.weight") for e in range(config.experts)]
            )
            for part in ("gate", "up", "down")
        }
        layer = f"model.layers.{i}.block_sparse_moe"
        found[f"{layer}.input_linear.weight"] = np.concatenate([each["gate"], each["up"]], axis=1)
        found[f"{layer}.output_linear.weight"] = each["down"]
    return found


@pytest.mark.parametrize("name", [name for name, tiny in MODELS.items() if tiny.hf])
def test_convert(tmp_path: Path, name: str) -> None:
    """From a folder with the keys of the real config.json comes the same model."""
    original = GgufFile(MODELS[name].write(tmp_path / "m.gguf", "MXFP4" if name == "gpt-oss" else "F32"))
    config = ModelConfig.from_gguf(original.metadata, original.tensors)
    folder = hf_folder(tmp_path / "tiny", MODELS[name].hf_config(), hf_weights(original, config))
    source, out = open_source(str(folder)), tmp_path / "out.gguf"
    convert(source, out, plan(source, "f16", "f16"))
    file = GgufFile(out)
    assert ModelConfig.from_gguf(file.metadata, file.tensors) == config
    assert file.tensors.keys() == original.tensors.keys()
    for name, tensor in file.tensors.items():
        assert np.allclose(to_f32(tensor), to_f32(original.tensors[name]), rtol=0, atol=1e-6), name


@pytest.mark.parametrize("name", ["qwen3", "phi3"])
def test_tied_where_config_json_does_not_say(tmp_path: Path, name: str) -> None:
    original = GgufFile(MODELS[name].write(tmp_path / "m.gguf", "F32"))
    config = ModelConfig.from_gguf(original.metadata, original.tensors)
    hf = MODELS[name].hf_config()
    del hf["tie_word_embeddings"]
    assert (
        "output.weight" not in open_source(str(hf_folder(tmp_path / "tiny", hf, hf_weights(original, config)))).tensors
    )


@pytest.mark.parametrize(
    ("name", "changes", "cause"),
    [
        ("gemma2", {"final_logit_softcapping": None}, "final_logit_softcapping is None"),
        ("gemma3, capped logits", {"query_pre_attn_scalar": 100}, "query_pre_attn_scalar is 100, not 64"),
    ],
)
def test_what_gguf_cannot_say_is_not_converted(tmp_path: Path, name: str, changes: dict[str, Any], cause: str) -> None:
    original = GgufFile(MODELS[name].write(tmp_path / "m.gguf", "F32"))
    config = ModelConfig.from_gguf(original.metadata, original.tensors)
    folder = hf_folder(tmp_path / "tiny", MODELS[name].hf_config() | changes, hf_weights(original, config))
    with pytest.raises(Unsupported, match=cause):
        open_source(str(folder))


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window_pattern": 2}, [7, 0, 7]),
        ({"sliding_window_pattern": 1}, [0, 0, 0]),
        ({"layer_types": ["full_attention"] * 3}, [0, 0, 0]),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, [0, 7, 0]),
    ],
)
def test_which_layers_of_gemma_3_have_a_window(changes: dict[str, Any], windows: list[int]) -> None:
    hf = MODELS["gemma3, capped logits"].hf_config() | {"num_hidden_layers": 3} | changes
    keys = window_keys(hf, ARCHITECTURES["gemma3"], 7, 3)
    pattern = keys.get("{arch}.attention.sliding_window_pattern", [False] * 3)
    assert [keys.get("{arch}.attention.sliding_window", 0) * flag for flag in pattern] == windows


@pytest.mark.parametrize(
    ("name", "tensor"), [("phi3", "attn_qkv.bias"), ("qwen3", "attn_v.scale"), ("lfm2", "shortconv.conv.bias")]
)
def test_biases_and_scales_that_nobody_would_use_are_refused(tmp_path: Path, name: str, tensor: str) -> None:
    file = GgufFile(MODELS[name].write(tmp_path / "m.gguf", "F32"))
    config = ModelConfig.from_gguf(file.metadata, file.tensors)
    norm = file.tensors[f"{config.output_norm}.weight"]
    check_tensors(config, file.tensors | {f"blk.{config.layers}.{tensor}": norm})  # of no layer
    with pytest.raises(Unsupported, match=f"a {name} model with blk.1.{tensor} is not supported"):
        check_tensors(config, file.tensors | {f"blk.1.{tensor}": norm})


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        (
            {"attention.head_count_kv": np.array([0, 0, 0, 0, 0])},
            "head_count_kv, an array of 5, is not 0 or one number for 5 layers",
        ),
        ({"attention.head_count_kv": np.array([0, 1, 2, 0, 1])}, "head_count_kv, an array of 5, is not"),
        ({"attention.head_count_kv": np.array([0, -1, 0, 0, -1])}, "head_count_kv, an array of 5, is not"),
        ({"attention.head_count_kv": np.array([0, 1])}, "head_count_kv, an array of 2, is not"),
        ({"attention.head_count_kv": np.array([0, 3, 0, 0, 3])}, "2 attention heads cannot share 3"),
        ({"attention.key_length": 96, "attention.value_length": 96}, "128, do not divide into pairs of heads of 96"),
        ({"shortconv.l_cache": 0}, "l_cache is 0, not a whole number in 1..64"),
        ({"shortconv.l_cache": None}, "l_cache is missing"),
        ({"shortconv.l_cache": 4}, r"shortconv.conv.weight has shape \[128, 3\], not \[128, 4\]"),
    ],
    ids=str,
)
def test_convolutions_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, Any], cause: str) -> None:
    file = GgufFile(MODELS["lfm2"].write(tmp_path / "m.gguf", "F32"))
    metadata = {key: value for key, value in file.metadata.items() if key.removeprefix("lfm2.") not in changes}
    metadata |= {f"lfm2.{key}": value for key, value in changes.items() if value is not None}
    with pytest.raises(BadFile, match=cause):
        check_tensors(ModelConfig.from_gguf(metadata, file.tensors), file.tensors)


LFM2_LAYERS = ["conv", "full_attention", "conv", "conv", "full_attention"]


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"norm_eps": 1e-6}, {"attention.layer_norm_rms_epsilon": 1e-6}),
        ({"layer_types": None, "full_attn_idxs": [0, 4]}, {"attention.head_count_kv": [1, 0, 0, 0, 1]}),
        ({"layer_types": None}, {"attention.head_count_kv": [1] * 5}),
        ({"block_ff_dim": None, "intermediate_size": 512}, {"feed_forward_length": 384}),  # 341, rounded up
        ({"block_ffn_dim_multiplier": 1.3}, {"feed_forward_length": 256}),  # 221
        ({"block_auto_adjust_ff_dim": False}, {"feed_forward_length": 255}),
        ({"block_auto_adjust_ff_dim": None}, {"feed_forward_length": 255}),
        ({"block_ffn_dim_multiplier": None}, {"feed_forward_length": 170}),  # as it is
        ({"theta": 5e5}, {"rope.freq_base": 5e5}),
        ({"rope_parameters": {"rope_theta": 2e6, "rope_type": "default"}}, {"rope.freq_base": 2e6}),
        ({"conv_L_cache": 4}, {"shortconv.l_cache": 4}),
        ({"num_key_value_heads": ...}, {"attention.head_count_kv": [0, 8, 0, 0, 8]}),
    ],
    ids=str,
)
def test_fields_of_lfm2(changes: dict[str, Any], keys: dict[str, Any]) -> None:
    hf = {k: v for k, v in (MODELS["lfm2"].hf_config() | changes).items() if v is not ...}
    record, config = find_architecture(hf)
    found = read_metadata(config, record, "tiny")
    assert {key: np.asarray(found[f"lfm2.{key}"]).tolist() for key in keys} == keys


@pytest.mark.parametrize(
    ("changes", "error", "cause"),
    [
        ({"layer_types": [*LFM2_LAYERS[:4], "mamba"]}, Unsupported, "layers of type .mamba. are not supported"),
        ({"layer_types": LFM2_LAYERS[:4]}, BadFile, "layer_types is an array of 4, and there are 5 layers"),
        ({"conv_L_cache": 3.7}, BadFile, "conv_L_cache is 3.7"),
        ({"block_auto_adjust_ff_dim": "false"}, BadFile, "not true or false"),
        ({"architectures": ["Lfm2BidirectionalForCausalLM"]}, Unsupported, "whose tokens see later ones"),
    ],
    ids=str,
)
def test_fields_of_lfm2_that_are_refused(changes: dict[str, Any], error: type, cause: str) -> None:
    with pytest.raises(error, match=cause):
        record, config = find_architecture(MODELS["lfm2"].hf_config() | changes)
        read_metadata(config, record, "tiny")


@pytest.mark.parametrize("tied", [False, True])
def test_lfm2_says_in_a_field_of_its_own_whether_it_is_tied(tmp_path: Path, tied: bool) -> None:
    tiny = replace(MODELS["lfm2"], tied=tied)
    original = GgufFile(tiny.write(tmp_path / "m.gguf"))
    hf = tiny.hf_config() | {"tie_word_embeddings": not tied, "tie_embedding": tied}
    weights = hf_weights(original, ModelConfig.from_gguf(original.metadata, original.tensors))
    assert ("output.weight" in open_source(str(hf_folder(tmp_path / "tiny", hf, weights))).tensors) is not tied


def test_models_that_do_not_only_predict_are_refused(tmp_path: Path) -> None:
    """Of embeddings: tokens see later ones, or a matrix follows the output."""
    file = GgufFile(MODELS["lfm2"].write(tmp_path / "m.gguf"))
    config = ModelConfig.from_gguf(file.metadata | {"lfm2.attention.causal": True}, file.tensors)
    with pytest.raises(Unsupported, match="a lfm2 model whose tokens see later ones"):
        ModelConfig.from_gguf(file.metadata | {"lfm2.attention.causal": False}, file.tensors)
    with pytest.raises(Unsupported, match=r"a lfm2 model with .dense_2\.weight. is not"):
        check_tensors(config, file.tensors | {"dense_2.weight": file.tensors["token_embd.weight"]})


def test_taps_that_no_texture_holds(gpu: Any) -> None:
    config = replace(synthetic_config("lfm2-1.2b"), conv_taps=3)
    caps = replace(gpu.caps, texture_side=16384)
    assert suits_textures(config, caps) and not suits_textures(replace(config, conv_taps=64), caps)


def test_the_widest_row_is_that_of_a_convolution(tmp_path: Path) -> None:
    """Its step is no larger than a binding."""
    file = GgufFile(replace(MODELS["lfm2"], ffn=128).write(tmp_path / "m.gguf"))
    assert ModelConfig.from_gguf(file.metadata, file.tensors).widest == 3 * 128


def test_gemma_2_has_a_window_where_the_file_has_none(tmp_path: Path) -> None:
    file = GgufFile(MODELS["gemma2"].write(tmp_path / "m.gguf", "F32"))
    del file.metadata["gemma2.attention.sliding_window"]
    config = ModelConfig.from_gguf(file.metadata | {"gemma2.context_length": 8192}, file.tensors)
    assert config.kinds[0].window == 4096 and config.kinds[1].window == 0


FUSED = ("qwen3", "smollm3", "mistral3", "olmo2", "olmo3", "gemma2", "gemma3")
MIXED = 4  # kernels of lfm2: one for each run of layers that attend, or that do not
FUSED_EXPERTS = ("mixtral", "qwen3moe", "granitemoe", "olmoe", "gpt-oss")


def fused_kernels(run: OneSequence) -> int:
    return [dispatch.kernel for dispatch in run.model.plan(1).dispatches].count("fused_layers")


@WGPU
@pytest.mark.parametrize(
    "name", mostly_slow((*FUSED, *FUSED_EXPERTS, "lfm2"), ("qwen3", "qwen3moe", "gpt-oss", "lfm2"))
)
def test_fused_decode(fused_gpu: Any, expected: Any, name: str) -> None:
    """Architectures with stages of their own, or layers of several kinds, in the kernel of all layers."""
    path, want = expected(name)
    run = load_steps(fused_gpu, path)
    assert run.model.fused and fused_kernels(run) == (MIXED if name == "lfm2" else 1)
    check(run, want, LARGEST_NMSE[Precision.HIGH])


@WGPU
@pytest.mark.parametrize("rows", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_fused_rows_with_qk_norm(fused_gpu: Any, expected: Any, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """A stage normalises and rotates; the linears into the residual stream leave blocks for those after the norms."""
    path, want = expected("qwen3", "Q8_0")
    monkeypatch.setattr(fused_gpu, "caps", replace(fused_gpu.caps, measured_barrier=True))
    monkeypatch.setattr(routes, "FUSED_PREFETCH", {rows: 1})
    monkeypatch.setattr(routes, "sums_leave_blocks", lambda dim, rows, *_: rows == 4)
    run = load_one(fused_gpu, path, precision=Precision.FAST, kv_type=KvType.F16, chunk=rows)
    assert [dispatch.kernel for dispatch in run.model.plan(rows).dispatches].count("fused_layers") == 1
    stages = fused_of(run).stages([0, 1], rows=rows)
    assert len(stages) == (6 if rows == 2 else 7) and [stage.first for stage in stages].count(True) == rows // 4
    ids = token_ids(END)
    run.logits_after(ids[:PROMPT])
    for end in range(PROMPT + rows, END + 1, rows):
        got, right = log_probs(run.logits_after(ids[end - rows : end])), want[end - PROMPT]
        assert np.square(got - right).sum() < LARGEST_NMSE[Precision.FAST] * np.square(right).sum()


@WGPU
@pytest.mark.parametrize(("name", "kernels"), [("qwen3", 1), ("lfm2", MIXED)])
def test_fused_decode_with_a_q8_0_cache(fused_gpu: Any, expected: Any, name: str, kernels: int) -> None:
    """Attention normalises, rotates and quantises the row's own key. The inputs of convolutions are f16."""
    path, want = expected(name)
    run = load_steps(fused_gpu, path, kv_type=KvType.Q8_0)
    assert fused_kernels(run) == kernels and len(fused_of(run).stages([1])) == 5
    check(run, want, LARGEST_NMSE[Precision.FAST])


@WGPU
def test_heads_of_256_rotate_in_attention(fused_gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane holds more than one run of a head where a subgroup is small; the routes leave these to `rotate`."""
    monkeypatch.setattr(routes, "attention_can_rotate", lambda *_: True)
    path = replace(MODELS["qwen3"], head_dim=256).write(tmp_path / "m.gguf", "Q8_0")
    run = load_steps(fused_gpu, path, precision=Precision.FAST, kv_type=KvType.F16)
    assert isinstance(run.model, BufferModel) and len(fused_of(run).stages([0, 1])) == 5
    assert largest_nmse(run.engine, run.model) <= MAX_NMSE[Precision.FAST]


@WGPU
@pytest.mark.parametrize("kv_type", [KvType.F16, KvType.Q8_0])
def test_workgroups_share_query_heads(
    fused_gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv_type: KvType
) -> None:
    """Two for each KV head, with three query heads each; both need the row's own key, and one stores it. In one split
    and in several, unfused decode gives the same."""
    monkeypatch.setattr(routes, "SHORT_SPLIT", 1 << 20)
    path = replace(MODELS["qwen3"], heads=12, kv_heads=2).write(tmp_path / "m.gguf", "Q8_0")
    mode = dict(context=128, kv_type=kv_type, precision=Precision.FAST)
    fused, unfused = (load_steps(fused_gpu, path, **mode) for _ in range(2))
    assert fused_kernels(fused) == 1 and fused_of(fused).stages([0, 1])[1].grid[0] == 4
    unfused.model.unfuse()
    for count in (7, 1, 1, 64, 1, 1):
        ids = token_ids(count, seed=count)
        got, want = log_probs(fused.logits_after(ids)), log_probs(unfused.logits_after(ids))
        if count == 1:
            assert np.square(got - want).sum() < 1e-5 * np.square(want).sum()


@WGPU
def test_fused_decode_in_several_kernels(fused_gpu: Any, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer of each kernel finds the residual stream that the last one of the kernel before has stored."""
    path, want = expected("gemma3")
    monkeypatch.setattr(fused_decode, "place_of_layer", lambda buffer, layer: (layer // 3, 0))
    run = load_steps(fused_gpu, path)
    assert run.model.fused and fused_kernels(run) == 3
    check(run, want, LARGEST_NMSE[Precision.HIGH])


@WGPU
@pytest.mark.parametrize(("name", "stored"), [("gemma3", "stream"), ("lfm2", "residual")])
def test_with_tint_what_is_late_comes_from_its_copy(
    fused_gpu: Any, expected: Any, monkeypatch: pytest.MonkeyPatch, name: str, stored: str
) -> None:
    """In the stages of a model with QK norm and norms after attention and feed forward, and of convolutions."""
    path, want = expected(name, "Q8_0")
    dropped = drop_stores(monkeypatch)
    monkeypatch.setattr(fused_gpu, "caps", replace(fused_gpu.caps, tint=True, storage_buffers=16))
    run = load_steps(fused_gpu, path, precision=Precision.FAST, kv_type=KvType.F16)
    assert run.model.fused and {"y", "stats", "kv_rows", stored} <= set(dropped)
    check(run, want, LARGEST_NMSE[Precision.FAST])


@WGPU
@pytest.mark.parametrize("kv_type", [KvType.F32, KvType.F16])
def test_nothing_is_read_before_the_wait_is_over(
    fused_gpu: Any, unprobed: None, expected: Any, kv_type: KvType
) -> None:
    """`rotate` is a stage with an f32 cache only; attention writes what it reads of an f16 one, as convolutions do."""
    stages = fused_of(load_steps(fused_gpu, expected("gemma3")[0], kv_type=kv_type)).stages(list(range(7)))
    more = 3 if kv_type is KvType.F32 else 1  # raw | keys, values; or the row's own of raw
    run = load_steps(fused_gpu, expected("lfm2")[0], kv_type=kv_type)
    assert late_reads(fused_of(run).stages([2, 3])) == 7  # x | raw | q, x | mid | act, mid
    assert late_reads(stages) == 10 + more  # branch, mid | q or raw | partial, stats | branch, x | act | branch, mid


@WGPU
@pytest.mark.parametrize("tint", [False, True])
@pytest.mark.parametrize("name", mostly_slow(FUSED, ("gemma3",)))
def test_fused_decode_in_several_splits(
    fused_gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, tint: bool
) -> None:
    """Layers with a window have two splits where the others have three, then four; unfused decode gives the same."""
    monkeypatch.setattr(fused_gpu, "caps", replace(fused_gpu.caps, tint=tint))
    tiny = MODELS[name]
    window = {key: 40 for key in tiny.keys if key == "attention.sliding_window"}
    path = replace(tiny, keys=tiny.keys | window).write(tmp_path / "m.gguf", "Q8_0")
    mode = dict(context=128, chunk=64, kv_type=KvType.F16, precision=Precision.FAST if tint else Precision.HIGH)
    fused, unfused = (load_one(fused_gpu, path, **mode) for _ in range(2))
    assert fused_kernels(fused) == 1 and isinstance(unfused.model, BufferModel)
    config = fused.engine.config  # a norm of all heads is a stage, and one after the last layer
    more = (config.qk_norm is QkNorm.ROW) + config.norms_after
    assert len(fused_of(fused).stages(list(range(config.layers)))) == 5 + more
    unfused.model.unfuse()
    for count in (64, 1, 1, 40, 1):
        ids = token_ids(count, seed=count)
        got, want = log_probs(fused.logits_after(ids)), log_probs(unfused.logits_after(ids))
        if count == 1:
            assert np.square(got - want).sum() < (1e-5 if tint else 1e-10) * np.square(want).sum()
    check_places_of_splits(fused)


def check_places_of_splits(run: OneSequence) -> None:
    """A token of a fused kernel writes its layers' splits where no other layer does, however many it has."""
    fused, c, gpu = fused_of(run), run.engine.config, run.model.gpu
    stats = fused.between(1).stats
    gpu.write(stats, np.full(stats.size // 4, np.nan, np.float32))
    run.logits_after([3])
    end = len(run.ids)
    consts = routes.fused_head_consts(attention_shape(c, 1), fused.grid, gpu.caps)
    most = routes.fused_max_splits(c.kv_heads, shares=consts["HEAD_SHARES"])
    written = ~np.isnan(gpu.read(stats, np.float32, stats.size // 4).reshape(-1, 2)[:, 0])
    seen = [min(kind.window or end, end) for kind in c.kinds]
    splits = [max(min(-(-positions // 32), 4), min(-(-positions // 64), 16)) for positions in seen]
    stride = c.heads * (most if len(set(c.kinds)) > 1 else splits[0]) + 32  # 64 words of padding
    for own, places in zip(splits, written[: c.layers * stride].reshape(c.layers, -1), strict=True):
        assert places[: c.heads * own].all() and not places[c.heads * own :].any()
