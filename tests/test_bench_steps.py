"""`bench steps`: which rows it measures, the cliffs that it finds, and what it writes."""

import csv
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from measuring import Runner, measure  # noqa: F401

pytest.importorskip("wgpu")
from llamagpu.bench import steps
from llamagpu.bench.steps import StepTimes, find_cliffs, ladder, settle, step_row, told

TINY = ("bench", "steps", "--synthetic", "tiny", "-r", "2")


def test_ladder() -> None:
    """Every number up to 32, four an octave, and both sides of where the plan changes."""
    found = ladder(1000, lambda m: next(width for width in (1, 8, 50, 300, 1000) if m <= width))
    assert found[:32] == list(range(1, 33))
    assert found[32:] == [
        *(40, 48, 50, 51, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 300, 301, 320, 384, 448, 512, 640, 768, 896),
        1000,
    ]
    assert ladder(5, lambda m: 1) == [1, 2, 3, 4, 5]


def test_cliffs() -> None:
    times = {1: 500, 2: 600, 3: 595, 4: 640, 5: 900, 8: 1300, 16: 840, 17: 812, 32: 1290, 64: 2000}
    found = find_cliffs({m: 1e3 * us for m, us in times.items()})
    assert [(cliff.rows, cliff.than) for cliff in found] == [(5, 4), (16, 8), (17, 8)]
    assert [cliff.mark for cliff in found] == ["1.41x", "< 8", "< 8"]
    assert told(found) == [
        "5 rows take 900 us, 1.41 times as long as 4",
        "17 rows take 812 us, less than 8 with 1300 us",  # the lowest of the two
    ]
    assert find_cliffs({1: 2.0, 2: 2.0, 3: 2.1}) == [] and find_cliffs({7: 1.0}) == []


def sweeps(times: dict[int, list[float]]) -> Callable[[int], float]:
    return lambda m: times[m].pop(0) if len(times[m]) > 1 else times[m][0]


def test_settling() -> None:
    """Only rows that drift are swept again."""
    times = {1: [5.0, 5.1, 0.0], 2: [9.0, 6.0, 5.0, 5.0, 0.0], 3: [4.0]}
    assert settle(sweeps(times), [1, 2, 3]) == set()
    assert (times[1], times[2]) == ([0.0], [0.0])
    never = {1: [2.0**-i for i in range(9)], 2: [1.0]}
    assert settle(sweeps(never), [1, 2], sweeps=3) == {1} and len(never[1]) == 5


def test_row() -> None:
    row = step_row(4, StepTimes([4000.0, 6000.0, 5000.0], [4000.0, 3900.0, 4100.0], True), 8_000_000)
    assert (row["n_rows"], row["wall_ns"], row["gpu_ns"], row["wall_per_gpu"]) == (4, 5000, 4000, 1.25)
    assert (row["rows_per_s"], row["linear_tflops"], row["settled"]) == (8e5, 2.0, True)
    unclocked = step_row(4, StepTimes([4000.0]), 8_000_000)
    assert unclocked["gpu_ns"] is None and unclocked["wall_per_gpu"] is None and unclocked["linear_tflops"] == 2.0
    assert [cell for cell in steps.cells(unclocked | {"model_type": "m", "cliff": None})] == [
        *("m", "4", "-", "4.0", "-", "1000000.0", "2", "")
    ]


def test_rows_of_a_model(measure: Runner) -> None:  # noqa: F811
    found = measure(*TINY, "--rows", "1-2,5", "-d", "3", "-o", "json")
    assert found.code == 0 and found.err
    rows: list[dict[str, Any]] = found.json
    assert [(row["n_rows"], row["n_depth"]) for row in rows] == [(1, 3), (2, 3), (5, 3)]
    assert all(list(row) == list(steps.FIELDS) and row["wall_ns"] > 0 for row in rows)


def test_formats(measure: Runner) -> None:  # noqa: F811
    table = measure(*TINY, "--rows", "2,2", "-q")
    names, _, row = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.out.splitlines())
    assert tuple(names) == steps.COLUMNS and row[:2] == ["tiny Q4_0 (random)", "2"] and not table.err
    assert json.loads(measure(*TINY, "--rows", "2", "-o", "jsonl", "-q").out)["n_rows"] == 2
    header, values = csv.reader(io.StringIO(measure(*TINY, "--rows", "2", "-o", "csv", "-q").out))
    assert tuple(header) == steps.FIELDS and values[header.index("n_rows")] == "2"


def test_picture(measure: Runner, tmp_path: Any) -> None:  # noqa: F811
    assert measure(*TINY, "--rows", "1-2", "-q", "--plot", tmp_path / "x.svg").code == 0
    assert "<svg" in (tmp_path / "x.svg").read_text()


@pytest.mark.parametrize("args", [["--rows", "0"], ["--rows", "x"], ["--rows", "5000"], ["-o", "sql"], ["-d", "-1"]])
def test_bad_arguments(measure: Runner, args: list[str]) -> None:  # noqa: F811
    result = measure(*TINY, *args)
    assert result.code == 2 and result.out == "" and "bug" not in result.err
