"""Fused decode: against float64, against unfused decode, and where workgroups do not run at the same time."""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wgpu
from conftest import WGPU, open_gpu
from gguf_builder import tiny_llama, tiny_parts, write_gguf
from one_sequence import OneSequence, load_one, reference_of, reserve, token_ids
from reference import assert_close
from test_model import INT8, by_name, check_against_reference

from llamagpu.engine import fused_check, routes, weights
from llamagpu.engine import load as engine_load
from llamagpu.engine.decode import MAX_TOKENS_PER_SUBMIT, SUBMISSIONS_IN_FLIGHT
from llamagpu.engine.fused_decode import FusedDecode, matrix_buffers, slab_key, timed_out
from llamagpu.engine.model import BufferModel
from llamagpu.engine.options import Backend, KvType, Precision, Settings
from llamagpu.engine.routes import Attention, GridSize
from llamagpu.engine.sampler import Sampling
from llamagpu.engine.slabs import Slabs
from llamagpu.engine.step_inputs import Segment
from llamagpu.engine.weights import Layer, slab_groups
from llamagpu.errors import BadArgument, BadFile
from llamagpu.files.storage import Storage
from llamagpu.gpu import device
from llamagpu.gpu import fuse as fuse_module
from llamagpu.gpu.buffers import BufferRange, as_buffer
from llamagpu.gpu.caps import barrier_is_measured, grid_barrier_allowed
from llamagpu.gpu.device import Dispatch
from llamagpu.gpu.fuse import BOUND, Stage, fuse, identity, storage_bindings
from llamagpu.gpu.recorder import Plan, Recorder, Step
from llamagpu.gpu.shaders import compose, constants

pytestmark = WGPU


def fused_of(run: OneSequence) -> FusedDecode:
    assert isinstance(run.model, BufferModel) and run.model.fused_decode
    return run.model.fused_decode


def load_steps(gpu: Any, path: Path, **settings: Any) -> OneSequence:
    """Reads prompts token by token: the kernels of a prompt take three times as long to compile as a fused one."""
    return load_one(gpu, path, chunk=1, **settings)


def fused_kernels(run: OneSequence) -> int:
    return [dispatch.kernel for dispatch in run.model.plan(1).dispatches].count("fused_layers")


SHAPE: dict[str, Any] = dict(dim=128, heads=2, kv_heads=1, head_dim=64, ffn=192, layers=3, ggml_type="Q4_0")
FAST_F16 = dict(precision=Precision.FAST, kv_type=KvType.F16)
PRECISIONS = pytest.mark.parametrize("precision", list(Precision))

MODELS: dict[str, dict[str, Any]] = {
    "2 heads per KV head": SHAPE,
    "3 heads per KV head, offsets": SHAPE | dict(heads=6, kv_heads=2, ggml_type="Q4_1", tied=False),
    "biases": SHAPE | dict(biases=True, ggml_type="Q8_0"),
    "sliding window, ffn 160": SHAPE | dict(ffn=160, metadata={"llama.attention.sliding_window": 5}),
    "qwen2, head_dim 128": SHAPE | dict(arch="qwen2", head_dim=128, ggml_type="F16"),
    "two types of down": SHAPE | dict(ggml_type=by_name(**{"1.ffn_down": "Q8_0", "": "Q4_0"}), layers=4),
    "two types of v": SHAPE | dict(ggml_type=by_name(**{"1.attn_v": "Q8_0", "3.attn_v": "Q8_0", "": "Q4_0"}), layers=4),
    "four types of down": SHAPE
    | dict(
        layers=6,
        ggml_type=by_name(
            **{
                "1.ffn_down": "Q8_0",
                "4.ffn_down": "Q8_0",
                "2.ffn_down": "Q4_0",
                "5.ffn_down": "Q4_1",
                "": "F16",
            }
        ),
    ),
    # groups of 16 in 6 bits, and the second layer unlike its neighbours in two stages
    "mixed": SHAPE
    | dict(dim=256, ffn=256, ggml_type=by_name(**{"1.attn_v": "Q6_K", "1.ffn_down": "Q6_K", "": "Q4_K"})),
}


# Each in one precision, two in both: a fused kernel takes ten seconds to compile on a CPU.
BOTH = ("2 heads per KV head", "mixed")
CASES = [(n, p) for i, n in enumerate(MODELS) for p in Precision if n in BOTH or (p is Precision.FAST) == (i % 2 == 0)]


@pytest.mark.parametrize("name, precision", CASES)
def test_fused_decode(fused_gpu, tmp_path, name, precision):
    path, fast = tiny_llama(tmp_path / "m.gguf", **MODELS[name]), precision is Precision.FAST
    kv_type = KvType.F32 if name == "biases" or not fast else KvType.F16
    load = load_one if name == "2 heads per KV head" else load_steps
    run = load(fused_gpu, path, precision=precision, kv_type=kv_type)
    assert run.model.fused and run.model.int8_decode == fast
    assert fused_kernels(run) == 1
    check_against_reference(run, path)


def test_a_q8_0_cache(fused_gpu, tmp_path, monkeypatch):
    """Attention stores the keys and values; rows that share a step are not fused."""
    monkeypatch.setattr(fused_gpu, "caps", replace(fused_gpu.caps, measured_barrier=True))
    path = tiny_llama(tmp_path / "m.gguf", **SHAPE)
    run = load_one(fused_gpu, path, kv_type=KvType.Q8_0)
    assert fused_kernels(run) == 1 and list(fused_of(run).compiled) == [1]
    check_against_reference(run, path)


LACKING = (("0.attn_q", "0.attn_k", "0.attn_v"), ("0.attn_output",), ("1.ffn_down",))


@pytest.mark.parametrize("lacking, zeros", [(LACKING[0], True), *((names, False) for names in LACKING)])
def test_a_bias_that_some_layers_lack(fused_gpu, tmp_path, lacking, zeros):
    keys, tensors = tiny_parts(**SHAPE | dict(biases=True, ggml_type="Q8_0"))
    for name in lacking:
        ggml_type, shape, data = tensors.pop(f"blk.{name}.bias")
        if zeros:
            tensors[f"blk.{name}.bias"] = ggml_type, shape, bytes(len(data))
    path = write_gguf(tmp_path / "m.gguf", keys, tensors)
    run = load_steps(fused_gpu, path)
    assert run.model.fused
    check_against_reference(run, path)


def test_a_matrix_that_does_not_fit_a_slab(fused_gpu, tmp_path, monkeypatch):
    """Its words have a buffer for each layer, its scales a slab; every layer reads its own."""
    monkeypatch.setattr(fused_gpu, "caps", replace(fused_gpu.caps, binding_bytes=1 << 17))
    monkeypatch.setattr(weights, "slab_groups", lambda *rest: (slab_groups(*rest)[0], 4, {}))
    types = by_name(attn_q="Q8_0", attn_k="Q8_0", attn_v="Q8_0", **{"": "Q4_0"})
    path = tiny_llama(tmp_path / "m.gguf", **SHAPE | dict(kv_heads=2, layers=4, ggml_type=types))
    run = load_steps(fused_gpu, path)
    shard = run.engine.weights.layers[1].qkv.shards[0]
    assert run.model.fused and not isinstance(shard.words, BufferRange) and isinstance(shard.scales, BufferRange)
    check_against_reference(run, path)


@pytest.mark.parametrize("other, ready", [("attn_q", "false"), ("attn_v", "true")])
def test_shards_share_the_inputs_of_the_first_prologue(fused_gpu, unprobed, tmp_path, other, ready):
    """Where the first shard's prologue ran in every workgroup that the second has; read from the kernels' source."""
    shape = SHAPE | dict(dim=512, kv_heads=2, ggml_type=by_name(**{other: "Q8_0", "": "F16"}))
    fused = fused_of(load_steps(fused_gpu, tiny_llama(tmp_path / "m.gguf", **shape)))
    fused.grid = GridSize(128, 512)
    shards = fused.weights.layers[0].qkv.shards
    shapes = [shard.shape(1, fused.inputs) for shard in shards]
    busy = [fused.ops.workgroups(routes.fused_linear(s, fused.grid, fused_gpu.caps), s) for s in shapes]
    assert (busy[1] <= busy[0]) == (ready == "true"), "choose another shape"
    found = [re.findall(r"const INPUTS_READY: bool = (\w+);", stage.source) for stage in fused.stages([0, 1, 2])]
    assert found[0] == ["false"] and found[1] == [ready]


@pytest.mark.parametrize("most, ready", [(1024, "true"), (16, "false")], ids=["whole", "in pieces"])
def test_shards_share_copied_inputs(fused_gpu, unprobed, tmp_path, monkeypatch, most, ready):
    """Unless pieces of them have been copied over the first ones."""
    monkeypatch.setattr(routes, "piece_blocks", lambda half_sums, caps: most)
    shape = SHAPE | dict(dim=512, kv_heads=2, layers=1, ggml_type=by_name(**{"attn_v": "Q8_0", "": "Q4_0"}))
    fused = fused_of(load_steps(fused_gpu, tiny_llama(tmp_path / "m.gguf", **shape), **FAST_F16))
    assert len(fused.weights.layers[0].qkv.shards) == 2
    sources = [stage.source for stage in fused.stages([0], rows=4) if stage.column == 0]
    assert [re.findall(r"const INPUTS_READY: bool = (\w+);", source) for source in sources] == [["false"], [ready]]


def test_inputs_that_workgroup_memory_does_not_hold(fused_gpu, tmp_path):
    """The down projection reads f32 inputs where they are; as int8 blocks they fit."""
    path = tiny_llama(tmp_path / "m.gguf", **SHAPE | dict(layers=2, ffn=fused_gpu.caps.shared_bytes // 4))
    for precision, kv_type in ((Precision.HIGH, KvType.F32), (Precision.FAST, KvType.F16)):
        fast = precision is Precision.FAST
        run = load_steps(fused_gpu, path, precision=precision, kv_type=kv_type)
        *_, gate_up, down = fused_of(run).stages([0, 1])
        assert f"const INTERLEAVED: bool = {str(not fast).lower()};" in gate_up.source
        reads = "var<workgroup> blocks" if fast else "fn run_prologue(index: u32) { wait(index); }"
        assert reads in down.source
        check_against_reference(run, path)


def test_a_long_context_is_split_and_merged(fused_gpu, tmp_path):
    """More splits with every 32 positions, then 64; unfused decode gives the same."""
    path = tiny_llama(tmp_path / "m.gguf", **SHAPE, context=1024)
    fused, unfused = (load_one(fused_gpu, path, context=1024, chunk=256) for _ in range(2))
    assert isinstance(unfused.model, BufferModel)
    unfused.model.unfuse()
    for count in (31, 1, 1, 90, 1, 500, 1):  # up to 10 splits
        ids = token_ids(count, seed=count)
        got, want = fused.logits_after(ids), unfused.logits_after(ids)
        if count == 1:
            assert np.abs(got - want).max() < 1e-4 * np.abs(want).max()
    assert len(fused.model.plan(1)) == 4 < len(unfused.model.plan(1))  # embedding, layers, norm, output


@pytest.mark.parametrize("settings", [{"LLAMAGPU_SAFE": "1"}, {"LLAMAGPU_UNCHECKED": "0"}], ids=str)
def test_the_same_text_by_other_means(fused_gpu, tmp_path, monkeypatch, settings):
    """150 tokens, in pages that are in no order."""
    path = tiny_llama(tmp_path / "m.gguf", **SHAPE | dict(layers=2), context=512)

    def text(gpu: Any) -> list[int]:
        run = load_steps(gpu, path, context=512, kv_type=KvType.F16)
        assert run.model.fused
        run.engine.cache.pool.free = [5, 1, 7, 0, 2, 6, 3, 4]
        run.prefill([1, 2, 3])
        return list(run.greedy(150))

    want = text(fused_gpu)
    assert len(want) == 150
    monkeypatch.setenv(*next(iter(settings.items())))
    assert text(open_gpu(LLAMAGPU_FUSED="1", **settings)) == want


def test_the_cache_is_read_back(fused_gpu, tmp_path):
    """Layers behind each other: out of the device and back."""
    path = tiny_llama(tmp_path / "m.gguf", **SHAPE)
    run, other = load_steps(fused_gpu, path), load_steps(fused_gpu, path)
    run.prefill([5, 6, 7])
    assert len(list(run.greedy(30))) == 30
    pieces = [piece.copy() for piece in run.engine.cache.read(run.sequence, 20)]
    sequence, rest = reserve(other.engine, 0, 20), iter(pieces)
    other.engine.cache.write(sequence, 20, lambda count: next(rest))
    assert all(np.array_equal(a, b) for a, b in zip(other.engine.cache.read(sequence, 20), pieces, strict=True))


# Several token rows


SUMS_LEAVE_BLOCKS = "4 rows, sums leave blocks"
TINT_ROWS = ["2 rows, norms in prologues, Tint", SUMS_LEAVE_BLOCKS + ", Tint"]


@pytest.fixture(
    params=[
        "2 rows, norms in prologues",
        "4 rows, norm stages",
        pytest.param(SUMS_LEAVE_BLOCKS, marks=pytest.mark.slow),  # see also test_fused_rows_with_qk_norm
        *TINT_ROWS,
        pytest.param("4 rows, norm stages, Tint", marks=pytest.mark.slow),
    ]
)
def rows_gpu(fused_gpu, monkeypatch, request):
    """Steps of up to so many rows are fused, as where the barrier was measured; a short prefetch compiles faster."""
    caps = replace(fused_gpu.caps, measured_barrier=True, tint="Tint" in request.param, storage_buffers=16)
    monkeypatch.setattr(fused_gpu, "caps", caps)
    monkeypatch.setattr(routes, "FUSED_PREFETCH", {int(request.param[0]): 1})
    monkeypatch.setattr(routes, "piece_blocks", lambda half_sums, caps: 128)  # two for the widest inputs
    monkeypatch.setattr(
        routes, "int8_result_lanes", lambda rows, grid, caps: max(caps.subgroup, grid.invocations // 16)
    )  # 64 rows of gate and up in two passes
    leaves = SUMS_LEAVE_BLOCKS in request.param
    monkeypatch.setattr(routes, "sums_leave_blocks", lambda dim, rows, *_: leaves and rows == 4)
    return fused_gpu


def most_rows() -> int:
    return max(routes.FUSED_PREFETCH)


SHARED_ROWS = SHAPE | dict(
    dim=256, ffn=1088, layers=2, heads=2, biases=True, ggml_type=by_name(**{"1.ffn_down": "Q8_0", "": "Q4_1"})
)


INPUT_WIDTH = re.compile(r"const INPUT_WIDTH: u32 = (\w+);")


def test_fused_rows_of_several_sequences(rows_gpu, tmp_path, monkeypatch):
    """Fewer rows than the kernel takes, of one sequence and of several, at first positions and in a split context."""
    path = tiny_llama(tmp_path / "m.gguf", **SHARED_ROWS, context=128)
    run = load_one(rows_gpu, path, **FAST_F16, slots=3, chunk=64, context=128)
    model, references, most = run.model, [reference_of(run, path) for _ in range(3)], most_rows()
    for slot in (2, 0, 1):
        reserve(run.engine, slot, 128)
    assert [d.kernel for d in model.plan(most).dispatches].count("fused_layers") == 1
    *_, down = fused_of(run).stages([0, 1], rows=most)  # of 1088 inputs
    piece = "512u" if routes.sums_leave_blocks(256, most, GridSize(1, 256), 128, rows_gpu.caps) else "128u"
    whole = ["1088u"] if rows_gpu.caps.tint else []
    assert INPUT_WIDTH.findall(down.source) == ([piece] if most == 4 else whole)

    def check(*segments: Segment) -> None:
        rows, position = sum(len(s.tokens) for s in segments), max(s.position for s in segments)
        model.write_step(segments)
        plan = model.plan(rows, position, segments=len(segments))
        run.engine.recorder.submit([Step(plan, rows, position)])
        got = rows_gpu.read(model.logits, np.float32, len(segments) * 288).reshape(-1, 288)
        want = [references[s.slot].forward(list(s.tokens))[-1] for s in segments]
        assert_close(got, np.array(want), *INT8, str(segments))

    def read(slot: int, position: int, tokens: list[int]) -> None:
        for i in range(0, len(tokens), most):
            check(Segment(slot, position + i, tokens[i : i + most]))

    check(Segment(1, 0, token_ids(max(2, most - 1))))
    if most == 4:
        check(Segment(2, 0, token_ids(40, seed=1)))  # unfused; its kernels take long to compile
    else:  # pairs of rows at both sides of multiples of 32, too
        first, *rest = token_ids(40, seed=1)
        check(Segment(2, 0, [first]))
        read(2, 1, rest)
    check(Segment(2, 40, token_ids(1, seed=2)), Segment(0, 0, token_ids(most - 1, seed=3)))
    check(Segment(2, 41, token_ids(most, seed=5)))
    if most == 2:  # neighbours in position, not in sequence
        check(Segment(0, 1, token_ids(1, seed=10)), Segment(1, 2, token_ids(1, seed=11)))
    assert not timed_out(rows_gpu, fused_of(run).barrier)
    if most == 2:
        return
    check(*(Segment(s, position, token_ids(1, seed=s)) for s, position in enumerate((3, 3, 45))))
    monkeypatch.setattr(routes, "LONG_CONTEXT", 65)  # from there on unfused: attention has few workgroups
    for position in (63, 64):
        fused = "fused_layers" in [d.kernel for d in model.plan(4, position).dispatches]
        (hidden,) = model.hidden_plan(4, position).dispatches
        assert fused == (position == 63) == (hidden.bindings["x"] != model.x)
    read(2, 46, token_ids(18, seed=6))
    check(Segment(2, 64, token_ids(3, seed=7)), Segment(0, 4, token_ids(1, seed=8)))
    check(Segment(0, 5, token_ids(3, seed=9)))


def test_fused_rows_that_a_barrier_spoilt_are_computed_again(rows_gpu, tmp_path):
    run = load_one(rows_gpu, tiny_llama(tmp_path / "m.gguf", **SHARED_ROWS), **FAST_F16)
    ids = [1, 2, 3, 4][: most_rows()]
    want = run.logits_after(ids)
    run.clear()
    assert run.model.barrier and fused_rows(run)
    rows_gpu.write(run.model.barrier, np.array([1], np.uint32), offset=4)  # timed out: nobody waits any more
    got = run.logits_after(ids)
    assert run.model.fused and not fused_rows(run)  # the kernel of one row was probed
    assert np.square(got - want).sum() < 1e-3 * np.square(want).sum()
    break_barrier(run, 1)
    again = run.logits_after([4])
    assert not run.model.fused and np.isfinite(again).all()


PLAIN_ROWS = SHARED_ROWS | dict(heads=6, kv_heads=2, ggml_type="Q4_0")  # 3 workgroups share 3 heads


@pytest.fixture
def all_rows_gpu(fused_gpu, monkeypatch):
    """Steps are fused as where the barrier was measured; a short prefetch compiles faster."""
    monkeypatch.setattr(fused_gpu, "caps", replace(fused_gpu.caps, measured_barrier=True))
    monkeypatch.setattr(routes, "FUSED_PREFETCH", {2: 1, 8: 1})
    return fused_gpu


@pytest.mark.slow
def test_fused_steps_of_any_width(all_rows_gpu, tmp_path):
    """Kernels of 1, 2 and 8 rows share buffers; so do rows of one sequence and of four."""
    path = tiny_llama(tmp_path / "m.gguf", **PLAIN_ROWS)
    run = load_one(all_rows_gpu, path, **FAST_F16, slots=4, chunk=16)
    model, references, ends = run.model, [reference_of(run, path) for _ in range(4)], [0] * 4
    for slot in range(4):
        reserve(run.engine, slot, 64)
    steps = ((7, 0, 0, 0), (0, 2, 0, 0), (1, 1, 2, 1), (0, 0, 3, 5), (1, 0, 1, 0), (0, 0, 0, 1), (4, 2, 1, 1))
    for number, counts in enumerate(steps):
        segments = [Segment(s, ends[s], token_ids(n, seed=9 * number + s)) for s, n in enumerate(counts) if n]
        rows, position = sum(counts), max(s.position for s in segments)
        model.write_step(segments)
        plan = model.plan(rows, position, segments=len(segments))
        assert [d.kernel for d in plan.dispatches].count("fused_layers") == 1
        run.engine.recorder.submit([Step(plan, rows, position)])
        got = all_rows_gpu.read(model.logits, np.float32, len(segments) * 288).reshape(-1, 288)
        want = [references[s.slot].forward(list(s.tokens))[-1] for s in segments]
        assert_close(got, np.array(want), *INT8, str(counts))
        ends = [end + n for end, n in zip(ends, counts, strict=True)]


def test_rows_are_unfused_where_the_driver_refuses_their_kernel(rows_gpu, tmp_path, monkeypatch):
    path = tiny_llama(tmp_path / "m.gguf", **SHARED_ROWS)
    run = load_one(rows_gpu, path, **FAST_F16)
    real = rows_gpu.pipeline

    def pipeline(source: str, label: str) -> Any:
        if label == "fused_layers":
            raise wgpu.GPUError("too large")
        return real(source, label)

    monkeypatch.setattr(rows_gpu, "pipeline", pipeline)
    assert not fused_rows(run) and run.model.fused
    monkeypatch.setattr(rows_gpu, "pipeline", real)
    run.model.clear_plans()
    assert not fused_rows(run) and fused_kernels(run) == 1  # nobody asks again


def test_widths_that_are_fused(fused_gpu):
    """As many rows as are faster and fit workgroup memory, where the barrier was measured."""
    caps = replace(fused_gpu.caps, measured_barrier=True, cpu=False, subgroup=32, shared_bytes=49152, invocations=1024)
    llama_8b, llama_1b = (Attention(1, 32, 8, head_dim) for head_dim in (128, 64))
    assert routes.fused_widths(4096, llama_8b, True, False, caps) == (2, 4, 8, 16)
    assert routes.fused_widths(4096, llama_8b, True, True, caps) == (2, 4)  # groups of 16
    assert routes.fused_widths(2048, llama_1b, True, False, caps) == (2, 4, 8, 16)
    assert routes.fused_widths(3072, Attention(1, 24, 8, 128), True, False, caps) == (2, 4, 8, 16)
    assert routes.fused_widths(5120, llama_8b, True, False, caps) == ()
    assert routes.fused_widths(2048, llama_1b, True, False, replace(caps, shared_bytes=16384)) == (2, 4)
    assert routes.fused_widths(2048, llama_1b, False, False, caps) == ()
    assert routes.fused_widths(576, llama_1b, True, False, caps) == ()  # rows of 576 / 8 are no whole subgroups
    assert routes.fused_widths(2048, llama_1b, True, False, replace(caps, measured_barrier=False)) == ()


def fused_rows(run: OneSequence) -> bool:
    return "fused_layers" in [dispatch.kernel for dispatch in run.model.plan(most_rows()).dispatches]


# Slabs


def layer_buffers(layer: Layer) -> list[Any]:
    return [layer.attn_norm, layer.ffn_norm, *(b for matrix in layer.matrices for b in matrix_buffers(matrix))]


SETTINGS = Settings(Precision.HIGH, KvType.F32, Backend.BUFFERS, chunk=16, context=64, capacity=64)


@pytest.mark.parametrize("shape", [MODELS["biases"], SHAPE | dict(ffn=1024, ggml_type=by_name(**{"0.ffn_up": "Q8_0"}))])
def test_slabs_hold_the_same_bytes(fused_gpu, tmp_path, shape):
    """Also where gate and up of a layer are separate matrices."""
    plain_gpu = open_gpu(LLAMAGPU_FUSED="0")
    source = engine_load.open_source(tiny_llama(tmp_path / "m.gguf", **shape))
    before = fused_gpu.allocated_bytes, plain_gpu.allocated_bytes
    in_slabs, plain = (engine_load.load_source(source, SETTINGS, gpu) for gpu in (fused_gpu, plain_gpu))
    used = fused_gpu.allocated_bytes - before[0], plain_gpu.allocated_bytes - before[1]
    assert used[0] == used[1]  # nothing is there twice
    for layer, other in zip(in_slabs.layers, plain.layers, strict=True):
        for buffer, single in zip(layer_buffers(layer), layer_buffers(other), strict=True):
            assert isinstance(buffer, BufferRange) and buffer.offset % 256 == 0 and buffer.size == single.size
            got, want = fused_gpu.read(buffer, np.uint8, buffer.size), plain_gpu.read(single, np.uint8, single.size)
            assert np.array_equal(got, want)


@pytest.mark.parametrize("name", ["blk.7", "blk.1", "blk.x.weight", "blk.3.nextn.weight", "blk.1.nextn.weight"])
def test_tensors_that_no_layer_has_are_not_looked_at(fused_gpu, tmp_path, name):
    keys, tensors = tiny_parts(**SHAPE)
    path = write_gguf(tmp_path / "m.gguf", keys, tensors | {name: ("Q8_K", (256, 256), bytes(256 * 292))})
    source = engine_load.open_source(path)
    before = fused_gpu.allocated_bytes
    engine_load.load_source(source, SETTINGS, fused_gpu)
    planned = engine_load.plan_memory(source, SETTINGS, fused_gpu).weights
    assert fused_gpu.allocated_bytes - before == planned


def test_matrices_of_other_layouts_are_other_variants(fused_gpu, tmp_path):
    """Also where they have as many bytes, as a packed file may have that says something else."""
    run = load_steps(fused_gpu, tiny_llama(tmp_path / "m.gguf", **SHAPE))
    first, other = (layer.attn_output for layer in run.engine.weights.layers[:2])
    assert slab_key(first) == slab_key(other)
    shard = first.shards[0]
    layout = shard.layout
    lies = (
        replace(layout, group=64),
        replace(layout, storage=Storage.Q8),
        replace(layout, has_offset=True),
        replace(layout, scale_bits=48 - layout.scale_bits),
    )
    for changed in (*(replace(shard, layout=lie) for lie in lies), replace(shard, n=64)):
        assert slab_key(replace(first, shards=(changed,))) != slab_key(first)


def test_layers_of_the_same_storage_share_a_slab(fused_gpu):
    """Also where others are between them; in binding ranges, each within a binding."""
    slabs = Slabs(fused_gpu, [{"down": storage} for storage in "abaab"], most=4)
    places = [slabs.alloc(512, f"blk.{i}.down", i) for i in range(5)]
    assert [place.offset for place in places] == [0, 0, 512, 1024, 0]
    assert places[0].buffer is places[2].buffer is places[3].buffer and places[0].buffer.size == 3 * 512
    assert len({id(place.buffer) for place in places}) == 3  # the last is of another binding range
    norms = [slabs.alloc(256, f"blk.{i}.norm", i) for i in range(5)]
    assert [norm.offset for norm in norms] == [0, 256, 512, 768, 0]


def test_slabs_share_a_buffer(fused_gpu):
    """Those of all layers, or where they are too many those of a binding range; short vectors are padded."""
    pools = {("scales", 0): 1024, ("scales", 1): 1024, ("norms", None): 1024}
    slabs = Slabs(fused_gpu, [{}] * 4, 2, pools)
    scales = [as_buffer(slabs.alloc(512, f"blk.{i}.scales", i, "scales")) for i in range(4)]
    assert [place.offset for place in scales if isinstance(place, BufferRange)] == [0, 512, 0, 512]
    assert [identity(place)[0] == identity(scales[0])[0] for place in scales] == [True, True, False, False]
    norms = [slabs.alloc(8, f"blk.{i}.norm", i, "norms", padded=True) for i in range(4)]
    assert norms == [BufferRange(slabs.pools["norms", None].buffer, 256 * i, 256) for i in range(4)]
    assert not isinstance(slabs.alloc(8, "blk.0.other", 0), BufferRange)
    assert as_buffer(Slabs(fused_gpu).alloc(8, "blk.0.norm", 0, "norms", padded=True)).size < 256  # no slabs


def test_what_does_not_fit_a_slab_has_a_buffer_of_its_own(fused_gpu):
    """Sizes that no binding could begin after, and more than a binding holds."""
    slabs = Slabs(fused_gpu, [{}] * 3, most=3)
    assert isinstance(slabs.alloc(512, "a", 1), BufferRange) and not isinstance(slabs.alloc(100, "b", 1), BufferRange)
    assert not isinstance(slabs.alloc(512, "a"), BufferRange)
    large = 1 << 20
    slabs.gpu.caps, caps = replace(fused_gpu.caps, binding_bytes=3 * large - 256), fused_gpu.caps
    try:
        assert not isinstance(slabs.alloc(large, "c", 0), BufferRange)
    finally:
        slabs.gpu.caps = caps


def test_a_packed_file_whose_matrices_are_not_what_it_says(fused_gpu, tmp_path, monkeypatch):
    """The rows that are loaded must be those that were described: slabs are cut by the description."""
    from llamagpu.convert.convert import convert, open_source, plan

    path = tmp_path / "m.safetensors"
    source = open_source(str(tiny_llama(tmp_path / "m.gguf", **SHAPE)))
    convert(source, path, plan(source, None, packed=True))
    opened = engine_load.open_source(path)
    engine_load.load_source(opened, SETTINGS, fused_gpu)
    lying = [
        replace(matrix, rows=((replace(matrix.rows[0][0], group=64), matrix.rows[0][1]),))
        if matrix.label == "blk.1.ffn_down"
        else matrix
        for matrix in opened.matrices
    ]
    with pytest.raises(BadFile, match=r"blk\.1\.ffn_down is not of the type that the file says"):
        engine_load.load_source(replace(opened, matrices=lying), SETTINGS, fused_gpu)


# Where it is not used


def test_fused_by_default_where_it_was_measured(gpu, tmp_path):
    """GPUs through Vulkan. A software adapter runs its workgroups one after another."""
    wanted = gpu.info["adapter_type"] != "CPU" and gpu.info["backend_type"] == "Vulkan"
    assert gpu.caps.grid_barrier == wanted
    run = load_steps(gpu, tiny_llama(tmp_path / "m.gguf", **SHAPE))
    norm = run.engine.weights.layers[0].attn_norm
    assert run.model.fused == isinstance(norm, BufferRange) == (wanted and gpu.caps.subgroup >= 4)


def test_fused_decode_can_be_turned_off(tmp_path):
    plain_gpu = open_gpu(LLAMAGPU_FUSED="0")
    path = tiny_llama(tmp_path / "m.gguf", **SHAPE)
    run = load_steps(plain_gpu, path)
    assert not run.model.fused and not isinstance(run.engine.weights.layers[0].attn_norm, BufferRange)
    check_against_reference(run, path)


# Workgroups that do not run at the same time: more of them than the adapter can hold


def too_many(gpu: Any) -> GridSize:
    return GridSize(64 if gpu.caps.cpu else 1 << 14, 256)


def test_a_grid_size_that_works_is_found(fused_gpu, tmp_path, monkeypatch):
    path = tiny_llama(tmp_path / "m.gguf", **SHAPE)
    want = load_steps(fused_gpu, path).logits_after([1])
    sizes = (too_many(fused_gpu), GridSize(1, 256))
    monkeypatch.setattr(routes, "grid_sizes", lambda *_: sizes)
    run = load_steps(fused_gpu, path)
    assert fused_of(run).grid.workgroups == 1
    got = run.logits_after([1])
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()  # lanes share rows differently


def test_a_driver_that_refuses_a_kernel_of_different_types(fused_gpu, tmp_path, monkeypatch):
    """Layers of each type get a kernel of their own."""
    real, refused = fused_gpu.pipeline, []

    def pipeline(source: str, label: str) -> Any:
        if "entry >> 16u == 1u" in source:
            refused.append(source)
            raise wgpu.GPUError("too large")
        return real(source, label)

    monkeypatch.setattr(fused_gpu, "pipeline", pipeline)
    path = tiny_llama(tmp_path / "m.gguf", **MODELS["two types of down"])
    run = load_steps(fused_gpu, path)
    assert fused_of(run).same_storage and fused_kernels(run) == 3
    assert len(refused) == 1
    check_against_reference(run, path)


def test_a_driver_is_asked_once_for_each_kernel(fused_gpu, tmp_path, monkeypatch):
    refused: list[str] = []

    def pipeline(source: str, label: str) -> Any:
        refused.append(source)
        raise wgpu.GPUError("too large")

    run = load_steps(fused_gpu, tiny_llama(tmp_path / "m.gguf", **SHAPE))
    monkeypatch.setattr(fused_gpu, "pipeline", pipeline)
    assert not fused_of(run).probe(run.engine.recorder)
    assert len(refused) == len(set(refused)) == len(routes.grid_sizes(SHAPE["dim"], 2, fused_gpu.caps))


def test_unfused_where_no_grid_size_works(fused_gpu, tmp_path, monkeypatch):
    path = tiny_llama(tmp_path / "m.gguf", **SHAPE)
    monkeypatch.setattr(routes, "grid_sizes", lambda *_: (too_many(fused_gpu),))
    run = load_steps(fused_gpu, path)
    assert not run.model.fused
    check_against_reference(run, path)
    assert len(list(run.greedy(5))) == 5


def test_another_subgroup_size_than_probed_is_noticed(fused_gpu, tmp_path, monkeypatch):
    """A driver may choose it by kernel: here the kernel is made for twice as many lanes as there are."""

    def doubled(stages, count, caps, *rest):
        return fuse(stages, count, replace(caps, subgroup=2 * caps.subgroup), *rest)

    monkeypatch.setattr(device, "fuse", doubled)
    assert not load_steps(fused_gpu, tiny_llama(tmp_path / "m.gguf", **SHAPE)).model.fused


def test_stores_that_do_not_arrive_are_noticed(fused_gpu, tmp_path, monkeypatch):
    path = tiny_llama(tmp_path / "m.gguf", **SHAPE)
    source = compose("barrier_litmus", (), {})
    wrong = source.replace("+ 1u;\n}", "+ select(1u, 0u, i == 77u && layer() == 9u);\n}")
    assert wrong != source
    monkeypatch.setattr(
        device.shaders,
        "compose",
        lambda kernel, *rest: wrong if kernel == "barrier_litmus" else compose(kernel, *rest),
    )
    assert not load_steps(fused_gpu, path).model.fused


# A grid barrier that times out in the middle of a text costs speed, not the text


def break_barrier(run: OneSequence, spins: int) -> None:
    """From now on the grid is larger than can run at the same time."""
    fused_of(run).grid = too_many(run.engine.gpu)
    run.model.clear_plans()
    barrier = run.model.barrier
    assert barrier
    run.engine.gpu.write(barrier, np.array([spins], np.uint32), offset=8)


@pytest.mark.parametrize("spins", [1, 1 << 12], ids=["one look", "a limit"])
@pytest.mark.parametrize("sampling", [None, Sampling(seed=7, repeat_penalty=1.3, top_k=9)], ids=["greedy", "sampled"])
def test_a_barrier_that_times_out_in_the_100th_token(fused_gpu, tmp_path, caplog, sampling, spins):
    run = load_steps(fused_gpu, tiny_llama(tmp_path / "m.gguf", **SHAPE), context=160)
    prompt, count = [1, 2, 3], 100 + 2 * MAX_TOKENS_PER_SUBMIT * SUBMISSIONS_IN_FLIGHT  # some are computed already

    def text():
        run.clear()
        run.prefill(prompt)
        return run.sample(sampling, prompt, count) if sampling else run.greedy(count)

    want = list(text())
    tokens = text()
    got = [next(tokens) for _ in range(100)]
    break_barrier(run, spins)
    got += tokens
    assert got == want and not run.model.fused
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "unfused" in caplog.text
    assert list(text()) == want  # and it stays so


@pytest.mark.parametrize(
    "compute",
    [
        lambda run: run.logits_after([5]),
        lambda run: [run.logits_after([i]) for i in (5, 6, 7)][-1],
        lambda run: run.log_probs([4, 5]),
        lambda run: run.engine.mean_hidden(run.sequence, [4]),
        lambda run: np.array([run.logits_after([9]).argmax(), *islice(run.sample_on_host(), 5)]),
    ],
    ids=["logits", "three steps", "scores", "hidden", "sampled on the host"],
)
def test_what_a_timed_out_barrier_spoilt_is_computed_again(fused_gpu, tmp_path, compute: Callable[[OneSequence], Any]):
    run = load_steps(fused_gpu, tiny_llama(tmp_path / "m.gguf", **SHAPE))
    run.prefill([1, 2, 3])
    length = len(run.ids)
    want = compute(run)
    run.sequence.truncate(length)
    run.engine.check()
    break_barrier(run, 1)
    got = compute(run)
    assert not run.model.fused
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("tint", [False, True])
def test_after_a_time_out_nobody_waits(fused_gpu, tmp_path, monkeypatch, tint):
    """The first workgroup that gives up poisons the count, once: the others see that at their next look."""
    monkeypatch.setattr(fused_gpu, "caps", replace(fused_gpu.caps, tint=tint))
    run = load_steps(fused_gpu, tiny_llama(tmp_path / "m.gguf", **SHAPE), kv_type=KvType.F16)
    break_barrier(run, 1 << 12)
    run.prefill([1])
    barrier, poison = run.model.barrier, constants("grid_barrier")["POISON"]
    assert barrier and timed_out(fused_gpu, barrier)
    assert poison <= fused_gpu.read(barrier, np.uint32, 1)[0] < 2 * poison


def test_the_spin_limit_is_calibrated(fused_gpu, tmp_path, monkeypatch):
    """A quarter of a second, whatever a look takes."""
    path = tiny_llama(tmp_path / "m.gguf", **SHAPE)
    monkeypatch.setattr(FusedDecode, "spin_seconds", lambda self: 2e-6)
    barrier = load_steps(fused_gpu, path).model.barrier
    assert barrier and fused_gpu.read(barrier, np.uint32, 4).tolist() == [0, 0, 125_000, 0]
    monkeypatch.undo()
    seconds = fused_of(load_steps(fused_gpu, path)).spin_seconds()
    assert 0 < seconds < 1e-3


# Memory: what one workgroup writes and another reads


def test_no_buffer_is_bound_twice_where_it_is_written(fused_gpu, unprobed, tmp_path):
    for kv_type in KvType:
        run = load_steps(fused_gpu, tiny_llama(tmp_path / "m.gguf", **SHAPE), kv_type=kv_type)
        (kernel,) = (d for d in run.model.plan(1).dispatches if d.kernel == "fused_layers")
        modes: dict[Any, list[str]] = {}
        for mode, name, _ in BOUND.findall(kernel.source):
            modes.setdefault(identity(kernel.bindings[name]), []).append(mode)
        assert all(len(found) == 1 for found in modes.values() if any("write" in mode for mode in found))


@pytest.mark.parametrize("measured", [True, False])
def test_coherent_buffers_and_fences_where_nobody_measured(fused_gpu, tmp_path, monkeypatch, measured):
    monkeypatch.setattr(fused_gpu, "caps", replace(fused_gpu.caps, measured_barrier=measured))
    path = tiny_llama(tmp_path / "m.gguf", **SHAPE)
    run = load_steps(fused_gpu, path)
    (kernel,) = (d for d in run.model.plan(1).dispatches if d.kernel == "fused_layers")
    written = kernel.source.count("var<storage, read_write>") - 1  # the barrier's words are atomic
    assert kernel.source.count("@coherent") == (0 if measured or not fused_gpu.caps.coherent else written)
    assert f"const FENCE: bool = {str(not measured).lower()};" in kernel.source
    check_against_reference(run, path)


# The comparison with unfused decode


@pytest.fixture
def compared(fused_gpu, tmp_path, monkeypatch):
    """A GPU that nobody has tried."""
    monkeypatch.setattr(fused_gpu, "caps", replace(fused_gpu.caps, compares_fused=True))
    monkeypatch.setenv("LLAMAGPU_CACHE", str(tmp_path / "cache"))
    return fused_gpu


@pytest.mark.parametrize("mode", [{}, FAST_F16], ids=["high", "fast"])
def test_right_layers_are_fused(compared, tmp_path, monkeypatch, mode):
    path = tiny_llama(tmp_path / "m.gguf", **SHAPE)
    run = load_steps(compared, path, **mode)
    assert run.model.fused
    check_against_reference(run, path)
    assert [file.read_text() for file in (tmp_path / "cache/fused").iterdir()] == ["right"]
    monkeypatch.setattr(fused_check, "largest_nmse", None)
    assert load_steps(compared, path, **mode).model.fused  # remembered
    monkeypatch.setitem(compared.info, "description", "another driver")
    with pytest.raises(TypeError):
        load_steps(compared, path, **mode)


def test_wrong_layers_are_not_fused(compared, tmp_path, monkeypatch):
    """The litmus test passes, and one layer's numbers are wrong."""
    path = tiny_llama(tmp_path / "m.gguf", **SHAPE)
    real = FusedDecode.layer_table
    shifted = lambda self, members: real(self, [members[0], members[0], *members[2:]])  # noqa: E731
    monkeypatch.setattr(FusedDecode, "layer_table", shifted)
    run = load_steps(compared, path)
    assert not run.model.fused
    assert [file.read_text() for file in (tmp_path / "cache/fused").iterdir()] == ["wrong"]
    check_against_reference(run, path)


def test_a_cache_that_cannot_be_written(compared, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLAMAGPU_CACHE", str(tmp_path / "file"))
    assert load_steps(compared, tiny_llama(tmp_path / "m.gguf", **SHAPE)).model.fused


@pytest.mark.parametrize(
    "info, coherent, wanted",
    [
        (
            dict(library="wgpu", backend_type="Vulkan", adapter_type="DiscreteGPU", vendor_id=0x10DE),
            False,
            (True, False),
        ),
        (
            dict(library="dawn", backend_type="Vulkan", adapter_type="DiscreteGPU", vendor_id=0x10DE),
            False,
            (True, False),
        ),
        (
            dict(library="wgpu", backend_type="Vulkan", adapter_type="IntegratedGPU", vendor_id=0x8086),
            True,
            (True, True),
        ),
        (
            dict(library="wgpu", backend_type="Vulkan", adapter_type="IntegratedGPU", vendor_id=0x8086),
            False,
            (False, True),
        ),
        (dict(library="wgpu", backend_type="Metal", adapter_type="IntegratedGPU", vendor_id=0), True, (False, True)),
        (dict(library="wgpu", backend_type="Vulkan", adapter_type="CPU", vendor_id=0x10005), True, (False, True)),
    ],
)
def test_where_layers_are_fused(monkeypatch, info, coherent, wanted):
    """Measured on NVIDIA's Vulkan driver, compared with coherent buffers, by hand anywhere."""
    monkeypatch.delenv("LLAMAGPU_FUSED", raising=False)
    allowed, compared = wanted
    assert grid_barrier_allowed(info, coherent) == allowed
    assert barrier_is_measured(info) != compared
    for value in "01":
        monkeypatch.setenv("LLAMAGPU_FUSED", value)
        assert grid_barrier_allowed(info, coherent) == (value == "1")
    monkeypatch.setenv("LLAMAGPU_FUSED", "maybe")
    with pytest.raises(BadArgument, match="LLAMAGPU_FUSED is 'maybe'"):
        grid_barrier_allowed(info, coherent)


def test_ranges_of_a_buffer_share_a_binding_where_bindings_are_few(fused_gpu, tmp_path, monkeypatch):
    """Three types in q, k and v, and biases; the adapter has one buffer less than the kernel needs."""
    types = by_name(attn_q="Q4_0", attn_k="Q4_1", attn_v="Q8_0")
    path = tiny_llama(tmp_path / "m.gguf", **SHAPE | dict(layers=2, biases=True, ggml_type=types))
    dispatches = fused_of(load_steps(fused_gpu, path)).dispatches()
    monkeypatch.setattr(fused_gpu, "caps", replace(fused_gpu.caps, storage_buffers=bindings_of(dispatches) - 1))
    run = load_steps(fused_gpu, path)
    assert run.model.fused and fused_kernels(run) == 1
    check_against_reference(run, path)
    fused = fused_of(run)
    few = bindings_of(fused.dispatches())
    assert few <= bindings_of(dispatches) - 8
    monkeypatch.setattr(fused_gpu, "caps", replace(fused_gpu.caps, storage_buffers=few - 1))
    assert not fused.probe(run.engine.recorder)


def test_rope_tables_that_are_too_large_for_a_binding(fused_gpu, unprobed, tmp_path, monkeypatch):
    """A kernel of layers that differ binds them all; the context is checked for one of them only."""
    fused = fused_of(load_steps(fused_gpu, tiny_llama(tmp_path / "m.gguf", **SHAPE)))
    dispatches, size = fused.dispatches(), fused.cache.rope_tables.size
    for most, fits in ((size, True), (size - 1, False)):
        monkeypatch.setattr(fused_gpu, "caps", replace(fused_gpu.caps, binding_bytes=most))
        assert fused.can_bind(dispatches) == fits


def bindings_of(dispatches: list[Dispatch]) -> int:
    return max(storage_bindings(dispatch.source) for dispatch in dispatches)


@pytest.mark.parametrize(
    "name, kv_type",
    [("2 heads per KV head", KvType.Q8_0), ("mixed", KvType.F16), ("qwen2, head_dim 128", KvType.F16)],
)
def test_with_tint(fused_gpu, tmp_path, kv_type, name, monkeypatch):
    """What workgroups read of each other has copies, and attention takes the row's own key and value."""
    caps = replace(fused_gpu.caps, tint=True, measured_barrier=True, storage_buffers=16)
    monkeypatch.setattr(fused_gpu, "caps", caps)
    path = tiny_llama(tmp_path / "m.gguf", **MODELS[name])
    run = load_steps(fused_gpu, path, precision=Precision.FAST, kv_type=kv_type)
    assert run.model.fused and list(fused_of(run).compiled) == [1]
    assert bindings_of(fused_of(run).dispatches()) <= 16 and fused_kernels(run) == 1
    check_against_reference(run, path)


def drop_stores(monkeypatch: pytest.MonkeyPatch, streams: bool = True) -> list[str]:
    """With Tint what is stored between stages, but for queries and x, is missing: only the copies are stored.

    The next kernel reads x of the last layer; with `streams` x is dropped as `stream`. Returns the names of these
    bindings, once they are bound.
    """
    dropped, accessors, stages = [], fuse_module.accessors, FusedDecode.stages
    kept = {0}  # first words of the queries and of x in their common binding

    def find_x(self: FusedDecode, members: list[int], rows: int = 1) -> list[Stage]:
        found = stages(self, members, rows)
        bound = (as_buffer(binding) for stage in found for binding in stage.bindings.values())
        offsets = [each.offset for each in bound if isinstance(each, BufferRange) and each.buffer is self.x.buffer]
        kept.add((max(offsets) - min(offsets)) // 4)
        return found

    def late(name: str, target: str, element: Any, first_word: int, repairs: bool) -> str:
        text = accessors(name, target, element, first_word, repairs)
        if (first_word in kept and not (streams and name == "stream")) or "atomicStore" not in text:
            return text
        dropped.append(name)
        return re.sub(r"(fn store_to_\w+\(.*?\) \{) .*? atomicStore", r"\1 atomicStore", text)

    monkeypatch.setattr(FusedDecode, "stages", find_x)
    monkeypatch.setattr(fuse_module, "accessors", late)
    return dropped


def test_with_tint_what_is_late_comes_from_its_copy(fused_gpu, tmp_path, monkeypatch):
    dropped = drop_stores(monkeypatch)
    monkeypatch.setattr(fused_gpu, "caps", replace(fused_gpu.caps, tint=True, storage_buffers=16))
    path = tiny_llama(tmp_path / "m.gguf", **SHAPE)
    run = load_steps(fused_gpu, path, precision=Precision.FAST, kv_type=KvType.F16)
    assert run.model.fused and {"y", "stats", "kv_rows"} <= set(dropped)
    check_against_reference(run, path)


@pytest.mark.parametrize("rows_gpu", TINT_ROWS, indirect=True)
@pytest.mark.parametrize("dropped", ["cache", "between stages"])
def test_rows_of_a_step_with_tint(rows_gpu, tmp_path, monkeypatch, dropped):
    """They see each other, though nobody reads what others have stored in the cache, and what is late between stages
    comes from its copy: without such stores the step is right."""
    stages = FusedDecode.stages

    def storing_nothing(self: FusedDecode, members: list[int], rows: int = 1) -> list[Stage]:
        found = stages(self, members, rows)
        assert sum("if (stores) { k_cache[" in stage.source for stage in found) == 1
        return [replace(s, source=s.source.replace("if (stores) { k_cache[", "if (false) { k_cache[")) for s in found]

    if dropped == "cache":
        monkeypatch.setattr(FusedDecode, "stages", storing_nothing)
    else:
        names = drop_stores(monkeypatch, streams=False)
    path, ids = tiny_llama(tmp_path / "m.gguf", **SHARED_ROWS), token_ids(most_rows())
    run = load_one(rows_gpu, path, **FAST_F16)
    got = run.logits_after(ids)
    assert "fused_layers" in [d.kernel for d in run.model.plan(most_rows()).dispatches]
    assert dropped == "cache" or {"y", "kv_rows"} <= set(names)
    assert_close(got, reference_of(run, path).forward(ids)[-1], *INT8, "logits")
    assert not timed_out(rows_gpu, fused_of(run).barrier)


def test_an_f32_cache_is_not_fused_with_tint(fused_gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(fused_gpu, "caps", replace(fused_gpu.caps, tint=True))
    path = tiny_llama(tmp_path / "m.gguf", **SHAPE)
    assert not load_steps(fused_gpu, path, kv_type=KvType.F32).model.fused


@pytest.mark.parametrize("kv_type", list(KvType))
def test_a_plain_model_needs_few_bindings(fused_gpu, tmp_path, kv_type, monkeypatch):
    caps = replace(fused_gpu.caps, storage_buffers=routes.MIN_FUSED_BINDINGS)
    monkeypatch.setattr(fused_gpu, "caps", caps)
    path = tiny_llama(tmp_path / "m.gguf", **SHAPE)
    run = load_steps(fused_gpu, path, kv_type=kv_type)
    assert run.model.fused and fused_kernels(run) == 1
    check_against_reference(run, path)


@pytest.mark.parametrize(
    "lacking", [dict(scalar=True), dict(shared_bytes=8192), dict(invocations=256), dict(subgroup=0)], ids=str
)
def test_what_fused_decode_needs(gpu, lacking):
    """A GPU that could fuse Llama 1B, and one that lacks something."""
    able = replace(
        gpu.caps,
        cpu=False,
        grid_barrier=True,
        scalar=False,
        subgroup=32,
        invocations=1024,
        shared_bytes=32768,
        storage_buffers=64,
    )
    attention = Attention(1, 32, 8, 64)
    assert routes.can_fuse(2048, 8192, attention, True, able)
    assert not routes.can_fuse(2048, 8192, attention, True, replace(able, **lacking))
    assert not routes.can_fuse(2048, 8192, Attention(1, 32, 1, 64), True, able)  # 32 heads share one: a subgroup each


def test_layers_share_no_cache_line(fused_gpu, tmp_path):
    """A line that was read with one layer's values may stay in a workgroup's cache, and be read for the next one's: 256
    bytes that nobody writes, and nobody reads, are between them and around all."""
    run = load_steps(fused_gpu, tiny_llama(tmp_path / "m.gguf", **SHAPE), kv_type=KvType.F16)
    want, layers = run.logits_after([3]), SHAPE["layers"]
    run.clear()
    between, model = fused_of(run).between(1), run.model
    assert isinstance(model, BufferModel)
    poison = np.uint32(0x7FC0BEEF)  # not a number
    fused_gpu.write(between.q.buffer, np.full(between.q.buffer.size // 4, poison))
    assert np.array_equal(run.logits_after([3]), want)
    words = fused_gpu.read(between.q.buffer, np.uint32, fused_of(run).x.offset // 4)
    rows = dict(q=2 * 64, mid=128, act=192, partial=2 * 128 * 64, stats=2 * 2 * 128)  # 128 splits, one of them used
    end = 0
    for name, width in rows.items():
        place = getattr(between, name)
        for layer in range(layers):
            used = width // 128 if name in ("partial", "stats") else width
            start = place.offset // 4 + layer * (used + 64)
            assert (words[start : start + used] != poison).all(), (name, layer)
            assert (words[end:start] == poison).all() and start - end >= 64, (name, layer)
            end = start + used
    assert (words[end:] == poison).all() and len(words) - end >= 64
    x = fused_gpu.read(model.x, np.uint32, (layers + 1) * (128 + 64)).reshape(layers + 1, -1)
    assert (x[:, :128] != poison).all() and (x[:, 128:] == poison).all()
    first, last = run.engine.cache.layers[0], run.engine.cache.layers[-1]
    for part in (first.keys, first.values, last.keys, last.values):
        assert part.offset >= 256 and part.buffer.size - part.offset - part.size >= 256


# How kernels are fused


def test_what_one_stage_writes_no_stage_binds_read_only(fused_gpu, unprobed, tmp_path):
    """A driver may read what is declared read-only through a cache that stores do not reach."""
    run = load_steps(fused_gpu, tiny_llama(tmp_path / "m.gguf", **SHAPE))
    (layers,) = (d for d in run.model.plan(1).dispatches if d.kernel == "fused_layers")
    declared = {name: mode for mode, name, _ in BOUND.findall(layers.source)}
    modes: dict[Any, set[str]] = {}
    for name, binding in layers.bindings.items():
        modes.setdefault(getattr(binding, "buffer", binding), set()).add(declared[name])
    assert all(len(found) == 1 or found <= {"storage, read", "uniform"} for found in modes.values())
    cache = run.engine.cache.layers[0]
    shared = (fused_of(run).x.buffer, cache.keys.buffer, cache.values.buffer)
    assert all(modes[buffer] == {"storage, read_write"} for buffer in shared)


def test_names_of_stages_do_not_collide(fused_gpu):
    """The same kernel twice, with a constant of its own each: y = x * 2 + 1, by layer."""
    source = (
        "const STEP: u32 = 1u;\nconst WORKGROUP: u32 = 8u;\n"
        "@group(0) @binding(0) var<storage, read> x: array<u32>;\n"
        "@group(0) @binding(1) var<storage, read_write> y: array<u32>;\n"
        "fn next(v: vec2<u32>) -> u32 { return v.x * STEP + v.y; }\n"
        "@compute @workgroup_size(WORKGROUP)\n"
        "fn main(@builtin(local_invocation_index) index: u32, @builtin(workgroup_id) workgroup: vec3<u32>) {\n"
        "  let i = layer() * 64u + workgroup.x * 8u + index;\n  y[i] = next(vec2<u32>(x[i], STEP - 1u));\n}\n"
    )
    x = fused_gpu.upload(np.arange(128, dtype=np.uint32), "x")
    mid, y = fused_gpu.zeros(512, "mid"), fused_gpu.zeros(512, "y")
    stages = [
        Stage(source.replace("= 1u", "= 2u"), {"x": x, "y": mid}, (8, 1, 1)),
        Stage(source, {"x": mid, "y": y}, (8, 1, 1)),
    ]
    barrier = fused_gpu.upload(np.array([0, 0, 1 << 20, 0], np.uint32), "barrier")
    layers = fused_gpu.upload(np.array([2, 0, 0, 0], np.uint32), "layers", wgpu.BufferUsage.UNIFORM)
    text, bindings = fuse(stages, 1, fused_gpu.caps, barrier, layers)
    assert {"STEP_0", "STEP_1", "next_0", "next_1"} <= set(re.findall(r"\w+", text)) and len(bindings) == 5
    Recorder(fused_gpu).submit([Step(Plan([fused_gpu.fused(stages, 1, barrier, layers)]))])
    assert fused_gpu.read(y, np.uint32, 128).tolist() == [2 * i + 1 for i in range(128)]


def test_of_ranges_that_begin_together_the_longer_is_bound(fused_gpu):
    source = (
        "const WORKGROUP: u32 = 8u;\n@group(0) @binding(0) var<storage, read> x: array<u32>;\n"
        "@group(0) @binding(1) var<storage, read_write> y: array<u32>;\n"
        "@compute @workgroup_size(WORKGROUP)\n"
        "fn main(@builtin(local_invocation_index) index: u32) { y[index] = x[index]; }\n"
    )
    x, y, layers = (fused_gpu.zeros(1024, name) for name in ("x", "y", "layers"))
    stages = [Stage(source, {"x": BufferRange(x, 256, size), "y": y}, (1, 1, 1)) for size in (256, 768, 512)]
    _, bindings = fuse(stages, 1, fused_gpu.caps, fused_gpu.zeros(16, "barrier"), layers)
    assert bindings["x_0"] == BufferRange(x, 256, 768)


def test_struct_fields_have_names_of_their_own(fused_gpu):
    """Their declarations would be renamed, and their uses would not."""
    wrong = compose("barrier_litmus", (), {}) + "\nstruct Two { N: u32, other: u32 }\n"
    with pytest.raises(AssertionError, match=r"the name of something else: {'N'}"):
        fuse(
            [Stage(wrong, {"y": fused_gpu.zeros(16, "y")}, (1, 1, 1))],
            1,
            fused_gpu.caps,
            None,
            fused_gpu.zeros(16, "layers"),
        )


# Indices read after a wait add opaque_zero(), so that the compiler cannot hoist the loads


def functions(source: str) -> dict[str, tuple[list[str], str]]:
    """Name: parameters and body; declarations begin at the start of a line."""
    head, next_one = r"^fn (\w+)\(((?:[^()]|\([^()]*\))*)\)[^{\n]*\{", r"(?=^(?:fn|@|var|const|struct)|\Z)"
    found = re.findall(f"{head}(.*?){next_one}", re.sub(r"//.*", "", source), re.M | re.S)
    return {name: (re.findall(r"(\w+):", params), body) for name, params, body in found}


def early_reads(source: str, name: str) -> list[str]:
    """Reads of the binding `name` whose index could be known before the wait."""
    known, private = functions(source), set(re.findall(r"^var<private> (\w+)", source, re.M))

    def opaque(index: str, within: str, depth: int = 0) -> bool:
        params, body = known[within]
        words = set(re.findall(r"\w+", index))
        if "opaque_zero" in words:
            return True
        lets = [expression for word in words for expression in re.findall(rf"\b(?:let|var) {word} = ([^;]+);", body)]
        if depth < 9 and any(opaque(expression, within, depth + 1) for expression in lets):
            return True
        assigned = [
            (expression, other)
            for word in words & private
            for other, (_, text) in known.items()
            for expression in re.findall(rf"\b{word} = ([^;]+);", text)
        ]
        if depth < 9 and assigned and all(opaque(*each, depth + 1) for each in assigned):
            return True
        calls = []
        if words & set(params):
            calls = [
                (other, call)
                for other, (_, text) in known.items()
                if other != within
                for call in re.findall(rf"\b{within}\(((?:[^()]|\([^()]*\))*)\)", text)
            ]
        passed = within != "main" and bool(words & set(params)) and depth < 9  # what nobody calls reads nothing
        return passed and all(opaque(call, other, depth + 1) for other, call in calls)

    return [
        f"{within}: {name}[{index}]"
        for within, (_, body) in known.items()
        for index in re.findall(rf"\b{name}\[([^\]]+)\](?! =[^=])", body)
        if not opaque(index, within)
    ]


@pytest.mark.parametrize("wide", [False, True], ids=["in workgroup memory", "too wide"])
@PRECISIONS
def test_nothing_is_read_before_the_wait_is_over(fused_gpu, unprobed, tmp_path, precision, wide):
    """In every stage, of every buffer that a stage writes; and the test sees where opaque_zero() is missing."""
    ffn = fused_gpu.caps.shared_bytes // 4 if wide else SHAPE["ffn"]
    path = tiny_llama(tmp_path / "m.gguf", **SHAPE | dict(ffn=ffn))
    stages = fused_of(load_steps(fused_gpu, path, precision=precision)).stages([0, 1, 2])
    assert late_reads(stages) == 10  # x | q, keys, values | partial, stats, x | mid | act, mid


def test_nothing_is_read_before_the_wait_in_steps_of_several_rows(rows_gpu, unprobed, tmp_path):
    run = load_one(rows_gpu, tiny_llama(tmp_path / "m.gguf", **SHAPE), **FAST_F16)
    found = late_reads(fused_of(run).stages([0, 1, 2], rows=most_rows())) + rows_gpu.caps.tint  # kv_rows: keys, values
    if routes.sums_leave_blocks(SHAPE["dim"], most_rows(), GridSize(1, 256), 128, rows_gpu.caps):
        assert found == 12  # x | blocks, squares | q, keys, values | blocks, x | blocks, squares | act, mid
    elif routes.has_norm_stages(most_rows(), SHAPE["dim"], rows_gpu.caps):
        assert found == 11  # x | blocks | q, keys, values | blocks, x | mid | blocks | act, mid
    else:
        assert found == 10  # x | q, keys, values | partial, stats, x | mid | act, mid


def late_reads(stages: list[Stage]) -> int:
    """Bindings of buffers that a stage writes and another one reads, which must wait for them."""
    written = {
        id(getattr(stage.bindings[name], "buffer", stage.bindings[name]))
        for stage in stages
        for mode, name, _ in BOUND.findall(stage.source)
        if "write" in mode
    }
    seen = 0
    for stage in stages:
        for mode, name, _ in BOUND.findall(stage.source):
            buffer = getattr(stage.bindings[name], "buffer", stage.bindings[name])
            if id(buffer) in written and "write" not in mode:
                seen += 1
                assert not early_reads(stage.source, name), name
                assert early_reads(stage.source.replace("opaque_zero() + ", ""), name), name
    return seen


@pytest.mark.parametrize("dim", [576, 1152, 1536, 2048])
def test_grid_sizes_are_powers_of_two(gpu, dim):
    """Arrivals are counted without end: 2^32 must be a multiple of the workgroups."""
    for cpu in (False, True):
        for grid in routes.grid_sizes(dim, 4, replace(gpu.caps, cpu=cpu)):
            assert grid.workgroups & (grid.workgroups - 1) == 0
