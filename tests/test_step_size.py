"""Steps are as long as a watchdog allows: the rule, and what the engine submits on a GPU that is slow."""

import pytest
from gguf_builder import tiny_llama
from one_sequence import load_one, token_ids

from llamagpu.engine.step_size import STEP_S, TRIAL_ROWS, StepSize


def test_a_fast_gpu_takes_whole_chunks():
    size = StepSize(1024, timed=True)
    assert size.needs_trial
    size.after_trial(0.008)  # an 8B model on an H200
    assert size.rows == 1024 and not size.needs_trial
    size.after_step(1024, 0.25)
    assert size.rows == 1024


@pytest.mark.parametrize("flops, rows", [(1e12, 32), (0.1e12, 4), (0.01e12, 1), (20e12, 1024)])
def test_a_slow_gpu_takes_shorter_steps(flops, rows):
    """An 8B model: 16 GFLOP a row."""
    size = StepSize(1024, timed=True)
    size.after_trial(TRIAL_ROWS * 16e9 / flops)
    assert size.rows == rows


def test_steps_get_shorter_as_attention_takes_longer_and_longer_again():
    size = StepSize(1024, timed=True)
    size.after_step(1024, 3 * STEP_S)
    assert size.rows == 256
    size.after_step(256, 1.5 * STEP_S)
    assert size.rows == 128
    size.after_step(128, 0.5 * STEP_S)
    assert size.rows == 128
    size.after_step(7, 0.01 * STEP_S)  # the rest of a prompt says little
    assert size.rows == 128
    for _ in range(9):
        size.after_step(size.rows, 0.1 * STEP_S)
    assert size.rows == 1024


@pytest.mark.parametrize("compute", ["prefill", "log_probs", "mean_hidden"])
def test_what_is_submitted(gpu, tmp_path, monkeypatch, compute):
    """Each row takes a quarter of STEP_S: never more than four rows at once, and the same numbers."""
    path = tiny_llama(tmp_path / "m.gguf")
    ids = token_ids(45)
    fast = load_one(gpu, path, chunk=40)
    want = getattr(fast.engine, compute)(fast.sequence, ids)
    run = load_one(gpu, path, chunk=40)
    engine, clock, rows = run.engine, [0.0], []
    engine.step_size = StepSize(40, timed=True)
    submit = engine.recorder.submit

    def slow_submit(steps, **more):
        rows.append(max(step.rows for step in steps))
        return submit(steps, **more)

    def wait():
        clock[0] += rows[-1] * STEP_S / 4

    monkeypatch.setattr(engine.recorder, "submit", slow_submit)
    monkeypatch.setattr(gpu, "wait_idle", wait)
    monkeypatch.setattr("llamagpu.engine.engine.time.perf_counter", lambda: clock[0])
    got = getattr(engine, compute)(run.sequence, ids)
    assert rows[:2] == [TRIAL_ROWS, TRIAL_ROWS] and max(rows[2:]) == 4
    assert len(run.ids) == 45
    if want is None:
        got, want = engine.read_logits(), fast.engine.read_logits()
    assert abs(got - want).max() < 1e-4 * abs(want).max()
