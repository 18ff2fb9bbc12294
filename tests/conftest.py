"""Where the tests find the repository and a device."""

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llamagpu.errors import NoAdapter

ROOT = Path(__file__).resolve().parent.parent
# Processes that tests start import this checkout, whatever folder they run in.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
DAWN = os.environ.get("LLAMAGPU_BACKEND") == "dawn"
# A software adapter whose shader cache is empty compiles a kernel for seconds, a fused one for ten: with all of these a
# run on two cores took 26 minutes, half of them compiling. Each is much like a test that runs every time. `-m slow`
# runs them.
SLOW_TO_COMPILE = re.compile(
    r"""
    test_architectures.py::( test_fused_decode_in_several_kernels | test_fused_decode_in_several_splits\[gemma3-True
        | test_workgroups_share_query_heads\[q8_0 | test_heads_of_256_rotate_in_attention | test_fused_decode\[qwen3moe
        | test_fused_decode_with_a_q8_0_cache\[lfm2
        | test_with_tint_what_is_late_comes_from_its_copy
        | test_gate_and_up_of_experts_have_two_types | test_experts_in_shards\[gpt-oss )
    | test_bench.py::test_synthetic_weights_keep_activations_finite\[.*-buffers
    | test_dawn.py::test_matrices_compile\[(8x8|16x8)
    | test_devices.py::test_listing_equals_.*\[buffers
    | test_fused_decode.py::( test_fused_decode\[(mixed-high|four.types|two.types|2.heads.*high|biases|sliding)
        | test_ranges_of_a_buffer_share_a_binding_where_bindings_are_few
        | test_a_plain_model_needs_few_bindings\[(f32|q8_0)
        | test_a_driver_that_refuses_a_kernel_of_different_types | test_with_tint\[(qwen2|mixed)
        | test_after_a_time_out_nobody_waits\[True | test_a_bias_that_some_layers_lack\[lacking[123]
        | test_the_same_text_by_other_means\[.*UNCHECKED | test_a_matrix_that_does_not_fit_a_slab
        | test_a_barrier_that_times_out_in_the_100th_token\[(sampled-a|greedy) )
    | test_fused_experts.py::( test_fused_experts\[(mixtral.*fast|olmoe|qwen3moe.*high|granitemoe|.*Q4_0|.*MXFP4-high)
        | test_inputs_that_workgroup_memory_does_not_hold | test_slabs_of_two_layers
        | test_sinks_in_several_splits\[False | test_with_tint_what_is_late_comes_from_its_copy )
    | test_kernels_attention.py::( test_attend_in_splits_with_16_lanes_per_position
        | test_attend_in_splits\[4of128( .*-2- | .*window.*(-f16|-f32)\] | -kv2-q8_0.*(-f16|-int8)\] )
        | test_attend_tile\[(2of64|6of64).*-(int8|f16)\] | test_attend_over_the_longest_context\[full-attend_tile-256 )
    | test_kernels_experts.py::test_expert_linear\[linear_tile_experts-(q6/16.f32|q8/32)
    | test_kernels_linear.py::( test_linear\[full-linear_gemm_int8-(q4/32\+-f32|q4/16|q8/32\+|q6/16-f32)
        | test_linear\[full-linear_gemm_int8,tile_m=( 16.*grid_split=[28] | 32.*grid_split=[24] | 64.*grid_split=[48]
            | (32|64).*-8193 | (16|32).*-q8/16 )
        | test_swiglu_to_int8_blocks\[full-linear_gemm_int8,tile_m=32
        | test_linear_gemv_fused\[( (q4/32\+|q6|q8|f16|bf16).*-f32\] | .*5376-norm )
        | test_gated_units_on_matrices\[(8x8|16x8)
        | test_tiles_stay_in_workgroup_memory\[.*grid_split | test_epilogue_qkv\[linear_(gemm|rows)-kv_f16 )
    | test_llama.py::test_an_interrupted_text_goes_on_as_if_nothing_had_been\[buffers-greedy
    | test_model.py::( test_model\[(types.from|1.head|head_dim.80|head_dim.48) | test_int8_attention\[8.heads
        | test_int8_activations\[types | test_f32_inputs_on_matrix_units
        | test_few_rows_on_matrix_units\[(12-linear_gemv_batch-512|20-linear_gemm_int8-128)
        | test_kernels_notice_subgroups_of_another_size\[textures | test_chunks_make_no_difference\[high
        | test_a_long_text_is_the_same_in_safe_recording )
    | test_prompt_cache.py::( test_restored_is_what_was_read\[buffers(.q8_0|.f32|,.head_dim)
        | test_heads_keep_their_place_in_other_pages\[q8_0 )
    | test_python_api.py::test_mean_hidden_state_of_fused_decode
    | test_texture_model.py::test_model\[(types.of.32|1.head|head_dim.80|head_dim.48)
    | test_verify.py::test_all_checks_pass_here
    """,
    re.VERBOSE,
)
WGPU = pytest.mark.skipif(DAWN, reason="Dawn fuses fewer steps, and has other faults and adapters")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if SLOW_TO_COMPILE.search(item.nodeid):
            item.add_marker(pytest.mark.slow)


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
def unprobed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that only read the source of fused kernels: none is compiled."""
    from llamagpu.engine.fused_decode import FusedDecode

    monkeypatch.setattr(FusedDecode, "probe", lambda *_: True)


@pytest.fixture
def matrix_gpu(gpu: Any, monkeypatch: pytest.MonkeyPatch, matrix: str) -> Iterator[Any]:
    """The device, which runs kernels with these subgroup matrices whether it has them or not."""
    from emulated_matrices import emulated

    from llamagpu.engine import routes

    half_sums = matrix == "16x16" and (gpu.caps.half_sums or not gpu.matrices)
    monkeypatch.setattr(gpu, "caps", replace(gpu.caps, matrix=matrix, half_sums=half_sums))
    if gpu.matrices and matrix not in gpu.matrices:
        pytest.skip(f"no matrices of {matrix}")
    if not gpu.matrices:
        monkeypatch.setattr(
            gpu, "caps", replace(gpu.caps, measured_barrier=False)
        )  # 32 invocations may be several subgroups
        create = gpu.native.create_module

        def create_emulated(source: str, label: str) -> Any:
            return create(emulated(source, gpu.caps.native_f16) if "subgroup_matrix" in source else source, label)

        monkeypatch.setattr(gpu.native, "create_module", create_emulated)
    routes._select.cache_clear()  # tests change what it compares with
    yield gpu
    routes._select.cache_clear()
