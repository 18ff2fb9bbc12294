"""`devices`: the adapters, and the dispatches that a model runs."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import WGPU, open_gpu
from gguf_builder import tiny_llama
from measuring import Runner, measure  # noqa: F401

pytest.importorskip("wgpu")
from llamagpu import devices
from llamagpu.devices import COLUMNS, PlannedDispatch, collapse_layers, dispatch_lines, planned_dispatches
from llamagpu.engine.engine import Engine
from llamagpu.engine.load import LoadedModel, load_model
from llamagpu.engine.options import Backend, EngineOptions, KvType, Precision
from llamagpu.engine.routes import default_chunk
from llamagpu.engine.sequence import Sequence
from llamagpu.errors import NoAdapter
from llamagpu.gpu.caps import MINIMUM_LIMITS, Grid
from llamagpu.gpu.device import Gpu
from llamagpu.gpu.recorder import Recorder, Step

BUFFERS = Backend.BUFFERS


def load(gpu: Gpu, **options: object) -> LoadedModel:
    return load_model("tiny:q4_k_m", EngineOptions(**options), gpu=gpu)  # type: ignore[arg-type]


@pytest.fixture(params=["default", "buffers high", "buffers fast", "fused", "small chunk"])
def engine(request: pytest.FixtureRequest, gpu: Gpu) -> Engine:
    """On a software adapter the default is textures, on a GPU fused decode."""
    if request.param == "fused":
        found = load(open_gpu(LLAMAGPU_FUSED="1"), precision=Precision.FAST, backend=BUFFERS).engine
        assert found.model.fused
        return found
    options = {
        "default": {},
        "buffers high": {"precision": Precision.HIGH, "backend": BUFFERS, "kv_type": KvType.F32},
        "buffers fast": {"precision": Precision.FAST, "backend": BUFFERS, "kv_type": KvType.F16},
        "small chunk": {"chunk": 8, "context": 100},
    }[request.param]
    return load(gpu, **options).engine


Launches = list[tuple[str, Grid]]


def launches(step: Step) -> Launches:
    return [(d.source, d.grid_for(step.rows, step.position)) for d in step.plan.dispatches]


def listed(engine: Engine) -> dict[str, list[PlannedDispatch]]:
    steps: dict[str, list[PlannedDispatch]] = {}
    for found in planned_dispatches(engine):
        steps.setdefault(found.step, []).append(found)
    return steps


def test_listing_equals_the_plans(engine: Engine) -> None:
    steps, model = listed(engine), engine.model
    assert all([found.id for found in own] == [f"{name}.{i}" for i in range(len(own))] for name, own in steps.items())
    rows = [1, *dict.fromkeys(min(rows, model.chunk) for rows in (4, 16, 512))]
    assert {name for name in steps if name.isdigit()} == {str(count) for count in rows}
    for name, own in steps.items():
        if name in ("greedy", "sample"):
            plan = model.sample_plan(greedy=name == "greedy")
            assert own[0].dispatch.kernel == name
        else:
            count, _, position = name.partition("@")
            assert (own[0].rows, own[0].position) == (int(count), int(position or 0))
            plan = model.plan(int(count), int(position or 0))
        kernels = [(d.kernel, d.grid_for(own[0].rows, own[0].position)) for d in plan.dispatches]
        assert [(found.dispatch.kernel, found.grid) for found in own] == kernels


def test_listing_equals_what_the_engine_submits(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[Launches] = []
    submit = Recorder.submit

    def record(self: Recorder, steps: list[Step], *args: object, **more: object) -> object:
        submitted.extend(launches(step) for step in steps)
        return submit(self, steps, *args, **more)  # type: ignore[arg-type]

    steps = {name: [(f.dispatch.source, f.grid) for f in own] for name, own in listed(engine).items()}
    monkeypatch.setattr(Recorder, "submit", record)
    sequence = Sequence()
    engine.prefill(sequence, [1, 2, 3, 4])
    sequence.truncate(0)
    engine.prefill(sequence, [1])
    list(engine.greedy(sequence, 1))
    assert submitted == [steps["4"], steps["1"], steps["greedy"]]


def test_decode_is_listed_again_where_a_long_context_differs(engine: Engine) -> None:
    steps, last = listed(engine), engine.settings.context - 1
    if engine.model.fused:
        fused = ["fill", "fused_layers"] if engine.gpu.caps.tint else ["fused_layers"]
        assert [found.dispatch.kernel for found in steps["1"]][1 : 1 + len(fused)] == fused
        assert "1@" not in "".join(steps)  # it splits the context itself
        return
    differs = launches(Step(engine.model.plan(1, last), 1, last)) != launches(Step(engine.model.plan(1)))
    assert (f"1@{last}" in steps) == differs
    if engine.settings.backend is Backend.TEXTURES:
        assert differs  # more workgroups compute the scores


@WGPU
def test_fused_kernel_shows_its_grid_size() -> None:
    engine = load(open_gpu(LLAMAGPU_FUSED="1"), precision=Precision.FAST, backend=BUFFERS).engine
    assert engine.model.fused
    found = listed(engine)["1"]
    assert [f.dispatch.kernel for f in found] == ["embed", "fused_layers", "rms_norm_blocks", "linear_gemv"]
    grid = engine.model.fused_decode.grid.workgroups  # type: ignore[attr-defined]
    assert found[1].grid == (grid, 1, 1)
    text = list(dispatch_lines(engine, planned_dispatches(engine)))
    kv_type = engine.settings.kv_type
    assert text[0] == f"{engine.gpu.name}: precision fast, KV cache {kv_type}, buffers, fused decode"
    assert any(re.search(rf"fused_layers +{grid}x1x1", line) for line in text)


def test_text(engine: Engine) -> None:
    planned = planned_dispatches(engine)
    lines = list(dispatch_lines(engine, planned))
    assert all(len(line) <= COLUMNS == 120 for line in lines) and not any(line != line.rstrip() for line in lines)
    titles = [line for line in lines if line.startswith(("Step of", "Sampling"))]
    assert titles[0] == "Step of 1 row of one sequence at position 0"
    assert titles[-2:] == ["Sampling the likeliest token", "Sampling"]
    ids = [line.split()[0] for line in lines if line.startswith("  ") and "." in line.split()[0]]
    by_step = listed(engine).values()
    assert ids == [found.id for own in by_step for found, _ in collapse_layers(own)]
    for own in by_step:  # every dispatch is listed or counted
        assert sum(count for _, count in collapse_layers(own)) == len(own)


def test_equal_layers_are_shown_once(gpu: Gpu) -> None:
    same = load_model("tiny:q4_0", EngineOptions(precision=Precision.HIGH), gpu=open_gpu(LLAMAGPU_FUSED="0")).engine
    shown = collapse_layers(listed(same)["4"])
    assert {(found.dispatch.layer, count) for found, count in shown} == {(None, 1), (0, 2)}
    assert any("  ffn_down     0 x2 " in line for line in dispatch_lines(same, planned_dispatches(same)))
    other = load(gpu).engine  # the second layer stores ffn_down in more bits
    shown = collapse_layers(listed(other)["4"])
    assert {(found.dispatch.layer, count) for found, count in shown} == {(None, 1), (0, 1), (1, 1)}


# The command


@WGPU
def test_adapters(measure: Runner, gpu: Gpu) -> None:  # noqa: F811
    found = measure("devices", "--json").json
    chosen = [d for d in found if d["chosen"]]
    assert len(chosen) == 1 and chosen[0]["name"] == gpu.name and chosen[0]["why"]
    assert chosen[0]["limits"]["max-storage-buffer-binding-size"] >= 128 << 20
    shown = measure("devices")
    assert shown.code == 0 and not shown.err and shown.out.count("<- used: ") == 1
    assert measure("bench", "--list-devices").out == shown.out
    assert measure("devices", "--device", "0", "--json").json[0]["why"] == "--device 0"
    assert measure("devices", "--device", "no such card").code == 3


def test_reasons() -> None:
    assert devices.reason("CPU", None) == "a software adapter, the only kind here"
    assert devices.reason("DiscreteGPU", None) == "the best kind found"
    assert devices.reason("CPU", "1") == "--device 1"


def test_what_does_not_run_on_an_adapter() -> None:
    limits, features = dict(MINIMUM_LIMITS), {"subgroup"}
    assert devices.missing(features, limits) == ""
    assert devices.missing({"shader-f16"}, limits).startswith("no subgroups: attend_split")
    few = limits | {"max-storage-buffers-per-shader-stage": 4}
    why = "max-storage-buffers-per-shader-stage is 4, and kernels need 8"
    assert devices.missing(features, few) == f"cannot be used: {why}"
    with pytest.raises(NoAdapter, match=f"small cannot run the kernels: {why}"):
        Gpu(SimpleNamespace(info={"device": "small"}, limits=few, features=features))


def test_matrices_of_an_adapter(gpu: Gpu) -> None:
    """The best of those that there are kernels for."""
    adapter = SimpleNamespace(info=gpu.info, limits=gpu.limits, features=gpu.features, matrices=["16x8", "8x8"])
    device = devices.describe(0, adapter, False, None, "")
    assert device.matrix == "16x8" and ", matrices of 16x8)" in next(devices.device_lines([device]))


def test_kernels_as_json(measure: Runner, gpu: Gpu) -> None:  # noqa: F811
    args = ["devices", "--kernels", "--synthetic", "tiny", "--precision", "fast", "-ctk", "f32", "-ub", "16", "-q"]
    rows = measure(*args, "--json").json
    planned = planned_dispatches(
        load_model("tiny", EngineOptions(precision=Precision.FAST, kv_type=KvType.F32, chunk=16), gpu=gpu).engine
    )
    assert [row["id"] for row in rows] == [found.id for found in planned]
    assert {row["rows"] for row in rows} == {1, 4, 16}
    down = next(row for row in rows if row["op"] == "ffn_down" and row["rows"] == 4 and row["layer"] == 1)
    matrix = {"type": "Linear", "m": 4, "n": 128, "k": 256, "group": 32, "storage": "q4"}
    given = {"inputs": "int8", "prologue": "none", "epilogue": "epilogue_add", "blocks": None}
    assert down["shape"] == matrix | given | {"f16_scales": True, "sub_scales": False}
    assert down["kernel"] == "linear_gemv_batch" and down["needs"].startswith("m <= 4, k % 32 = 0")
    assert len(down["grid"]) == 3 and down["consts"]["N"] == 128
    assert down["bindings"]["y"] in ("x", "x and inter-stage") and "ffn_down" in down["bindings"]["w"]  # fused or not
    assert next(row for row in rows if row["op"] == "sampling")["shape"] is None


def test_kernels_of_a_file(measure: Runner, gpu: Gpu, tmp_path: Path) -> None:  # noqa: F811
    path = tiny_llama(tmp_path / "m.gguf", context=256)
    result = measure("devices", "--kernels", "-m", path, "-c", "64", "--precision", "high", "-q")
    assert result.code == 0 and not result.err and "precision high" in result.out.splitlines()[0]
    rows = min(64, default_chunk(gpu.caps, int8=False, textures=gpu.software))
    assert f"Step of {rows} rows of one sequence at position 0" in result.out and " 128x64 " in result.out


def test_wgsl(measure: Runner, gpu: Gpu) -> None:  # noqa: F811
    args = ["devices", "--kernels", "--synthetic", "tiny"]
    planned = planned_dispatches(load_model("tiny", EngineOptions(), gpu=gpu).engine)
    for found in (planned[1], planned[-1]):
        result = measure(*args, "--wgsl", found.id)
        assert result.code == 0 and result.out == found.dispatch.source + "\n" and not result.err
    missing = measure(*args, "--wgsl", "3.1")
    rows = min(512, default_chunk(gpu.caps, int8=False, textures=gpu.software))
    assert missing.code == 2 and not missing.out and f"{rows}.N" in missing.err
