"""Composes every kernel for adapters that are not here, and compiles them with Tint.

The kernels are those of the checks of `verify` and of the plans of models.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from conftest import ROOT
from kernel_cases import FULL_CAPS, MINIMUM_CAPS
from numpy.typing import NDArray

from llamagpu.engine.engine import Engine
from llamagpu.engine.load import ModelSource, Source, allocate_source, open_source, resolve
from llamagpu.engine.model import Model
from llamagpu.engine.options import Backend, EngineOptions, KvType, Precision, Settings
from llamagpu.engine.routes import CONTEXT_BUCKETS, GEMM_WIDTHS, GEMV_WIDTHS
from llamagpu.engine.synthetic import SyntheticFile, parse, synthetic_config
from llamagpu.files.config import ModelConfig
from llamagpu.gpu.caps import MATRICES, MINIMUM_LIMITS, Caps
from llamagpu.gpu.device import Dispatch
from llamagpu.gpu.dry_gpu import DryGpu
from llamagpu.gpu.recorder import Plan
from llamagpu.verify.kernels import kernel_cases
from llamagpu.verify.others import other_cases
from llamagpu.verify.textures import texture_cases

CPU = replace(FULL_CAPS, cpu=True, subgroup=4, shader_f16=True)
LARGE = replace(FULL_CAPS, shader_f16=True, shared_bytes=49152, storage_buffers=64, grid_barrier=True)
ADAPTERS: dict[str, Caps] = {
    "minimum limits": MINIMUM_CAPS,
    "minimum limits, features": replace(MINIMUM_CAPS, native_f16=True, shader_f16=True, subgroup=32, storage_buffers=9),
    "subgroups of 8": replace(FULL_CAPS, subgroup=8, native_f16=False),
    "subgroups of 16": replace(FULL_CAPS, subgroup=16, shader_f16=True),
    "subgroups of 64": replace(FULL_CAPS, subgroup=64, shader_f16=True),
    "fused": LARGE,
    **{f"matrices of {matrix}": replace(LARGE, matrix=matrix, tint=True, storage_buffers=16) for matrix in MATRICES},
    "matrices, measured barrier": replace(LARGE, matrix="16x16", tint=True, storage_buffers=16, measured_barrier=True),
    "matrices, 32 KiB": replace(FULL_CAPS, shader_f16=True, matrix="8x8"),
    "CPU, subgroups of 4": CPU,
    "CPU, subgroups of 8": replace(CPU, subgroup=8, native_f16=False, shader_f16=False),
    "CPU, no subgroups": replace(CPU, subgroup=0, shader_f16=False),
}
ROWS = (1, *GEMV_WIDTHS, *GEMM_WIDTHS, 512)
SYNTHETIC = (
    *("tiny", "tiny:q4_k_m", "tiny:f16", "llama-3.2-1b:q4_k_m", "llama-3.1-8b", "qwen2.5-0.5b:q8_0"),
    *("qwen3-0.6b", "gemma-3-1b", "qwen3-30b-a3b", "gpt-oss-20b:mxfp4", "lfm2-350m"),
)
TINT = ROOT / "scripts/portability/tint.mjs"
DAWN = Path(sys.prefix) / "portability/node_modules/webgpu"  # `scripts/test --portability` installs it
NOT_WGSL: tuple[str, ...] = ()  # kernels that Tint may refuse
BUFFERS = EngineOptions(precision=Precision.HIGH, backend=Backend.BUFFERS)


class ComposedError(Exception):
    """The kernels are composed, and there is no device to run them."""


class ComposingGpu(DryGpu):
    """Keeps the sources that are composed for an adapter with these capabilities. Nothing runs."""

    def __init__(self, caps: Caps) -> None:
        self.caps = caps
        self.info = {
            "library": "wgpu",
            "device": "composed",
            "adapter_type": "DiscreteGPU",
            "backend_type": "none",
            "description": "",
            "vendor_id": 0,
            "device_id": 0,
        }
        self.limits = {**MINIMUM_LIMITS, "max-buffer-size": caps.binding_bytes}
        self.allocated_bytes = self.peak_bytes = self.staged_bytes = 0
        self.closed, self.unchecked, self.features = False, True, {"subgroup"} if caps.subgroup else set()
        self.pipelines = {}
        self.sources: dict[str, str] = {}  # kernel, by its source

    @property
    def device(self) -> Any:
        raise ComposedError

    native = device

    def dispatch(self, *args: Any, **more: Any) -> Dispatch:
        return self._keep(super().dispatch(*args, **more))

    def fused(self, *args: Any, **options: Any) -> Dispatch:
        return self._keep(super().fused(*args, **options))

    def _keep(self, dispatch: Dispatch) -> Dispatch:
        self.sources.setdefault(dispatch.checked_source, dispatch.kernel)
        return dispatch

    def _probe(self, source: str, first: int = 0) -> NDArray[np.uint32]:
        self.sources.setdefault(source, "probe")
        return np.zeros(4, np.uint32)


def compose_all(caps: Caps, models: Iterable[Source]) -> dict[str, str]:
    """The kernel of every distinct source that is composed on such an adapter, by its source."""
    gpu = ComposingGpu(caps)
    probes = (gpu._probe_native_f16, gpu._probe_subgroup_size)
    textures = texture_cases(gpu) if caps.cpu else ()
    cases = (case.compare for case in (*kernel_cases(gpu, quick=False), *other_cases(gpu), *textures))
    for compose in (*probes, *cases):
        with suppress(ComposedError):
            compose()
    for model in models:
        compose_model(gpu, model)
    return gpu.sources


def compose_model(gpu: ComposingGpu, model: Source) -> None:
    with closing(open_model(model)) as source:
        for settings in model_settings(gpu, source):
            weights = allocate_source(source, settings, gpu)
            compose_plans(Engine(gpu, source.config, weights, settings, probe=False).model)


def open_model(model: Source) -> ModelSource:
    """A file, or a synthetic model cut to two layers: the others have the same kernels."""
    if isinstance(model, Path):
        return open_source(model)
    file = SyntheticFile(model, two_layers(synthetic_config(parse(model)[0])))
    return ModelSource(file, file.config, file.matrices())


def two_layers(config: ModelConfig) -> ModelConfig:
    """Of different kinds, where a model has such."""
    return replace(config, layers=2, kinds=(*dict.fromkeys(config.kinds), config.kinds[0])[:2])


def model_settings(gpu: ComposingGpu, source: ModelSource) -> list[Settings]:
    """Both precisions and cache types on buffers, and textures where they suit."""
    buffers, default = resolve(BUFFERS, source, gpu), resolve(EngineOptions(precision=Precision.HIGH), source, gpu)
    modes = product(Precision, KvType)
    found = [replace(buffers, precision=precision, kv_type=kv_type, slots=2) for precision, kv_type in modes]
    return found + [default] * (default.backend is Backend.TEXTURES)


def compose_plans(model: Model) -> None:
    last = model.settings.capacity - 1
    plans: list[Callable[[], Plan]] = [
        *(partial(model.plan, rows) for rows in ROWS if rows <= model.chunk),
        *(partial(model.plan, 1, position) for position, _, _ in CONTEXT_BUCKETS if position <= last),
        *(partial(model.score_plan, rows) for rows in (1, 16, min(64, model.chunk))),
        *(partial(model.hidden_plan, rows) for rows in (1, 2)),
        *(partial(model.sample_plan, greedy) for greedy in (True, False)),
        partial(model.sample_plan, False, masked=True, logprobs=True),
    ]
    if model.settings.slots > 1:
        plans += [partial(model.plan, rows, segments=2) for rows in (2, 16, min(64, model.chunk))]
    for plan in plans:
        with suppress(ComposedError):
            plan()


# Tint


def write_sources(folder: Path, adapters: Iterable[str], models: Iterable[Source]) -> int:
    """Write every distinct source once, below the first adapter that it is composed for; return how many."""
    seen: set[str] = set()
    devices = {}
    for name in adapters:
        caps = ADAPTERS[name]
        features = ["subgroups"] * (caps.subgroup > 0) + ["shader-f16"] * caps.shader_f16
        features += ["chromium-experimental-subgroup-matrix"] * (caps.matrix != "")
        least = MINIMUM_CAPS.shared_bytes, MINIMUM_CAPS.storage_buffers
        devices[name] = {"features": features, "minimumLimits": (caps.shared_bytes, caps.storage_buffers) == least}
        (folder / name).mkdir(parents=True)
        for source, kernel in compose_all(caps, models).items():
            if source not in seen:
                digest = hashlib.blake2b(source.encode(), digest_size=4).hexdigest()
                (folder / name / f"{kernel}-{digest}.wgsl").write_text(source)
                seen.add(source)
    (folder / "devices.json").write_text(json.dumps(devices))
    return len(seen)


def tint(folder: Path) -> dict[str, list[str]]:
    """The messages of Tint by the path of the source, of those that it does not compile."""
    run = subprocess.run(["node", TINT, DAWN, folder], capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = {}
    for message in json.loads(run.stdout.splitlines()[-1]):
        found.setdefault(message["path"], []).append(message["text"])
    return found
