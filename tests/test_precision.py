"""Which precision a model gets, and the start-up check of int8 products."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from gguf_builder import tiny_llama

from llamagpu import Llama
from llamagpu.engine import precision
from llamagpu.engine.options import Precision
from llamagpu.errors import NumericCheckFailed


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return tiny_llama(
        tmp_path_factory.mktemp("model") / "m.gguf", dim=64, heads=2, head_dim=64, ffn=128, ggml_type="Q8_0"
    )


def test_the_check_measures_a_rounding_and_no_more(any_gpu):
    error = precision.int8_error(any_gpu)
    assert 1e-6 < error < precision.NMSE_BOUND


def test_fast_rounds_and_high_does_not(path, gpu):
    """The same single steps in both: the logits differ by about the rounding of int8 activations."""
    logits = {}
    for wanted in Precision:
        with Llama(path, device=gpu, precision=wanted) as llama:
            assert llama.precision == wanted
            with llama.scheduler.alone(4) as sequence:
                for id in (1, 20, 33, 47):
                    llama.loaded.engine.prefill(sequence, [id])
            logits[wanted] = llama.loaded.engine.read_logits()
    exact = logits[Precision.HIGH]
    nmse = ((logits[Precision.FAST] - exact) ** 2).sum() / (exact**2).sum()
    assert 1e-7 < nmse < 5e-3


def test_the_default_depends_on_the_adapter(path, gpu, monkeypatch):
    with Llama(path, device=gpu) as llama:
        packed = not gpu.caps.cpu and gpu.info["vendor_id"] in precision.PACKED_DOT_VENDORS
        assert llama.precision == (Precision.FAST if packed else Precision.HIGH)
    monkeypatch.setattr(gpu, "caps", replace(gpu.caps, cpu=False))
    monkeypatch.setitem(gpu.info, "vendor_id", precision.PACKED_DOT_VENDORS[0])
    assert precision.resolve_precision(gpu, None) is Precision.FAST
    assert precision.resolve_precision(gpu, Precision.HIGH) is Precision.HIGH
    monkeypatch.setitem(gpu.info, "vendor_id", 0x106B)
    assert precision.resolve_precision(gpu, None) is Precision.HIGH


@pytest.mark.parametrize("error", [1.0, math.nan])
def test_wrong_int8_products_are_refused(path, gpu, monkeypatch, error):
    monkeypatch.setattr(precision, "_errors", {})
    monkeypatch.setattr(precision, "int8_error", lambda gpu: error)
    with pytest.raises(NumericCheckFailed, match="int8 products on"):
        Llama(path, device=gpu, precision="fast")
    with Llama(path, device=gpu) as llama:
        assert llama.precision == "high"
