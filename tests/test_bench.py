"""`bench`: its cases, what it measures, the formats that it writes; and the comparison of two runs."""

import csv
import io
import json
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import DAWN, ROOT, open_gpu
from gguf_builder import tiny_llama
from measuring import Runner, measure  # noqa: F401

import llamagpu
from llamagpu.bench.report import FIELDS, LLAMA_BENCH_FIELDS, OUR_FIELDS, SAMPLES

pytest.importorskip("wgpu")
from llamagpu import markdown
from llamagpu.bench import bench as bench_module
from llamagpu.bench import cases, report
from llamagpu.bench.bench import BenchOptions, ModelFacts, Monitor, bench, between_tokens, model_facts, short_count
from llamagpu.bench.cases import BadValue, BenchCase, make_cases, numbers
from llamagpu.bench.kernels import matrices
from llamagpu.cli.bench_progress import BenchProgress, software_minutes, time_left
from llamagpu.engine.load import ModelSource, load_model, open_source
from llamagpu.engine.options import Backend, EngineOptions, KvType
from llamagpu.engine.sequence import Sequence
from llamagpu.engine.synthetic import MIXES, SHAPES, SyntheticFile, synthetic_config
from llamagpu.files.config import LayerKind
from llamagpu.files.gguf_file import BLOCKS
from llamagpu.gpu.device import Gpu
from llamagpu.gpu.recorder import Plan, Step
from llamagpu.gpu.timing import Span, Stopwatch, Timestamps, busy_ns

Rows = list[dict[str, Any]]


@pytest.fixture
def shared_gpu(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """`bench` opens and closes a device; here it gets the device of the tests."""
    monkeypatch.setattr(Gpu, "open", lambda wanted=None, sequences=1: gpu)
    monkeypatch.setattr(gpu, "close", lambda: None)
    return gpu


@pytest.fixture(scope="module")
def rows(gpu: Gpu) -> Rows:
    """A prompt, a generation, and both together, at two depths."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gpu, "open", lambda wanted=None, sequences=1: gpu)
        patch.setattr(gpu, "close", lambda: None)
        patch.setattr(gpu, "pipelines", {})  # other tests may have compiled the same kernels
        wanted = make_cases([5], [6], [(4, 3)], [0, 16], [2048], [512], [None])
        return list(bench("tiny:q4_0", wanted, BenchOptions(repetitions=3)))


# Cases


@pytest.mark.parametrize(
    "texts, want",
    [
        (["512"], [512]),
        (["1,2", "3"], [1, 2, 3]),
        (["3-6"], [3, 4, 5, 6]),
        (["0-9+4"], [0, 4, 8]),
        (["1-20*3"], [1, 3, 9]),
        (["128-512*2,7"], [128, 256, 512, 7]),
        (["5-3"], []),
        (["0"], [0]),
    ],
)
def test_numbers(texts: list[str], want: list[int]) -> None:
    assert numbers(texts) == want


@pytest.mark.parametrize("text", ["", "x", "1-", "-3", "1-5/2", "0-8*2", "1-8*1", "1-8+0", "1.5", "1-2-3", "1,,2"])
def test_bad_numbers_are_refused(text: str) -> None:
    with pytest.raises(BadValue) as error:
        numbers([text])
    assert error.value.exit_code == 2


def test_order_is_that_of_llama_bench() -> None:
    """Settings outside, then prompts, generations and pairs. Cases without tokens are left out."""
    cases = make_cases([8, 0], [4], [(2, 3), (0, 0)], [0, 5], [64], [16, 32], [None])
    lengths = [(8, 0), (0, 4), (2, 3)]
    want = [(ubatch, depth, *length) for ubatch in (16, 32) for depth in (0, 5) for length in lengths]
    assert [(case.n_ubatch, case.n_depth, case.n_prompt, case.n_gen) for case in cases] == want


def test_steps_of_a_case() -> None:
    both = BenchCase(64, 4, None, 10, 9, 2)
    assert list(both.steps()) == [(4, 10), (4, 14), (1, 18), (1, 19), (1, 20)]
    assert list(BenchCase(64, 4, None, 0, 0, 2).steps()) == [(1, 1), (1, 2)]  # sampling needs a token before it
    assert cases.positions([both]) >= 21


# Formats


def test_fields_are_those_of_llama_bench() -> None:
    """The fields of llama-bench's CSV, JSON and SQL, in its order."""
    fields = """
        build_commit build_number cpu_info gpu_info backends model_filename model_type model_size model_n_params
        n_batch n_ubatch n_threads cpu_mask cpu_strict poll type_k type_v n_gpu_layers n_cpu_moe split_mode main_gpu
        no_kv_offload flash_attn devices tensor_split tensor_buft_overrides load_mode embeddings no_op_offload no_host
        fit_target fit_min_ctx n_prompt n_gen n_depth test_time avg_ns stddev_ns avg_ts stddev_ts
    """
    assert " ".join(LLAMA_BENCH_FIELDS) == " ".join(fields.split())


def written(rows: Rows, output: str, *extra: str) -> str:
    printer = report.printer(output, extra)
    return printer.header() + "".join(printer.row(row) for row in rows) + printer.footer()


def test_csv(rows: Rows) -> None:
    found = list(csv.reader(io.StringIO(written(rows, "csv"))))
    assert tuple(found[0]) == FIELDS and found[0][: len(LLAMA_BENCH_FIELDS)] == list(LLAMA_BENCH_FIELDS)
    assert len(found) == 1 + len(rows)
    first = dict(zip(*found[:2], strict=True))
    assert first["n_prompt"] == "5" and first["cpu_strict"] == "0" and first["itl_p50_ns"] == ""
    assert float(first["avg_ts"]) == pytest.approx(rows[0]["avg_ts"], abs=1e-6)


@pytest.mark.parametrize("output", ["json", "jsonl"])
def test_json(rows: Rows, output: str) -> None:
    text = written(rows, output)
    found = json.loads(text) if output == "json" else [json.loads(line) for line in text.splitlines()]
    assert [list(row) for row in found] == [[*LLAMA_BENCH_FIELDS, *SAMPLES, *OUR_FIELDS]] * len(rows)
    assert found[1]["n_gen"] == 6 and found[1]["embeddings"] is False and found[1]["ttft_ns"] is None
    assert len(found[1]["samples_ns"]) == 3


def test_json_without_rows() -> None:
    assert json.loads(written([], "json")) == []


def test_sqlite_takes_the_sql(rows: Rows) -> None:
    quoted = [row | {"cpu_info": "Bob's; DROP TABLE llama_bench"} for row in rows]
    database = sqlite3.connect(":memory:")
    database.executescript(written(quoted, "sql"))
    found = database.execute("SELECT cpu_info, n_gen, avg_ts, ttft_ns FROM llama_bench").fetchall()
    assert [row[:2] for row in found] == [("Bob's; DROP TABLE llama_bench", row["n_gen"]) for row in rows]
    assert found[0][2] == pytest.approx(rows[0]["avg_ts"], abs=1e-5) and found[1][3] is None


def test_markdown(rows: Rows) -> None:
    names, lines, *body = written(rows, "md").splitlines()
    body, (empty, build) = body[:-2], body[-2:]
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in (names, *body)]
    assert split[0] == ["model", "size", "params", "backend", "ngl", "test", "t/s"]
    assert re.fullmatch(r"\|( -{2,}[-:] \|){7}", lines)
    assert [row[5] for row in split[1:]] == ["pp5", "tg6", "pp4+tg3", "pp5 @ d16", "tg6 @ d16", "pp4+tg3 @ d16"]
    assert all(re.fullmatch(r"\d+\.\d\d ± \d+\.\d\d", row[6]) for row in split[1:])
    assert split[1][1:3] == ["0.28 MiB", "0.46 M"]
    assert empty == "" and build == f"build: {llamagpu.__version__}"
    assert len({len(line) for line in (names, lines, *body)}) == 1


def test_markdown_shows_what_was_set(rows: Rows) -> None:
    header = written(rows, "md", "type_v", "n_batch", "flash_attn").splitlines()[0]
    shown = [cell.strip() for cell in header.strip("|").split("|")]
    assert shown[4:] == ["ngl", "n_batch", "type_v", "fa", "test", "t/s"]


def test_table_is_aligned() -> None:
    lines = markdown.table(("name", "m"), [["a", "1"], ["bcdefg", "12"]]).splitlines()
    assert lines == ["| name   |   m |", "| ------ | --: |", "| a      |   1 |", "| bcdefg |  12 |"]


# Measuring, with a clock and a recorder of known times


class FakeEngine:
    """Takes the times of `runs`: seconds of the prefill, and of the decode, of each run in turn."""

    gpu = SimpleNamespace(software=True, compile_seconds=0.0)
    config = SimpleNamespace(vocab=10)

    def __init__(self, runs: list[tuple[float, float]]) -> None:
        self.now, self.runs, self.calls = 100.0, list(runs), []  # type: ignore[var-annotated]

    def prefill(self, sequence: Sequence, ids: list[int]) -> None:
        assert all(0 <= token < 10 for token in ids)
        self.calls.append(("prefill", len(sequence), len(ids)))
        self.now += self.runs[0][0]
        sequence.ids += ids

    def greedy(self, sequence: Sequence, most: int) -> Iterator[int]:
        self.calls.append(("greedy", len(sequence), most))
        self.now += self.runs[0][1]
        yield from range(most)

    def discard(self, sequence: Sequence) -> None: ...

    def wait_idle(self, gpu: object) -> None:
        self.calls.append(("wait",))


class FakeRecorder:
    def __init__(self, taken: list[tuple[list[Span], list[list[float]] | None]]) -> None:
        self.taken = list(taken)

    def take_spans(self) -> tuple[list[Span], Any]:
        spans, passes = self.taken.pop(0)
        return spans, None if passes is None else np.array(passes)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[dict[str, Any], FakeEngine]]:
    def run(
        case: BenchCase, runs: list[tuple[float, float]], taken: list[Any], **options: Any
    ) -> tuple[dict[str, Any], FakeEngine]:
        engine, recorder = FakeEngine(runs), FakeRecorder(taken)
        clock = SimpleNamespace(perf_counter=lambda: engine.now, strftime=time.strftime, gmtime=time.gmtime)
        monkeypatch.setattr(bench_module, "time", clock)
        monkeypatch.setattr(bench_module, "TimedRecorder", lambda gpu: recorder)
        monkeypatch.setattr(bench_module, "wait_idle", engine.wait_idle)
        starts = []

        class Starts(Monitor):
            def run_starts(self, stage: str, done: int, runs: int) -> None:
                assert done == len(starts) < runs == planned
                if starts:
                    engine.runs.pop(0)
                starts.append(engine.now)

        planned = len(runs)
        found = bench_module.measure(engine, case, BenchOptions(**options), Starts())  # type: ignore[arg-type]
        assert not recorder.taken and len(engine.runs) == 1, "all of the runs took place"
        return found, engine

    return run


def test_measured_prompt_and_generation(measured: Callable[..., Any]) -> None:
    """Two runs to warm up, two repetitions of 0.4 and 0.6 s for 6 tokens, and one to the first token."""
    runs = [(9.0, 9.0), (9.0, 9.0), (0.1, 0.3), (0.2, 0.4), (0.1, 0.05)]
    prefill = Span(1, 10, began=1.0, recorded=1.001, submitting=1.002, submitted=1.004)  # nobody waits for it
    times = dict(began=2.0, recorded=2.003, submitting=2.003, submitted=2.004)
    two_tokens = [Span(1, 1, **times, done=3.0), Span(4, 21, **times, done=3.2)]
    one_by_one = [Span(1, 1, **times, done=4.0), Span(2, 11, **times, done=4.1), Span(2, 11, **times, done=4.4)]
    taken = [
        ([], None),  # of the warm-up
        ([prefill, *two_tokens], [[0.0, 2e8]]),
        ([prefill, *one_by_one], [[0.0, 1e8], [5e7, 3e8]]),  # passes that overlap
        ([], None),  # of the run to the first token
    ]
    row, engine = measured(BenchCase(64, 4, None, 3, 4, 2), runs, taken, repetitions=2)
    both, first = [("prefill", 3, 4), ("greedy", 7, 3)], [("prefill", 3, 4), ("greedy", 7, 1)]
    assert [call for call in engine.calls if call != ("wait",)] == [*both, *first, *both, *both, *first]
    assert row["samples_ns"] == [400_000_000, 600_000_000] and row["samples_ts"] == [15.0, 10.0]
    assert (row["avg_ns"], row["stddev_ns"]) == (500_000_000, 141_421_356)
    assert (row["avg_ts"], row["median_ts"]) == (12.5, 12.5) and row["stddev_ts"] == pytest.approx(3.5355339)
    assert row["ttft_ns"] == 150_000_000
    # 0.1, 0.1, 0.1 and 0.3 s between tokens
    assert row["itl_p50_ns"] == pytest.approx(1e8) and row["itl_p95_ns"] == pytest.approx(2.7e8)
    assert row["gpu_ns"] == 250_000_000
    assert row["encode_ns"] == pytest.approx(8_500_000) and row["submit_ns"] == pytest.approx(4_500_000)
    assert row["dispatches_per_token"] == pytest.approx(65 / 12)


def test_measured_generation_alone(measured: Callable[..., Any]) -> None:
    """It starts from one token in the cache, and has no time to the first token."""
    span = Span(1, 1, 0.0, 0.0)
    row, engine = measured(
        BenchCase(64, 4, None, 0, 0, 3),
        [(9.0, 9.0), (9.0, 2.0)],
        [([], None), ([span], None), ([], None)],
        repetitions=1,
    )
    assert engine.calls == [("wait",), ("greedy", 1, 4)] * 2
    assert (row["avg_ts"], row["stddev_ts"], row["stddev_ns"]) == (1.5, 0.0, 0)
    assert row["ttft_ns"] is None and row["itl_p50_ns"] is None and row["gpu_ns"] is None


def test_measured_prompt_alone(measured: Callable[..., Any]) -> None:
    """The clock runs until the device is idle. Without a warm-up the first run counts."""
    runs = [(0.5, 9.0), (0.25, 0.25)]
    row, engine = measured(BenchCase(64, 4, None, 0, 8, 0), runs, [([], None)] * 3, repetitions=1, warmup=False)
    wait, prefill = ("wait",), ("prefill", 0, 8)
    assert engine.calls == [wait, prefill, wait, wait, prefill, ("greedy", 8, 1)]
    assert (row["avg_ts"], row["ttft_ns"]) == (16.0, 500_000_000) and row["itl_p95_ns"] is None


def test_measured_after_the_times_have_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose runs take 0.4 s, from the tenth second on 0.1 s: in the middle of the repetitions."""
    engine = FakeEngine([])
    engine.gpu = SimpleNamespace(software=False, compile_seconds=0.0)
    recorder = SimpleNamespace(take_spans=lambda: ([Span(1, 1, 0.0, 0.0)], None))

    def prefill(sequence: Sequence, ids: list[int]) -> None:
        engine.now += 0.4 if engine.now < 103.5 else 0.1

    monkeypatch.setattr(engine, "prefill", prefill)
    monkeypatch.setattr(engine, "greedy", lambda sequence, most: ())
    clock = SimpleNamespace(perf_counter=lambda: engine.now, strftime=time.strftime, gmtime=time.gmtime)
    monkeypatch.setattr(bench_module, "time", clock)
    monkeypatch.setattr(bench_module, "TimedRecorder", lambda gpu: recorder)
    monkeypatch.setattr(bench_module, "wait_idle", lambda gpu: None)
    case = BenchCase(64, 4, None, 0, 8, 0)
    row = bench_module.measure(engine, case, BenchOptions(repetitions=4), Monitor())  # type: ignore[arg-type]
    assert row["samples_ns"] == pytest.approx([100_000_000] * 4) and row["settled"] is True
    assert row["settle_ns"] > 3.5e9  # two blocks, repetitions that did not count, two blocks
    said = report.settling(row | {"n_prompt": 8, "n_gen": 0, "n_depth": 0})
    assert re.fullmatch(r"pp8: settled after \d\.\d s of warm-up", said)


def test_what_is_said_about_settling() -> None:
    row = {"n_prompt": 8, "n_gen": 0, "n_depth": 0, "settled": True, "settle_ns": 700_000_000}
    assert report.settling(row) == "" and report.settling(row | {"settled": None, "settle_ns": 0}) == ""
    assert "pp8: not settled: after 10.2 s" in report.settling(row | {"settled": False, "settle_ns": 10.2e9})


def test_real_rows_are_complete(rows: Rows, gpu: Gpu) -> None:
    for row in rows:
        assert len(row["samples_ns"]) == 3 and min(row["samples_ns"]) > 0 and row["encode_ns"] > 0
        assert row["gpu_ns"] is None or row["gpu_ns"] > 0
        assert (row["ttft_ns"] is None) == (row["n_prompt"] == 0)
        assert (row["itl_p50_ns"] is None) == (row["n_gen"] == 0)
        assert row["load_ns"] > 0 and row["gpu_bytes_peak"] > row["model_size"]
        assert (row["settled"] is None) == gpu.software  # a CPU's times do not settle
    assert rows[0]["compile_ns"] > 0


def test_work_of_the_tiny_model(rows: Rows, gpu: Gpu) -> None:
    """Computed by hand: 2 layers of 196,608 weights, 65,536 in the output; every step reads every matrix once."""
    pp, tg, both, pp_deep, tg_deep, _ = rows
    # a row of 128 weights in q4 is 64 bytes and 4 groups: textures have scale and offset in f32, buffers a scale
    step_bytes = 376_832 if gpu.caps.cpu else 290_816 if gpu.caps.native_f16 else 319_488
    assert tg["weight_bytes_per_token"] == step_bytes
    assert pp["weight_bytes_per_token"] == step_bytes / 5 and both["weight_bytes_per_token"] == step_bytes * 4 / 7
    # keys and values of a position: 2 layers, 2 heads of 64, 2 or 4 bytes each
    position = 1024 if tg["type_k"] == "f16" else 2048
    assert tg["kv_bytes_per_token"] == position * 4.5  # positions 2 to 7
    assert tg_deep["kv_bytes_per_token"] == position * 19.5  # positions 17 to 22
    assert pp_deep["kv_bytes_per_token"] == position * 4.2  # 21 positions for 5 tokens
    # 5 * 2 * 393,216 in the layers, 2 * 65,536 in the output, 15 * 2,048 in attention
    assert pp["tflops"] * pp["avg_ns"] * 1e3 == pytest.approx(4_093_952)
    # 6 * (2 * 393,216 + 2 * 65,536), 27 * 2,048 in attention
    assert tg["tflops"] * tg["avg_ns"] * 1e3 == pytest.approx(5_560_320)


def test_rates() -> None:
    """A made-up model: 1000 bytes of weights and 10 of cache for each position, in 2 steps of 100 ns in all."""
    matrix = SimpleNamespace(n=10, k=20, used=1)
    weights = SimpleNamespace(layers=[SimpleNamespace(matrices=[matrix] * 3)], output=matrix, token_bytes=1000)
    config = SimpleNamespace(kinds=(LayerKind(),), layers=1, q_width=8)
    loaded, engine = (
        SimpleNamespace(config=config, weights=weights),
        SimpleNamespace(cache=SimpleNamespace(attention_bytes=10)),
    )
    case = BenchCase(4, 4, None, 0, 6, 0)  # 4 rows, then 2
    found = bench_module.rates(loaded, engine, case, 100.0, 42e9)  # type: ignore[arg-type]
    assert found == {
        "weight_bytes_per_token": pytest.approx(2000 / 6),
        "kv_bytes_per_token": pytest.approx(100 / 6),  # 4 positions, then 6
        "gbps": pytest.approx(21.0),
        "copy_gbps": 42.0,
        "copy_share": pytest.approx(0.5),
        "tflops": pytest.approx((2 * 6 * 600 + 2 * 2 * 200 + 4 * 8 * 21) / 1e5),
    }
    windowed = replace(case, n_depth=100)
    config.kinds = (LayerKind(5),)
    found = bench_module.rates(loaded, engine, windowed, 100.0, 42e9)  # type: ignore[arg-type]
    assert found["kv_bytes_per_token"] == pytest.approx(10 * (9 + 7) / 6)  # the window and the step's own rows


def test_model_facts(tmp_path: Any) -> None:
    found = model_facts(open_source("tiny:q4_0"))
    # 393,216 weights of Q4_0, 65,536 of Q8_0, 5 norms of 128 f32
    assert (found.params, found.size) == (459_392, 221_184 + 69_632 + 2_560)
    assert (found.filename, found.type) == ("synthetic:tiny:q4_0", "tiny Q4_0 (random)")
    path = tiny_llama(tmp_path / "m.gguf", metadata={"general.file_type": 15})
    named = model_facts(open_source(path))
    assert (named.filename, named.type) == (str(path), f"llama {short_count(named.params)} Q4_K - Medium")


def test_counts_in_words() -> None:
    assert [short_count(n) for n in (12, 260_000, 134_515_008, 1_235_814_400)] == ["12", "260K", "135M", "1.24B"]


def test_time_between_tokens() -> None:
    """Three submissions after the first token: of 1, 2 and 4 tokens."""
    spans = [Span(1, 1, 0, 0, 0, 1.0), Span(2, 9, 0, 0, 0, 1.1), Span(4, 18, 0, 0, 0, 1.5), Span(8, 36, 0, 0, 0, 1.9)]
    assert between_tokens(spans) == pytest.approx([1e8] + [2e8] * 2 + [1e8] * 4)
    assert between_tokens([Span(3, 9, 0, 0, 0)]) == []  # a prefill: nobody waited


def test_busy_time_counts_overlaps_once() -> None:
    assert busy_ns(np.array([[0, 10], [5, 12], [20, 30], [22, 25]])) == 12 + 10


def test_timestamps_beyond_one_query_set(gpu: Gpu) -> None:
    if "timestamp-query-inside-passes" not in gpu.features:
        pytest.skip("the adapter has no timestamps inside passes")
    buffer, watch = gpu.zeros(64, "y"), Stopwatch(gpu)
    dispatch = gpu.dispatch("fill_random", (), {"WORDS": 16, "MASK": 0, "VALUE": 7}, {"y": buffer}, (1, 1, 1))
    for count in (5000, 3):  # the second time the queries are used again
        stamps, span = watch.dispatches_ns([Step(Plan([dispatch] * count))])
        assert len(stamps) == count + 1 and span.dispatches == count
        assert (np.diff(stamps) >= 0).all() and stamps[-1] > stamps[0]
    assert len(Timestamps(gpu).read()) == 0


# Models


def test_engines_share_the_weights(shared_gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases with other chunks and KV types get separate engines on weights that are loaded once."""
    found = []
    monkeypatch.setattr(
        bench_module, "load_model", lambda *args, **more: found.append(load_model(*args, **more)) or found[0]
    )
    before = shared_gpu.allocated_bytes
    wanted = make_cases([6], [2], [], [0], [2048], [2, 8], [KvType.F32, KvType.F16])
    rows = list(bench("tiny", wanted, BenchOptions(repetitions=1, warmup=False)))
    assert [(row["n_ubatch"], row["type_k"]) for row in rows] == [
        (ubatch, kv_type) for ubatch in (2, 8) for kv_type in ("f32", "f16") for _ in range(2)
    ]
    assert len(found) == 1 and found[0].settings.backend is Backend.BUFFERS  # an f16 cache has no textures
    assert shared_gpu.allocated_bytes - before == found[0].memory.weights  # every engine is freed


def test_cases_beyond_the_context_of_the_training(shared_gpu: Gpu) -> None:
    wanted = make_cases([4], [], [], [1100], [2048], [512], [None])  # tiny was "trained" for 1024
    assert [row["n_depth"] for row in bench("tiny", wanted, BenchOptions(repetitions=1))] == [1100]


def test_probe_gets_a_separate_engine(shared_gpu: Gpu) -> None:
    """The probe unfuses its engine; the rows are measured with another one."""
    probed = []
    wanted = make_cases([], [2], [], [0], [2048], [512], [None])
    (row,) = bench(
        "tiny", wanted, BenchOptions(repetitions=1), probe=lambda engine, copy: probed.append((engine, copy))
    )
    ((engine, copy),) = probed
    assert copy == row["copy_gbps"] * 1e9 and not engine.model.plans  # freed


def test_an_engine_frees_all_that_it_allocates(gpu: Gpu) -> None:
    for device in (gpu, open_gpu(LLAMAGPU_FUSED="1")):
        loaded = load_model("tiny:q4_0", EngineOptions(context=64, chunk=16, backend=Backend.BUFFERS), gpu=device)
        loaded.engine.free()
        before = device.allocated_bytes
        engine = loaded.another_engine(EngineOptions(context=64, chunk=16))
        assert device.allocated_bytes > before and (device is gpu or engine.model.fused or DAWN)
        list(engine.greedy(Sequence(ids=[1]), 2))
        engine.free()
        assert device.allocated_bytes == before


# Parameters as published, norms included
PARAMS = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "smollm2": 134_515_008,
    "tinyllama": 1_100_048_384,
    "llama-2-7b": 6_738_415_616,
}


@pytest.mark.parametrize("name", PARAMS)
def test_synthetic_shapes_are_the_real_ones(name: str) -> None:
    assert model_facts(open_source(name)).params == PARAMS[name]
    layer = sum(weight.n * weight.k for _, weight in matrices(name)) + 2 * SHAPES[name].dim  # of `bench kernels`
    outside = SHAPES[name].vocab * SHAPES[name].dim * (1 if SHAPES[name].tied else 2) + SHAPES[name].dim
    assert SHAPES[name].layers * layer + outside == PARAMS[name]


@pytest.mark.parametrize(("name", "params"), [("gemma-3-1b", 999_812_736), ("qwen3-30b-a3b", 3_340_437_504)])
def test_sizes_of_another_architecture_as_a_llama(name: str, params: int) -> None:
    """As large, but for norms; of experts those that a token uses, without routers."""
    config = synthetic_config(f"{name}@llama")
    assert not config.experts and not config.norms_after and not config.rotates_apart
    assert model_facts(open_source(f"{name}@llama")).params == params


@pytest.mark.parametrize("quant", MIXES)
@pytest.mark.parametrize("name", SHAPES)
def test_synthetic_tensors_are_of_types_that_their_rows_can_have(name: str, quant: str) -> None:
    for tensor in SyntheticFile(f"{name}:{quant}").tensors.values():
        assert tensor.shape[-1] % BLOCKS[tensor.ggml_type][0] == 0, tensor


@pytest.mark.parametrize("backend", [None, Backend.BUFFERS])
@pytest.mark.parametrize("quant", MIXES)
def test_synthetic_weights_keep_activations_finite(gpu: Gpu, quant: str, backend: Backend | None) -> None:
    config = replace(synthetic_config("tiny"), dim=256)  # whole super-blocks
    file = SyntheticFile(f"tiny:{quant}", config)
    source = ModelSource(file, config, file.matrices())
    loaded = load_model(source, EngineOptions(context=16, backend=backend), gpu=gpu)
    loaded.engine.prefill(Sequence(), [3, 1, 4])
    logits = loaded.engine.read_logits()
    loaded.engine.free()
    assert np.isfinite(logits).all() and np.abs(logits).max() > 1e-3


# The command


def test_synthetic_models_in_both_precisions(measure: Runner) -> None:  # noqa: F811
    for precision in ("fast", "high"):
        flags = ("-p", "4", "-n", "2", "-r", "1", "-o", "json", "-q", "--precision", precision)
        result = measure("bench", "--synthetic", "tiny", *flags)
        assert result.code == 0 and [row["precision"] for row in result.json] == [precision] * 2


def test_pasted_llama_bench_flags(measure: Runner) -> None:  # noqa: F811
    flags = "-ngl 99 -t 4,8 --n_cpu_moe=0 -mmp 0 -sm none --poll 50 -fa 1 -r 1 -o json --no-warmup"
    result = measure("bench", "--synthetic", "tiny", "-p", "4", "-n", "0", *flags.split())
    assert result.code == 0 and len(result.json) == 1
    assert "-ngl -t --n-cpu-moe -mmp -sm --poll" in result.err and "-fa" not in result.err
    assert not measure("bench", "--synthetic", "tiny", "-p", "4", "-n", "0", *flags.split(), "-q").err


def test_stdout_carries_only_the_table(measure: Runner) -> None:  # noqa: F811
    result = measure("bench", "--synthetic", "tiny,tiny:f16", "-p", "4", "-n", "0", "-r", "1", "--progress")
    assert result.code == 0
    table = [line for line in result.out.splitlines() if line]
    assert len(table) == 2 + 2 + 1 and all(line.startswith(("|", "build:")) for line in table)
    assert result.err.count("starting") == 2 and result.err.count("of a copy") == 2


def test_each_test_gets_a_line_where_there_is_no_terminal(measure: Runner) -> None:  # noqa: F811
    args = ["bench", "--synthetic", "tiny", "-p", "4", "-n", "2", "-r", "3"]
    said = measure(*args).err
    lines = [line for line in said.splitlines() if line.startswith("tiny: ")]
    assert lines == ["tiny: test 1 of 2, pp4", "tiny: test 2 of 2, tg2"] and " run " not in said
    assert "tiny: test" not in measure(*args, "--progress").err
    assert not measure(*args, "-q").err


def test_time_left() -> None:
    assert time_left(0.5, 0, 7) == ""  # nothing is known before the first run
    assert time_left(20.0, 2, 7) == ", about 50 s left"
    assert time_left(120.0, 2, 7) == ", about 5 min left"
    assert time_left(3.0, 9, 7) == ", about 0 s left"  # a GPU may need more runs to warm up


def test_a_long_benchmark_on_a_software_adapter_is_told_first(gpu: Gpu, capsys: pytest.CaptureFixture[str]) -> None:
    """The default cases of a 1B model take half an hour there, those of the tiny model no time at all."""
    cases = [BenchCase(2048, 512, None, 0, 512, 0), BenchCase(2048, 512, None, 0, 0, 128)]
    assert 10 < software_minutes(1_200_000_000, cases, 5) < 60 and software_minutes(460_000, cases, 5) < 0.1
    for params, quiet in ((1_200_000_000, False), (1_200_000_000, True), (460_000, False)):
        progress = BenchProgress("model", cases, 5, quiet, False, lambda: None)
        progress.opened(gpu, ModelFacts("", "", 0, params))
        said = capsys.readouterr().err
        assert ("--synthetic tiny" in said) == (gpu.software and params > 1e9 and not quiet)


def test_two_outputs_and_details(measure: Runner) -> None:  # noqa: F811
    result = measure("bench", "--synthetic", "tiny", "-p", "4", "-n", "0", "-r", "1", "-oe", "jsonl", "-q", "-v")
    assert result.code == 0 and json.loads(result.err)["n_prompt"] == 4
    assert "median t/s" in result.out and "gpu/wall" in result.out and "a copy " in result.out


def test_a_file(measure: Runner, tmp_path: Any) -> None:  # noqa: F811
    path = tiny_llama(tmp_path / "m.gguf", context=256, head_dim=32)
    both = ["-ctk", "q8_0,f32", "-ctv", "q8_0,f32"]
    result = measure("bench", "-m", path, "-p", "4", "-n", "3", *both, "-d", "3", "-r", "1", "-o", "json", "-q")
    assert result.code == 0
    rows = result.json
    assert [(r["n_prompt"], r["type_k"]) for r in rows] == [(4, "q8_0"), (0, "q8_0"), (4, "f32"), (0, "f32")]
    assert {r["model_filename"] for r in rows} == {str(path)}
    assert all(r["model_size"] < path.stat().st_size and r["gpu_bytes_peak"] > 0 for r in rows)


def test_too_little_memory_is_said_before_the_first_row(measure: Runner, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("LLAMAGPU_MAX_MEMORY", "8")
    result = measure("bench", "--synthetic", "tiny", "-p", "4", "-n", "0", "-d", "0,6000", "-r", "1")
    assert result.code == 5 and result.out == "" and "MiB" in result.err


@pytest.mark.parametrize(
    "args, code",
    [
        (["-p", "x"], 2),
        (["-p", "0", "-n", "0"], 2),
        (["--delay", "inf"], 2),
        (["-pg", "5"], 2),
        (["-o", "xml"], 2),
        (["-ctk", "q4_0"], 2),
        (["-ctk", "f16", "-ctv", "f32"], 2),
        (["-r", "0"], 2),
        (["--synthetic", "nope"], 2),
        (["--synthetic", "tiny:q9"], 2),
        (["--synthetic", "tiny@qwen3"], 2),
        (["-m", "no/such/file.gguf"], 1),
        (["--nonsense"], 2),
    ],
)
def test_bad_arguments(measure: Runner, args: list[str], code: int) -> None:  # noqa: F811
    result = measure("bench", *args)
    assert result.code == code and result.out == "" and "bug" not in result.err


def test_a_misspelled_synthetic_name(measure: Runner) -> None:  # noqa: F811
    assert "did you mean llama-3.2-1b?" in measure("bench", "--synthetic", "llama-3.2-1x").err
    assert "choose one of q4_0" in measure("bench", "--synthetic", "llama-3.2-1b:q9").err
    assert "choose one of q4_0" in measure("bench", "--synthetic", "gemma-3-1b@llama:q9").err


def test_plot_without_matplotlib(measure: Runner, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    missing = measure("bench", "--synthetic", "tiny", "--plot", tmp_path / "x.png")
    assert missing.code == 1 and "llamagpu[plot]" in missing.err and missing.out == ""


def test_plot_is_a_picture(measure: Runner, tmp_path: Any) -> None:  # noqa: F811
    args = ["-p", "4", "-n", "2", "-d", "0,8", "-r", "2", "-q"]
    result = measure("bench", "--synthetic", "tiny", *args, "--plot", tmp_path / "x.png")
    assert result.code == 0 and (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert measure("bench", "--synthetic", "tiny", *args, "--plot", tmp_path / "no" / "x.png").code == 1


# Two runs


def row(avg: float, deviation: float, **more: Any) -> str:
    samples = [avg - deviation, avg, avg + deviation]
    facts = {"model_type": "llama 1B Q4_0", "n_prompt": 512, "n_gen": 0, "n_depth": 0, "precision": "fast"}
    return json.dumps(facts | {"avg_ts": avg, "stddev_ts": deviation, "samples_ts": samples} | more)


def compare(tmp_path: Any, old: list[str], new: list[str], *args: str) -> "subprocess.CompletedProcess[str]":
    for name, lines in (("old", old), ("new", new)):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    command = [sys.executable, ROOT / "scripts/bench_compare.py", tmp_path / "old", tmp_path / "new", *args]
    return subprocess.run(command, capture_output=True, text=True)


def test_compare(tmp_path: Any) -> None:
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


def test_compare_refuses_files_that_it_cannot_compare(tmp_path: Any) -> None:
    assert compare(tmp_path, [row(1, 0)], [row(1, 0, n_gen=3)]).returncode == 2
    assert "old" in compare(tmp_path, ["nonsense"], [row(1, 0)]).stderr
