"""Fused steps of several token rows by the adapter's own compiler and barrier; `test_fused_decode.py` has the cases."""

from dataclasses import replace

import pytest
from gguf_builder import tiny_llama
from one_sequence import load_one, reference_of, reserve, token_ids
from reference import assert_close
from test_fused_decode import FAST_F16, SHARED_ROWS, fused_of
from test_model import INT8

from llamagpu.engine import routes
from llamagpu.engine.fused_decode import timed_out
from llamagpu.engine.step_inputs import Segment
from llamagpu.gpu.recorder import Step


@pytest.mark.parametrize("most", [2, 4])
def test_rows_see_each_other(fused_gpu, tmp_path, monkeypatch, most):
    """Prompts in several steps, then rows of two sequences: as by float64, and nobody waits in vain."""
    monkeypatch.setattr(fused_gpu, "caps", replace(fused_gpu.caps, measured_barrier=True))
    monkeypatch.setattr(routes, "FUSED_PREFETCH", {most: 1})  # a short prefetch compiles faster
    path = tiny_llama(tmp_path / "m.gguf", **SHARED_ROWS)
    run = load_one(fused_gpu, path, **FAST_F16, slots=2)
    model, references = run.model, [reference_of(run, path) for _ in range(2)]
    for slot in range(2):
        reserve(run.engine, slot, 32)

    def check(*segments: Segment) -> None:
        rows, position = sum(len(s.tokens) for s in segments), max(s.position for s in segments)
        model.write_step(segments)
        plan = model.plan(rows, position, segments=len(segments))
        assert "fused_layers" in [d.kernel for d in plan.dispatches]
        run.engine.recorder.submit([Step(plan, rows, position)])
        got = fused_gpu.read(model.logits, "f4", len(segments) * 288).reshape(-1, 288)
        for logits, s in zip(got, segments, strict=True):
            assert_close(logits, references[s.slot].forward(list(s.tokens))[-1], *INT8, str(s))

    for step in range(4):
        check(Segment(0, step * most, token_ids(most, seed=step)))
    check(Segment(1, 0, token_ids(most, seed=9)))
    check(Segment(0, 4 * most, token_ids(most - 1, seed=5)), Segment(1, most, token_ids(1, seed=6)))
    assert not timed_out(fused_gpu, fused_of(run).barrier)
