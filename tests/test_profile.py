"""`profile`: every dispatch has its place, time and work; the trace and the page are what their readers expect."""

import json
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from measuring import measure  # noqa: F401

pytest.importorskip("wgpu")
from llamagpu.gpu.timing import Span
from llamagpu.tools import report_html, report_profile
from llamagpu.tools.bench import load_synthetic
from llamagpu.tools.bench_tests import Test
from llamagpu.tools.profile import Phase, Profile, Slice, profile, totals

Test.__test__ = False  # pytest: it is none
LAYERS, STEPS = 2, 3


@pytest.fixture(scope="module")
def model(gpu):
    if "timestamp-query-inside-passes" not in gpu.features:
        pytest.skip("the adapter has no timestamps inside passes")
    return load_synthetic("tiny:q4_k_m", gpu).transformer(gpu, 96, 16, None, False)


@pytest.fixture(scope="module")
def found(model) -> Profile:
    return profile(model, "tiny <model>", 12, STEPS, 40)


def test_every_dispatch_is_there(model, found):
    prefill, decode = found.phases
    steps = model.steps(40, STEPS, model.choose())
    assert [s.kernel for s in prefill.slices] == [d.label for d in model.plan(12, 40).dispatches]
    assert [s.kernel for s in decode.slices] == [d.label for plan, _, _ in steps for d in plan.dispatches]
    assert (prefill.steps, prefill.tokens, decode.steps, decode.tokens) == (1, 12, STEPS, STEPS)


def test_times(found):
    for phase in found.phases:
        starts = np.array([s.start_ns for s in phase.slices])
        widths = np.array([s.ns for s in phase.slices])
        assert starts[0] == 0 and np.allclose(starts[1:], starts[:-1] + widths[:-1])  # no gap, no overlap
        assert phase.stamped_ns == pytest.approx(widths.sum()) and phase.plain_ns > 0
        assert all(0 < s.net_ns <= s.ns for s in phase.slices)
        assert f"{phase.plain_ns / 1e3:.1f} us without" in phase.overhead


def test_layers_and_operations(found, gpu):
    for phase in found.phases:
        ops = {i: {s.op for s in phase.slices if s.layer == i} for i in range(LAYERS)}
        wanted = {"qkv", "attention", "attn_output", "gate_up", "ffn_down"}
        if phase is found.phases[0] or not gpu.caps.cpu:  # a CPU adapter normalises one token inside the linears
            wanted |= {"attn_norm", "ffn_norm"}
        assert all(wanted <= found for found in ops.values()), ops
        assert {s.op for s in phase.slices if s.layer is None} >= {"output_norm", "output"}
    assert "choice" in {s.op for s in found.phases[1].slices}


def test_work(model, found):
    """By hand: 12 tokens at position 40, then three; q4_k_m stores rows in several types."""
    c, (prefill, decode) = model.config, found.phases
    gate = [s for s in prefill.slices if s.op == "gate_up"]
    assert [s.flops for s in gate] == [2 * 12 * 2 * c.ffn_dim * c.dim] * LAYERS
    weights = model.weights.layers[0].gate_up[0]
    assert gate[0].bytes == weights.nbytes + 12 * 4 * (c.dim + 2 * c.ffn_dim)
    output = [s for s in prefill.slices if s.op == "output"]
    assert sum(s.flops for s in output) == 2 * c.vocab * c.dim  # of the last token alone
    attention = sum(s.flops for s in decode.slices if s.op == "attention" and s.layer == 0)
    assert attention == 4 * c.heads * c.head_dim * (41 + 42 + 43)


def test_totals_add_up(found):
    for phase in found.phases:
        for by in ("op", "kernel", "layer"):
            rows = totals(phase.slices, by)
            assert sum(t.count for t in rows) == len(phase.slices)
            assert sum(t.ns for t in rows) == pytest.approx(phase.stamped_ns)
        assert [t.name for t in totals(phase.slices, "layer")] == ["0", "1", "-"]


# A profile with round numbers


def made_up() -> Profile:
    """Two layers of two dispatches and a head, 100 us apart, after 1 ms of recording and 0.2 of submitting."""
    ops = [("linear_gemv", "qkv", 0), ("attend", "attention", 0), ("linear_gemv", "qkv", 1), ("attend", "attention", 1)]
    ops.append(("linear_gemv", "output", None))
    slices = tuple(Slice(k, op, i, 1e5 * n, 1e5, 9e4, 2e6, 1e6) for n, (k, op, i) in enumerate(ops))
    span = Span(1, 5, 10.0, 10.001, 10.0012, 10.0018)
    prefill = Phase("prefill of 4 at 0", 1, 4, slices, 4.5e5, 5e5, span)
    decode = Phase(
        "2 tokens at 4", 2, 2, slices * 2, 9e5, 1e6, replace(span, began=11.0, recorded=11.1, submitted=11.2, done=11.3)
    )
    return Profile("a <b> & c", "GPU", "1.0", "fast", 1e12, 1e13, 4e13, (prefill, decode))


def test_text():
    text = report_profile.text(made_up())
    assert "450.0 us without timestamps between them, 500.0 us with (+11.1%); 10.00 us are taken off each" in text
    row = next(line for line in text.splitlines() if line.startswith("| qkv (linear_gemv)"))
    assert [cell.strip() for cell in row.strip("|").split("|")][1:] == [
        "2", "200.0", "180.0", "40.0%", "11.1", "1.1%", "0.0222",
    ]  # fmt: skip


def test_json():
    data = json.loads(json.dumps(report_profile.as_json(made_up())))
    assert [len(phase["slices"]) for phase in data["phases"]] == [5, 10]
    assert data["phases"][0]["by_layer"][0]["count"] == 2


def test_trace():
    """Chrome's format: complete events on named tracks; the GPU's lie inside what the host waited for."""
    trace = json.loads(json.dumps(report_profile.trace(made_up())))
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


class Reader(HTMLParser):
    """Every element is closed where it should be; nothing is fetched."""

    VOID = ("meta", "line", "polyline")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        assert not {"src", "href", "onclick", "onload"} & {name for name, _ in attrs}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_page():
    page, reader = report_html.page(made_up()), Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open and "script" not in reader.seen
    assert reader.seen.count("svg") == 3  # the roofline, and bars for each phase
    assert "a <b> & c" in reader.texts and "prefers-color-scheme: dark" in page
    assert "http" not in page and "nan" not in page.lower().replace("nanos", "")
    assert "layer 1, attention: 90.0 us" in reader.texts


def test_page_of_a_real_run(found):
    page, reader = report_html.page(found), Reader()
    reader.feed(page)
    assert not reader.open and 'width="-' not in page and 'height="-' not in page and "tiny &lt;model&gt;" in page


def test_page_without_work():
    empty = replace(made_up(), phases=())
    Reader().feed(report_html.page(empty))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [0, 1], ids=["dark", "light"])
def test_page_in_a_browser(tmp_path, scheme):
    chromium = shutil.which("chromium")
    if not chromium:
        pytest.skip("no chromium here")
    (tmp_path / "page.html").write_text(report_html.page(made_up()))
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    command = [chromium, *flags.split(), f"--user-data-dir={tmp_path / 'user'}", "--disable-component-update",
               f"--blink-settings=preferredColorScheme={scheme}", "--window-size=900,900",
               f"--screenshot={tmp_path / 'page.png'}", f"file://{tmp_path / 'page.html'}"]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert (tmp_path / "page.png").stat().st_size > 10_000


# The command


def test_command(measure, tmp_path):  # noqa: F811
    trace, page = tmp_path / "trace.json", tmp_path / "page.html"
    args = ["--synthetic", "tiny", "-p", "8", "-n", "2", "-q", "--trace", trace, "--html", page]
    result = measure("profile", *args)
    assert result.code == 0 and "us without timestamps between them" in result.out
    assert json.loads(trace.read_text())["traceEvents"] and page.read_text().startswith("<!doctype html>")
    as_json = measure("profile", "--synthetic", "tiny", "-p", "0", "-n", "1", "-o", "json", "-q")
    assert as_json.code == 0 and len(as_json.json["phases"]) == 1


def test_what_cannot_be(measure, tmp_path):  # noqa: F811
    nowhere = tmp_path / "no" / "page.html"
    result = measure("profile", "--synthetic", "tiny", "-p", "4", "-n", "0", "-q", "--html", nowhere)
    assert result.code == 1 and "cannot write" in result.err
    assert measure("profile", "-o", "xml").code == 2


def test_without_timestamps(measure, gpu, monkeypatch):  # noqa: F811
    monkeypatch.setattr(gpu, "features", set())
    result = measure("profile", "--synthetic", "tiny", "-p", "4", "-n", "1", "-q")
    assert result.code == 1 and "no timestamps" in result.err
    rows = measure("bench", "--synthetic", "tiny", "-p", "4", "-n", "0", "-r", "1", "-o", "json", "-q").json
    assert rows[0]["gpu_ns"] is None and rows[0]["avg_ns"] > 0
