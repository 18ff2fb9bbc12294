"""Fused decode of experts: each stage against float64, and steps against unfused ones."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import WGPU
from gguf_builder import Tensors, pack, write_gguf
from one_sequence import OneSequence, load_one, token_ids
from reference import assert_close
from test_architectures import EXPERTS, GPT_OSS, GRANITE, MODELS, Tiny, check_places_of_splits
from test_fused_decode import FAST_F16, bindings_of, drop_stores, fused_kernels, fused_of, late_reads, load_steps
from test_model import INT8, by_name

from llamagpu.engine import load as engine_load
from llamagpu.engine import routes
from llamagpu.engine.fused_decode import can_fuse, layer_stride, weights_fit
from llamagpu.engine.model import BufferModel
from llamagpu.engine.ops import attention_shape
from llamagpu.engine.options import Backend, KvType, Precision, Settings
from llamagpu.engine.routes import GridSize
from llamagpu.engine.weights import WeightTarget
from llamagpu.files.config import ModelConfig
from llamagpu.files.gguf_file import GgufFile
from llamagpu.files.repack import to_f32
from llamagpu.files.storage import Storage
from llamagpu.gpu.buffers import AnyBuffer, BufferRange
from llamagpu.verify.reference import F32, REQUANTISED, round_int8

pytestmark = WGPU

F32_STEP = 1e-10, 1e-4  # two orders of addition, over two or three layers
K_QUANTS = by_name(**{"attn_output": "Q4_0", "1.ffn_down": "Q6_K", "": "Q4_K"})
QWEN = Tiny("qwen3moe", EXPERTS | {"expert_feed_forward_length": 96})
OLMOE = Tiny("olmoe", {"expert_count": 16, "expert_used_count": 8}, kv_heads=2, tied=False, ffn=64)
GRANITE_MOE = Tiny("granitemoe", GRANITE | {"expert_count": 4, "expert_used_count": 1})
MIXTRAL = Tiny("llama", {"expert_count": 8, "expert_used_count": 2}, layers=3, dim=256, ffn=256)
# 8 heads to a KV head, windows of 3 positions in every other layer, sinks, a bias for every matrix
BIASED = Tiny("gpt-oss", GPT_OSS | {"attention.sliding_window": 3}, heads=8, tied=False, ffn=96)
Shape = tuple[Tiny, str | Callable[[str], str]]  # a model, and the type of its matrices
SHAPES: dict[str, Shape] = {
    "qwen3moe, 3 of 6, ffn 96": (QWEN, "Q8_0"),
    "olmoe, 8 of 16, ffn 64": (OLMOE, "Q4_0"),
    "granitemoe, 1 of 4": (GRANITE_MOE, "Q4_1"),
    "mixtral, 2 of 8, two types of down": (MIXTRAL, K_QUANTS),  # groups of 16 in 6 bits, super-block scales
    "gpt-oss, Q4_0": (BIASED, "Q4_0"),
    "gpt-oss, MXFP4": (BIASED, by_name(_exps="MXFP4", **{"": "Q8_0"})),
}
FAST, HIGH = Precision
CASES = [(name, FAST) for name in SHAPES] + [(name, HIGH) for name in (*SHAPES,)[:1] + (*SHAPES,)[3:]]


def write(path: Path, tiny: Tiny, ggml_type: str | Callable[[str], str] = "Q8_0", ties: bool = True) -> Path:
    """With `ties` the second half of the experts has the logits of the first half."""
    metadata, tensors = tiny.parts()
    rng, found = np.random.default_rng(2), dict[str, Any]()
    for name, (own_type, shape, data) in tensors.items():
        values = np.frombuffer(data, "<f4").reshape(-1, shape[-1]).copy()
        if "ffn_gate_inp" in name:
            values = values.reshape(shape[0], -1)  # a row or a bias for each expert
            values[len(values) // 2 :] = values[: len(values) // 2] if ties else values[len(values) // 2 :]
            found[name] = own_type, shape, values.tobytes()
        elif len(shape) > 1 and not name.endswith(".bias"):
            wanted = ggml_type(name) if callable(ggml_type) else ggml_type
            found[name] = wanted, shape, pack(values, wanted, rng)
        else:
            found[name] = own_type, shape, data
    return write_gguf(path, metadata, Tensors(found))


def check_equal_to_unfused(run: OneSequence) -> None:
    """Single tokens from the first position on."""
    assert isinstance(run.model, BufferModel) and run.model.fused
    ids = token_ids(5)
    got = [run.logits_after([id]) for id in ids]
    run.clear()
    with run.model.unfused():
        want = [run.logits_after([id]) for id in ids]
    bound = INT8 if run.model.int8_decode else F32_STEP
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_close(a, b, *bound, f"token {i}")


def check_stages(run: OneSequence, path: Path) -> None:
    """Of each layer: the residual stream after attention, the logits, the weighted hidden states of the chosen experts,
    the residual stream after them."""
    c, tensors, between = run.engine.config, GgufFile(path).tensors, fused_of(run).between(1)
    model, int8 = run.model, run.model.int8_decode
    assert isinstance(model, BufferModel)
    rounded = round_int8 if int8 else np.asarray
    run.logits_after([7])

    def row(buffer: AnyBuffer, layer: int, width: int) -> np.ndarray:
        return model.gpu.read(buffer, np.float32, width, offset=layer * layer_stride(width)).astype(np.float64)

    def tensor(layer: int, name: str) -> np.ndarray:
        return to_f32(tensors[f"blk.{layer}.{name}.weight"]).astype(np.float64)

    def bias(layer: int, name: str) -> np.ndarray:
        found = tensors.get(f"blk.{layer}.{name}.bias")
        return np.zeros(1) if found is None else to_f32(found).astype(np.float64)

    def attended(layer: int) -> np.ndarray:
        """The only split of each head, which begins with its sink."""
        consts = routes.fused_head_consts(attention_shape(c, 1), fused_of(run).grid, model.gpu.caps)
        by_layer = len(set(c.kinds)) > 1
        places = c.heads * (routes.fused_max_splits(c.kv_heads, shares=consts["HEAD_SHARES"]) if by_layer else 1)
        sums, stats = (
            model.gpu.read(buffer, np.float32, c.heads * width, offset=layer * layer_stride(places * width))
            for buffer, width in ((between.partial, c.head_dim), (between.stats, 2))
        )
        top, total = stats.astype(np.float64).reshape(-1, 2).T
        total += np.exp(tensor(layer, "attn_sinks") - top) if c.sinks else 0
        return (sums.reshape(-1, c.head_dim) / total[:, None]).reshape(-1)

    for i in range(c.layers):
        mid, logits = row(between.mid, i, c.dim), row(between.logits, i, c.experts)
        branch = tensor(i, "attn_output") @ rounded(attended(i)[None])[0] + bias(i, "attn_output")
        assert_close(mid, row(model.x, i, c.dim) + branch, *(REQUANTISED if int8 else F32), f"attention {i}")
        normed = mid / np.sqrt(np.square(mid).mean() + c.stream_eps) * tensor(i, c.ffn_norm)
        assert_close(logits, tensor(i, "ffn_gate_inp") @ normed, *F32, f"logits {i}")
        logits += bias(i, "ffn_gate_inp")
        chosen = np.argsort(-logits, kind="stable")[: c.experts_used]
        shares = np.exp(logits - logits.max())
        weights = shares[chosen] / (shares[chosen] if c.whole_weights else shares).sum()
        x = rounded(normed[None])[0]
        gate, up = (tensor(i, f"ffn_{name}_exps")[chosen] @ x for name in ("gate", "up"))
        act = row(between.act, i, c.hidden_width)
        if c.biases:
            gate, up = gate + bias(i, "ffn_gate_exps")[chosen], up + bias(i, "ffn_up_exps")[chosen]
            gate, up = 1.702 * np.minimum(gate, 7), (np.clip(up, -7, 7) + 1) / 1.702
        want = weights[:, None] * gate / (1 + np.exp(-gate)) * up
        bound = REQUANTISED if int8 else F32
        assert_close(act, want.reshape(-1), *bound, f"hidden {i}")
        inputs = rounded(act[None])[0].reshape(c.experts_used, -1)
        branch = np.einsum("enk,ek->n", tensor(i, "ffn_down_exps")[chosen], inputs)
        branch += weights @ bias(i, "ffn_down_exps")[chosen] if c.biases else 0
        assert_close(row(model.x, i + 1, c.dim), mid + branch, *bound, f"residual {i}")


@pytest.fixture
def six_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Q6_K as a GPU stores it."""

    def of(cls: Any, backend: Backend, precision: Precision, caps: Any) -> WeightTarget:
        return WeightTarget(backend, True, caps.native_f16, precision is Precision.FAST)

    monkeypatch.setattr(WeightTarget, "of", classmethod(of))


@pytest.mark.parametrize("name, precision", CASES)
def test_fused_experts(fused_gpu, tmp_path, six_bits, name, precision):
    """With experts whose logits tie, where the choice ends too."""
    path = write(tmp_path / "m.gguf", *SHAPES[name])
    run = load_one(fused_gpu, path, precision=precision)
    assert fused_kernels(run) == 1 and run.model.int8_decode == (precision is Precision.FAST)
    assert list(fused_of(run).compiled) == [1]
    storages = {layer.ffn_down.shards[0].layout.storage for layer in run.engine.weights.layers}
    assert (Storage.Q6 in storages) == ("two types" in name)
    check_stages(run, path)
    run.clear()
    check_equal_to_unfused(run)


def test_inputs_that_workgroup_memory_does_not_hold(fused_gpu, tmp_path):
    """The down projection reads the hidden states of all experts where they are."""
    path = write(tmp_path / "m.gguf", replace(GRANITE_MOE, ffn=fused_gpu.caps.shared_bytes // 8, keys=EXPERTS))
    run = load_one(fused_gpu, path)
    *_, down = fused_of(run).stages([0, 1])
    assert "fn run_prologue(index: u32) { wait(index); }" in down.source
    check_equal_to_unfused(run)


def test_slabs_of_two_layers(fused_gpu, tmp_path, monkeypatch):
    """Two layers of the largest matrix fill a binding: a kernel for every two of five layers."""
    path = write(tmp_path / "m.gguf", replace(QWEN, layers=5))
    monkeypatch.setattr(fused_gpu, "caps", replace(fused_gpu.caps, binding_bytes=2 * 6 * 192 * 128))
    run = load_one(fused_gpu, path)
    assert fused_kernels(run) == 3
    assert fused_of(run).between(1).logits.size == 2 * layer_stride(6)  # kernels share the rows of inter-stage buffers
    matrices = (matrix for layer in run.engine.weights.layers for matrix in layer.matrices)
    assert all(isinstance(matrix.shards[0].words, BufferRange) for matrix in matrices)
    check_equal_to_unfused(run)


def test_with_tint(fused_gpu, tmp_path, monkeypatch):
    """Within the 16 bindings that Dawn has."""
    caps = replace(fused_gpu.caps, tint=True, measured_barrier=True, storage_buffers=16)
    monkeypatch.setattr(fused_gpu, "caps", caps)
    run = load_one(fused_gpu, write(tmp_path / "m.gguf", QWEN), **FAST_F16)
    assert bindings_of(fused_of(run).dispatches()) <= 16
    check_equal_to_unfused(run)


@pytest.mark.parametrize("tint", [False, True])
def test_sinks_in_several_splits(fused_gpu, tmp_path, monkeypatch, tint):
    """Two in layers with a window where the others have three, then four; unfused decode gives the same."""
    caps = replace(fused_gpu.caps, tint=tint, storage_buffers=16 if tint else fused_gpu.caps.storage_buffers)
    monkeypatch.setattr(fused_gpu, "caps", caps)
    tiny = replace(BIASED, keys=BIASED.keys | {"attention.sliding_window": 40})
    path = write(tmp_path / "m.gguf", tiny, SHAPES["gpt-oss, MXFP4"][1], ties=False)
    kv_type = KvType.Q8_0 if tint else KvType.F16
    run = load_steps(fused_gpu, path, context=128, kv_type=kv_type, precision=FAST if tint else HIGH)
    assert fused_kernels(run) == 1 and isinstance(run.model, BufferModel)
    assert bindings_of(fused_of(run).dispatches()) <= caps.storage_buffers
    for count in (64, 1, 1, 40, 1):
        ids = token_ids(count, seed=count)
        got = run.logits_after(ids)
        if count == 1:
            run.sequence.truncate(len(run.ids) - 1)
            with run.model.unfused():
                want = run.logits_after(ids)
            assert_close(got, want, *(REQUANTISED if tint else F32_STEP), f"{len(run.ids)} positions")
    check_places_of_splits(run)


def test_with_tint_what_is_late_comes_from_its_copy(fused_gpu, tmp_path, monkeypatch):
    """Also the splits of heads with sinks, and the router's results, to which its bias is added."""
    dropped = drop_stores(monkeypatch)
    monkeypatch.setattr(fused_gpu, "caps", replace(fused_gpu.caps, tint=True, storage_buffers=16))
    run = load_one(fused_gpu, write(tmp_path / "m.gguf", BIASED), **FAST_F16)
    assert run.model.fused and {"y", "stats", "kv_rows"} <= set(dropped)
    check_equal_to_unfused(run)


@pytest.mark.parametrize("precision", list(Precision))
def test_nothing_is_read_before_the_wait_is_over(fused_gpu, unprobed, tmp_path, precision):
    fused = fused_of(load_one(fused_gpu, write(tmp_path / "m.gguf", QWEN), precision=precision))
    # x | raw | q, keys, values | partial, stats, x | mid | mid, logits | act, logits, mid
    assert late_reads(fused.stages([0, 1])) == 14


def test_nothing_is_read_before_the_wait_where_there_are_sinks(fused_gpu, unprobed, tmp_path):
    fused = fused_of(load_one(fused_gpu, write(tmp_path / "m.gguf", BIASED)))
    # x | q, keys, values | partial, stats, x | mid | mid, logits | act, mid
    assert late_reads(fused.stages([0, 1])) == 13


def test_all_workgroups_choose(fused_gpu, unprobed, tmp_path):
    """Down reads the choice from workgroup memory: also where gate and up have rows for fewer workgroups."""
    fused = fused_of(load_one(fused_gpu, write(tmp_path / "m.gguf", GRANITE_MOE)))
    fused.grid = GridSize(128, 512)
    *_, router, gate_up, down = fused.stages([0, 1])
    assert [stage.column for stage in (router, gate_up, down)] == [4, 2, 3]
    assert gate_up.grid == (128, 1, 1) and "const CHOOSES: bool = true;" in gate_up.source
    assert "const CHOOSES: bool = false;" in down.source and "const CHOOSES: bool = false;" in router.source
    matrix = fused.weights.layers[0].gate_up[0]
    shape = replace(matrix.shards[0].shape(1), n=matrix.n)
    assert fused.ops.workgroups(routes.fused_linear(shape, fused.grid, fused_gpu.caps), shape) < 128


def settings(precision: Precision = Precision.HIGH) -> Settings:
    return Settings(precision, KvType.F32, Backend.BUFFERS, chunk=16, context=64, capacity=64)


@pytest.mark.parametrize("tiny, precision", [(QWEN, FAST), (QWEN, HIGH), (BIASED, FAST)])
def test_the_plan_is_what_is_allocated(fused_gpu, tmp_path, tiny, precision):
    path = write(tmp_path / "m.gguf", tiny)
    before, source = fused_gpu.allocated_bytes, engine_load.open_source(path)
    planned = engine_load.plan_memory(source, settings(precision), fused_gpu, loading=False).total
    run = load_one(fused_gpu, path, precision=precision, chunk=16)
    tables = sum(table.size for table in fused_of(run).layer_tables.values())
    assert fused_gpu.allocated_bytes - before == planned + tables


# Where it is not used


def test_which_experts_can_be_fused(fused_gpu, tmp_path):
    """An even number of them, and room for f32 inputs of the router beside int8 blocks."""

    def config_of(tiny: Tiny) -> ModelConfig:
        return engine_load.open_source(tiny.write(tmp_path / "m.gguf")).config

    def fuses(config: ModelConfig, **caps: Any) -> bool:
        return can_fuse(config, replace(fused_gpu.caps, **caps), True, KvType.F16)

    def least_memory(config: ModelConfig) -> int:
        return next(size for size in range(0, 1 << 16, 4) if fuses(config, shared_bytes=size))

    experts, dense = config_of(QWEN), config_of(Tiny("qwen3", ffn=3 * 96))
    assert fuses(experts) and fuses(config_of(MODELS["gpt-oss"])) and not fuses(replace(experts, experts=7))
    assert least_memory(experts) == least_memory(dense) + 4 * (QWEN.dim + 2 * 6 + 2 * 3)  # and the choice of 3 of 6


def test_biases_of_some_experts_are_not_fused(fused_gpu, unprobed, tmp_path):
    weights = load_one(fused_gpu, write(tmp_path / "m.gguf", QWEN)).engine.weights
    assert weights_fit(weights, fused_gpu.caps)
    first, *rest = weights.layers
    biased = replace(first, ffn_down=replace(first.ffn_down, bias=first.ffn_norm))
    assert not weights_fit(replace(weights, layers=(biased, *rest)), fused_gpu.caps)


def test_experts_that_are_faster_unfused(fused_gpu, unprobed, tmp_path):
    """Of 8 bits, with biases, by wgpu; LLAMAGPU_FUSED=1, which these tests have, fuses them."""
    as_usual = replace(fused_gpu.caps, fuses_all=False)
    for name, fused in (("gpt-oss, MXFP4", False), ("gpt-oss, Q4_0", True), ("qwen3moe, 3 of 6, ffn 96", True)):
        weights = load_one(fused_gpu, write(tmp_path / "m.gguf", *SHAPES[name])).engine.weights
        for caps, expected in ((as_usual, fused), (replace(as_usual, tint=True), True), (fused_gpu.caps, True)):
            assert weights_fit(weights, caps) == expected, (name, caps.tint)


def test_experts_in_shards_are_not_fused(fused_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(fused_gpu, "caps", replace(fused_gpu.caps, binding_bytes=60_000))
    run = load_one(fused_gpu, write(tmp_path / "m.gguf", QWEN))
    assert len(run.engine.weights.layers[0].gate_up[0].shards) > 1 and not run.model.fused
