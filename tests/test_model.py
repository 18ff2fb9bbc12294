"""The engine's logits and tokens against numpy float64: tiny random models of every shape."""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import open_gpu
from gguf_builder import tiny_llama
from one_sequence import OneSequence, load_one, reference_of, reserve, token_ids
from reference import Reference, assert_close

from llamagpu.engine import decode, routes
from llamagpu.engine.engine import Engine
from llamagpu.engine.kv_cache import BufferKvCache
from llamagpu.engine.load import load_model
from llamagpu.engine.model import BufferModel, PlanKind
from llamagpu.engine.options import Backend, EngineOptions, KvType, Precision
from llamagpu.engine.routes import Inputs
from llamagpu.engine.sampler import HostSampler, Sampling
from llamagpu.engine.step_inputs import MAX_ROWS, Segment
from llamagpu.engine.weights import WeightTarget
from llamagpu.errors import DoesNotFit
from llamagpu.files.gguf_file import BLOCKS, GgufFile
from llamagpu.files.storage import Storage
from llamagpu.gpu import caps, device, recorder
from llamagpu.gpu.device import Gpu
from llamagpu.gpu.recorder import Pending, Plan, Step

# (NMSE, largest error / largest logit). All sums are in f32, measured 1e-12 and 2e-6; a few layers deep.
F32 = (1e-10, 1e-5)
# The reference rounds keys and values to f16 as well; a few near a tie round differently.
F16_CACHE = (1e-8, 1e-4)
Q8_0_CACHE = (1e-6, 3e-3)  # likewise to int8
CACHE_BOUNDS = {KvType.F32: F32, KvType.F16: F16_CACHE, KvType.Q8_0: Q8_0_CACHE}
# int8 activations: the reference rounds to the same 1/127, and again a few round differently. One is enough for
# 9e-5 and 1e-2 in these models (the reference changes as much when its inputs change by 2e-7), several gave 3.4e-4 on a
# GPU. A wrong scale or a lost group gives more than 1e-2.
INT8 = (1e-3, 3e-2)
F16_BLOCKS = (1e-4, 1e-2)  # int8 in the output head alone: measured 1.2e-5 and 3e-3
INT8_WEIGHTS = (1e-3, 4e-2)  # prompts round f16 weights, too
INT8_ATTENTION = (3e-3, 0.1)  # against exact activations: measured 2e-4 to 7e-4, with int8 attention as without

PRECISIONS = pytest.mark.parametrize("precision", list(Precision))


def check_against_reference(run: OneSequence, path: Path) -> None:
    """A prompt, three single steps, and as many tokens more at once. The kernels of other widths take long to compile:
    see test_chunks_make_no_difference."""
    prompt = 13 if run.model.int8_prefill else 18
    ids, reference = token_ids(2 * prompt + 3), reference_of(run, path)
    rounded = run.model.weights.layers[0].qkv.shards[0].layout.storage.two_bytes
    int8 = INT8_WEIGHTS if rounded else INT8
    bounds = int8 if run.model.int8_decode else CACHE_BOUNDS[run.engine.settings.kv_type]
    for start, end in pairwise((0, prompt, prompt + 1, prompt + 2, prompt + 3, 2 * prompt + 3)):
        want = reference.forward(ids[start:end])[-1]
        assert_close(run.logits_after(ids[start:end]), want, *bounds, f"tokens {start} to {end}")


def by_name(**types: str) -> Callable[[str], str]:
    """A ggml type per tensor, by a fragment of its name; Q4_0 otherwise."""
    return lambda name: next((ggml_type for fragment, ggml_type in types.items() if fragment in name), "Q4_0")


# Most of them share their widths, so that kernels are compiled once: a model with other widths takes 4 s on a CPU.
MODELS: dict[str, dict[str, Any]] = {
    "1 head per KV head": dict(heads=4, kv_heads=4, ggml_type="Q4_0"),
    "2 heads per KV head": dict(heads=4, kv_heads=2, ggml_type="Q4_0", tied=False),
    "4 heads per KV head": dict(heads=4, kv_heads=1, ggml_type="Q4_0"),
    "8 heads per KV head": dict(heads=8, kv_heads=1, ggml_type="Q4_0"),
    "head_dim 48": dict(heads=2, kv_heads=1, head_dim=48, ggml_type="Q4_0"),
    "head_dim 64": dict(heads=2, kv_heads=1, head_dim=64, ggml_type="Q4_0"),
    "head_dim 80": dict(heads=2, kv_heads=2, head_dim=80, ggml_type="Q4_0"),
    "head_dim 128": dict(heads=1, kv_heads=1, head_dim=128, ggml_type="Q4_0"),
    "head_dim 256": dict(heads=1, kv_heads=1, head_dim=256, ggml_type="Q4_0"),
    "head_dim 6": dict(dim=24, heads=4, kv_heads=2, ggml_type="F16"),
    "odd widths": dict(dim=33, heads=3, kv_heads=1, head_dim=10, ffn=129, tied=False, biases=True),
    "biases": dict(ggml_type="Q4_0", biases=True),
    "qwen2": dict(arch="qwen2", ggml_type="Q4_0", tied=False),
    "qwen2, rope_dims 8": dict(arch="qwen2", ggml_type="Q4_0", metadata={"qwen2.rope.dimension_count": 8}),
    "rope_dims 6": dict(ggml_type="Q4_0", metadata={"llama.rope.dimension_count": 6}),
    "rope_freqs": dict(ggml_type="Q4_0", rope_freqs=np.linspace(1.0, 8.0, 8), rope_theta=500000.0),
    "linear scaling": dict(ggml_type="Q4_0", metadata={"llama.rope.scaling.factor": 4.0}),
    "sliding window": dict(ggml_type="Q4_0", metadata={"llama.attention.sliding_window": 5}),
    # every type once; in the first also q, k and v, and gate and up, of different types
    "types of 32 weights": dict(
        tied=False,
        layers=1,
        biases=True,
        ggml_type=by_name(
            token_embd="Q4_0",
            attn_q="Q4_1",
            attn_k="Q5_0",
            attn_v="Q5_1",
            attn_output="Q8_0",
            ffn_gate="IQ4_NL",
            ffn_up="F16",
            ffn_down="BF16",
            output="F32",
        ),
    ),
    "types of 256 weights": dict(
        dim=256,
        ffn=256,
        tied=False,
        layers=1,
        ggml_type=by_name(
            token_embd="Q2_K",
            attn_q="Q3_K",
            attn_k="Q4_K",
            attn_v="Q5_K",
            attn_output="Q6_K",
            ffn_gate="IQ4_XS",
            ffn_up="IQ4_XS",
            output="Q3_K",
            weight="Q4_K",
        ),
    ),
    "types from tables": dict(
        dim=256,
        ffn=256,
        tied=False,
        layers=2,
        ggml_type=by_name(
            token_embd="TQ1_0",
            **{
                "0.attn_q": "IQ3_S",
                "1.attn_q": "IQ1_M",
                "attn_k": "IQ3_XXS",
                "attn_v": "IQ2_S",
                "attn_output": "IQ2_XS",
                "ffn_gate": "IQ2_XXS",
                "ffn_up": "IQ2_XXS",
                "0.ffn_down": "IQ1_S",
                "1.ffn_down": "TQ2_0",
                "output": "MXFP4",
            },
        ),
    ),
}


def test_the_models_have_every_weight_type(tmp_path):
    files = [GgufFile(tiny_llama(tmp_path / "m.gguf", **MODELS[name])) for name in MODELS if "types" in name]
    assert {t.ggml_type for file in files for t in file.tensors.values() if len(t.shape) == 2} == set(BLOCKS)


@pytest.mark.parametrize("name", MODELS)
def test_model(gpu, tmp_path, name):
    path = tiny_llama(tmp_path / "m.gguf", **MODELS[name])
    check_against_reference(load_one(gpu, path), path)


@pytest.mark.parametrize("name", ["1 head per KV head", "8 heads per KV head", "head_dim 6", "head_dim 80", "qwen2"])
def test_f16_cache(gpu, tmp_path, name):
    path = tiny_llama(tmp_path / "m.gguf", **MODELS[name])
    check_against_reference(load_one(gpu, path, kv_type=KvType.F16), path)


# heads of 32 have no attend_split, which stores the key and value of a single row
Q8_0_MODELS = {"head_dim 32": MODELS["head_dim 64"] | {"head_dim": 32}, "head_dim 64": MODELS["head_dim 64"]}


@pytest.mark.parametrize("name", Q8_0_MODELS)
def test_q8_0_cache(gpu, tmp_path, name):
    path = tiny_llama(tmp_path / "m.gguf", **Q8_0_MODELS[name])
    run = load_one(gpu, path, kv_type=KvType.Q8_0)
    check_against_reference(run, path)
    kernels = [dispatch.kernel for dispatch in run.model.plan(1).dispatches]
    assert ("store_kv" in kernels) == (name == "head_dim 32")


@pytest.mark.parametrize("name", ["2 heads per KV head", "head_dim 64", "types of 256 weights"])
def test_int8_activations(gpu, tmp_path, name):
    """Precision fast: activations are rounded to int8 before every linear that has a kernel for it."""
    path = tiny_llama(tmp_path / "m.gguf", **MODELS[name])
    run = load_one(gpu, path, precision=Precision.FAST)
    assert run.model.int8_decode and run.model.int8_prefill
    check_against_reference(run, path)


@pytest.mark.parametrize("name", ["head_dim 64", "8 heads per KV head"])
def test_int8_attention(gpu, tmp_path, monkeypatch, name):
    """Prompts of many tokens: queries, keys and values are rounded to int8 as well, where the adapter can."""
    monkeypatch.setattr(routes, "FEW_SCORES", 0)
    path = tiny_llama(tmp_path / "m.gguf", **MODELS[name])
    run, ids = load_one(gpu, path, precision=Precision.FAST, chunk=64), token_ids(60)
    model = buffer_model(run)
    assert model.int8_attention
    assert (model.int8_kv is not None) == (gpu.caps.subgroup >= 8 and model.config.head_dim == 64)
    for start, end in ((0, 40), (40, 60)):
        want = Reference(GgufFile(path)).forward(ids[:end])[-1]
        assert_close(run.logits_after(ids[start:end]), want, *INT8_ATTENTION, f"tokens {start} to {end}")


def buffer_model(run: OneSequence) -> BufferModel:
    assert isinstance(run.model, BufferModel)
    return run.model


@pytest.mark.parametrize("output", ["Q4_0", "F16"])
def test_log_probabilities_of_few_tokens_in_int8(gpu, tmp_path, output):
    """Steps for which attention is split, and an output matrix that int8 blocks have no kernel for."""
    shape = dict(heads=2, kv_heads=1, head_dim=64, tied=False)
    types = by_name(**{"output.weight": output})
    path, ids = (
        tiny_llama(tmp_path / "m.gguf", ggml_type=lambda n: "Q4_0" if "attn" in n else types(n), **shape),
        token_ids(12),
    )
    run = load_one(gpu, path, precision=Precision.FAST, chunk=12)
    assert run.model.int8_prefill
    logits = Reference(GgufFile(path)).forward(ids)
    want = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert np.abs(run.log_probs(ids) - want[np.arange(11), ids[1:]]).max() < 0.1


def test_no_int8_attention_with_biases(gpu, tmp_path):
    path = tiny_llama(tmp_path / "m.gguf", **MODELS["qwen2"])
    assert not buffer_model(load_one(gpu, path, precision=Precision.FAST)).int8_attention


@pytest.mark.parametrize("name, allowed", [("qwen2", False), ("head_dim 64", True)])
def test_no_scores_in_f16_with_biases(gpu, tmp_path, name, allowed):
    path = tiny_llama(tmp_path / "m.gguf", **MODELS[name])
    model = buffer_model(load_one(gpu, path, precision=Precision.FAST, kv_type=KvType.F16))
    assert model.half_attention and model.attention(70).half_scores == allowed


@pytest.mark.parametrize("matrix", ["16x16"])
def test_memory_for_splits_on_matrix_units(matrix_gpu, tmp_path, monkeypatch):
    """Partial sums of the rows of any plan, at any depth; none where the kernel never runs."""
    monkeypatch.setattr(caps.Caps, "matrices", True)
    path = tiny_llama(tmp_path / "m.gguf", heads=2, kv_heads=1, head_dim=64)
    options = {"precision": Precision.FAST, "kv_type": KvType.F16}
    model, narrow = (buffer_model(load_one(matrix_gpu, path, chunk=m, context=m, **options)) for m in (256, 64))
    shapes = [model.attention(m, bucket) for m in (65, 100, 128, 256) for bucket in (1, 513, 1537, 8192)]
    assert {routes.select(routes.ATTEND, shape, matrix_gpu.caps).kernel for shape in shapes} >= {"attend_matrix"}
    rows = max(shape.m * shape.splits for shape in shapes)
    assert rows > 512 and rows * 2 * 64 * 4 <= model.partial.size and rows * 2 * 8 <= model.stats.size
    assert narrow.partial.size < model.partial.size


def test_norms_as_prologues_or_dispatches(gpu, tmp_path):
    """The plan of one row with norms as prologues gives the results of the plan with two more dispatches a layer."""
    path, ids = tiny_llama(tmp_path / "m.gguf", **MODELS["head_dim 64"]), token_ids(20)
    inside, before = (load_one(gpu, path, precision=Precision.FAST) for _ in range(2))
    if not buffer_model(inside).norm_in_linear:
        pytest.skip("the adapter has too few bindings, or too little workgroup memory")
    for run in (inside, before):
        buffer_model(run).unfuse()
    buffer_model(before).norm_in_linear = False
    layers = inside.engine.config.layers
    assert len(before.model.plan(1)) == len(inside.model.plan(1)) + 2 * layers
    one_token = len(inside.model.plan(1, 2000, embed=False)) + len(inside.model.sample_plan(greedy=True))
    assert one_token <= 7 * layers + 3
    for token in ids:
        assert_close(inside.logits_after([token]), before.logits_after([token]), *INT8)


@pytest.mark.parametrize("name", ["types of 32 weights", "odd widths"])
def test_int8_activations_only_where_they_fit(gpu, tmp_path, name):
    path = tiny_llama(tmp_path / "m.gguf", **MODELS[name])
    run = load_one(gpu, path, precision=Precision.FAST)
    assert not run.model.int8_decode and run.model.precision is Precision.HIGH


def test_a_binding_is_no_larger_than_a_buffer(monkeypatch):
    monkeypatch.setitem(caps.MINIMUM_LIMITS, "max-buffer-size", 64 << 20)
    assert open_gpu(LLAMAGPU_MINIMUM_LIMITS="1").caps.binding_bytes == 64 << 20


def test_steps_whose_activations_fit_a_binding(minimum_gpu, tmp_path, monkeypatch):
    """A chunk beyond every limit is cut to what a step and a binding hold."""
    path = tiny_llama(tmp_path / "m.gguf", metadata={"llama.context_length": 100_000})
    run = load_one(minimum_gpu, path, chunk=70_000, context=70_000, capacity=64)
    assert run.model.chunk == MAX_ROWS
    monkeypatch.setattr(minimum_gpu, "caps", replace(minimum_gpu.caps, binding_bytes=4 * 64 * 1024))
    run = load_one(minimum_gpu, path, chunk=70_000, context=70_000, capacity=64)
    assert run.model.chunk == 4 * 64 * 1024 // (4 * run.engine.config.ffn_dim)
    check_against_reference(run, path)


def test_a_rope_table_that_fits_no_binding_is_refused(minimum_gpu, tmp_path, monkeypatch):
    """Before anything is allocated, with the context that fits."""
    path = tiny_llama(tmp_path / "m.gguf", metadata={"llama.context_length": 1 << 24})
    monkeypatch.setattr(minimum_gpu, "caps", replace(minimum_gpu.caps, cpu=False))
    dims = GgufFile(path).metadata.get("llama.rope.dimension_count", 0)
    most = (128 << 20) // (4 * dims)
    before = minimum_gpu.allocated_bytes
    options = EngineOptions(context=most + 4, backend=Backend.BUFFERS)
    with pytest.raises(DoesNotFit, match="MiB of RoPE table") as refused:
        load_model(path, options, gpu=minimum_gpu)
    assert minimum_gpu.allocated_bytes == before
    assert refused.value.remedy == f"use -c {most} or less"


@pytest.mark.parametrize("backend, unchecked", [("Vulkan", True), ("Metal", False)])
def test_shaders_stay_checked_on_metal(gpu, monkeypatch, backend, unchecked):
    monkeypatch.delenv("LLAMAGPU_UNCHECKED", raising=False)
    assert device.may_be_unchecked(backend) == unchecked
    assert gpu.unchecked == device.may_be_unchecked(gpu.info["backend_type"])


@pytest.mark.parametrize("name", ["2 heads per KV head", "odd widths"])
def test_minimum_limits(minimum_gpu, tmp_path, monkeypatch, name):
    """No subgroups, 128 MiB bindings, 16 KiB of workgroup memory; checked shaders and checked recording."""
    assert minimum_gpu.caps.subgroup == 0 and minimum_gpu.caps.binding_bytes == 128 << 20
    assert (minimum_gpu.caps.shared_bytes, minimum_gpu.caps.storage_buffers) == (16384, 8)
    monkeypatch.setenv("LLAMAGPU_SAFE", "1")
    path = tiny_llama(tmp_path / "m.gguf", **MODELS[name])
    check_against_reference(load_one(minimum_gpu, path, kv_type=KvType.F16), path)


# Positions, chunks and the KV cache: one model, loaded once


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny") / "m.gguf", ggml_type="Q4_0", tied=False)


@pytest.fixture(scope="module")
def shared_run(gpu, tiny) -> OneSequence:
    return load_one(gpu, tiny)


@pytest.fixture
def run(shared_run) -> OneSequence:
    shared_run.clear()
    return shared_run


@PRECISIONS
def test_prefill_equals_single_steps(gpu, tiny, precision):
    ids, run = token_ids(33), load_one(gpu, tiny, precision=precision)
    assert run.model.int8_prefill == (precision is Precision.FAST)
    at_once = run.logits_after(ids)
    run.clear()
    for token in ids:
        run.prefill([token])
    # other kernels, the same sums in another order
    assert_close(run.engine.read_logits(), at_once, *(INT8 if run.model.int8_prefill else F32))


@PRECISIONS
def test_chunks_make_no_difference(gpu, tiny, precision):
    ids, int8 = token_ids(540), precision is Precision.FAST
    want = Reference(GgufFile(tiny), int8_decode=int8, int8_prefill=int8).forward(ids)
    for chunk, count in ((1, 64), (7, 64), (32, 540), (512, 540)):
        run = load_one(gpu, tiny, context=540, chunk=chunk, precision=precision)
        bounds = INT8 if int8 else F32
        assert_close(run.logits_after(ids[:count]), want[count - 1], *bounds, f"chunks of {chunk}")


@pytest.mark.parametrize(
    "precision, kv_type", [*((precision, KvType.F32) for precision in Precision), (Precision.HIGH, KvType.Q8_0)]
)
def test_sequences_of_one_step_do_not_see_each_other(gpu, tmp_path, precision, kv_type):
    """Four prompts of different lengths in one step, then decode of three: as each alone. The last is not finished."""
    path = tiny_llama(tmp_path / "m.gguf", ggml_type="Q4_0", heads=2, kv_heads=1, head_dim=64, tied=False)
    prompts = {2: token_ids(7, seed=1), 0: token_ids(20, seed=2), 1: token_ids(1, seed=3), 3: token_ids(4, seed=4)}
    run = load_one(gpu, path, chunk=64, precision=precision, kv_type=kv_type, slots=4)
    model, recorder = run.model, run.engine.recorder
    bounds = INT8 if precision is Precision.FAST else CACHE_BOUNDS[kv_type]
    for slot in prompts:
        reserve(run.engine, slot, 64)

    def logits(segments: int) -> np.ndarray:
        return gpu.read(model.logits, np.float32, segments * 288).reshape(segments, 288)

    references = [reference_of(run, path) for _ in prompts]
    want = [reference.forward(ids)[-1] for reference, ids in zip(references, prompts.values(), strict=True)]
    model.write_step([Segment(slot, 0, ids) for slot, ids in prompts.items()])
    recorder.submit([Step(model.plan(32, 0, segments=4), 32, 0)])
    assert_close(logits(4), np.array(want), *bounds)
    prompts.pop(3)
    references.pop()
    sample, sampled = model.sample_plan(True, segments=4, sampled=3), [[int(row.argmax())] for row in logits(3)]
    for _ in range(3):
        recorder.submit([Step(sample), Step(model.plan(3, 20, not model.embeds_next, segments=3), 3, 20)])
        rows = zip(references, sampled, strict=True)
        assert_close(logits(3), np.array([model.forward(ids[-1:])[-1] for model, ids in rows]), *bounds)
        for ids, row in zip(sampled, logits(3), strict=True):
            ids.append(int(row.argmax()))
        sample = model.sample_plan(True, segments=3)
    words, token = gpu.read(model.sampler.ring, np.uint32, model.sampler.first_change), model.sampler.token
    for (slot, prompt), ids in zip(prompts.items(), sampled, strict=True):
        assert [token(words, slot, len(prompt) + i)[0] for i in range(3)] == ids[:3]


def test_progress_counts_every_chunk(run):
    seen: list[tuple[int, int]] = []
    run.prefill(token_ids(33), lambda done, total: seen.append((done, total)))
    assert seen == [(0, 33), (18, 33), (33, 33)]


def test_continue_after_truncate(run, tiny):
    first, other = token_ids(20), token_ids(9, seed=1)
    run.prefill(first)
    run.sequence.truncate(7)
    assert run.ids == first[:7]
    want = Reference(GgufFile(tiny)).forward(first[:7] + other)[-1]
    assert_close(run.logits_after(other), want, *F32)
    assert run.ids == first[:7] + other


def test_log_probs(run, tiny):
    ids = token_ids(40)
    logits = Reference(GgufFile(tiny)).forward(ids)
    logits -= logits.max(axis=1, keepdims=True)
    want = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))[np.arange(39), ids[1:]]
    assert_close(run.log_probs(ids), want, *F32)
    assert run.ids == ids


@pytest.mark.parametrize("kv_type", [KvType.F16, KvType.F32])
def test_pages_in_any_order(gpu, tmp_path, kv_type):
    path = tiny_llama(tmp_path / "m.gguf", context=256)
    ids, bounds = token_ids(200), CACHE_BOUNDS[kv_type]
    run = load_one(gpu, path, context=256, kv_type=kv_type)
    run.engine.cache.pool.free = [1, 3, 0, 2]
    want = Reference(GgufFile(path), kv_type=kv_type).forward(ids)
    for start, end in ((0, 8), (8, 64), (64, 65), (65, 150), (150, 151), (151, 200)):
        assert_close(run.logits_after(ids[start:end]), want[end - 1], *bounds, f"tokens {start} to {end}")
    assert run.sequence.pages == [2, 0, 3, 1]


@PRECISIONS
def test_matrices_split_by_rows(gpu, tmp_path, monkeypatch, precision):
    """Bindings so small that most matrices need two or three; a page of the KV cache, which would not fit, may."""
    path, ids = tiny_llama(tmp_path / "m.gguf", **MODELS["1 head per KV head"]), token_ids(10)
    allocate, roomy = BufferKvCache._allocate, gpu.caps

    def allocate_cache(cache: BufferKvCache) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(gpu, "caps", roomy)
            allocate(cache)

    monkeypatch.setattr(BufferKvCache, "_allocate", allocate_cache)
    monkeypatch.setattr(gpu, "caps", replace(gpu.caps, binding_bytes=4200, grid_barrier=False))
    run = load_one(gpu, path, context=12, kv_type=KvType.F16, precision=precision)
    weights = run.engine.weights
    for matrix in (weights.token_embd, weights.layers[0].qkv, *weights.layers[0].gate_up):
        assert len(matrix.shards) > 1
        assert max(b.size for shard in matrix.shards for b in shard.bindings.values()) <= 4200
        assert [s.row0 for s in matrix.shards] == list(np.cumsum([0, *(s.n for s in matrix.shards)])[:-1])
    reference = reference_of(run, path)
    fast = precision is Precision.FAST
    for piece in (ids[:1], ids[1:2]) if fast else (ids[:9], ids[9:]):
        want = reference.forward(piece)[-1]
        assert_close(run.logits_after(piece), want, *(INT8 if fast else F16_CACHE))
    assert next(run.greedy()) == want.argmax()


# Decode


def test_greedy_on_the_device_equals_the_host(run, tiny):
    prompt = token_ids(5)
    want, logits = Reference(GgufFile(tiny)).greedy(prompt, 30)
    margins = np.diff(np.sort(logits, axis=1)[:, -2:]).ravel()
    assert margins.min() > 1e-3  # else this model proves nothing: choose another seed
    run.prefill(prompt)
    assert list(islice(run.sample_on_host(), 30)) == want
    for most in (1, 2, 3, 30):
        run.clear()
        run.prefill(prompt)
        assert list(run.greedy(most)) == want[:most]
        assert run.ids == prompt + want[: most - 1]  # the last one is not in the cache


@pytest.mark.parametrize("tokens_per_submit", [1, 3, 32])
def test_greedy_in_submissions_of_any_size(run, monkeypatch, tokens_per_submit):
    prompt = token_ids(5)
    run.prefill(prompt)
    want = list(islice(run.sample_on_host(), 40))
    monkeypatch.setattr(decode, "MAX_TOKENS_PER_SUBMIT", tokens_per_submit)
    monkeypatch.setattr(decode, "SUBMIT_S", 1e9)  # no smaller submissions because the adapter is slow
    run.clear()
    run.prefill(prompt)
    assert list(islice(run.greedy(), 40)) == want


def test_submissions_are_short_however_slow_the_steps(gpu, tmp_path, monkeypatch):
    """Tokens come several at a time, but no later than 50 ms after they were sampled: the steps of a fast model become
    slow, then slower than a submission may last. (The three submissions in flight were sized before.) Only steps move
    the clock."""
    run = load_one(gpu, tiny_llama(tmp_path / "m.gguf", ggml_type="Q4_0", layers=1), context=256)
    decode_steps, wait, clock = decode.decode_steps, Pending.wait, 0.0
    submissions: list[tuple[int, int]] = []  # position, tokens
    costs = deque([0.0])  # of submissions that nothing has waited for; the first is a sampling step alone

    def counted(engine: Any, position: int, count: int, sample: Plan) -> list[Any]:
        submissions.append((position, count))
        costs.append(sum(0.001 if p < 100 else 0.006 if p < 140 else 0.03 for p in range(position, position + count)))
        return decode_steps(engine, position, count, sample)

    def timed(pending: Pending) -> Any:
        nonlocal clock
        clock += costs.popleft()
        return wait(pending)

    run.prefill(token_ids(5))
    monkeypatch.setattr(decode, "decode_steps", counted)
    monkeypatch.setattr(Pending, "wait", timed)
    monkeypatch.setattr(decode, "time", SimpleNamespace(perf_counter=lambda: clock))
    came = [clock for _ in run.greedy(165)]  # token i is sampled in the step at position 4 + i
    phases = {"fast": (30, 90), "slow": (126, 140), "slower": (152, 256)}
    sizes = {phase: {n for p, n in submissions if first <= p < end} for phase, (first, end) in phases.items()}
    assert sizes == {"fast": {decode.MAX_TOKENS_PER_SUBMIT}, "slow": {2}, "slower": {1}} and not costs
    assert max(came[p - 4] - came[p - 5] for p, _ in submissions if not 140 <= p < 152) < 0.05


def test_greedy_may_stop_anywhere(run, monkeypatch):
    monkeypatch.setattr(decode, "SUBMIT_S", 1e9)  # submissions of 1, 2, 4, 8 tokens: stops fall on each of their tokens
    prompt = token_ids(5)
    run.prefill(prompt)
    want = list(islice(run.greedy(), 24))
    for stop in range(1, 13):
        run.clear()
        run.prefill(prompt)
        got = list(islice(run.greedy(), stop))
        assert got == want[:stop]
        assert run.ids == prompt + got[:-1]
        # steps computed ahead have no effect: after the last token the text continues as without a stop
        run.prefill(got[-1:])
        assert list(islice(run.greedy(), 4)) == want[stop : stop + 4]


def test_generation_ends_with_the_context(gpu, tiny):
    prompt = token_ids(5)
    ways: list[Callable[[OneSequence], Iterator[int]]] = [OneSequence.greedy, OneSequence.sample_on_host]
    for generate in ways:
        run = load_one(gpu, tiny, context=17)
        run.prefill(prompt)
        got = list(generate(run))
        assert len(got) == 17 - 5 + 1  # one for each free position, and one sampled from the last
        assert run.ids == prompt + got[:-1]
        with pytest.raises(DoesNotFit):
            run.prefill(got[-1:])


def test_more_than_the_context_is_refused_before_anything_runs(gpu, tiny):
    run, ids = load_one(gpu, tiny, context=17), token_ids(20)
    before = run.logits_after(ids[:10])
    with pytest.raises(DoesNotFit, match="17"):
        run.prefill(ids[10:18])
    assert run.ids == ids[:10]
    assert (run.engine.read_logits() == before).all()
    want = Reference(GgufFile(tiny)).forward(ids[:17])[-1]
    assert_close(run.logits_after(ids[10:17]), want, *F32)  # and all seven that fit still do


def test_a_cache_beyond_a_binding_is_refused(gpu, monkeypatch, run):
    engine = run.engine
    monkeypatch.setattr(gpu, "caps", replace(gpu.caps, binding_bytes=1 << 16))
    settings = replace(engine.settings, context=1000, capacity=1000)
    with pytest.raises(DoesNotFit, match="a context of 1000 needs") as caught:
        Engine(gpu, engine.config, engine.weights, settings)
    assert caught.value.remedy == "use -c 512 or less, or an f16 cache (-ctk f16)"


def test_sampling_penalises_what_it_sampled(run):
    """At temperature 0 the penalty decides, over a window longer than the prompt; the host does the same."""
    prompt, sampling = token_ids(5), Sampling(temperature=0.0, repeat_penalty=1.3, repeat_last_n=16)
    run.prefill(prompt)
    want = list(islice(run.sample_on_host(HostSampler(sampling, prompt)), 30))
    assert len(set(want)) > 10
    run.clear()
    run.prefill(prompt)
    assert run.engine.samples_on_device(sampling)
    assert list(run.sample(sampling, prompt, 30)) == want
    assert run.ids == prompt + want[:-1]


def test_the_same_seed_samples_the_same(run, monkeypatch):
    prompt, sampled = token_ids(5), []
    for seed, tokens_per_submit in ((7, 8), (7, 1), (8, 8)):
        monkeypatch.setattr(decode, "MAX_TOKENS_PER_SUBMIT", tokens_per_submit)
        run.clear()
        run.prefill(prompt)
        sampled.append(list(run.sample(Sampling(temperature=2.0, top_k=40, seed=seed), prompt, 20)))
    assert sampled[0] == sampled[1] != sampled[2]


# Safe and fast recording, checked and unchecked shader modules


def test_safe_recording_gives_the_same(gpu, tiny, run, monkeypatch):
    ids = token_ids(12)
    want = [run.logits_after(ids), *(run.logits_after([i]) for i in ids[:3])]
    monkeypatch.setenv("LLAMAGPU_SAFE", "1")
    safe = load_one(gpu, tiny)
    assert safe.engine.recorder.safe and not run.engine.recorder.safe
    got = [safe.logits_after(ids), *(safe.logits_after([i]) for i in ids[:3])]
    assert (np.array(got) == np.array(want)).all()
    assert list(islice(safe.greedy(), 12)) == list(islice(run.greedy(), 12))


def test_a_step_in_pieces_gives_the_same(gpu, run, monkeypatch):
    """As on a GPU, where a worker submits a piece while the next one is recorded."""
    ids = token_ids(12)
    want = [run.logits_after(ids), *(run.logits_after([i]) for i in ids[:3])]
    monkeypatch.setattr(recorder, "FIRST_PIECE", 2)
    monkeypatch.setattr(recorder, "PIECE", 3)
    monkeypatch.setattr(Gpu, "software", False)
    run.model.clear_plans()
    run.clear()
    got = [run.logits_after(ids), *(run.logits_after([i]) for i in ids[:3])]
    assert (np.array(got) == np.array(want)).all()
    plan = run.model.plan(12)
    assert [len(piece) for piece in plan.pieces][:2] == [2, 3] and max(map(len, plan.pieces)) <= 4
    assert tuple(dispatch for piece in plan.pieces for dispatch in piece.dispatches) == plan.dispatches


def test_sizes_of_pieces(gpu):
    fill = gpu.dispatch("fill_random", (), {"WORDS": 4, "MASK": 0, "VALUE": 7}, {"y": gpu.status}, (1, 1, 1))
    sizes = [[len(piece) for piece in Plan([fill] * count).pieces] for count in (1, 36, 37, 115, 227)]
    assert sizes == [[1], [36], [16, 21], [16, 40, 59], [16, 40, 40, 40, 40, 51]]


def test_a_long_text_is_the_same_in_safe_recording(gpu, tmp_path, monkeypatch):
    """In four context buckets of split attention; and the logits, bit for bit."""
    path = tiny_llama(tmp_path / "m.gguf", ggml_type="Q4_0", layers=1, heads=2, kv_heads=1, head_dim=64, ffn=64)
    found: dict[str, list[Any]] = {"0": [], "1": []}
    for safe, texts in found.items():
        monkeypatch.setenv("LLAMAGPU_SAFE", safe)
        run = load_one(gpu, path, context=768)
        buffer_model(run).unfuse()
        assert run.engine.recorder.safe == (safe == "1")
        for count in (5, 70, 130, 150):
            run.prefill(token_ids(count, seed=count))
            texts += [list(run.greedy(70)), run.engine.read_logits().tolist()]
        buckets = {key.bucket for key in run.model.plans if key.kind is PlanKind.STEP}
        assert len(buckets) > (3 if gpu.caps.subgroup >= 4 else 0)
    assert found["0"] == found["1"]


def test_checked_shaders_give_the_same(tiny, run):
    ids = token_ids(12)
    checked = open_gpu(LLAMAGPU_UNCHECKED="0")
    assert not checked.unchecked and run.engine.gpu.unchecked
    other = load_one(checked, tiny)
    for piece in (ids, ids[:1]):
        # a compiler may fuse operations differently around the checks: a few roundings, no more
        assert_close(other.logits_after(piece), run.logits_after(piece), 1e-12, 1e-6)


# Subgroups of another size than probed


@pytest.mark.parametrize("backend", list(Backend))
def test_kernels_notice_subgroups_of_another_size(tmp_path, caplog, backend):
    """The probe saw twice as many lanes as the kernels get. What they computed is computed again, without subgroups."""
    gpu = open_gpu()
    if not gpu.caps.subgroup:
        pytest.skip("the adapter has no subgroups")
    if backend is Backend.TEXTURES and not gpu.caps.cpu:
        pytest.skip("textures are for CPU adapters")
    caplog.set_level(logging.INFO, "llamagpu")
    path = tiny_llama(tmp_path / "m.gguf", dim=128, heads=2, kv_heads=1, head_dim=64, ffn=192)
    want = load_one(gpu, path, backend=backend)
    check_against_reference(want, path)
    assert gpu.caps.subgroup and not caplog.records
    want.clear()
    gpu.caps = replace(gpu.caps, subgroup=2 * gpu.caps.subgroup, grid_barrier=False)
    run = load_one(gpu, path, backend=backend)
    got, expected = ([*r.logits_after([1, 2, 3]), *r.greedy(20)] for r in (run, want))
    assert got[-20:] == expected[-20:]
    if "SUBGROUP" not in "".join(d.source for d in want.model.plan(1).dispatches):
        return  # nothing relies on subgroups here
    assert gpu.caps.subgroup == 0 and run.model.lanes == 0
    assert "kernels without them" in caplog.text
    check_against_reference(run, path)


def on_matrix_units(gpu, path, ffn, rows, precision=Precision.FAST, kv_type=KvType.F16, **changed):
    """A prompt on matrices that need no subgroups of 32: logits, those of float64 with an int8 output head, kernels."""
    shape = {"dim": 128, "heads": 2, "kv_heads": 1, "head_dim": 64, "ffn": ffn, "layers": 2} | changed
    tiny_llama(path, ggml_type="Q4_0", **shape)
    run, ids = (
        load_one(gpu, path, context=128, chunk=128, precision=precision, kv_type=kv_type),
        token_ids(rows),
    )
    int8 = precision is Precision.FAST
    want = Reference(GgufFile(path), kv_type=kv_type, int8_decode=int8).forward(ids)[-1]
    linears = [d for d in run.model.plan(rows).dispatches if d.kernel.startswith("linear_") and d.layer is not None]
    return run.logits_after(ids), want, [d.kernel for d in linears]


@pytest.mark.parametrize("matrix", ["16x16"])
def test_a_prompt_on_matrix_units(matrix_gpu, tmp_path, monkeypatch):
    """All linears of a layer read f16 blocks, whoever writes them; the output head of one row reads int8."""
    monkeypatch.setattr(caps.Caps, "matrices", True)
    got, want, kernels = on_matrix_units(matrix_gpu, tmp_path / "m.gguf", 192, 70)
    assert_close(got, want, *F16_BLOCKS)
    assert set(kernels) == {"linear_matrix"}


@pytest.mark.parametrize("matrix", ["16x16"])
def test_few_tiles_on_matrix_units(matrix_gpu, tmp_path, monkeypatch):
    """qkv is split over k, and linear_sum rotates the heads; the norm after attn_output adds its splits up."""
    monkeypatch.setattr(caps.Caps, "matrices", True)
    got, want, kernels = on_matrix_units(matrix_gpu, tmp_path / "m.gguf", 192, 70, dim=512, heads=8, layers=1)
    assert_close(got, want, *F16_BLOCKS)
    assert kernels == ["linear_matrix", "linear_sum", *["linear_matrix"] * 3]


@pytest.mark.parametrize("matrix", ["16x16"])
def test_f32_inputs_on_matrix_units(matrix_gpu, tmp_path, monkeypatch):
    """`high`: numbers of two f16 each are as good as f32."""
    monkeypatch.setattr(caps.Caps, "matrices", True)
    monkeypatch.setattr(routes, "CORES", 2)  # of which tiles must fill half
    got, want, kernels = on_matrix_units(matrix_gpu, tmp_path / "m.gguf", 192, 70, Precision.HIGH, KvType.F32)
    assert_close(got, want, *F32)
    assert set(kernels) == {"linear_matrix"}


@pytest.mark.parametrize("matrix", ["16x16"])
@pytest.mark.parametrize("ffn", [512, 128])
@pytest.mark.parametrize("rows, small", [(20, "linear_gemm_int8"), (12, "linear_gemv_batch")])
def test_few_rows_on_matrix_units(matrix_gpu, tmp_path, monkeypatch, rows, small, ffn):
    """Linears of f16 and of int8 blocks alternate, and the norm after one that is split over k adds the splits up."""
    monkeypatch.setattr(caps.Caps, "matrices", True)
    monkeypatch.setattr(routes, "LONG_ROWS", 256)
    monkeypatch.setattr(routes, "SMALL_MATRIX", 8000)
    got, want, kernels = on_matrix_units(matrix_gpu, tmp_path / "m.gguf", ffn, rows)
    assert_close(got, want, *INT8)
    layer = ["linear_matrix", small, "linear_matrix"]  # qkv, attn_output, gate_up
    down, last = ("linear_matrix", ["linear_sum"]) if ffn == 512 else (small, [])
    assert kernels == [*layer, down, *layer, down, *last]


@pytest.mark.parametrize("matrix", ["16x16"])
def test_skinny_on_matrix_units(matrix_gpu, tmp_path, monkeypatch):
    """9 to 16 rows with inputs in registers: qkv into the cache, gated units in f16 blocks, the residual stream."""
    monkeypatch.setattr(caps.Caps, "matrices", True)
    monkeypatch.setattr(routes, "SMALL_MATRIX", 8000)
    monkeypatch.setattr(routes, "skinny_is_faster", lambda caps: True)
    monkeypatch.setattr(routes, "CORES", 3)  # each takes several strips in turn
    got, want, kernels = on_matrix_units(matrix_gpu, tmp_path / "m.gguf", 1024, 12, dim=1024, layers=1)
    assert_close(got, want, *F16_BLOCKS)
    assert kernels == ["linear_skinny", "linear_matrix", "linear_skinny", "linear_skinny"]  # attn_output has 128 k


@pytest.fixture
def skinny_head(matrix_gpu, tmp_path, monkeypatch):
    """A model whose embeddings and output head are Q6_K, in 6 bits as on a GPU, and its file."""
    monkeypatch.setattr(caps.Caps, "matrices", True)
    monkeypatch.setattr(routes, "SMALL_MATRIX", 8000)
    monkeypatch.setattr(routes, "VOCABULARY", 288)
    monkeypatch.setattr(routes, "skinny_is_faster", lambda caps: True)
    monkeypatch.setattr(routes, "CORES", 3)  # each takes several strips in turn
    of_a_gpu = WeightTarget(Backend.BUFFERS, six_bits=True, native_f16=True, int8=True)
    monkeypatch.setattr(WeightTarget, "of", lambda *_: of_a_gpu)
    shape = {"dim": 1024, "heads": 2, "kv_heads": 1, "head_dim": 64, "ffn": 192, "layers": 1}
    path = tiny_llama(tmp_path / "m.gguf", ggml_type=by_name(token_embd="Q6_K"), **shape)
    return load_one(matrix_gpu, path, context=128, chunk=16, precision=Precision.FAST, slots=16), path


@pytest.mark.parametrize("matrix", ["16x16"])
def test_skinny_output_head(skinny_head):
    """The norm writes f16 blocks for 9 to 16 rows of logits, else int8 blocks."""
    model = skinny_head[0].model
    inputs = {m: model.inputs(m, model.weights.output) for m in (1, 8, 9, 16)}
    assert inputs == {1: Inputs.INT8, 8: Inputs.INT8, 9: Inputs.F16, 16: Inputs.F16}
    layer = replace(model.weights.output)  # gate and up together may have as many rows
    assert model.inputs(12, layer) is Inputs.INT8
    norm, *head = model.head(model.step_key(12, 0, True, 12))
    assert [d.kernel for d in head] == ["linear_skinny", "argmax"]
    assert "const X_UNIT" in norm.source, "it writes f16 blocks"


@pytest.mark.slow
@pytest.mark.parametrize("matrix", ["16x16"])
def test_scores_by_a_skinny_output_head(skinny_head):
    """Of one step, as perplexity takes them."""
    (run, path), ids = skinny_head, token_ids(12)
    head = run.model.score_plan(run.engine.score_rows).dispatches[-2]
    assert (head.kernel, head.shape.storage) == ("linear_skinny", Storage.Q6)
    logits = Reference(GgufFile(path), kv_type=KvType.F32, int8_decode=True, int8_prefill=True).forward(ids)
    logits -= logits.max(axis=1, keepdims=True)
    want = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert_close(run.log_probs(ids), want[np.arange(11), ids[1:]], *INT8)
