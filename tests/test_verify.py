"""`verify`: it runs every kernel, it notices a wrong one, and what it found is remembered."""

import json

import numpy as np
import pytest
from measuring import measure  # noqa: F401

from llamagpu.errors import NumericCheckFailed

pytest.importorskip("wgpu")
from llamagpu.gpu import routes, shaders
from llamagpu.tools import verify as v
from llamagpu.tools.oracle import F32, Case, Weight, from_records, rounded, to_records
from llamagpu.tools.verify_images import image_cases
from llamagpu.tools.verify_kernels import kernel_cases, norm_cases
from llamagpu.tools.verify_others import other_cases

WITHIN = {"mul": "rms_norm_plain", "attend_image_values": "attend_image_scores"}  # run in another's case


@pytest.mark.parametrize("quick", [False, True])
def test_every_kernel_has_a_case(gpu, quick):
    kernels = {name for name, path in shaders.kernel_files().items() if path.parent.name != "parts"}
    cases = [*kernel_cases(gpu, quick), *other_cases(gpu), *image_cases(gpu)]
    assert {case.kernel for case in cases} == kernels - set(WITHIN)


def test_every_route_has_a_case(gpu):
    """Rows that differ only in their settings too."""
    said = [f"{case.kernel} {case.shape}" for case in kernel_cases(gpu, quick=False)]
    for route in routes.LINEAR:
        if route.fits(Weight("q4", 71, 576).shape(1), gpu.caps):
            settings = "".join(f", {name.lower()} {value}" for name, value in route.consts.items())
            assert any(text.startswith(route.kernel) and text.endswith(settings) for text in said), route


def test_cases_have_names_of_their_own(gpu):
    cases = [(case.kernel, case.shape) for case in (*kernel_cases(gpu, quick=False), *other_cases(gpu))]
    assert len(set(cases)) == len(cases)


def test_all_is_right_here(measure, gpu):  # noqa: F811
    result = measure("verify", "--quick", "--json")
    assert result.code == 0 and len(result.json) > 60 and all(check["ok"] for check in result.json)
    assert {"model", "linear_gemv", "attend", "rms_norm_vec4", "sample"} <= {c["kernel"] for c in result.json}
    assert v.verified(gpu.info)["checks"] == len(result.json)
    assert v.verified_line(gpu.info).startswith("verified on 20") and "(quick)" in v.verified_line(gpu.info)


@pytest.fixture
def only_norms(monkeypatch):
    monkeypatch.setattr(v, "kernel_cases", lambda gpu, quick: norm_cases(gpu))
    for name in ("other_cases", "image_cases", "model_cases"):
        monkeypatch.setattr(v, name, lambda *_: ())


def broken(monkeypatch, kernel: str, old: str, new: str) -> None:
    read = shaders.read
    assert old in read(kernel)
    monkeypatch.setattr(shaders, "read", lambda name: read(name).replace(old, new) if name == kernel else read(name))


def test_a_wrong_kernel_is_noticed(measure, gpu, only_norms, monkeypatch):  # noqa: F811
    assert measure("verify").code == 0
    broken(monkeypatch, "rms_norm_vec4", "v[r] * scale * weight[r]", "v[r] * scale * 1.00002 * weight[r]")
    result = measure("verify")
    assert result.code == 7
    wrong = [line for line in result.out.splitlines() if "WRONG" in line]
    assert wrong and all(line.startswith("rms_norm_vec4") for line in wrong)
    assert "out of their bounds: rms_norm_vec4" in result.err
    assert "FAILED" in v.verified_line(gpu.info) and "rms_norm_vec4" in v.verified_line(gpu.info)


def test_one_wrong_lane_is_noticed(measure, only_norms, monkeypatch):  # noqa: F811
    """One value in 576: the mean hardly moves, the largest error does."""
    good, bad = "x[source + i] * scale * w[i]", "x[source + i] * (scale + select(0.0, 1e-3, i == 77u)) * w[i]"
    broken(monkeypatch, "rms_norm", good, bad)
    result = measure("verify", "-q")
    assert result.code == 7 and result.out.count("WRONG") == 3  # of three widths


def test_a_kernel_that_does_not_compile(measure, only_norms, monkeypatch):  # noqa: F811
    broken(monkeypatch, "rms_norm_i8", "var squares = 0.0;", "var squares = nonsense;")
    result = measure("verify")
    assert result.code == 7 and "rms_norm_i8" in result.err and "rms_norm_vec4" not in result.err


def test_nan_is_not_right():
    nan = float("nan")
    assert not v.Check("k", "s", nan, nan, F32).ok and not v.Check("k", "s", 0.0, nan, F32).ok
    assert v.Check("k", "s", 1e-11, 1e-6, F32).ok and not v.Check("k", "s", 1e-9, 1e-6, F32).ok
    with pytest.raises(NumericCheckFailed, match="1 of 2"):
        v.need_right([v.Check("k", "s", 0.0, 0.0, F32), v.Check("k", "s", nan, 0.0, F32)])


def test_results_belong_to_adapter_driver_and_kernels(gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMAGPU_CACHE", str(tmp_path))
    info = gpu.info
    assert v.verified(info) is None and "not verified" in v.verified_line(info)
    v.keep(info, [v.Check("k", "s", 0.0, 0.0, F32)], False, 1.0)
    assert v.verified(info)["wrong"] == [] and not list(v.results_dir().glob("tmp*"))
    assert v.verified(info | {"description": "another driver"}) is None
    monkeypatch.setattr(v, "kernel_set", lambda: "another")
    assert v.verified(info) is None


def test_damaged_results_are_no_results(gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMAGPU_CACHE", str(tmp_path))
    v.keep(gpu.info, [], False, 1.0)
    (file,) = v.results_dir().glob("*.json")
    for text in ("{", "[]", ""):
        file.write_text(text)
        assert v.verified(gpu.info) is None
    file.unlink()
    file.mkdir()
    v.keep(gpu.info, [], False, 1.0)  # cannot be written: no error


def test_what_is_run_is_what_is_said(gpu, only_norms, monkeypatch):
    """The bound belongs to the case; an answer of another size is no answer."""
    seen = []
    monkeypatch.setattr(v, "kernel_cases", lambda *_: [Case("k", "s", lambda: ([1.0], [1.0]), (0.5, 0.25))])
    checks = v.verify(gpu, seen=seen.append)
    assert checks == seen == [v.Check("k", "s", 0.0, 0.0, (0.5, 0.25))]


def test_records_round_to_127_steps():
    x = np.random.default_rng(0).standard_normal((2, 64))
    error = np.abs(rounded(x) - x).reshape(2, 2, 32)
    step = np.abs(x).reshape(2, 2, 32).max(axis=2, keepdims=True) / 127
    assert (error <= step / 2 + 1e-6).all() and error.max() > step.min() / 4
    assert json.dumps(from_records(to_records(np.zeros((1, 32)))).tolist()) == json.dumps([[0.0] * 32])
