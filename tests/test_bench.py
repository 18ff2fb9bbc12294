"""`bench`: the tests it makes, the formats it writes, what it measures; and the comparison of two runs."""

import csv
import io
import json
import re
import sqlite3
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from conftest import ROOT, SHARED, open_gpu
from gguf_builder import tiny_llama
from measuring import measure  # noqa: F401

import llamagpu
from llamagpu.tools.report import FIELDS, LLAMA_BENCH_FIELDS, OUR_FIELDS, SAMPLES

pytest.importorskip("wgpu")
from llamagpu.engine.layers import matrices as matrices_of
from llamagpu.engine.llama import Transformer
from llamagpu.engine.synthetic import MIXES, SHAPES, synthetic_config, synthetic_weights
from llamagpu.gpu.device import nbytes
from llamagpu.gpu.timing import Span, Stamps, Stopwatch, busy_ns
from llamagpu.tools import bench_tests, report
from llamagpu.tools.bench import Settings, bench, between_tokens, release, short_count
from llamagpu.tools.bench_tests import BadValue, Test, make_tests, numbers
from llamagpu.tools.kernel_bench import matrices

Test.__test__ = False  # pytest: it is none


@pytest.fixture(scope="module")
def rows(gpu):
    """One prompt, one generation, one of both, the latter at two depths."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llamagpu.tools.bench.Gpu.open", lambda wanted=None: gpu)
        patch.setattr(gpu, "close", lambda: None)
        tests = make_tests([5], [6], [(4, 3)], [0, 16], [2048], [512], [None])
        return list(bench("tiny:q4_0", tests, Settings(repetitions=3)))


# Which tests


@pytest.mark.parametrize(
    "texts, want",
    [
        (["512"], [512]), (["1,2", "3"], [1, 2, 3]), (["3-6"], [3, 4, 5, 6]), (["0-9+4"], [0, 4, 8]),
        (["1-20*3"], [1, 3, 9]), (["128-512*2,7"], [128, 256, 512, 7]), (["5-3"], []), (["0"], [0]),
    ],
)  # fmt: skip
def test_numbers(texts, want):
    assert numbers(texts) == want


@pytest.mark.parametrize("text", ["", "x", "1-", "-3", "1-5/2", "0-8*2", "1-8*1", "1-8+0", "1.5", "1-2-3", "1,,2"])
def test_what_is_no_number(text):
    with pytest.raises(BadValue) as error:
        numbers([text])
    assert error.value.exit_code == 2


def test_order_is_that_of_llama_bench():
    """Settings outside, then prompts, generations and pairs; what has no tokens is left out."""
    tests = make_tests([8, 0], [4], [(2, 3), (0, 0)], [0, 5], [64], [16, 32], [None])
    named = [(t.n_ubatch, t.n_depth, t.n_prompt, t.n_gen) for t in tests]
    each = [(8, 0), (0, 4), (2, 3)]
    assert named == [(ub, d, *kind) for ub in (16, 32) for d in (0, 5) for kind in each]


def test_steps_of_a_test():
    assert list(Test(64, 4, None, 10, 9, 2).steps()) == [(4, 10), (4, 14), (1, 18), (1, 19), (1, 20)]
    assert list(Test(64, 4, None, 0, 0, 2).steps()) == [(1, 1), (1, 2)]  # a choice needs a token before it
    assert bench_tests.positions([Test(64, 4, None, 10, 9, 2)]) >= 21


# Formats


def test_fields_are_those_of_the_survey():
    survey = SHARED / "FEATURES.md"
    if not survey.exists():
        pytest.skip("the survey of other tools is not on this machine")
    line = re.search(r"\*\*CSV/JSON/SQL fields, in order\*\*: (.*)", survey.read_text())[1]
    listed = re.match(r"[\w ,()Z-]+?(?=; JSON)", line.replace("(ISO-8601 Z)", ""))[0]
    assert tuple(name.strip() for name in listed.split(",")) == LLAMA_BENCH_FIELDS


def written(rows, kind: str, *extra: str) -> str:
    printer = report.printer(kind, extra)
    return printer.header() + "".join(printer.row(row) for row in rows) + printer.footer()


def test_csv(rows):
    found = list(csv.reader(io.StringIO(written(rows, "csv"))))
    assert tuple(found[0]) == FIELDS and found[0][: len(LLAMA_BENCH_FIELDS)] == list(LLAMA_BENCH_FIELDS)
    assert len(found) == 1 + len(rows)
    first = dict(zip(*found[:2], strict=True))
    assert first["n_prompt"] == "5" and first["cpu_strict"] == "0" and first["itl_p50_ns"] == ""
    assert float(first["avg_ts"]) == pytest.approx(rows[0]["avg_ts"], abs=1e-6)


@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_json(rows, kind):
    text = written(rows, kind)
    found = json.loads(text) if kind == "json" else [json.loads(line) for line in text.splitlines()]
    assert [list(row) for row in found] == [[*LLAMA_BENCH_FIELDS, *SAMPLES, *OUR_FIELDS]] * len(rows)
    assert found[1]["n_gen"] == 6 and found[1]["embeddings"] is False and found[1]["ttft_ns"] is None
    assert len(found[1]["samples_ns"]) == 3


def test_json_of_nothing():
    assert json.loads(written([], "json")) == []


def test_sql_is_what_sqlite_takes(rows):
    quoted = [row | {"cpu_info": "Bob's; DROP TABLE llama_bench"} for row in rows]
    database = sqlite3.connect(":memory:")
    database.executescript(written(quoted, "sql"))
    found = database.execute("SELECT cpu_info, n_gen, avg_ts, ttft_ns FROM llama_bench").fetchall()
    assert [row[:2] for row in found] == [("Bob's; DROP TABLE llama_bench", row["n_gen"]) for row in rows]
    assert found[0][2] == pytest.approx(rows[0]["avg_ts"], abs=1e-5) and found[1][3] is None


def test_markdown(rows):
    names, lines, *cells = written(rows, "md").splitlines()
    cells, (empty, build) = cells[:-2], cells[-2:]
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in (names, *cells)]
    assert split[0] == ["model", "size", "params", "backend", "ngl", "test", "t/s"]
    assert re.fullmatch(r"\|( -{2,}[-:] \|){7}", lines)
    assert [row[5] for row in split[1:]] == ["pp5", "tg6", "pp4+tg3", "pp5 @ d16", "tg6 @ d16", "pp4+tg3 @ d16"]
    assert all(re.fullmatch(r"\d+\.\d\d ± \d+\.\d\d", row[6]) for row in split[1:])
    assert split[1][1].endswith(" MiB") and split[1][2] == "0.46 M"
    assert empty == "" and build == f"build: {llamagpu.__version__}"
    assert len({len(line) for line in (names, lines, *cells)}) == 1


def test_markdown_shows_what_was_set(rows):
    header = written(rows, "md", "type_v", "n_batch", "flash_attn").splitlines()[0]
    shown = [cell.strip() for cell in header.strip("|").split("|")]
    assert shown[4:] == ["ngl", "n_batch", "type_v", "fa", "test", "t/s"]


def test_table_is_aligned():
    lines = report.table(("name", "m"), [["a", "1"], ["bcdefg", "12"]]).splitlines()
    assert lines == ["| name   |   m |", "| ------ | --: |", "| a      |   1 |", "| bcdefg |  12 |"]


# What is measured


def test_rows_agree_with_themselves(rows):
    for row in rows:
        tokens = row["n_prompt"] + row["n_gen"]
        assert row["samples_ts"] == pytest.approx([1e9 * tokens / ns for ns in row["samples_ns"]])
        assert row["avg_ts"] == pytest.approx(np.mean(row["samples_ts"]))
        assert row["stddev_ts"] == pytest.approx(np.std(row["samples_ts"], ddof=1), abs=1e-3)
        assert min(row["samples_ts"]) <= row["median_ts"] <= max(row["samples_ts"])
        assert 0 < row["encode_ns"] + row["submit_ns"] < row["avg_ns"]
        if row["gpu_ns"] is not None:  # the device is not busy for longer than the clock on the wall ran
            assert 0 < row["gpu_ns"] < 1.1 * row["avg_ns"]
        moved = (row["weight_bytes_per_token"] + row["kv_bytes_per_token"]) * tokens
        assert row["gbps"] == pytest.approx(moved / row["avg_ns"])
        assert row["copy_share"] == pytest.approx(row["gbps"] / row["copy_gbps"])
        assert (row["ttft_ns"] is None) == (row["n_prompt"] == 0)
        assert (row["itl_p50_ns"] is None) == (row["n_gen"] == 0)
        if row["n_gen"]:
            assert 0 < row["itl_p50_ns"] <= row["itl_p95_ns"] <= max(row["samples_ns"])


def test_work_is_counted(rows):
    """By hand for the tiny model: f32 cache of 2 layers, 2 kv heads of 64; every matrix once per step."""
    pp, tg, both, pp_deep, tg_deep, _ = rows
    c = synthetic_config("tiny")
    linear = sum(w.n * w.k for _, w in matrices("tiny")) * c.layers
    per_position = 2 * c.layers * c.kv_heads * c.head_dim * (2 if tg["type_k"] == "f16" else 4)
    assert tg["kv_bytes_per_token"] == per_position * np.mean([2, 3, 4, 5, 6, 7])
    assert tg_deep["kv_bytes_per_token"] == per_position * np.mean([17, 18, 19, 20, 21, 22])
    assert pp_deep["kv_bytes_per_token"] == per_position * 21 / 5
    assert pp["weight_bytes_per_token"] == tg["weight_bytes_per_token"] / 5
    assert both["weight_bytes_per_token"] == tg["weight_bytes_per_token"] * 4 / 7
    attention = 4 * c.layers * c.heads * c.head_dim * (1 + 2 + 3 + 4 + 5)
    flops = 2 * 5 * linear + 2 * c.vocab * c.dim + attention
    assert pp["tflops"] == pytest.approx(flops / pp["avg_ns"] / 1e3)


def test_counts_in_words():
    assert [short_count(n) for n in (12, 260_000, 134_515_008, 1_235_814_400)] == ["12", "260K", "135M", "1.24B"]


def test_time_between_tokens():
    """Three batches after the first choice: of 1, 2 and 4 tokens."""
    spans = [Span(1, 1, 0, 0, 0, 1.0), Span(2, 9, 0, 0, 0, 1.1), Span(4, 18, 0, 0, 0, 1.5), Span(8, 36, 0, 0, 0, 1.9)]
    assert between_tokens(spans) == pytest.approx([1e8] + [2e8] * 2 + [1e8] * 4)
    assert between_tokens([Span(3, 9, 0, 0, 0)]) == []  # a prefill: nobody waited


def test_busy_time_counts_overlaps_once():
    assert busy_ns(np.array([[0, 10], [5, 12], [20, 30], [22, 25]])) == 12 + 10


def test_timestamps_beyond_one_query_set(gpu):
    if "timestamp-query-inside-passes" not in gpu.features:
        pytest.skip("the adapter has no timestamps inside passes")
    buffer, watch = gpu.zeros(64, "y"), Stopwatch(gpu)
    work = gpu.dispatch("fill_random", (), {"WORDS": 16, "VALUE": 7}, {"y": buffer}, (1, 1, 1))
    from llamagpu.gpu.recorder import Plan

    for count in (5000, 3):  # the second time the places are used again
        stamps, span = watch.each_ns([(Plan([work] * count), 1, 0)])
        assert len(stamps) == count + 1 and span.dispatches == count
        assert (np.diff(stamps) >= 0).all() and stamps[-1] > stamps[0]
    assert len(Stamps(gpu).read()) == 0


# Parameters as published, norms included
PARAMS = {
    "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824, "llama-3.1-8b": 8_030_261_248,
    "smollm2": 134_515_008, "tinyllama": 1_100_048_384, "llama-2-7b": 6_738_415_616,
}  # fmt: skip


@pytest.mark.parametrize("name", PARAMS)
def test_synthetic_shapes_are_the_real_ones(name):
    s = SHAPES[name]
    layer = sum(w.n * w.k for _, w in matrices(name)) + 2 * s.dim
    assert s.layers * layer + s.vocab * s.dim * (1 if s.tied else 2) + s.dim == PARAMS[name]


@pytest.mark.parametrize("quant", MIXES)
@pytest.mark.parametrize("name", ["tiny", "smollm2", "qwen2.5-0.5b", "llama-3.2-1b"])
def test_synthetic_weights_are_of_types_that_their_rows_can_have(gpu, name, quant):
    """Rows are whole blocks, and all that a kernel reads is there."""
    config = replace(synthetic_config(name), layers=2, vocab=512)
    weights = synthetic_weights(gpu, config, quant)
    for matrix in (weights.output, *(m for layer in weights.layers for m in matrices_of(layer))):
        for part in matrix.parts:
            words = part.n * part.k * {"q4": 4, "q6": 6, "q8": 8, "f16": 16}[part.form] // 8
            values = part.n * part.k // part.group * (1 + part.pair)
            scales = values * part.scale_bits // 8 + (part.n * part.k // 256 * 4 if part.scale_bits == 8 else 0)
            assert nbytes(part.words) == words and (part.scales is None or nbytes(part.scales) == scales)
            assert part.k % (256 if part.scale_bits == 8 else 32) == 0 and (part.scales is None) == (scales == 0)


def test_a_model_is_given_back_whole(gpu, tmp_path):
    """Caches are slices of buffers; and so is what joined layers hand on."""
    for device in (gpu, open_gpu(LLAMAGPU_JOIN="1")):
        config = synthetic_config("tiny")
        weights = synthetic_weights(device, config, "q4_0")
        before = device.allocated_bytes
        model = Transformer(device, config, weights, None, 64, chunk=16)
        assert device.allocated_bytes > before and (device is gpu or model.joined)
        release(model)
        assert device.allocated_bytes == before


# The command


def test_synthetic_models_in_both_precisions(measure):  # noqa: F811
    for precision in ("fast", "high"):
        flags = ("-p", "4", "-n", "2", "-r", "1", "-o", "json", "-q", "--precision", precision)
        result = measure("bench", "--synthetic", "tiny", *flags)
        assert result.code == 0 and len(result.json) == 2


def test_pasted_llama_bench_flags(measure):  # noqa: F811
    flags = "-ngl 99 -t 4,8 --n_cpu_moe=0 -mmp 0 -sm none --poll 50 -fa 1 -r 1 -o json -q --no-warmup"
    result = measure("bench", "--synthetic", "tiny", "-p", "4", "-n", "0", *flags.split())
    assert result.code == 0 and len(result.json) == 1
    assert "-ngl -t --n-cpu-moe -mmp -sm --poll" in result.err and "-fa" not in result.err


def test_stdout_carries_only_the_table(measure):  # noqa: F811
    result = measure("bench", "--synthetic", "tiny,tiny:f16", "-p", "4", "-n", "0", "-r", "1", "--progress")
    assert result.code == 0
    table = [line for line in result.out.splitlines() if line]
    assert len(table) == 2 + 2 + 1 and all(line.startswith(("|", "build:")) for line in table)
    assert result.err.count("starting") == 2 and result.err.count("of a copy") == 2


def test_two_outputs_and_details(measure):  # noqa: F811
    result = measure("bench", "--synthetic", "tiny", "-p", "4", "-n", "0", "-r", "1", "-oe", "jsonl", "-q", "-v")
    assert result.code == 0 and json.loads(result.err)["n_prompt"] == 4
    assert "median t/s" in result.out and "gpu/wall" in result.out and "a copy " in result.out


def test_a_file(measure, tmp_path):  # noqa: F811
    path = tiny_llama(tmp_path / "m.gguf", kind="Q4_0", context=256)
    both = ["-ctk", "f16,f32", "-ctv", "f16,f32"]
    result = measure("bench", "-m", path, "-p", "4", "-n", "3", *both, "-d", "3", "-r", "1", "-o", "json", "-q")
    assert result.code == 0
    rows = result.json
    assert [(r["n_prompt"], r["type_k"]) for r in rows] == [(4, "f16"), (0, "f16"), (4, "f32"), (0, "f32")]
    assert {r["model_filename"] for r in rows} == {str(path)}
    assert all(r["model_size"] < path.stat().st_size and r["gpu_bytes_peak"] > r["model_size"] for r in rows)


@pytest.mark.parametrize(
    "args, code",
    [
        (["-p", "x"], 2), (["-pg", "5"], 2), (["-o", "xml"], 2), (["-ctk", "q8_0"], 2),
        (["-ctk", "f16", "-ctv", "f32"], 2), (["-r", "0"], 2), (["--synthetic", "nope"], 1),
        (["--synthetic", "tiny:q9"], 1), (["-m", "no/such/file.gguf"], 1), (["--nonsense"], 2),
    ],
)  # fmt: skip
def test_what_cannot_be(measure, args, code):  # noqa: F811
    result = measure("bench", *args)
    assert result.code == code and result.out == "" and "bug" not in result.err


def test_plot(measure, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    missing = measure("bench", "--synthetic", "tiny", "--plot", tmp_path / "x.png")
    assert missing.code == 1 and "llamagpu[plot]" in missing.err and missing.out == ""
    monkeypatch.undo()


def test_plot_is_a_picture(measure, tmp_path):  # noqa: F811
    pytest.importorskip("matplotlib")
    args = ["-p", "4", "-n", "2", "-d", "0,8", "-r", "2", "-q"]
    result = measure("bench", "--synthetic", "tiny", *args, "--plot", tmp_path / "x.png")
    assert result.code == 0 and (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert measure("bench", "--synthetic", "tiny", *args, "--plot", tmp_path / "no" / "x.png").code == 1


# Two runs


def row(avg: float, spread: float, **more) -> str:
    samples = [avg - spread, avg, avg + spread]
    facts = {"model_type": "llama 1B Q4_0", "n_prompt": 512, "n_gen": 0, "n_depth": 0, "precision": "fast"}
    return json.dumps(facts | {"avg_ts": avg, "stddev_ts": spread, "samples_ts": samples} | more)


def compare(tmp_path, old: list[str], new: list[str], *args: str) -> subprocess.CompletedProcess:
    for name, lines in (("old", old), ("new", new)):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    command = [sys.executable, ROOT / "scripts/bench_compare.py", tmp_path / "old", tmp_path / "new", *args]
    return subprocess.run(command, capture_output=True, text=True)


def test_compare(tmp_path):
    old = [row(100, 1), row(50, 1, n_depth=64), row(10, 0.01, n_gen=8), row(70, 1, n_prompt=1)]
    new = [row(98, 1), row(40, 1, n_depth=64), row(12, 0.01, n_gen=8), row(70, 1, n_prompt=2)]
    result = compare(tmp_path, old, new)
    assert result.returncode == 1
    _, noisy, slower, faster = result.stdout.splitlines()
    assert noisy.endswith("-2.0%    2.4%") and slower.endswith("SLOWER") and "pp512 @ d64" in slower
    assert faster.endswith("faster") and "pp512+tg8" in faster
    assert "1 tests are only in the old file" in result.stderr
    assert compare(tmp_path, old, old).returncode == 0
    assert compare(tmp_path, old, new, "--least", "25").returncode == 0


def test_compare_what_cannot_be(tmp_path):
    assert compare(tmp_path, [row(1, 0)], [row(1, 0, n_gen=3)]).returncode == 2
    assert "old" in compare(tmp_path, ["nonsense"], [row(1, 0)]).stderr
