"""`profile`: every dispatch has its op, layer, time and work; the trace and the page are what their readers expect."""

import json
import shutil
import subprocess
import time
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import WGPU, open_gpu
from measuring import Runner, measure  # noqa: F401

pytest.importorskip("wgpu")
from llamagpu.engine.decode import decode_steps
from llamagpu.engine.engine import Engine
from llamagpu.engine.load import load_model
from llamagpu.engine.options import Backend, EngineOptions, KvType, Precision
from llamagpu.engine.routes import Attention, Inputs, Linear, Prologue, RowWise
from llamagpu.files.storage import Storage
from llamagpu.gpu.device import Dispatch, Gpu
from llamagpu.gpu.dry_gpu import PlannedBuffer
from llamagpu.gpu.recorder import Step
from llamagpu.gpu.settle import BLOCK_RUNS
from llamagpu.gpu.timing import Span
from llamagpu.profile import html, report
from llamagpu.profile.labels import inside, overlap, place_labels
from llamagpu.profile.profile import DispatchTiming, Phase, Profile, ceilings, profile, quickest, totals, work

LAYERS, STEPS = 2, 3


def need_timestamps(gpu: Gpu) -> None:
    if "timestamp-query-inside-passes" not in gpu.features:
        pytest.skip("the adapter has no timestamps inside passes")


@pytest.fixture(scope="module")
def engine(gpu: Gpu) -> Engine:
    need_timestamps(gpu)
    return load_model("tiny:q4_k_m", EngineOptions(context=96, chunk=16, precision=Precision.HIGH), gpu=gpu).engine


@pytest.fixture(scope="module")
def found(engine: Engine) -> Profile:
    return profile(engine, "tiny <model>", 12, STEPS, 40)


def test_every_dispatch_is_there(engine: Engine, found: Profile) -> None:
    prefill, decode = found.phases
    steps = decode_steps(engine, 40, STEPS, engine.model.sample_plan(greedy=True))
    assert [t.kernel for t in prefill.timings] == [d.kernel for d in engine.model.plan(12, 40).dispatches]
    assert [t.kernel for t in decode.timings] == [d.kernel for step in steps for d in step.plan.dispatches]
    assert (prefill.steps, prefill.tokens, decode.steps, decode.tokens) == (1, 12, STEPS, STEPS)
    assert (prefill.name, decode.name) == ("prefill of 12 at 40", "3 tokens at 40")


def test_times(found: Profile) -> None:
    for phase in found.phases:
        starts = np.array([t.start_ns for t in phase.timings])
        widths = np.array([t.ns for t in phase.timings])
        assert starts[0] == 0 and np.allclose(starts[1:], starts[:-1] + widths[:-1])  # no gap, no overlap
        assert phase.stamped_ns == pytest.approx(widths.sum()) and phase.plain_ns > 0
        assert all(0 < t.net_ns <= t.ns for t in phase.timings)


def test_settles_by_wall_clock(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of a nanosecond on the GPU's clock is not run until seconds of these have passed."""
    runs = 0

    class QuickWatch:
        def pass_ns(self, steps: list[Step]) -> float:
            nonlocal runs
            runs += 1
            assert runs < 2000, "it does not end"
            time.sleep(0.001)
            return 1.0

    monkeypatch.setattr(Gpu, "software", False)
    monkeypatch.setattr("llamagpu.profile.profile.FRESH_S", 0.1)
    steps = decode_steps(engine, 40, 1, engine.model.sample_plan(greedy=True))
    assert quickest(engine, QuickWatch(), steps) == 1.0  # type: ignore[arg-type]
    assert runs > 2 * BLOCK_RUNS


def test_ops_and_layers(found: Profile, gpu: Gpu) -> None:
    for phase in found.phases:
        ops = {layer: {t.op for t in phase.timings if t.layer == layer} for layer in range(LAYERS)}
        wanted = {"qkv", "attention", "attn_output", "gate_up", "ffn_down"}
        if phase is found.phases[0] or not gpu.caps.cpu:  # the texture backend normalises one row inside the linears
            wanted |= {"attn_norm", "ffn_norm"}
        assert all(own == wanted for own in ops.values()), ops
        outside = {t.op for t in phase.timings if t.layer is None}
        assert outside >= {"output_norm", "output"} and all(t.op for t in phase.timings)
    assert "sampling" in {t.op for t in found.phases[1].timings}


def test_work_of_the_tiny_model(engine: Engine, found: Profile, gpu: Gpu) -> None:
    """Computed by hand: 12 rows at position 40, then three tokens."""
    prefill, decode = found.phases

    def of(phase: Phase, op: str) -> list[DispatchTiming]:
        return [t for t in phase.timings if t.op == op]

    gate_up = of(prefill, "gate_up")
    assert [t.flops for t in gate_up] == [12 * 2 * 512 * 128] * 2
    # Q5_0 is stored in 8 bits, 4 groups in a row of 128: scale and offset in f32 in textures, a scale in buffers
    row_bytes = 128 + (32 if gpu.caps.cpu else 8 if gpu.caps.native_f16 else 16)
    assert [t.bytes for t in gate_up] == [512 * row_bytes + 12 * 4 * (128 + 512)] * 2
    assert sum(t.flops for t in of(prefill, "output")) == 131_072  # of the last row alone
    assert [t.bytes for t in of(prefill, "output_norm")] == [1024]
    assert [t.bytes for t in of(prefill, "attn_norm")] == [12_288] * 2
    kv_bytes = engine.settings.kv_type.head_bytes(64)
    attention = [t for t in of(prefill, "attention") if t.flops]
    assert [t.flops for t in attention] == [4 * 256 * 558] * 2  # 41 + 42 + ... + 52 positions
    assert [t.bytes for t in attention] == [2 * 2 * 52 * kv_bytes + 24_576] * 2
    assert sum(t.flops for t in of(decode, "attention") if t.layer == 0) == 4 * 256 * (41 + 42 + 43)
    assert sum(t.flops for t in of(decode, "qkv") if t.layer == 1) == 3 * 131_072


def dispatch(kernel: str, shape: object, op: str = "", sizes: dict[str, int] | None = None, **consts: int) -> Dispatch:
    bindings = {name: PlannedBuffer(size, name) for name, size in (sizes or {}).items()}
    return Dispatch(None, kernel, "", consts, bindings, (1, 1, 1), shape=shape, op=op)  # type: ignore[arg-type]


def linear(kernel: str, op: str, m: int, inputs: Inputs = Inputs.F32, prologue: Prologue = Prologue.NONE) -> Dispatch:
    """64 x 32 weights in 1024 bytes."""
    shape = Linear(m, 64, 32, 32, Storage.Q4, inputs, prologue)
    return dispatch(kernel, shape, op, {"w": 1000, "scales": 24, "x": 7, "y": 7})


@pytest.mark.parametrize(
    "dispatch, rows, position, want",
    [
        # 2 * 3 * 64 * 32 operations; weights, 3 rows of 32 f32 inputs and of 64 results
        (linear("linear_gemm", "qkv", 4), 3, 0, (12288, 2176)),
        # int8 blocks of 48 bytes
        (linear("linear_gemm_int8", "qkv", 4, Inputs.INT8), 3, 0, (12288, 1936)),
        # a prologue reads f32
        (linear("linear_gemv", "qkv", 1, Inputs.INT8, Prologue.NORM), 1, 9, (4096, 1408)),
        # the output of one row of many
        (linear("linear_gemv", "output", 1), 512, 0, (4096, 1408)),
        # a matrix row of 16 bytes and 32 results for each token
        (linear("embed", "embedding", 4), 2, 0, (0, 288)),
        # rows at positions 10 and 11 see 11 and 12; 12 positions of 2 KV heads in f16
        (dispatch("attend", Attention(2, 4, 2, 8)), 2, 10, (4 * 32 * 23, 2 * 16 * 2 * 12 + 8 * 2 * 32)),
        # a window of 5: both rows see 5 positions
        (dispatch("attend", Attention(2, 4, 2, 8, window=5)), 2, 10, (4 * 32 * 10, 2 * 16 * 2 * 7 + 8 * 2 * 32)),
        (dispatch("attend_merge", Attention(1, 4, 2, 8, splits=3)), 1, 10, (0, 4 * 32 * 4)),
        (dispatch("attend_texture_values", Attention(1, 4, 2, 8)), 1, 10, (0, 0)),
        (dispatch("rms_norm", RowWise(64)), 3, 0, (0, 1536)),
        (dispatch("rms_norm", RowWise(64), LAST_ROWS=1), 3, 0, (0, 512)),
        (dispatch("rms_norm_blocks", RowWise(64)), 3, 0, (0, 1056)),
        (dispatch("to_blocks", RowWise(64)), 3, 0, (0, 1056)),
        (dispatch("glu_mul", RowWise(64)), 3, 0, (0, 2304)),
        (dispatch("greedy", None, CANDIDATES=16), 1, 0, (0, 128)),
        (dispatch("argmax", None, VOCAB=512), 1, 0, (0, 2048)),
    ],
    ids=lambda value: value.kernel if isinstance(value, Dispatch) else "",
)
def test_work_of_a_dispatch(dispatch: Dispatch, rows: int, position: int, want: tuple[float, float]) -> None:
    assert work(dispatch, rows, position, KvType.F16) == want


def test_totals_add_up(found: Profile) -> None:
    for phase in found.phases:
        for by in ("op", "kernel", "layer"):
            rows = totals(phase.timings, by)
            assert sum(t.count for t in rows) == len(phase.timings)
            assert sum(t.ns for t in rows) == pytest.approx(phase.stamped_ns)
        assert [t.name for t in totals(phase.timings, "layer")] == ["0", "1", "-"]


@WGPU
def test_fused_decode_is_timed_whole_and_then_unfused() -> None:
    gpu = open_gpu(LLAMAGPU_FUSED="1")
    need_timestamps(gpu)
    options = EngineOptions(context=32, chunk=8, precision=Precision.FAST, backend=Backend.BUFFERS)
    loaded = load_model("tiny:q4_0", options, gpu=gpu)
    assert loaded.engine.model.fused
    prefill, decode = profile(loaded.engine, "tiny", 4, 2, 0).phases
    assert not loaded.engine.model.fused
    assert prefill.fused_ns is None and decode.fused_ns is not None and decode.fused_ns > 0
    assert decode.overhead.startswith(f"{decode.fused_ns / 1e3:.1f} us fused, ")
    kernels = {t.kernel for t in decode.timings}
    assert "linear_gemv" in kernels and "fused_layers" not in kernels


# A profile with round numbers


def made_up() -> Profile:
    """Two layers of two dispatches and the output, 100 us each, after 1 ms of recording and 0.2 ms of submitting."""
    ops = [("linear_gemv", "qkv", 0), ("attend", "attention", 0), ("linear_gemv", "qkv", 1), ("attend", "attention", 1)]
    every = [*ops, ("linear_gemv", "output", None)]
    timings = tuple(
        DispatchTiming(kernel, op, layer, 1e5 * i, 1e5, 9e4, 2e6, 1e6) for i, (kernel, op, layer) in enumerate(every)
    )
    span = Span(1, 5, 10.0, 10.001, 10.0012, 10.0018)
    prefill = Phase("prefill of 4 at 0", 1, 4, timings, 4.5e5, 5e5, span)
    decode_span = replace(span, began=11.0, recorded=11.1, submitted=11.2, done=11.3)
    decode = Phase("2 tokens at 4", 2, 2, timings * 2, 9e5, 1e6, decode_span, fused_ns=7e5)
    return Profile("a <b> & c", "GPU", "1.0", "wgpu", "fast", 1e12, 1e13, 4e13, (prefill, decode))


def test_text() -> None:
    text = report.text(made_up())
    overhead = (
        "5 dispatches: 450.0 us without timestamps between them, 500.0 us with (+11.1%); 10.00 us are taken off each"
    )
    assert f"prefill of 4 at 0: {overhead}" in text
    assert "2 tokens at 4: 700.0 us fused, as `generate` runs it; unfused 10 dispatches: 900.0 us without" in text
    row = next(line for line in text.splitlines() if line.startswith("| qkv (linear_gemv)"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:] == ["2", "200.0", "180.0", "40.0%", "11.1", "1.1%", "0.0222"]


def test_json() -> None:
    data = json.loads(json.dumps(report.as_json(made_up())))
    prefill, decode = data["phases"]
    assert len(prefill["timings"]) == 5 and len(decode["timings"]) == 10
    second = {"kernel": "attend", "op": "attention", "layer": 0, "start_ns": 1e5}
    assert prefill["timings"][1] == second | {"ns": 1e5, "net_ns": 9e4, "flops": 2e6, "bytes": 1e6}
    layer = {"name": "0", "count": 2, "ns": 2e5, "net_ns": 1.8e5, "flops": 4e6, "bytes": 2e6}
    assert prefill["by_layer"][0] == layer
    assert [total["name"] for total in prefill["by_op"]] == [
        "qkv (linear_gemv)",
        "attention (attend)",
        "output (linear_gemv)",
    ]
    assert prefill["fused_ns"] is None and decode["fused_ns"] == 7e5


def test_trace() -> None:
    """Chrome's format: complete events on named tracks; those of the GPU lie inside the wait of the host."""
    trace = json.loads(json.dumps(report.trace(made_up())))
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert set(names.values()) == {"GPU: GPU", "host", "dispatches", "layers", "recorder"}
    assert all(e["ts"] >= 0 and e["dur"] >= 0 and (e["pid"], e["tid"]) in names for e in events)
    first = [e for e in events if e["ts"] < 1e5]
    host = {e["name"].split()[0]: e for e in first if e["pid"] == 2}
    assert host["record"]["dur"] == pytest.approx(1000) and host["submit"]["dur"] == pytest.approx(200)
    gpu = [e for e in first if e["pid"] == 1 and e["tid"] == 1]
    assert [e["name"] for e in gpu] == ["qkv", "attention", "qkv", "attention", "output"]
    assert gpu[0]["ts"] >= host["submit"]["ts"]
    assert gpu[-1]["ts"] + gpu[-1]["dur"] == pytest.approx(host["wait"]["ts"] + host["wait"]["dur"])
    layers = [e for e in first if (e["pid"], e["tid"]) == (1, 2)]
    assert [(e["name"], e["dur"]) for e in layers] == [("layer 0", 200), ("layer 1", 200)]


# The page


class Elements(HTMLParser):
    """Counts the elements of a page, and notes those that are not closed where they should be."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.misplaced: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag != "meta":  # the only void element of HTML that is used
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.misplaced.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def well_formed(self) -> bool:
        return not self.open and not self.misplaced

    @property
    def fetches(self) -> set[str]:
        """Attributes that would load or run something."""
        return {name for name, _ in self.attributes if name in ("src", "href") or name.startswith("on")}


def test_the_parser_notices_what_is_malformed() -> None:
    assert not Elements("<p><b></p></b>").well_formed and not Elements("<p>").well_formed
    assert Elements('<img src="x" onload="y"></img>').fetches == {"src", "onload"}


def test_page() -> None:
    page = html.page(made_up())
    found = Elements(page)
    assert found.well_formed and not found.fetches and "script" not in found.counts
    assert "http" not in page and "prefers-color-scheme: dark" in page
    # the roofline, and bars for each phase
    assert found.counts["svg"] == 3 and found.counts["polyline"] == 2
    # three operations of the first phase are circles, those of the second squares; 3 columns of 7 categories a phase
    assert found.counts["circle"] == 3 and found.counts["rect"] == 3 + 2 * 3 * 7
    # for each phase a table by operation and one by layer, of a heading and three rows
    assert found.counts["table"] == 4 and found.counts["tr"] == 4 * 4
    assert "a <b> & c" in found.texts and "layer 1, attention: 90.0 us" in found.texts
    assert any("700.0 us fused" in text for text in found.texts)


def test_ceilings_lie_above_every_point() -> None:
    """A kernel that is faster than the measured peak raises it. f32 kernels have no int8 ceiling."""
    found = made_up()  # every operation computes 2e6 in 90 us: 22.2 GOP/s
    fastest = 2e6 / 9e4 * 1e9
    assert ceilings(found) == [("f32", 1e13), ("int8", 4e13)]
    assert ceilings(replace(found, int8_peak=1e9)) == [("f32", 1e13), ("int8", pytest.approx(fastest))]
    high = replace(found, precision="high")
    assert ceilings(high) == [("f32", 1e13)]
    assert ceilings(replace(high, f32_peak=1e9)) == [("f32", pytest.approx(fastest))]
    assert Elements(html.page(high)).counts["polyline"] == 1


def test_names_of_points_do_not_overlap() -> None:
    """Twelve points in one place, some on the edge: each name has a place of its own, beside no other point."""
    bounds = (0.0, 0.0, 400.0, 300.0)
    points = [(200.0 + i % 3, 150.0 + i % 2) for i in range(12)] + [(398.0, 10.0), (2.0, 290.0)]
    widths = [60.0 + 5 * (i % 4) for i in range(len(points))]
    places = place_labels(points, widths, 14, bounds)
    boxes = [(x, y - 7, x + width, y + 7) for (x, y), width in zip(places, widths, strict=True)]
    assert all(inside(box, bounds) for box in boxes)
    assert not any(overlap(a, b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert not any(overlap(box, (x - 5, y - 5, x + 5, y + 5)) for box in boxes for x, y in points)
    assert place_labels([(100.0, 100.0)], [50.0], 14, bounds) == [(111.0, 100.0)]


def test_page_of_a_real_run(found: Profile) -> None:
    page = html.page(found)
    elements = Elements(page)
    assert elements.well_formed and "tiny &lt;model&gt;" in page
    assert elements.counts["svg"] == 3 and elements.counts["rect"] >= 2 * 3 * 7
    sizes = [float(value) for name, value in elements.attributes if name in ("width", "height", "cx", "cy", "r")]
    assert sizes and min(sizes) >= 0 and "nan" not in page.lower()


def test_page_without_phases() -> None:
    found = Elements(html.page(replace(made_up(), phases=())))
    assert found.well_formed and (found.counts["h1"], found.counts["h2"]) == (1, 1)
    assert found.counts["svg"] == found.counts["table"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [0, 1], ids=["dark", "light"])
def test_page_in_a_browser(tmp_path: Path, scheme: int) -> None:
    chromium = shutil.which("chromium")
    if not chromium:
        pytest.skip("no chromium here")
    (tmp_path / "page.html").write_text(html.page(made_up()))
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    more = f"--disable-component-update --blink-settings=preferredColorScheme={scheme} --window-size=900,900"
    paths = [f"--user-data-dir={tmp_path / 'user'}", f"--screenshot={tmp_path / 'page.png'}"]
    command = [chromium, *flags.split(), *more.split(), *paths, f"file://{tmp_path / 'page.html'}"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert (tmp_path / "page.png").stat().st_size > 10_000


# The command


def test_command(measure: Runner, gpu: Gpu, tmp_path: Path) -> None:  # noqa: F811
    need_timestamps(gpu)
    trace, page = tmp_path / "trace.json", tmp_path / "page.html"
    args = ["--synthetic", "tiny", "-p", "8", "-n", "2", "-q", "--trace", trace, "--html", page]
    result = measure("profile", *args)
    assert result.code == 0 and "us without timestamps between them" in result.out
    assert json.loads(trace.read_text())["traceEvents"] and page.read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "trace.json"]
    assert not result.err
    told = measure("profile", "--synthetic", "tiny", "-p", "0", "-n", "1", "-o", "json", "--html", page)
    assert told.err.endswith(f"written: {page}\n")
    as_json = measure("profile", "--synthetic", "tiny", "-p", "0", "-n", "1", "-o", "json", "-q")
    assert as_json.code == 0 and [phase["name"] for phase in as_json.json["phases"]] == ["1 tokens at 1"]


def test_bad_arguments(measure: Runner, tmp_path: Path) -> None:  # noqa: F811
    nowhere = tmp_path / "no" / "page.html"
    result = measure("profile", "--synthetic", "tiny", "-p", "4", "-n", "0", "-q", "--html", nowhere)
    assert result.code == 1 and "cannot write" in result.err
    assert measure("profile", "-o", "xml").code == 2


def test_without_timestamps(measure: Runner, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(gpu, "features", set())
    result = measure("profile", "--synthetic", "tiny", "-p", "4", "-n", "1", "-q")
    assert result.code == 1 and "no timestamps" in result.err
    rows = measure("bench", "--synthetic", "tiny", "-p", "4", "-n", "0", "-r", "1", "-o", "json", "-q").json
    assert rows[0]["gpu_ns"] is None and rows[0]["avg_ns"] > 0
