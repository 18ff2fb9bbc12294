"""Where the tests find the repository, the shared data and a device."""

import os
from pathlib import Path
from typing import Any

import pytest

from llamagpu.errors import NoAdapter

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(os.environ.get("LLAMAGPU_SHARED", ROOT.parent / "shared"))


def shared_data(rel: str) -> Path:
    """A file under shared/data; skips the test when it is not there."""
    path = SHARED / "data" / rel
    if not path.exists():
        pytest.skip(f"shared data {rel} is not on this machine (LLAMAGPU_SHARED names its folder)")
    return path


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
