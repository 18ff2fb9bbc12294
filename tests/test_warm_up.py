"""Kernels compiled before the first request: no step compiles another one."""

import gc
from contextlib import closing
from dataclasses import replace
from itertools import product
from typing import Any
from weakref import WeakValueDictionary

import pytest
import wgpu
from composed import ADAPTERS, BUFFERS, ComposingGpu
from gguf_builder import tiny_llama
from test_company import GREEDY, SAMPLINGS, Thirds, load, run

from llamagpu import Llama
from llamagpu.engine.device_sampler import SampleKind
from llamagpu.engine.engine import Engine
from llamagpu.engine.load import ModelSource, allocate_source, resolve
from llamagpu.engine.options import Backend, KvType, Precision
from llamagpu.engine.scheduler import Request, Scheduler
from llamagpu.engine.synthetic import SyntheticFile, parse, synthetic_config
from llamagpu.gpu.recorder import Step

ROWS = (1, 2, 3, 5, 12, 17, 40, 64, 65, 200, 257, 512)
DEPTHS = (0, 63, 64, 200, 700, 2000)
LAYERS = 4


def engine_of(gpu, name, settings) -> Engine:
    """Of a synthetic model cut to a few layers, for 16 sequences."""
    config = synthetic_config(parse(name)[0])
    file = SyntheticFile(name, replace(config, layers=LAYERS, kinds=config.kinds[:LAYERS]))
    with closing(ModelSource(file, file.config, file.matrices())) as source:
        found = replace(resolve(BUFFERS, source, gpu), slots=16, context=2048, **settings)
        return Engine(gpu, source.config, allocate_source(source, found, gpu), found, probe=False)


@pytest.mark.parametrize(
    ("adapter", "name"),
    [
        ("minimum limits", "llama-3.2-1b"),
        ("fused", "llama-3.2-1b"),
        ("fused", "llama-3.2-1b:q4_k_m"),
        ("fused", "qwen3-30b-a3b"),
        ("matrices of 16x16", "llama-3.1-8b:q4_k_m"),
        ("matrices of 16x16", "gemma-3-1b"),
        ("matrices of 16x16", "llama-3.1-8b"),
    ],
)
def test_every_step_finds_its_kernels(adapter, name):
    measured = adapter == "fused" or name == "llama-3.1-8b"  # the latter for linear_skinny and fused rows by Tint
    caps = replace(ADAPTERS[adapter], binding_bytes=1 << 31, measured_barrier=measured)
    fast = {"precision": Precision.FAST, "kv_type": KvType.F16}
    model = engine_of(ComposingGpu(caps), name, fast if caps.native_f16 else {}).model
    if fused := model.fused_decode:
        fused.compiled = dict.fromkeys(fused.compiled, True)  # whatever the driver would say
    assert (fused is not None and len(fused.compiled) > 1) == (measured and "a3b" not in name)
    compiled = {dispatch.checked_source for dispatch in model.step_kernels()}
    assert len(compiled) > 30
    for rows, segments, depth in product(ROWS, (1, 2, 3, 16), DEPTHS):
        if segments <= rows <= model.chunk:
            key = model.step_key(rows, depth, True, segments)
            needed = {d.checked_source: d.kernel for d in model.step_dispatches(key, depth)}
            assert {kernel for source, kernel in needed.items() if source not in compiled} == set(), key
    for flags, segments in product(product((False, True), repeat=4), (1, 2, 3, 16)):
        sampling = model.sample_dispatches(SampleKind(*flags), segments, segments)
        assert {d.checked_source for d in sampling} <= compiled


def test_requests_compile_nothing(tmp_path, gpu, monkeypatch):
    """Prompts of several lengths with a common beginning, on the adapter, whatever is sampled how."""
    monkeypatch.setattr(gpu, "pipelines", {})  # other tests may have compiled the same kernels
    engine = load(tiny_llama(tmp_path / "tiny.gguf"), gpu, Backend.BUFFERS, chunk=64).engine
    before = set(gpu.pipelines)
    engine.warm_up(lambda: True)
    assert set(gpu.pipelines) == before  # told to end early
    engine.warm_up()
    compiled, scheduler = set(gpu.pipelines), Scheduler(engine)
    for length, new in ((3, 5), (70, 2), (100, 3)):
        run(scheduler, Request([1, *range(3, 2 + length)], GREEDY, new))
    company = [Request([1, *range(3, 20 + i), 9], sampling, 4) for i, sampling in enumerate(SAMPLINGS)]
    company += [Request([1, 5, 9], GREEDY, 4, matcher=Thirds()), Request([1, 6, 9], GREEDY, 4, logprobs=3)]
    for request in company:
        scheduler.submit(request)
    while not all(request.done for request in company):
        scheduler.step()
    with scheduler.alone(40) as sequence:
        engine.mean_hidden(sequence, [1, *range(3, 30)])
    assert set(gpu.pipelines) == compiled


def test_plans_share_bind_groups(tmp_path, gpu, monkeypatch):
    """A plan of another number of sequences is made of what the warm-up bound; what no plan needs is freed."""
    monkeypatch.setattr(gpu, "bind_groups", WeakValueDictionary())
    engine = load(tiny_llama(tmp_path / "tiny.gguf"), gpu, Backend.BUFFERS, chunk=64, parallel=8).engine
    engine.warm_up()
    made, create = [], gpu.device.create_bind_group
    monkeypatch.setattr(gpu.device, "create_bind_group", lambda **of: made.append(of["label"]) or create(**of))
    for rows, segments in ((20, 2), (20, 4), (60, 4)):  # more than fused steps have
        assert engine.model.step_key(rows, 0, True, segments) not in engine.model.plans
        assert len(engine.model.plan(rows, segments=segments).handles) > 10
    assert len(made) <= 3, made  # of the rows that get logits
    engine.free()
    engine.model.plans.clear()
    gc.collect()
    assert not gpu.bind_groups


@pytest.mark.parametrize("warm", [False, True])
def test_subgroups_are_looked_at_when_kernels_first_run(tmp_path, gpu, warm):
    """Not when they are compiled: a driver chooses the size for each kernel."""
    if not gpu.caps.subgroup:
        pytest.skip("the adapter has no subgroups")
    engine = load(tiny_llama(tmp_path / "tiny.gguf"), gpu, Backend.BUFFERS).engine
    scheduler = Scheduler(engine)
    if warm:
        engine.warm_up()
    run(scheduler, Request([1, 2, 3], GREEDY, 3))
    assert not gpu.unproven
    engine.recorder.submit([Step(engine.model.plan(2, 100), 2, 100)])
    assert gpu.unproven and not engine.subgroups_differ() and not gpu.unproven


def test_a_kernel_that_the_driver_refuses(tmp_path, gpu, monkeypatch, caplog):
    """The step that needs it will say so, if one comes."""
    engine = load(tiny_llama(tmp_path / "tiny.gguf"), gpu, Backend.BUFFERS).engine
    monkeypatch.setattr(gpu, "pipelines", {})
    compile_one = gpu.pipeline

    def refuse(source: str, label: str) -> Any:
        if label == "linear_sum" or label.startswith("linear_gemm"):
            raise wgpu.GPUError("too large")
        return compile_one(source, label)

    monkeypatch.setattr(gpu, "pipeline", refuse)
    engine.warm_up()
    assert "a kernel was not compiled: too large" in caplog.text


def test_a_software_adapter_compiles_what_it_runs(tmp_path, gpu, monkeypatch):
    monkeypatch.setattr(gpu, "pipelines", {})
    with Llama(tiny_llama(tmp_path / "tiny.gguf"), device=gpu) as llama:
        before = set(gpu.pipelines)
        llama.warm_up()
        assert (set(gpu.pipelines) == before) == gpu.software
