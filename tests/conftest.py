"""Where the tests find the repository and a device."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamagpu.errors import NoAdapter

ROOT = Path(__file__).resolve().parent.parent
# Processes that tests start import this checkout, whatever folder they run in.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
DAWN = os.environ.get("LLAMAGPU_BACKEND") == "dawn"
WGPU = pytest.mark.skipif(DAWN, reason="Dawn fuses fewer steps, and has other faults and adapters")


def open_gpu(**settings: str) -> Any:
    """A device of its own, opened with these environment variables; skips the test without an adapter."""
    from llamagpu.gpu.device import Gpu  # not at the top: tests without a GPU need no wgpu

    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        try:
            return Gpu.open()
        except NoAdapter as error:
            pytest.skip(f"no GPU tests: {error.cause}")


@pytest.fixture(scope="session")
def gpu() -> Any:
    """The adapter with all that it offers, shader modules unchecked."""
    return open_gpu()


@pytest.fixture(scope="session")
def minimum_gpu() -> Any:
    """No feature and no limit beyond what WebGPU guarantees, shader modules with bounds checks."""
    return open_gpu(LLAMAGPU_MINIMUM_LIMITS="1", LLAMAGPU_UNCHECKED="0")


@pytest.fixture(scope="session", params=["full", "minimum"])
def any_gpu(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue("gpu" if request.param == "full" else "minimum_gpu")


@pytest.fixture(scope="module")
def fused_gpu() -> Any:
    """On a software adapter, which runs one workgroup at a time for sure, the grid has one workgroup."""
    found = open_gpu(LLAMAGPU_FUSED="1")
    if found.caps.subgroup < 4:
        pytest.skip("fused decode needs subgroups of 4 or more")
    found.caps = replace(found.caps, compares_fused=False)  # most tests compare, with float64
    return found


@pytest.fixture
def matrix_gpu(gpu: Any, monkeypatch: pytest.MonkeyPatch, matrix: str) -> Any:
    """The device, which runs kernels with these subgroup matrices whether it has them or not."""
    from emulated_matrices import emulated

    monkeypatch.setattr(gpu, "caps", replace(gpu.caps, matrix=matrix))
    if gpu.matrices and matrix not in gpu.matrices:
        pytest.skip(f"no matrices of {matrix}")
    if not gpu.matrices:
        create = gpu.native.create_module

        def create_emulated(source: str, label: str) -> Any:
            return create(emulated(source) if "subgroup_matrix" in source else source, label)

        monkeypatch.setattr(gpu.native, "create_module", create_emulated)
    return gpu
