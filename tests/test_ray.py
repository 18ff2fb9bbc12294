"""`llamagpu.ray.Predictor`: alone, and as actors of a real local Ray, one of which is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from gguf_builder import tiny_llama
from package_data import default_model
from serving import EXACT

from llamagpu import Llama, Sampling
from llamagpu.errors import BadArgument
from llamagpu.gpu.caps import NVIDIA
from llamagpu.ray import Predictor, adapter_of

AMD, INTEL = 0x1002, 0x8086
SAMPLING = {"temperature": 1, "seed": 3}
PROMPTS = [f"prompt number {i} of this test" for i in range(24)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("ray") / "tiny.gguf", context=256)


class Killed(Predictor):
    """The first actor that gets the row of `victim` is killed in the midst of its batch."""

    def __init__(self, mark: str, **options: Any) -> None:
        super().__init__(**options)
        self.mark = mark

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if PROMPTS[13] in batch["prompt"] and not os.path.exists(self.mark):
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {**super().__call__(batch), "pid": np.full(len(batch["prompt"]), os.getpid())}


def test_a_batch(gpu: Any, model: Path) -> None:
    predictor = Predictor(model, max_tokens=6, sampling=SAMPLING, device=gpu, **EXACT)
    found = predictor({"prompt": np.array([*PROMPTS[:3], "x" * 400], object), "id": np.arange(4)})
    with Llama(model, device=gpu, **EXACT) as llama:
        alone = [llama.complete(text, max_tokens=6, sampling=Sampling(**SAMPLING)).text for text in PROMPTS[:3]]
    assert found["answer"].tolist() == [*alone, ""] and found["id"].tolist() == [0, 1, 2, 3]
    assert found["answer_finish_reason"].tolist()[2:] == ["length", "error"]
    assert "context" in found["answer_error"][3] and found["answer_tokens"].tolist() == [6, 6, 6, 0]
    with pytest.raises(BadArgument, match="no column"):
        predictor({"text": np.array(["a"], object)})


def info(vendor: int, kind: str = "DiscreteGPU", backend: str = "Vulkan") -> dict[str, Any]:
    return {"vendor_id": vendor, "adapter_type": kind, "backend_type": backend}


@pytest.mark.parametrize(
    ("adapters", "numbers"),
    [
        ([info(NVIDIA), info(NVIDIA), info(5, "CPU")], ["0", "1"]),
        ([info(AMD), info(NVIDIA), info(NVIDIA), info(INTEL, "IntegratedGPU")], ["1", "2"]),
        ([info(AMD), info(AMD), info(5, "CPU")], ["0", "1"]),
        ([info(NVIDIA), info(NVIDIA, backend="D3D12"), info(NVIDIA)], ["0", "2"]),  # one of them by two APIs
        ([info(5, "CPU")], [None, None]),  # ray.init(num_gpus=2)
    ],
)
def test_adapters_of_rays_gpus(adapters: list[Any], numbers: list[Any]) -> None:
    assert [adapter_of(str(gpu), adapters) for gpu in range(len(numbers))] == numbers
    if numbers[0]:
        for gpu in (str(len(numbers)), "GPU-4f6c"):
            with pytest.raises(BadArgument, match=f"the GPU {gpu}"):
                adapter_of(gpu, adapters)


@pytest.mark.slow
def test_two_actors_one_of_which_is_killed(gpu: Any, model: Path, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    expected = Predictor(model, max_tokens=6, sampling=SAMPLING, device=gpu, **EXACT)(
        {"prompt": np.array(PROMPTS, object)}
    )
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}}
    ray.init(num_cpus=2, resources={"webgpu": 2}, include_dashboard=False, runtime_env=environment)
    try:
        options = {"mark": str(tmp_path / "mark"), "model": str(model), "max_tokens": 6, "sampling": SAMPLING, **EXACT}
        data = ray.data.from_items([{"prompt": prompt} for prompt in PROMPTS]).repartition(6)
        more = {"batch_size": 4, "concurrency": 2, "num_cpus": 0, "resources": {"webgpu": 1}}
        rows = data.map_batches(Killed, fn_constructor_kwargs=options, **more).take_all()
    finally:
        ray.shutdown()
    assert (tmp_path / "mark").exists() and len(rows) == len(PROMPTS)
    assert {row["prompt"]: row["answer"] for row in rows} == dict(zip(PROMPTS, expected["answer"], strict=True))
    assert len({row["pid"] for row in rows}) >= 2


@pytest.mark.slow
def test_the_example(gpu: Any) -> None:
    pytest.importorskip("ray")
    default_model()
    command = [sys.executable, ROOT / "scripts/examples/ray_batch.py"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0 and "> Which colour has the sky?" in found.stdout, found.stderr
    assert "The capital of France is Paris." in found.stdout
