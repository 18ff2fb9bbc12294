"""Whole models on the texture backend against float64, and which models it runs."""

from dataclasses import replace

import numpy as np
import pytest
from gguf_builder import tiny_llama
from one_sequence import load_one, token_ids
from reference import Reference, assert_close
from test_model import F32, MODELS, check_against_reference

from llamagpu.engine import routes
from llamagpu.engine.load import load_model, open_source, resolve
from llamagpu.engine.options import Backend, EngineOptions, KvType, Precision
from llamagpu.engine.sequence import Sequence
from llamagpu.engine.step_inputs import Segment
from llamagpu.files.gguf_file import GgufFile
from llamagpu.gpu.recorder import Step

UNFIT = ("head_dim 6", "head_dim 256", "odd widths", "rope_dims 6")  # these run on buffers everywhere
TEXTURES = Backend.TEXTURES


@pytest.mark.parametrize("name", [name for name in MODELS if name not in UNFIT])
def test_model(gpu, tmp_path, name):
    path = tiny_llama(tmp_path / "m.gguf", **MODELS[name])
    check_against_reference(load_one(gpu, path, backend=TEXTURES), path)


def test_model_with_minimum_limits(minimum_gpu, tmp_path):
    path = tiny_llama(tmp_path / "m.gguf", **MODELS["types of 32 weights"])
    check_against_reference(load_one(minimum_gpu, path, backend=TEXTURES), path)


def test_pages_in_any_order(gpu, tmp_path):
    path, ids = tiny_llama(tmp_path / "m.gguf", context=256), token_ids(140)
    run = load_one(gpu, path, context=256, chunk=32, backend=TEXTURES)
    run.engine.cache.pool.free = [1, 3, 0, 2]
    want = Reference(GgufFile(path)).forward(ids)
    for start, end in ((0, 60), (60, 100), (100, 101), (101, 139), (139, 140)):
        assert_close(run.logits_after(ids[start:end]), want[end - 1], *F32, f"{end} tokens")


def test_rows_of_several_sequences(any_gpu, tmp_path):
    """A row of each, a step with a piece of one's prompt, a row of each again: the logits that each has alone."""
    gpu, path, ids = any_gpu, tiny_llama(tmp_path / "m.gguf", context=256), token_ids(140)
    want = Reference(GgufFile(path)).forward(ids)
    engine = load_one(gpu, path, context=256, chunk=32, backend=TEXTURES, slots=3).engine
    model, ends = engine.model, [70, 5, 63]
    for slot, end in enumerate(ends):
        engine.reserve(sequence := Sequence(slot), 140)
        engine.prefill(sequence, ids[:end])
    for counts in ([1, 1, 1], [1, 30, 1], [1, 1, 1]):
        segments = [Segment(i, end, ids[end : end + n]) for i, (end, n) in enumerate(zip(ends, counts, strict=True))]
        rows, position = sum(counts), max(ends)
        plan = model.plan(rows, position, segments=3)
        ends = [end + n for end, n in zip(ends, counts, strict=True)]
        model.write_step(segments)
        engine.recorder.submit([Step(plan, rows, position)])
        got = np.array([engine.segment_logits(i) for i in range(3)])
        assert_close(got, want[np.array(ends) - 1], *F32, f"{counts} rows")
        lanes = gpu.caps.subgroup == routes.vector_lanes(gpu.caps)
        kernel = "attend_texture_decode" if rows == 3 and lanes else "attend_texture"
        assert kernel in {dispatch.kernel for dispatch in plan.dispatches}


def test_log_probs(gpu, tmp_path):
    path, ids = tiny_llama(tmp_path / "m.gguf"), token_ids(20)
    logits = Reference(GgufFile(path)).forward(ids).astype(np.float64)
    logs = logits - np.log(np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
    want = (logs - logits.max(axis=1, keepdims=True))[np.arange(19), ids[1:]]
    assert_close(load_one(gpu, path, backend=TEXTURES).log_probs(ids), want, *F32, "log probabilities")


def test_which_models_run_on_textures(gpu, tmp_path, monkeypatch):
    """Models of fitting shapes, on a CPU adapter with large enough textures."""
    cpu = replace(gpu.caps, cpu=True)
    for name, shape in MODELS.items():
        source = open_source(tiny_llama(tmp_path / "m.gguf", **shape))
        for caps, fits in (
            (cpu, name not in UNFIT),
            (replace(cpu, cpu=False), False),
            (replace(cpu, texture_side=32), False),
        ):
            monkeypatch.setattr(gpu, "caps", caps)
            backend = resolve(EngineOptions(precision=Precision.HIGH), source, gpu).backend
            assert backend is (TEXTURES if fits else Backend.BUFFERS), f"{name} with {caps}"
        source.close()


def test_a_cpu_adapter_takes_the_texture_backend(gpu, tmp_path):
    """All kernels but those of sampling are on textures there, and the logits are right on any adapter."""
    path, ids = tiny_llama(tmp_path / "m.gguf"), token_ids(21)
    loaded = load_model(path, EngineOptions(precision=Precision.HIGH, kv_type=KvType.F32), gpu=gpu)
    engine, sequence = loaded.engine, Sequence()
    engine.prefill(sequence, ids[:20])
    engine.prefill(sequence, ids[20:])
    assert_close(engine.read_logits(), Reference(GgufFile(path)).forward(ids)[-1], *F32, "logits")
    kernels = {dispatch.kernel for rows in (1, 2) for dispatch in engine.model.plan(rows).dispatches}
    loaded.close()
    assert ("linear_texture_gemv" in kernels) == gpu.caps.cpu
    if gpu.caps.cpu:
        attention = {"attend_texture", "attend_texture_scores", "attend_texture_values"}
        linear = {"linear_texture", "linear_texture_gemv"}
        assert kernels == attention | linear | {"embed_texture", "rms_norm_texture", "argmax"}
