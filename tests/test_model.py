"""The transformer on the device against numpy float64: tiny random models of every shape, then real ones."""

import json
from collections import deque
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import open_gpu, shared_data
from gguf_builder import tiny_llama
from reference import Reference, assert_close

from llamagpu.errors import DoesNotFit
from llamagpu.files.config import LlamaConfig, check_tensors
from llamagpu.files.gguf_file import BLOCKS, GgufFile
from llamagpu.files.repack import small

pytest.importorskip("wgpu")
from llamagpu.engine import llama
from llamagpu.engine.llama import Transformer
from llamagpu.engine.sampler import Sampling, make_sampler
from llamagpu.engine.tiled import TiledTransformer, load_tiles, suits_tiles
from llamagpu.engine.weights import load_weights
from llamagpu.gpu import device
from llamagpu.gpu.recorder import Pending, Plan

# (NMSE, largest error / largest logit). All sums are in f32, measured 1e-12 and 2e-6; a few layers deep.
F32 = (1e-10, 1e-5)
# The reference rounds keys and values to f16 as well; a few lie so near the middle of two that they differ.
F16_CACHE = (1e-8, 1e-4)
# int8 activations: the reference makes the same steps of 1/127, and again a few fall to the other side. One is enough
# for 9e-5 and 1e-2 in these models: the reference itself moves so far when its inputs move by 2e-7.
FAST = (3e-4, 3e-2)
ROUGH = (3e-3, 0.1)  # against exact activations: measured 2e-4 to 7e-4, with int8 attention as without


def open_model(path: Path) -> tuple[GgufFile, LlamaConfig]:
    file = GgufFile(path)
    config = LlamaConfig.from_gguf(file.metadata, file.tensors)
    check_tensors(config, file.tensors)
    return file, config


def load(
    gpu: Any, path: Path, context: int = 64, chunk: int = 16, kv_f32: bool = True, tiled: bool = False, **more: Any
) -> Transformer:
    file, config = open_model(path)
    factors = file.tensors.get("rope_freqs.weight")
    made, weights = (TiledTransformer, load_tiles) if tiled else (Transformer, load_weights)
    freqs = None if factors is None else small(factors)
    loaded = weights(file.tensors, config, gpu)
    return made(gpu, config, loaded, freqs, context, chunk=chunk, kv_f32=kv_f32, **more)


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 288, count).tolist()


def logits_after(model: Transformer, ids: list[int]) -> np.ndarray:
    model.prefill(ids)
    return model.read_logits()


def reference_of(model: Transformer, path: Path) -> Reference:
    """One that rounds what the model rounds."""
    rounds = {"kv_f16": not model.kv_f32, "fast": model.fast, "fast_many": model.fast_many}
    return Reference(GgufFile(path), **rounds)


def check_against_reference(model: Transformer, path: Path) -> None:
    """A prompt of 13, three single steps, and 14 more at once. (For 2 to 8 there are kernels of their own that
    take long to compile: see test_chunks_make_no_difference.)"""
    ids = tokens(30)
    reference = reference_of(model, path)
    bounds = FAST if model.fast else F32 if model.kv_f32 else F16_CACHE
    for start, end in ((0, 13), (13, 14), (14, 15), (15, 16), (16, 30)):
        want = reference.forward(ids[start:end])[-1]
        assert_close(logits_after(model, ids[start:end]), want, *bounds, f"tokens {start} to {end}")


def by_name(**kinds: str) -> Any:
    """A kind per tensor, by a part of its name; Q4_0 otherwise."""
    return lambda name: next((kind for part, kind in kinds.items() if part in name), "Q4_0")


# Most of them share their widths, so that kernels are compiled once: a model of its own takes 4 s on a CPU.
MODELS: dict[str, dict[str, Any]] = {
    "share 1": dict(heads=4, kv_heads=4, kind="Q4_0"),
    "share 2": dict(heads=4, kv_heads=2, kind="Q4_0", tied=False),
    "share 4": dict(heads=4, kv_heads=1, kind="Q4_0"),
    "share 8": dict(heads=8, kv_heads=1, kind="Q4_0"),
    "head_dim 48": dict(heads=2, kv_heads=1, head_dim=48, kind="Q4_0"),
    "head_dim 64": dict(heads=2, kv_heads=1, head_dim=64, kind="Q4_0"),
    "head_dim 80": dict(heads=2, kv_heads=2, head_dim=80, kind="Q4_0"),
    "head_dim 128": dict(heads=1, kv_heads=1, head_dim=128, kind="Q4_0"),
    "head_dim 256": dict(heads=1, kv_heads=1, head_dim=256, kind="Q4_0"),
    "head_dim 6": dict(dim=24, heads=4, kv_heads=2, kind="F16"),
    "odd widths": dict(dim=33, heads=3, kv_heads=1, head_dim=10, ffn=129, tied=False, biases=True),
    "biases": dict(kind="Q4_0", biases=True),
    "qwen2": dict(arch="qwen2", kind="Q4_0", tied=False),
    "qwen2, rope_dims 8": dict(arch="qwen2", kind="Q4_0", metadata={"qwen2.rope.dimension_count": 8}),
    "rope_dims 6": dict(kind="Q4_0", metadata={"llama.rope.dimension_count": 6}),
    "rope_freqs": dict(kind="Q4_0", rope_freqs=np.linspace(1.0, 8.0, 8), rope_theta=500000.0),
    "linear scaling": dict(kind="Q4_0", metadata={"llama.rope.scaling.factor": 4.0}),
    "sliding window": dict(kind="Q4_0", metadata={"llama.attention.sliding_window": 5}),
    # every type once; in the first also q, k and v, and gate and up, of different types
    "32 weights": dict(
        tied=False, layers=1, biases=True, kind=by_name(token_embd="Q4_0", attn_q="Q4_1", attn_k="Q5_0",
        attn_v="Q5_1", attn_output="Q8_0", ffn_gate="IQ4_NL", ffn_up="F16", ffn_down="BF16", output="F32"),
    ),
    "256 weights": dict(
        dim=256, ffn=256, tied=False, layers=1, kind=by_name(token_embd="Q2_K", attn_q="Q3_K", attn_k="Q4_K",
        attn_v="Q5_K", attn_output="Q6_K", ffn_gate="IQ4_XS", ffn_up="IQ4_XS", output="Q3_K", weight="Q4_K"),
    ),
}  # fmt: skip


def test_the_models_have_every_weight_type(tmp_path):
    files = [open_model(tiny_llama(tmp_path / "m.gguf", **MODELS[n]))[0] for n in MODELS if "weights" in n]
    assert {t.kind for file in files for t in file.tensors.values() if len(t.shape) == 2} == set(BLOCKS)


@pytest.mark.parametrize("name", MODELS)
def test_model(gpu, tmp_path, name):
    path = tiny_llama(tmp_path / "m.gguf", **MODELS[name])
    check_against_reference(load(gpu, path), path)


@pytest.mark.parametrize("name", ["share 1", "share 8", "head_dim 6", "head_dim 80", "qwen2"])
def test_f16_cache(gpu, tmp_path, name):
    path = tiny_llama(tmp_path / "m.gguf", **MODELS[name])
    check_against_reference(load(gpu, path, kv_f32=False), path)


@pytest.mark.parametrize("name", ["share 2", "head_dim 64", "256 weights"])
def test_int8_activations(gpu, tmp_path, name):
    """Precision "fast": activations rounded to int8 before every linear that has a kernel for it."""
    path = tiny_llama(tmp_path / "m.gguf", **MODELS[name])
    model = load(gpu, path, fast=True)
    assert model.fast and model.fast_many
    check_against_reference(model, path)


@pytest.mark.parametrize("name", ["head_dim 64", "share 8"])
def test_int8_attention(gpu, tmp_path, name):
    """Prompts of more than 16 tokens: queries and keys rounded to int8 as well."""
    path = tiny_llama(tmp_path / "m.gguf", **MODELS[name])
    model, ids = load(gpu, path, fast=True, chunk=64), tokens(60)
    assert model.rough
    for start, end in ((0, 40), (40, 60)):
        reference = Reference(GgufFile(path))
        want = reference.forward(ids[:end])[-1]
        assert_close(logits_after(model, ids[start:end]), want, *ROUGH, f"tokens {start} to {end}")


@pytest.mark.parametrize("output", ["Q4_0", "F16"])
def test_log_probabilities_of_few_tokens_in_int8(gpu, tmp_path, output):
    """Chunks for which attention is split, and an output matrix that int8 records have no kernel for."""
    shape = dict(heads=2, kv_heads=1, head_dim=64, tied=False)
    kind = lambda name: output if name == "output.weight" else "Q4_0"  # noqa: E731
    path, ids = tiny_llama(tmp_path / "m.gguf", kind=kind, **shape), tokens(12)
    model = load(gpu, path, fast=True, chunk=12)
    assert model.fast_many
    logits = Reference(GgufFile(path)).forward(ids)
    want = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    got = model.log_probs(ids)
    assert np.abs(got - want[np.arange(11), ids[1:]]).max() < 0.1


def test_no_int8_attention_with_biases(gpu, tmp_path):
    path = tiny_llama(tmp_path / "m.gguf", **MODELS["qwen2"])
    assert not load(gpu, path, fast=True).rough


def test_norms_inside_the_linears_or_before_them(gpu, tmp_path):
    """The fused plan of one token gives what the plan with two more dispatches a layer gives."""
    path, ids = tiny_llama(tmp_path / "m.gguf", **MODELS["head_dim 64"]), tokens(20)
    fused, plain = load(gpu, path, fast=True), load(gpu, path, fast=True)
    if not fused.joins_norm:
        pytest.skip("the adapter has too few bindings, or too little workgroup memory")
    plain.joins_norm = False
    assert len(plain.plan(1)) == len(fused.plan(1)) + 2 * fused.config.layers
    assert len(fused.plan(1, 2000, embed=False)) + len(fused.choose()) <= 7 * fused.config.layers + 3
    for token in ids:
        assert_close(logits_after(fused, [token]), logits_after(plain, [token]), *FAST)


@pytest.mark.parametrize("name", ["32 weights", "odd widths"])
def test_int8_activations_only_where_they_fit(gpu, tmp_path, name):
    assert not load(gpu, tiny_llama(tmp_path / "m.gguf", **MODELS[name]), fast=True).fast


def test_a_binding_is_no_larger_than_a_buffer(monkeypatch):
    monkeypatch.setitem(device.FLOOR, "max-buffer-size", 64 << 20)
    assert open_gpu(LLAMAGPU_FLOOR="1").caps.binding_bytes == 64 << 20


@pytest.mark.parametrize("name", ["share 2", "odd widths"])
def test_floor_limits(floor_gpu, tmp_path, monkeypatch, name):
    """No subgroups, 128 MiB bindings, 16 KiB of workgroup memory; checked shaders and checked calls."""
    assert floor_gpu.caps.subgroup == 0 and floor_gpu.caps.binding_bytes == 128 << 20
    assert floor_gpu.device.limits["max-compute-workgroup-storage-size"] == 16384
    assert floor_gpu.device.limits["max-storage-buffers-per-shader-stage"] == 8
    monkeypatch.setenv("LLAMAGPU_SAFE", "1")
    path = tiny_llama(tmp_path / "m.gguf", **MODELS[name])
    check_against_reference(load(floor_gpu, path, kv_f32=False), path)


# Positions, chunks and the cache: one model, loaded once


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny") / "m.gguf", kind="Q4_0", tied=False)


@pytest.fixture(scope="module")
def shared_model(gpu, tiny) -> Transformer:
    return load(gpu, tiny)


@pytest.fixture
def model(shared_model) -> Transformer:
    shared_model.truncate(0)
    return shared_model


@pytest.mark.parametrize("fast", [False, True], ids=["high", "fast"])
def test_prefill_equals_single_steps(gpu, tiny, fast):
    ids, model = tokens(33), load(gpu, tiny, fast=fast)
    assert model.fast_many == fast
    at_once = logits_after(model, ids)
    model.truncate(0)
    for token in ids:
        model.prefill([token])
    # other kernels, the same sums in another order
    assert_close(model.read_logits(), at_once, *(FAST if fast else F32))


@pytest.mark.parametrize("fast", [False, True], ids=["high", "fast"])
def test_chunks_make_no_difference(gpu, tiny, fast):
    ids, bounds = tokens(540), FAST if fast else F32
    want = Reference(GgufFile(tiny), fast=fast, fast_many=fast).forward(ids)
    for chunk, count in ((1, 64), (7, 64), (32, 540), (512, 540)):
        model = load(gpu, tiny, context=540, chunk=chunk, fast=fast)
        assert_close(logits_after(model, ids[:count]), want[count - 1], *bounds, f"chunks of {chunk}")


def test_progress_counts_every_chunk(model):
    seen: list[tuple[int, int]] = []
    model.prefill(tokens(33), lambda done, total: seen.append((done, total)))
    assert seen == [(16, 33), (32, 33), (33, 33)]


def test_truncate_and_go_on(model, tiny):
    first, other = tokens(20), tokens(9, seed=1)
    model.prefill(first)
    model.truncate(7)
    assert model.history == first[:7]
    want = Reference(GgufFile(tiny)).forward(first[:7] + other)[-1]
    assert_close(logits_after(model, other), want, *F32)
    assert model.history == first[:7] + other


def test_log_probs(model, tiny):
    ids = tokens(40)
    logits = Reference(GgufFile(tiny)).forward(ids)
    logits -= logits.max(axis=1, keepdims=True)
    want = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))[np.arange(39), ids[1:]]
    assert_close(model.log_probs(ids), want, *F32)
    assert model.history == ids


@pytest.mark.parametrize("kv_f32", [True, False])
def test_a_growing_cache_keeps_what_it_holds(gpu, tiny, kv_f32):
    ids, bounds = tokens(60), F32 if kv_f32 else F16_CACHE
    model = load(gpu, tiny, context=8, limit=64, kv_f32=kv_f32)
    want = Reference(GgufFile(tiny), kv_f16=not kv_f32).forward(ids)
    capacities = [model.capacity]
    for start, end in ((0, 8), (8, 9), (9, 15), (15, 37), (37, 60)):
        assert_close(logits_after(model, ids[start:end]), want[end - 1], *bounds, f"tokens {start} to {end}")
        capacities.append(model.capacity)
    assert capacities[0] == 8 and capacities[-1] >= 60 and capacities == sorted(capacities)


def test_greedy_while_the_cache_grows(gpu, tiny, model):
    prompt = tokens(6)
    model.prefill(prompt)
    want = list(islice(model.greedy(), 40))
    growing = load(gpu, tiny, context=8, limit=64)
    growing.prefill(prompt)
    assert list(islice(growing.greedy(), 40)) == want
    assert growing.history == prompt + want[:-1]


@pytest.mark.parametrize("fast", [False, True], ids=["high", "fast"])
def test_matrices_split_by_rows(gpu, tmp_path, monkeypatch, fast):
    """Bindings so small that most matrices need two or three."""
    path, ids = tiny_llama(tmp_path / "m.gguf", **MODELS["share 1"]), tokens(10)
    monkeypatch.setattr(gpu, "caps", replace(gpu.caps, binding_bytes=4200))
    model = load(gpu, path, context=12, kv_f32=False, fast=fast)
    w = model.weights
    for matrix in (w.token_embd, w.layers[0].qkv, *w.layers[0].gate_up):
        assert len(matrix.parts) > 1
        assert max(b.size for part in matrix.parts for b in part.buffers.values()) <= 4200
        assert [p.row0 for p in matrix.parts] == list(np.cumsum([0, *(p.n for p in matrix.parts)])[:-1])
    reference = reference_of(model, path)
    for part in (ids[:1], ids[1:2]) if fast else (ids[:9], ids[9:]):
        want = reference.forward(part)[-1]
        assert_close(logits_after(model, part), want, *(FAST if fast else F16_CACHE))
    assert next(model.greedy()) == want.argmax()


# Generating


def test_greedy_equals_sampling_the_largest(model, tiny):
    prompt = tokens(5)
    want, logits = Reference(GgufFile(tiny)).greedy(prompt, 30)
    margins = np.diff(np.sort(logits, axis=1)[:, -2:]).ravel()
    assert margins.min() > 1e-3  # else this model proves nothing: choose another seed
    model.prefill(prompt)
    assert list(islice(model.sample(lambda logits: int(logits.argmax())), 30)) == want
    for most in (1, 2, 3, 30):
        model.truncate(0)
        model.prefill(prompt)
        assert list(model.greedy(most)) == want[:most]
        assert model.history == prompt + want[: most - 1]  # what is in the cache: the last one is not


@pytest.mark.parametrize("batch", [1, 3, 32])
def test_greedy_in_batches(model, monkeypatch, batch):
    prompt = tokens(5)
    model.prefill(prompt)
    want = list(islice(model.sample(lambda logits: int(logits.argmax())), 40))
    monkeypatch.setattr(llama, "BATCH", batch)
    monkeypatch.setattr(llama, "VISIBLE_S", 1e9)  # no smaller batches because the adapter is slow
    model.truncate(0)
    model.prefill(prompt)
    assert list(islice(model.greedy(), 40)) == want


def test_batches_are_short_however_slow_the_steps(gpu, tmp_path, monkeypatch):
    """Tokens come several at a time, but no later than 50 ms after they were made: the steps of a fast model become
    slow, then slower than a batch may last. (The three submissions in flight were sized before.) The clock is one
    that only the steps move on."""
    model = load(gpu, tiny_llama(tmp_path / "m.gguf", kind="Q4_0", layers=1), context=256)
    steps, wait, clock = model.steps, Pending.wait, 0.0
    batches: list[tuple[int, int]] = []  # position, size
    costs = deque([0.0])  # of what was submitted and not waited for; first a choice alone

    def noted(pos: int, count: int, choose: Plan) -> list[Any]:
        batches.append((pos, count))
        costs.append(sum(0.001 if p < 100 else 0.006 if p < 140 else 0.03 for p in range(pos, pos + count)))
        return steps(pos, count, choose)

    def timed(pending: Pending) -> Any:
        nonlocal clock
        clock += costs.popleft()
        return wait(pending)

    model.prefill(tokens(5))
    monkeypatch.setattr(model, "steps", noted)
    monkeypatch.setattr(Pending, "wait", timed)
    monkeypatch.setattr(llama, "time", SimpleNamespace(perf_counter=lambda: clock))
    came = [clock for _ in model.greedy(165)]  # token i is chosen in the step at position 4 + i
    sizes = {phase: {n for pos, n in batches if first <= pos < end} for phase, first, end in
             (("fast", 30, 90), ("slow", 126, 140), ("slower", 152, 256))}  # fmt: skip
    assert sizes == {"fast": {llama.BATCH}, "slow": {2}, "slower": {1}} and not costs
    assert max(came[pos - 4] - came[pos - 5] for pos, _ in batches if not 140 <= pos < 152) < 0.05


def test_greedy_may_stop_anywhere(model, monkeypatch):
    monkeypatch.setattr(llama, "VISIBLE_S", 1e9)  # batches of 1, 2, 4, 8: stops fall on all their places
    prompt = tokens(5)
    model.prefill(prompt)
    want = list(islice(model.greedy(), 24))
    for stop in range(1, 13):
        model.truncate(0)
        model.prefill(prompt)
        got = list(islice(model.greedy(), stop))
        assert got == want[:stop]
        assert model.history == prompt + got[:-1]
        # what was computed ahead does not show: the last token goes in, and it goes on as it would have
        model.prefill(got[-1:])
        assert list(islice(model.greedy(), 4)) == want[stop : stop + 4]


def test_greedy_and_sample_end_with_the_context(gpu, tiny):
    prompt = tokens(5)
    for make in (lambda m: m.greedy(), lambda m: m.sample(lambda logits: int(logits.argmax()))):
        model = load(gpu, tiny, context=17)
        model.prefill(prompt)
        got = list(make(model))
        assert len(got) == 17 - 5 + 1  # one for each free position, and one chosen from the last
        assert model.history == prompt + got[:-1]
        with pytest.raises(DoesNotFit):
            model.prefill(got[-1:])


def test_more_than_the_context_is_refused_before_anything_runs(gpu, tiny):
    model, ids = load(gpu, tiny, context=17), tokens(20)
    model.prefill(ids[:10])
    before = model.read_logits()
    with pytest.raises(DoesNotFit, match="17"):
        model.prefill(ids[10:18])
    assert model.history == ids[:10]
    assert (model.read_logits() == before).all()
    want = Reference(GgufFile(tiny)).forward(ids[:17])[-1]
    assert_close(logits_after(model, ids[10:17]), want, *F32)  # and all seven that fit still do


def test_a_cache_beyond_a_binding_is_refused(gpu, tiny, monkeypatch, model):
    ids = tokens(9)
    want = logits_after(model, ids)
    capacity = model.capacity
    monkeypatch.setattr(gpu, "caps", replace(gpu.caps, binding_bytes=1 << 14))
    with pytest.raises(DoesNotFit, match="1000"):
        model.reserve(1000)
    monkeypatch.undo()
    assert model.capacity == capacity
    model.truncate(0)
    assert (logits_after(model, ids) == want).all()


def test_draw_penalises_what_it_drew(model):
    """At temperature 0 the penalty decides, over a window longer than the prompt; the host does the same."""
    prompt, settings = tokens(5), Sampling(temperature=0.0, repeat_penalty=1.3, repeat_last_n=16)
    model.prefill(prompt)
    want = list(islice(model.sample(make_sampler(settings, prompt)), 30))
    assert len(set(want)) > 10
    model.truncate(0)
    model.prefill(prompt)
    assert model.draws_on_device(settings)
    assert list(model.draw(settings, prompt, 30)) == want
    assert model.history == prompt + want[:-1]


def test_draw_is_the_same_for_the_same_seed(model, monkeypatch):
    prompt, drawn = tokens(5), []
    for seed, batch in ((7, 8), (7, 1), (8, 8)):
        monkeypatch.setattr(llama, "BATCH", batch)
        model.truncate(0)
        model.prefill(prompt)
        drawn.append(list(model.draw(Sampling(temperature=2.0, top_k=40, seed=seed), prompt, 20)))
    assert drawn[0] == drawn[1] != drawn[2]


# Ways to record, ways to make shader modules


def test_safe_recording_gives_the_same(gpu, tiny, model, monkeypatch):
    ids = tokens(12)
    want = [logits_after(model, ids), *(logits_after(model, [i]) for i in ids[:3])]
    monkeypatch.setenv("LLAMAGPU_SAFE", "1")
    safe = load(gpu, tiny)
    assert safe.recorder.safe and not model.recorder.safe
    got = [logits_after(safe, ids), *(logits_after(safe, [i]) for i in ids[:3])]
    assert (np.array(got) == np.array(want)).all()
    assert list(islice(safe.greedy(), 12)) == list(islice(model.greedy(), 12))


def test_a_long_text_is_the_same_in_safe_recording(gpu, tmp_path, monkeypatch):
    """2000 tokens, through every way in which attention of one token is split; and the last logits, bit for bit."""
    path = tiny_llama(tmp_path / "m.gguf", kind="Q4_0", layers=1, heads=2, kv_heads=1, head_dim=64, ffn=64)
    found = []
    for safe in ("0", "1"):
        monkeypatch.setenv("LLAMAGPU_SAFE", safe)
        model = load(gpu, path, context=2048)
        assert model.recorder.safe == (safe == "1")
        model.prefill(tokens(5))
        found.append((list(model.greedy(2000)), model.read_logits().tolist()))
        assert len({key[2] for key in model.plans if key[0] == "plan"}) > (3 if gpu.caps.subgroup >= 4 else 0)
    assert found[0] == found[1]


def test_checked_shaders_give_the_same(tiny, model):
    ids = tokens(12)
    checked = open_gpu(LLAMAGPU_TRUSTED="0")
    assert not checked.trusted and model.gpu.trusted
    other = load(checked, tiny)
    for part in (ids, ids[:1]):
        # a compiler may fuse differently round the checks: a few roundings, no more
        assert_close(logits_after(other, part), logits_after(model, part), 1e-12, 1e-6)


# Real models


def test_stories260k_golden_ids(gpu):
    path, golden = shared_data("tiny/stories260K-f32.gguf"), shared_data("tiny/stories260K.golden.json")
    want = json.loads(golden.read_text())
    model = load(gpu, path, context=256)
    model.prefill([want["bos"]])
    got = list(islice(model.greedy(), len(want["greedy_ids"])))
    assert len(got) == 200 and got == want["greedy_ids"]


def test_stories15m_follows_the_reference(gpu):
    """Along the reference's own greedy text, the device chooses as it does wherever that is no toss-up."""
    path, count = shared_data("tiny/stories15M-q4_0.gguf"), 24
    want, logits = Reference(GgufFile(path)).greedy([1], count)
    margins = np.diff(np.sort(logits, axis=1)[:, -2:]).ravel()
    assert (margins > 0.02).sum() > count * 0.9
    file, config = open_model(path)
    model = load(gpu, path, tiled=suits_tiles(config, file.tensors, gpu))  # as the program would on this adapter
    for i, token in enumerate([1, *want[:-1]]):
        got = logits_after(model, [token])
        assert_close(got, logits[i], *F32, f"token {i}")
        assert margins[i] <= 0.02 or got.argmax() == want[i], f"token {i}"
    model.truncate(0)
    assert_close(logits_after(model, [1, *want[:15]]), logits[15], *F32, "16 at once")
