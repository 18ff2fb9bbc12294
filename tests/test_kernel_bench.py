"""`bench kernels`: every comparison on small shapes, its baselines, figures and formats."""

import json

import numpy as np
import pytest
from measuring import Runner, measure  # noqa: F401

pytest.importorskip("wgpu")
from llamagpu.bench import kernels
from llamagpu.bench.cases import BadValue
from llamagpu.bench.kernel_times import LinearTimes, Timed, attend_time, step_ns
from llamagpu.bench.kernels import OPS, Result, check_shape, markdown, matrices, result, shares
from llamagpu.engine import baselines, ops, routes
from llamagpu.engine.ops import AttentionBuffers, AttentionMode, Ops
from llamagpu.engine.options import KvType
from llamagpu.engine.routes import Attention
from llamagpu.files.storage import Storage
from llamagpu.gpu.device import Gpu
from llamagpu.gpu.recorder import Step
from llamagpu.gpu.timing import Stopwatch
from llamagpu.verify.reference import Weight, matrix_of, only, ops_at, run, step_buffer

TOKENS = [4]
F32_NMSE, INT8_NMSE = 1e-10, 5e-4  # largest error of f32 and of int8 activations


@pytest.fixture(scope="module")
def found(gpu: Gpu) -> dict[str, list[Result]]:
    """The results of all six comparisons."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "DEPTH", 64)
        shapes = {op: "64x64" if op in ("gemm", "gemv", "loads") else "tiny" for op in OPS}
        return {op: list(kernels.kernel_bench(gpu, [op], [shape], TOKENS)) for op, shape in shapes.items()}


def test_every_comparison_is_right_and_timed(found: dict[str, list[Result]]) -> None:
    assert list(found) == ["gemm", "gemv", "loads", "norm", "fused", "attend"]
    for op, rows in found.items():
        assert rows, op
        for r in rows:
            assert r.us > 0 and r.baseline_us > 0
            assert r.nmse < (INT8_NMSE if "int8" in r.note else F32_NMSE) and r.baseline_nmse < F32_NMSE


def test_kernels_and_their_baselines(gpu: Gpu, found: dict[str, list[Result]]) -> None:
    pairs = {op: {(r.kernel, r.baseline) for r in rows} for op, rows in found.items()}
    assert pairs["loads"] == {("linear_gemv", "linear_gemv_word")}
    assert pairs["norm"] == {("rms_norm_vec4", "rms_norm")}
    assert pairs["fused"] == {("rms_norm_vec4", "rms_norm_plain + mul")}
    assert {baseline for _, baseline in pairs["gemm"]} == {"linear_gemm_rows"}
    assert {baseline for _, baseline in pairs["gemv"]} == {"linear_gemm"}
    assert ("attend", "attend_strided") in pairs["attend"]
    assert ("linear_texture" in {kernel for kernel, _ in pairs["gemm"]}) == gpu.caps.cpu
    assert gpu.software or all("of a step" in r.note for r in found["fused"])


def test_kernels_that_models_do_not_use_here_are_marked(gpu: Gpu, found: dict[str, list[Result]]) -> None:
    """On a CPU models run on textures. Elsewhere only `attend` may have a better route."""
    for r in (r for rows in found.values() for r in rows):
        if gpu.caps.cpu:
            assert ("not used here" in r.note) == ("textures" not in r.note)
        elif r.op != "attend":
            assert "not used here" not in r.note
    attends = found["attend"]
    for r in (r for r in attends if not gpu.caps.cpu):
        other = any(o.kernel != "attend" for o in attends if o.m == r.m)
        assert ("not used here" in r.note) == (r.kernel == "attend" and other)


def test_token_rows(found: dict[str, list[Result]]) -> None:
    assert {r.m for r in found["gemm"]} == {4} and {r.m for r in found["gemv"]} == {1}
    for op in ("norm", "fused", "attend"):
        assert {r.m for r in found[op]} == {1, 4}


# Figures


def test_figures_of_a_result() -> None:
    """A matrix of 1000 bytes in 100 ns is 10 GB/s; 3000 operations in 100 ns are 30 GFLOP/s."""
    r = result("gemv", "s", 1, "", Timed("a", 100.0, 1e-12), Timed("b", 250.0, 2e-12), 1000)
    assert (r.kernel, r.rate, r.us, r.unit, r.nmse) == ("a", 10.0, 0.1, "GB/s", 1e-12)
    assert (r.baseline, r.baseline_rate, r.baseline_us, r.baseline_nmse) == ("b", 4.0, 0.25, 2e-12)
    assert r.ratio == 2.5 and r.claim == ""
    assert r.line() == "gemv s, m 1: a 0.1 us, b 0.2 us, 2.50x"
    norm = result("norm", "s", 4, "note", Timed("a", 100.0, 0.0), Timed("b", 250.0, 0.0), 3000, "GFLOP/s")
    assert (norm.rate, norm.unit, norm.claim) == (30.0, "GFLOP/s", "ExecuTorch's WebGPU backend gained 1.33x")


def test_markdown() -> None:
    """A table for each operation, in the order of the results."""
    timed = Timed("a", 1000.0, 1e-12), Timed("b", 2500.0, 2e-12)
    text = markdown([result("norm", "s", 1, "", *timed, 1000), result("gemm", "t", 4, "x in f32", *timed, 3000)])
    norm, gemm = text.split("\n\ngemm: ")
    heading = "norm: rms_norm by vec4 against by scalars (ExecuTorch's WebGPU backend gained 1.33x)"
    assert norm.startswith(f"{heading}\n\n| shape |")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in norm.splitlines()[2:]]
    assert cells[0][4:] == ["us", "rate", "baseline", "us", "rate", "ratio", "NMSE", "baseline NMSE"]
    assert cells[2][:4] == ["s", "1", "-", "a"]
    assert cells[2][4:] == ["1.0", "1 GB/s", "b", "2.5", "0.4 GB/s", "2.50", "1e-12", "2e-12"]
    assert len(gemm.splitlines()) == 5


def test_shares_of_a_step(gpu: Gpu) -> None:
    """Five norms of 10 us in 500 us; as two dispatches of 35 us together they would be 175 of 625."""
    assert shares("tiny", 10e3, 35e3, 500e3) == "10.0% of a step, as two dispatches 28.0%"
    assert step_ns(gpu, Stopwatch(gpu), "tiny", 4) > 0


def test_shapes_are_those_of_a_layer() -> None:
    shapes = [(weight.n, weight.k) for _, weight in matrices("llama-3.2-1b")]
    assert shapes == [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)]
    assert [(weight.n, weight.k) for _, weight in matrices("130x64")] == [(130, 64)]
    assert check_shape("130x64") == "130x64" and check_shape("smollm2") == "smollm2"
    for bad in ("nope", "64x", "64x100", "0x64", "64", "x64"):
        with pytest.raises(BadValue):
            check_shape(bad)


def test_a_wrong_kernel_has_a_large_error(gpu: Gpu) -> None:
    """The error is that of the kernel's own results, not of an earlier right one."""
    times = LinearTimes(gpu, Stopwatch(gpu), Weight(Storage.Q4, 64, 64), 2)
    assert times.time(2).nmse < F32_NMSE
    for shard in times.shards:
        gpu.write(shard.words, np.zeros(64 * 32, np.uint8))
    assert times.time(2).nmse > 0.1
    times.close()


# Baselines


def test_gemm_rows_baseline(gpu: Gpu) -> None:
    """Weights and inputs that are small multiples of a half: their sums need no rounding."""
    shard, _ = Weight(Storage.Q4, 6, 64).upload(gpu)
    integers = np.arange(6 * 64).reshape(6, 64) % 16
    gpu.write(shard.words, (integers[:, ::2] | integers[:, 1::2] << 4).astype(np.uint8))
    gpu.write(shard.scales, np.full((6, 2), 0.5, np.float32 if shard.layout.scale_bits == 32 else np.float16))
    x = (np.arange(3 * 64).reshape(3, 64) % 5).astype(np.float32)
    y, matrix = gpu.zeros(3 * 6 * 4, "y"), matrix_of(shard)
    make = Ops(gpu, step_buffer(gpu, 3))
    (dispatch,) = make.linear(gpu.upload(x, "x"), matrix, 3, ops.store(y, matrix), table=only(baselines.GEMM_ROWS))
    assert dispatch.kernel == "linear_gemm_rows"
    run(gpu, [dispatch], 3)
    assert np.array_equal(gpu.read(y, np.float32, 18).reshape(3, 6), x @ ((integers - 8) * 0.5).T)


def test_norm_then_mul_baseline(gpu: Gpu) -> None:
    """Rows of one value have that value as their root mean square, so that the result is the weight."""
    x = np.full((3, 96), 2.0, np.float32) * np.array([[1], [-2], [4]], np.float32)
    weight = np.arange(96, dtype=np.float32)
    size = x.nbytes
    normed, y = gpu.zeros(size, "normed"), gpu.zeros(size, "y")
    make = Ops(gpu, step_buffer(gpu, 3))
    dispatches = baselines.norm_then_mul(make, gpu.upload(x, "x"), gpu.upload(weight, "w"), normed, y, 96, 0.0)
    assert [dispatch.kernel for dispatch in dispatches] == ["rms_norm_plain", "mul"]
    run(gpu, dispatches, 3)
    signs = np.array([[1], [-1], [1]])
    assert np.allclose(gpu.read(normed, np.float32, 288).reshape(3, 96), np.ones((3, 96)) * signs, rtol=1e-6)
    assert np.allclose(gpu.read(y, np.float32, 288).reshape(3, 96), weight * signs, rtol=1e-6)


def test_attend_strided_baseline(gpu: Gpu) -> None:
    """Keys of zeros give every position the same weight: each row is the mean of the values up to its position."""
    values = np.arange(2 * 8 * 8, dtype=np.float32).reshape(2, 8, 8)  # 2 KV heads, 8 positions, head_dim 8
    keys, q = np.zeros_like(values), np.ones((3, 4, 8), np.float32)
    y, make = gpu.zeros(q.nbytes, "y"), ops_at(gpu, 3, 2, 8)
    buffers = AttentionBuffers(gpu.upload(q, "q"), gpu.upload(keys, "k"), gpu.upload(values, "v"), y)
    shape = Attention(3, 4, 2, 8, scale=8**-0.5)
    [dispatch] = make.attend(shape, buffers, AttentionMode(KvType.F32), only(baselines.ATTEND_STRIDED))
    assert dispatch.kernel == "attend_strided"
    run(gpu, [dispatch], 3, 2)
    want = [[values[head // 2, : 3 + row].mean(axis=0) for head in range(4)] for row in range(3)]
    assert np.allclose(gpu.read(y, np.float32, q.size).reshape(q.shape), want, rtol=1e-6)


def test_attention_over_a_split_context(gpu: Gpu) -> None:
    """The kernel of a long context with its merge, where the adapter has one."""
    timed = attend_time(gpu, Stopwatch(gpu), "tiny", 1, 700, routes.ATTEND)
    if gpu.caps.subgroup >= 4 and not gpu.caps.scalar:
        assert timed.kernel == "attend_split + attend_merge"
    assert timed.nmse < F32_NMSE


# Timing


def test_a_chain_counts_by_units(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit of several dispatches counts as one, however many units make up a chain. More work takes longer, by far
    more than what a busy machine adds to all attempts at the lesser."""
    watch, buffer = Stopwatch(gpu), gpu.zeros(4 << 20, "y")

    def least(words: int, dispatches: int) -> float:
        fill = gpu.dispatch("fill_random", (), {"WORDS": words, "MASK": 0, "VALUE": 7}, {"y": buffer}, (64, 1, 1))
        return min(watch.repeated_ns([[fill] * dispatches]) for _ in range(3))

    assert 0 < least(1 << 14, 1) < least(1 << 20, 64)  # 0.06 and 100 ms on two idle cores

    def pass_ns(steps: list[Step]) -> float:
        return 1e3 * sum(len(step.plan) for step in steps)

    monkeypatch.setattr(watch, "pass_ns", pass_ns)
    assert (least(16, 1), least(16, 5)) == (1e3, 5e3)


# The command


def test_command(measure: Runner) -> None:  # noqa: F811
    args = ["--op", "norm", "--shape", "tiny", "--tokens", "2"]
    table = measure("bench", "kernels", *args)
    assert table.code == 0 and table.out.startswith("norm: ") and "1.33x" in table.out
    assert table.err.count("rms_norm_vec4") == 2
    rows = measure("bench", "kernels", *args, "-o", "json", "-q")
    assert rows.code == 0 and not rows.err and {r["op"] for r in rows.json} == {"norm"}
    lines = measure("bench", "kernels", *args, "-o", "jsonl").out.splitlines()
    assert [json.loads(line)["m"] for line in lines] == [1, 2]


@pytest.mark.parametrize("args", [["--op", "nope"], ["--shape", "1x1"], ["-o", "csv"], ["--tokens", "0"]])
def test_bad_arguments(measure: Runner, args: list[str]) -> None:  # noqa: F811
    result = measure("bench", "kernels", *args)
    assert result.code == 2 and not result.out
