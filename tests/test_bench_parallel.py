"""`bench --parallel`: sequences together, with llama-batched-bench's columns."""

import csv
import io
import json
from itertools import chain, repeat
from types import SimpleNamespace

import pytest
from gguf_builder import overflowing_llama, tiny_llama
from test_bench import shared_gpu  # noqa: F401
from test_cli import run  # noqa: F401

from llamagpu.bench import parallel
from llamagpu.bench.bench import BenchOptions
from llamagpu.bench.cases import BenchCase
from llamagpu.cli.terminal import Interrupted
from llamagpu.engine.load import load_model
from llamagpu.engine.options import EngineOptions
from llamagpu.engine.pages import PAGE
from llamagpu.errors import NumericCheckFailed

pytestmark = pytest.mark.usefixtures("shared_gpu")
ARGS = ("bench", "--synthetic", "tiny", "--parallel", "1,3", "-p", 9, "-n", 5, "-r", 1)


def test_columns_and_counts(run):  # noqa: F811
    lines = run(*ARGS).out.decode().splitlines()
    names = [cell.strip() for cell in lines[0].split("|")[1:-1]]
    assert names == ["PP", "TG", "B", "N_KV", "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s", "T s", "S t/s"]
    rows = [dict(zip(names, map(float, line.split("|")[1:-1]), strict=True)) for line in lines[2:]]
    assert [(row["PP"], row["TG"], row["B"], row["N_KV"]) for row in rows] == [(9, 5, 1, 14), (9, 5, 3, 42)]
    for row in rows:
        assert row["T s"] == pytest.approx(row["T_PP s"] + row["T_TG s"], abs=0.002)
        assert row["T_TG s"] == pytest.approx(row["B"] * 4 / row["S_TG t/s"], abs=0.001)


def test_a_shared_prompt_is_counted_once(run):  # noqa: F811
    rows = [json.loads(line) for line in run(*ARGS, "-pps", "-ub", 4, "-ctk", "f32", "-o", "jsonl").out.splitlines()]
    assert [(row["pl"], row["is_pp_shared"], row["n_kv"], row["type_k"]) for row in rows] == [
        (1, True, 14, "f32"),
        (3, True, 9 + 2 + 3 * 5, "f32"),
    ]


def test_sequences_with_a_shared_page_wait_for_each_other(run):  # noqa: F811
    found = run(*ARGS[:3], "-npl", 3, "-pps", "-p", PAGE + 9, "-n", 5, "-r", 1, "-o", "jsonl").out
    [row] = map(json.loads, found.splitlines())
    assert row["n_kv"] == PAGE + 9 + 2 + 3 * 5 and round(row["speed_tg"] * row["t_tg"]) == 3 * 4


def test_csv_and_several_lengths(run):  # noqa: F811
    found = run(*ARGS[:3], "-npl", 2, "-pg", "4,2", "-pg", "5,1", "-pg", "5,0", "-r", 1, "-o", "csv").out.decode()
    rows = list(csv.DictReader(io.StringIO(found)))
    counts = [tuple(int(row[name]) for name in ("pp", "tg", "pl", "n_kv")) for row in rows]
    assert counts == [(4, 2, 2, 12), (5, 1, 2, 12), (5, 0, 2, 10)]
    # The first token of each comes with its prompt
    assert float(rows[1]["speed_tg"]) == float(rows[2]["speed_tg"]) == 0


def test_every_number_of_sequences_has_an_engine_of_its_own(run, monkeypatch):  # noqa: F811
    """A larger KV cache is slower on some GPUs: a row must not depend on the others."""
    found, measure = [], parallel.measure

    def measured(engine, case, width, *others):
        found.append((width, engine.settings.slots, engine.cache.capacity))
        return measure(engine, case, width, *others)

    monkeypatch.setattr(parallel, "measure", measured)
    run(*ARGS[:3], "-npl", "3,1,2", "-p", PAGE - 5, "-n", 5, "-r", 1)
    assert found == [(3, 3, 6 * PAGE), (1, 1, 2 * PAGE), (2, 2, 4 * PAGE)]


@pytest.mark.parametrize(
    "wrong",
    [
        ["-npl", 65],
        ["-npl", 0],
        ["-npl", "1,4", "-ub", 3],
        ["-d", 5],
        ["-o", "sql"],
        ["-oe", "md"],
        ["--plot", "x.png"],
    ],
)
def test_refused(run, wrong):  # noqa: F811
    result = run(*ARGS, *wrong)
    assert result.code == 2 and not result.out and len(result.err.splitlines()) == 2


def test_a_shared_prompt_needs_several_sequences(run):  # noqa: F811
    result = run("bench", "--synthetic", "tiny", "-pps")
    assert result.code == 2 and "give --parallel, too" in result.err


def test_measured_after_the_times_have_settled(monkeypatch):
    """A GPU that takes 0.4 s at first, then 0.1 s; and one that never takes the same time for long."""
    engine = SimpleNamespace(gpu=SimpleNamespace(software=False, compile_seconds=0.0))
    monkeypatch.setattr(parallel, "prompts_of", lambda *_: [])

    def measured(seconds) -> dict:
        monkeypatch.setattr(parallel, "run", lambda *_: parallel.Times(*[next(seconds) / 2] * 2, later=9))
        case, options = BenchCase(64, 4, None, 0, 8, 4), BenchOptions(repetitions=2)
        return parallel.measure(engine, case, 3, False, options, lambda *_: None) | {"model_type": "tiny"}

    settled = measured(chain(repeat(0.4, 7), repeat(0.1)))
    assert settled["t"] == pytest.approx(0.1) and settled["settled"] and settled["settle_ns"] > 3e9
    falls = measured(0.5 * 0.97**i for i in range(1000))
    assert falls["settled"] is False
    first, second = parallel.settling_lines([settled, falls | {"pl": 5}])
    assert first.startswith("tiny, 3 sequences: settled after 3.")
    assert second.startswith("tiny, 5 sequences: not settled: after 1")
    assert parallel.settling_lines([settled | {"settle_ns": 1e8}]) == []


@pytest.mark.parametrize("new", [1, 2, 20])
def test_all_sequences_decode_together(tmp_path, gpu, new):
    """Prompts that fill three steps: no sequence has a second token before the last one has its first."""
    options = EngineOptions(chunk=8, parallel=6, kv_positions=6 * PAGE)
    engine = load_model(tiny_llama(tmp_path / "m.gguf"), options, gpu=gpu).engine
    times = parallel.run(engine, [[1, 2, 3, 4 + i] for i in range(6)], new)
    assert times.later == 6 * (new - 1)


def test_a_failing_sequence_ends_the_run(tmp_path, gpu):
    path = overflowing_llama(tmp_path / "m.gguf", 5)
    engine = load_model(path, EngineOptions(parallel=2, kv_positions=2 * PAGE), gpu=gpu).engine
    with pytest.raises(NumericCheckFailed, match="not a number"):
        parallel.run(engine, [[1, 2], [1, 5]], 4)


def test_ctrl_c_between_steps(tmp_path, gpu):
    engine = load_model(tiny_llama(tmp_path / "m.gguf"), EngineOptions(), gpu=gpu).engine
    pressed = iter([False] * 3 + [True])

    def check() -> None:
        if next(pressed):
            raise Interrupted("interrupted")

    with pytest.raises(Interrupted):
        parallel.run(engine, [[1, 2]], 200, check)
