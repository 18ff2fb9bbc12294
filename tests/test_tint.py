"""The kernels are WGSL as browsers compile it, not only as naga does."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("wgpu")
from composed import ADAPTERS, DAWN, NOT_WGSL, compose_all, tint, write_sources

FEW = ("minimum limits, features", "CPU, subgroups of 4", "fused", "matrices of 16x16", "matrices of 8x8")


def test_every_kernel_is_composed_without_features() -> None:
    kernels = compose_all(ADAPTERS["minimum limits"], ["tiny"])
    assert {"linear_any", "linear_gemv", "linear_gemm", "attend", "rms_norm_vec4", "sample"} <= set(kernels.values())
    for source, kernel in kernels.items():
        code = "\n".join(line.partition("//")[0] for line in source.splitlines())
        assert "enable f16" not in code, kernel
        assert "subgroup" not in code, kernel


def test_tint_compiles_the_kernels(tmp_path: Path) -> None:
    if not shutil.which("node") or not DAWN.is_dir():
        pytest.skip("no Tint: `scripts/test --portability` installs it")
    assert write_sources(tmp_path, FEW, ["tiny"]) > 300
    refused = {path: messages for path, messages in tint(tmp_path).items() if not Path(path).name.startswith(NOT_WGSL)}
    assert not refused
