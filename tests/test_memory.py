"""The memory plan equals the allocation, and a model that does not fit is refused before it."""

import math
import re
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from composed import ADAPTERS, BUFFERS, ComposingGpu, open_model
from conftest import ROOT
from gguf_builder import tiny_llama, tiny_parts, write_gguf

from llamagpu import Llama
from llamagpu.engine import routes
from llamagpu.engine.engine import Engine
from llamagpu.engine.kv_cache import position_bytes
from llamagpu.engine.load import ModelSource, allocate_source, load_model, plan_memory, resolve
from llamagpu.engine.options import Backend, EngineOptions, KvType, Precision, Settings
from llamagpu.engine.synthetic import SyntheticFile, fitting_type, synthetic_config
from llamagpu.errors import BadArgument, DoesNotFit
from llamagpu.files.config import tensor_shapes
from llamagpu.files.gguf_file import BLOCKS, RawTensor
from llamagpu.files.matrices import matrix_sources

PROMPT = "the quick brown fox"
LAYER_TABLES = 4096  # bytes: fused decode makes small tables when its kernels are built


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.mark.parametrize("ggml_type", ["F32", "Q4_0", "Q4_K", "Q6_K", "Q8_0"])
def test_the_plan_is_what_is_allocated(tmp_path, any_gpu, ggml_type):
    """On the backend of the adapter. A model that does not fit is refused before anything is allocated."""
    keys, tensors = tiny_parts(ggml_type=ggml_type, vocab=10_000, dim=256, ffn=512, layers=3, biases=True)
    check_plan(any_gpu, write_gguf(tmp_path / "m.gguf", keys, tensors))


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("ggml_type", ["Q4_0", "Q4_K", "Q6_K", "F16"])
def test_the_plan_of_a_gpu_is_what_is_allocated(tmp_path, gpu, monkeypatch, ggml_type, precision):
    """Buffers and 6-bit weights, which a software adapter does not use by default."""
    monkeypatch.setattr(gpu, "caps", replace(gpu.caps, cpu=False))
    keys, tensors = tiny_parts(ggml_type=ggml_type, vocab=10_000, dim=256, ffn=512, layers=1)
    check_plan(gpu, write_gguf(tmp_path / "m.gguf", keys, tensors), precision=precision)


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("name, chunk", [("qwen3-8b", 256), ("llama-3.1-8b:q4_k_m", 512)])
def test_the_sums_of_split_linears_are_planned(name, chunk, precision):
    """No plan of a GPU with matrix units allocates more of them."""
    gpu = ComposingGpu(ADAPTERS["matrices of 16x16"])
    with closing(open_model(name)) as source:
        settings = replace(resolve(BUFFERS, source, gpu), precision=precision, chunk=chunk)
        model = Engine(gpu, source.config, allocate_source(source, settings, gpu), settings, probe=False).model
    planned, splits = gpu.allocated_bytes, set()
    for rows in (16, 32, 64, 65, 128, 256, 512):
        if rows <= chunk:
            splits |= {d.consts.get("GRID_SPLIT", 1) for d in model.plan(rows).dispatches}
    assert max(splits) > 1 and gpu.allocated_bytes == planned


def check_plan(gpu: Any, path: Path, **options: Any) -> None:
    before = gpu.allocated_bytes
    with pytest.MonkeyPatch.context() as patch:
        llama = Llama(path, device=gpu, **options)
        used = gpu.allocated_bytes - before
        assert llama.memory.total <= used <= llama.memory.total + (LAYER_TABLES if llama.fused else 0)
        patch.setenv("LLAMAGPU_MAX_MEMORY", str((llama.memory.total >> 20) - 1))
        before = gpu.allocated_bytes
        with pytest.raises(DoesNotFit, match=r"the model needs .* MiB and there are") as caught:
            Llama(path, device=gpu, **options)
        assert gpu.allocated_bytes == before and caught.value.remedy


@pytest.mark.parametrize("kv_type", [None, KvType.Q8_0])
def test_the_plan_of_a_synthetic_model(gpu, kv_type):
    before = gpu.allocated_bytes
    loaded = load_model("tiny:q4_k_m", EngineOptions(kv_type=kv_type), gpu=gpu)
    used = gpu.allocated_bytes - before
    assert loaded.memory.total <= used <= loaded.memory.total + LAYER_TABLES


def test_a_q8_0_cache_has_half_the_size_of_f16():
    config = synthetic_config("llama-3.1-8b")
    assert [position_bytes(config, kv_type) >> 10 for kv_type in KvType] == [128, 256, 68]


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("mix", ["Q4_0", "Q4_K_M", "Q8_0"])
@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "smollm2"])
def test_memory_is_that_of_the_file_and_little_more(gpu, monkeypatch, name, mix, precision):
    """On a GPU: the weights as the file has them, the cache, one row's activations, and at most 8 % of these."""
    if (name, mix) == ("smollm2", "Q4_K_M"):
        pytest.skip("such a file is Q5_0 for the most part, which has 8 bits on the device")
    limits = {"max-buffer-size": 1 << 40}
    monkeypatch.setattr(gpu, "limits", gpu.limits | limits)
    caps = replace(gpu.caps, cpu=False, native_f16=True, grid_barrier=True, subgroup=32, binding_bytes=1 << 31)
    caps = replace(caps, matrix="")  # which have larger chunks
    monkeypatch.setattr(gpu, "caps", caps)
    source, file = file_of(name, mix)
    settings = Settings(precision, KvType.F16, Backend.BUFFERS, chunk=1, context=1024, capacity=1024)
    single = plan_memory(source, settings, gpu)
    chunk = routes.default_chunk(caps, precision is Precision.FAST)
    plan = plan_memory(source, replace(settings, chunk=chunk), gpu)
    assert plan.total < 1.08 * (file + plan.cache + single.scratch)


def file_of(name: str, mix: str) -> tuple[ModelSource, int]:
    """A model of these types without data, and the bytes that its file takes."""
    config = synthetic_config(name)
    shapes, last = tensor_shapes(config), "token_embd" if config.tied else "output"
    mixed = mix == "Q4_K_M"
    six = re.compile(rf"{last}|attn_v|[02468]\.ffn_down" if mixed else last)  # about as in such files
    types = {
        n: "F32" if "norm" in n else fitting_type("Q6_K" if six.search(n) else "Q4_K" if mixed else mix, shape[-1])
        for n, shape in shapes.items()
    }
    none = np.zeros(0, np.uint8)
    tensors = {n: RawTensor(n, types[n], shape, none) for n, shape in shapes.items()}
    size = sum(math.prod(t.shape) // BLOCKS[t.ggml_type][0] * BLOCKS[t.ggml_type][1] for t in tensors.values())
    return ModelSource(SyntheticFile(name), config, matrix_sources(tensors, config)), size


def test_the_default_context_is_what_fits_the_memory(tmp_path, gpu, monkeypatch):
    """A context that was asked for is refused where it does not fit, with the one that does."""
    path = tiny_llama(tmp_path / "m.gguf", context=8000, kv_heads=4)
    with Llama(path, device=gpu, context=2048) as llama:
        limit = -(-llama.memory.peak >> 20)
    monkeypatch.setenv("LLAMAGPU_MAX_MEMORY", str(limit))
    with Llama(path, device=gpu) as llama:
        assert 2048 <= llama.context < 8000 and llama.memory.peak <= limit << 20
        list(llama.generate(PROMPT, max_tokens=1))
    with pytest.raises(DoesNotFit, match="the model needs") as caught:
        Llama(path, device=gpu, context=6000)
    fits = int(caught.value.remedy.split()[2])
    assert 2048 <= fits < 6000
    with Llama(path, device=gpu, context=fits) as llama:
        assert llama.context == fits


def test_max_memory_is_a_number(path, gpu, monkeypatch):
    monkeypatch.setenv("LLAMAGPU_MAX_MEMORY", "lots")
    with pytest.raises(BadArgument, match="LLAMAGPU_MAX_MEMORY is 'lots'"):
        Llama(path, device=gpu)


MEASURE = """
import sys, threading, time
from llamagpu import Llama
from llamagpu.gpu.device import Gpu


def anonymous():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("RssAnon"))


def watch():
    while True:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.005)


gpu = Gpu.open()
before = anonymous()
peak = [before]
threading.Thread(target=watch, daemon=True).start()
llama = Llama(sys.argv[1], device=gpu)
print(max(peak[0], anonymous()) - before, llama.memory.peak)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_a_software_adapter_takes_what_is_planned(gpu, tmp_path):
    """The machine's memory, while the weights are converted too: an embedding of 62 M weights, 8-bit on the device."""
    if not gpu.software:
        pytest.skip("the memory of a GPU is not the machine's")
    keys, tensors = tiny_parts(dim=1024, heads=16, kv_heads=4, head_dim=64, ffn=1024)
    blocks = np.zeros((60_000 * 1024 // 256, 210), np.uint8)  # Q6_K
    tensors["token_embd.weight"] = "Q6_K", (60_000, 1024), blocks.tobytes()
    path = write_gguf(tmp_path / "m.gguf", keys, tensors)
    done = subprocess.run([sys.executable, "-c", MEASURE, path], capture_output=True, text=True, check=True, cwd=ROOT)
    taken, planned = map(int, done.stdout.split())
    assert 0.6 * planned < taken < 1.1 * planned
