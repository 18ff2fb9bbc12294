"""`verify`: it runs every kernel, it notices a wrong one, and its results are saved."""

import numpy as np
import pytest
from measuring import measure  # noqa: F401

from llamagpu.engine import routes
from llamagpu.errors import NumericCheckFailed
from llamagpu.gpu import shaders
from llamagpu.verify import verify as v
from llamagpu.verify.kernels import Q4_WEIGHT, kernel_cases, linear_cases, norm_cases, tuning
from llamagpu.verify.others import other_cases
from llamagpu.verify.reference import F32, Case, dequantise_blocks, errors, quantise_blocks, round_int8
from llamagpu.verify.textures import texture_cases

# run in another kernel's case
WITHIN = {
    "mul": "rms_norm_plain",
    "attend_texture_values": "attend_texture_scores",
    "quantise_kv": "attend_int8",
    "linear_sum": "linear_gemm_int8",
    "conv_inputs_texture": "short_conv_texture",
}


@pytest.mark.parametrize("quick", [False, True], ids=["all", "quick"])
def test_every_kernel_has_a_case(gpu, quick):
    if not gpu.caps.subgroup:
        pytest.skip("without subgroups there is no fused decode and no split attention")
    kernels = {name for name, path in shaders.kernel_files().items() if path.parent.name != "parts"}
    cases = [*kernel_cases(gpu, quick), *other_cases(gpu), *texture_cases(gpu)]
    lacking = {"attend_int8"} if gpu.caps.subgroup < 8 else set()
    lacking |= set() if gpu.caps.subgroup == routes.vector_lanes(gpu.caps) else {"attend_texture_decode"}
    lacking |= set() if gpu.caps.matrices else {"linear_matrix", "linear_skinny", "attend_matrix"}
    assert {case.kernel for case in cases} == kernels - set(WITHIN) - lacking


def test_every_route_has_a_case(gpu):
    """Also rows that differ only in their tuning."""
    names = [f"{case.kernel} {case.shape}" for case in kernel_cases(gpu, quick=False)]
    for route in routes.LINEAR:
        if route.fits(Q4_WEIGHT.shape(1), gpu.caps):
            found = [name for name in names if name.startswith(route.kernel) and name.endswith(tuning(route))]
            assert found, route


def test_names_of_cases_are_unique(gpu):
    cases = [*kernel_cases(gpu, quick=False), *other_cases(gpu), *texture_cases(gpu)]
    assert len({(case.kernel, case.shape) for case in cases}) == len(cases)


def test_all_checks_pass_here(measure, gpu):  # noqa: F811
    result = measure("verify", "--quick", "--json")
    assert result.code == 0 and len(result.json) > 60 and all(check["ok"] for check in result.json)
    assert {"model", "linear_gemv", "attend", "rms_norm_vec4", "sample"} <= {c["kernel"] for c in result.json}
    assert v.verified(gpu.info).checks == len(result.json)
    assert v.verified_line(gpu.info).startswith("verified on 20") and "(quick)" in v.verified_line(gpu.info)


@pytest.fixture
def only_norms(monkeypatch):
    monkeypatch.setattr(v, "kernel_cases", lambda gpu, quick: norm_cases(gpu))
    for name in ("other_cases", "texture_cases", "model_cases"):
        monkeypatch.setattr(v, name, lambda *_: ())


def break_kernel(monkeypatch, kernel: str, old: str, new: str) -> None:
    read = shaders.read
    assert old in read(kernel)
    monkeypatch.setattr(shaders, "read", lambda name: read(name).replace(old, new) if name == kernel else read(name))


def test_a_wrong_kernel_is_noticed(measure, gpu, only_norms, monkeypatch):  # noqa: F811
    assert measure("verify").code == 0
    break_kernel(monkeypatch, "rms_norm_vec4", "v[r] * scale * weight[r]", "v[r] * scale * 1.00002 * weight[r]")
    result = measure("verify")
    assert result.code == 7
    wrong = [line for line in result.out.splitlines() if "WRONG" in line]
    assert wrong and all(line.startswith("rms_norm_vec4") for line in wrong)
    assert "out of their bounds: rms_norm_vec4" in result.err
    assert "FAILED" in v.verified_line(gpu.info) and "rms_norm_vec4" in v.verified_line(gpu.info)


def test_one_wrong_lane_is_noticed(measure, only_norms, monkeypatch):  # noqa: F811
    """One value in 576: the mean hardly moves, the largest error does."""
    good, bad = "x[source + i] * scale * w[i]", "x[source + i] * (scale + select(0.0, 1e-3, i == 77u)) * w[i]"
    break_kernel(monkeypatch, "rms_norm", good, bad)
    result = measure("verify", "-q")
    assert result.code == 7 and result.out.count("WRONG") == 4  # of four widths


def test_a_kernel_that_does_not_compile(measure, only_norms, monkeypatch):  # noqa: F811
    break_kernel(monkeypatch, "rms_norm_blocks", "var squares = 0.0;", "var squares = nonsense;")
    result = measure("verify")
    assert result.code == 7 and "rms_norm_blocks" in result.err and "rms_norm_vec4" not in result.err


def test_int8_bound_is_larger_only_where_sums_are_rounded(gpu):
    """The probe says what the kernel does: its squared error is 3e-14, or 2e-10."""
    for case in linear_cases(gpu, quick=True):
        if case.kernel == "linear_gemm_int8":
            assert (errors(*case.compare())[0] < 1e-12) == (case.bound == F32) == gpu.exact_int8_sums, case.shape


def test_nan_is_not_right():
    nan = float("nan")
    assert not v.Check("k", "s", nan, nan, F32).ok and not v.Check("k", "s", 0.0, nan, F32).ok
    assert v.Check("k", "s", 1e-11, 1e-6, F32).ok and not v.Check("k", "s", 1e-9, 1e-6, F32).ok
    with pytest.raises(NumericCheckFailed, match="1 of 2"):
        v.need_right([v.Check("k", "s", 0.0, 0.0, F32), v.Check("k", "s", nan, 0.0, F32)])


# Saved results


@pytest.fixture
def info(gpu, tmp_path, monkeypatch):
    """The adapter's, with an empty cache."""
    monkeypatch.setenv("LLAMAGPU_CACHE", str(tmp_path))
    return gpu.info


def test_results_belong_to_adapter_driver_and_kernels(info, monkeypatch):
    assert v.verified(info) is None and "not verified" in v.verified_line(info)
    v.save_results(info, [v.Check("k", "s", 0.0, 0.0, F32)], False, 1.0)
    assert v.verified(info).wrong == []
    assert v.verified(info | {"description": "another driver"}) is None
    monkeypatch.setattr(v, "kernel_set", lambda: "another")
    assert v.verified(info) is None


def test_a_quick_run_does_not_replace_a_whole_one(info):
    right, wrong = v.Check("k", "s", 0.0, 0.0, F32), v.Check("k", "s", 1.0, 1.0, F32)
    v.save_results(info, [right], True, 1.0)
    v.save_results(info, [right] * 9, False, 1.0)
    v.save_results(info, [right], True, 1.0)
    assert (v.verified(info).checks, v.verified(info).quick) == (9, False)
    v.save_results(info, [wrong], True, 1.0)
    assert v.verified(info).wrong == ["k s"]


def test_damaged_results_are_no_results(info):
    v.save_results(info, [], False, 1.0)
    file = v.results_path(info)
    for text in ("{", "[]", "{}", '{"wrong": []}', ""):
        file.write_text(text)
        assert v.verified(info) is None and "not verified" in v.verified_line(info)


def test_saving_leaves_no_other_file(info):
    """Nor if the results cannot be written, which is not an error."""
    v.save_results(info, [], False, 1.0)
    file = v.results_path(info)
    assert list(v.results_dir().iterdir()) == [file]
    file.unlink()
    file.mkdir()
    v.save_results(info, [], False, 1.0)
    assert list(v.results_dir().iterdir()) == [file] and file.is_dir()


def test_a_cache_that_is_no_folder_is_no_error(info, tmp_path):
    (tmp_path / "verified").write_text("in the way")
    v.save_results(info, [], False, 1.0)
    assert v.verified(info) is None


def test_a_check_has_the_bound_of_its_case(gpu, info, only_norms, monkeypatch):
    seen = []
    case = Case("k", "s", lambda: (np.ones(1), np.ones(1)), (0.5, 0.25))
    monkeypatch.setattr(v, "kernel_cases", lambda *_: [case])
    checks = v.verify(gpu, seen=seen.append)
    assert checks == seen == [v.Check("k", "s", 0.0, 0.0, (0.5, 0.25))]


def test_int8_blocks_round_to_127_steps():
    x = np.random.default_rng(0).standard_normal((2, 64))
    error = np.abs(round_int8(x) - x).reshape(2, 2, 32)
    step = np.abs(x).reshape(2, 2, 32).max(axis=2, keepdims=True) / 127
    assert (error <= step / 2 + 1e-6).all() and error.max() > step.min() / 4
    assert not dequantise_blocks(quantise_blocks(np.zeros((1, 32)))).any()
