"""`bench kernels`: every comparison on small shapes, its figures and its formats."""

import json

import pytest
from measuring import measure  # noqa: F401

pytest.importorskip("wgpu")
from llamagpu.gpu import shaders
from llamagpu.gpu.timing import Stopwatch
from llamagpu.tools import baselines, kernel_bench
from llamagpu.tools.bench_tests import BadValue
from llamagpu.tools.kernel_bench import CLAIMS, OPS, Result, check_shape, matrices, result, shares
from llamagpu.tools.kernel_times import whole_ns

FEW = [4]
EXACT, INT8 = 1e-10, 5e-4  # NMSE of f32 and of int8 activations


@pytest.fixture(scope="module")
def found(gpu) -> dict[str, list[Result]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_bench, "DEPTH", 64)
        names = {op: "64x64" if op in ("gemm", "gemv", "loads") else "tiny" for op in OPS}
        return {op: list(kernel_bench.kernel_bench(gpu, [op], [name], FEW)) for op, name in names.items()}


def test_every_comparison_is_right_and_timed(found):
    for op, rows in found.items():
        assert rows, op
        for r in rows:
            assert r.us > 0 and r.baseline_us > 0 and r.ratio == pytest.approx(r.baseline_us / r.us)
            assert r.rate / r.baseline_rate == pytest.approx(r.ratio)
            assert r.nmse < (INT8 if "i8" in r.note else EXACT) and r.baseline_nmse < EXACT
            assert r.claim == CLAIMS.get(op, "")


def test_kernels_meet_their_baselines(gpu, found):
    pairs = {op: {(r.kernel, r.baseline) for r in rows} for op, rows in found.items()}
    assert pairs["loads"] == {("linear_gemv", "linear_gemv_word")}
    assert pairs["norm"] == {("rms_norm_vec4", "rms_norm")}
    assert pairs["fused"] == {("rms_norm_vec4", "rms_norm_plain + mul")}
    assert {baseline for _, baseline in pairs["gemm"]} == {"linear_gemm_rows"}
    assert {baseline for _, baseline in pairs["gemv"]} == {"linear_gemm"}
    assert ("attend", "attend_strided") in pairs["attend"]
    assert ("linear_image" in {kernel for kernel, _ in pairs["gemm"]}) == gpu.caps.cpu
    assert gpu.software or all("of a step" in r.note for r in found["fused"])


def test_tokens(found):
    assert {r.m for r in found["gemm"]} == {4} and {r.m for r in found["gemv"]} == {1}
    for op in ("norm", "fused", "attend"):
        assert {r.m for r in found[op]} == {1, 4}


def test_rates():
    """A matrix of 1000 bytes in 100 ns is 10 GB/s; 3000 operations in 100 ns are 30 GFLOP/s."""
    r = result("gemv", "s", 1, "", ("a", 100.0, 0.0), ("b", 250.0, 0.0), 1000)
    assert (r.rate, r.baseline_rate, r.ratio, r.us, r.unit) == (10.0, 4.0, 2.5, 0.1, "GB/s")
    assert result("gemm", "s", 4, "", ("a", 100.0, 0.0), ("b", 250.0, 0.0), 3000, "GFLOP/s").rate == 30.0


def test_shares_of_a_step(gpu):
    """Five norms of 10 us in 500 us; as pairs of 35 us they would be 175 of 625."""
    assert shares("tiny", 10e3, 35e3, 500e3) == "10.0% of a step, the pair 28.0%"
    assert whole_ns(gpu, Stopwatch(gpu), "tiny", 4) > 0


def test_shapes_are_those_of_a_layer():
    assert [(w.n, w.k) for _, w in matrices("llama-3.2-1b")] == [
        (3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192),
    ]  # fmt: skip
    assert [(w.n, w.k) for _, w in matrices("130x64")] == [(130, 64)]
    for bad in ("nope", "64x", "64x100", "0x64", "64", "x64"):
        with pytest.raises(BadValue):
            check_shape(bad)


def test_baselines_are_there():
    files = shaders.kernel_files()
    for name in baselines.KERNELS:
        assert name in files
    assert "baseline" in files["linear_gemm_rows"].read_text()


def test_a_chain_is_no_longer_than_it_takes(gpu, monkeypatch):
    """A unit of several dispatches counts as one, however many units make up a chain; and more work takes longer, by
    far more than what a busy machine adds to all attempts at the lesser."""
    watch, buffer = Stopwatch(gpu), gpu.zeros(4 << 20, "y")

    def least(words: int, dispatches: int) -> float:
        fill = gpu.dispatch("fill_random", (), {"WORDS": words, "VALUE": 7}, {"y": buffer}, (64, 1, 1))
        return min(watch.repeated_ns([[fill] * dispatches]) for _ in range(3))

    assert 0 < least(1 << 14, 1) < least(1 << 20, 64)  # 0.06 and 100 ms on two idle cores
    monkeypatch.setattr(watch, "pass_ns", lambda steps: 1e3 * sum(len(plan) for plan, _, _ in steps))
    assert (least(16, 1), least(16, 5)) == (1e3, 5e3)


def test_command(measure):  # noqa: F811
    args = ["--op", "norm", "--shape", "tiny", "--tokens", "2"]
    table = measure("bench", "kernels", *args)
    assert table.code == 0 and table.out.startswith("norm: ") and "1.33x" in table.out
    assert table.err.count("rms_norm_vec4") == 2
    rows = measure("bench", "kernels", *args, "-o", "json", "-q")
    assert rows.code == 0 and not rows.err and {r["op"] for r in rows.json} == {"norm"}
    lines = measure("bench", "kernels", *args, "-o", "jsonl").out.splitlines()
    assert [json.loads(line)["m"] for line in lines] == [1, 2]


@pytest.mark.parametrize("args", [["--op", "nope"], ["--shape", "1x1"], ["-o", "csv"], ["--tokens", "0"]])
def test_what_cannot_be(measure, args):  # noqa: F811
    result = measure("bench", "kernels", *args)
    assert result.code == 2 and not result.out
