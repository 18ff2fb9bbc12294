"""The one load path: from a model source and options to an engine.

Every command and the Python API open models here. Only `verify` builds an engine itself: its tiny model has no file.
"""

import time
from bisect import bisect_right
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llamagpu.engine import routes
from llamagpu.engine.engine import Engine
from llamagpu.engine.fused_decode import can_fuse
from llamagpu.engine.kv_cache import most_cells, position_bytes
from llamagpu.engine.memory import MemoryPlan, loading_bytes, memory_limit
from llamagpu.engine.options import Backend, EngineOptions, KvType, Precision, Settings
from llamagpu.engine.pages import PAGE
from llamagpu.engine.precision import resolve_precision
from llamagpu.engine.synthetic import SyntheticFile
from llamagpu.engine.texture_model import suits_textures
from llamagpu.engine.weights import Weights, WeightTarget, allocate_weights, load_weights
from llamagpu.errors import BadArgument, DoesNotFit, Unsupported, error_context
from llamagpu.files.config import ModelConfig, check_tensors, freq_factors_name
from llamagpu.files.matrices import MatrixSource
from llamagpu.files.packed_file import ModelFile, file_matrices, open_model_file
from llamagpu.files.repack import to_f32
from llamagpu.files.texture_layout import texture_layout
from llamagpu.gpu.buffers import nbytes
from llamagpu.gpu.device import Gpu, check_process
from llamagpu.gpu.dry_gpu import DryGpu
from llamagpu.gpu.timing import wait_idle

KV_BYTES = 2 << 30  # of the KV cache when neither context nor memory is given
SOFTWARE_KV_BYTES = KV_BYTES // 4
LEAST_CONTEXT = 1024  # where the memory is short, the default context is reduced down to this
MIN_USEFUL_CONTEXT = 64
Source = Path | str  # a file, or the name of a synthetic model
Progress = Callable[[int, int], None]
OnPlan = Callable[[MemoryPlan, Gpu], None]


@dataclass(slots=True)
class LoadTimes:
    """Seconds of each stage of loading, for `-v` and `bench`."""

    open_s: float = 0.0  # read the file's header and the tokenizer's tables
    device_s: float = 0.0
    weights_s: float = 0.0  # repack and upload
    compile_s: float = 0.0  # the first plan
    prompt_s: float = 0.0  # `Llama.load_prompt`

    @property
    def total_s(self) -> float:
        return self.open_s + self.device_s + self.weights_s + self.compile_s + self.prompt_s


@dataclass(frozen=True, slots=True)
class ModelSource:
    """An opened model, before anything is on a device."""

    file: ModelFile | SyntheticFile
    config: ModelConfig
    matrices: list[MatrixSource]

    def close(self) -> None:
        self.file.close()

    def freq_factors(self, context: int) -> NDArray[np.float32] | None:
        """The divisors of the frequencies of RoPE for a context of this length."""
        name = freq_factors_name(self.config, self.file.tensors, context)
        return None if name is None else to_f32(self.file.tensors[name])


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Weights on a device, and the engine that was made for the options."""

    source: ModelSource
    gpu: Gpu
    options: EngineOptions
    settings: Settings
    weights: Weights
    engine: Engine
    memory: MemoryPlan
    owns_gpu: bool
    times: LoadTimes = field(default_factory=LoadTimes)

    def close(self) -> None:
        """Close the file and free the memory, with the device if it was opened for this model."""
        self.source.close()
        if self.owns_gpu:
            self.gpu.close()
        elif not self.gpu.closed and not self.engine.freed:
            self.engine.free()
            self.gpu.free(*self.weights.resources())

    @property
    def config(self) -> ModelConfig:
        return self.source.config

    def another_engine(self, options: EngineOptions, gpu: Gpu | None = None) -> Engine:
        """A second engine on the same weights, with another context, chunk or KV type; `gpu` may wrap the device."""
        gpu = gpu or self.gpu
        wanted = replace(options, backend=self.settings.backend, precision=self.settings.precision)
        settings = resolve(wanted, self.source, gpu)
        check_memory(self.source, settings, gpu)
        return Engine(gpu, self.config, self.weights, settings, self.source.freq_factors(settings.context))


def open_source(source: Source) -> ModelSource:
    """Open a file or a synthetic model and check that it can be run."""
    if isinstance(source, Path):
        file: ModelFile | SyntheticFile = open_model_file(source)
    else:
        file = SyntheticFile(source)
    try:
        with error_context(source):
            if isinstance(file, SyntheticFile):
                return ModelSource(file, file.config, file.matrices())
            config = ModelConfig.from_gguf(file.metadata, file.tensors)
            check_tensors(config, file.tensors)
            return ModelSource(file, config, file_matrices(file, config))
    except BaseException:
        file.close()
        raise


def resolve(options: EngineOptions, source: ModelSource, gpu: Gpu) -> Settings:
    """Resolve the options for this model on this adapter."""
    c, caps = source.config, gpu.caps
    if options.context and options.context > c.context:
        raise DoesNotFit(
            f"a context of {options.context} was asked for; the model was trained for {c.context}",
            f"use -c {c.context} or less",
        )
    if options.kv_type is KvType.Q8_0:
        check_q8_0(options, c)
    precision = resolve_precision(gpu, options.precision)
    layouts = (texture_layout(layout) for matrix in source.matrices for layout, _ in matrix.rows)
    textures = (
        precision is Precision.HIGH
        and options.kv_type in (None, KvType.F32)
        and options.backend is not Backend.BUFFERS
        and suits_textures(c, caps)
        and routes.suits_textures(c.dim, c.ffn_dim, c.head_dim, c.rope_dims, layouts, caps)
    )
    backend = Backend.TEXTURES if textures else Backend.BUFFERS
    kv_type = options.kv_type or (KvType.F32 if textures or not caps.native_f16 else KvType.F16)
    context = options.context or min(c.context, routes.max_positions(c.head_dim, caps, textures) or c.context)
    capacity = context
    if options.kv_positions:
        capacity = options.kv_positions
    elif options.kv_memory or not options.context:
        held = positions_in(options, c, kv_type, backend, gpu)
        context = min(context, held)
        capacity = held if options.kv_memory else context
    if options.kv_sequences > 1 and not (options.kv_positions or options.kv_memory):
        held = positions_in(replace(options, context=None), c, kv_type, backend, gpu)
        capacity = max(context, min(options.kv_sequences * context, held))
    default = routes.default_chunk(caps, precision is Precision.FAST, textures)
    chunk = options.chunk or max(default, 2 * options.parallel)  # as many rows of prompts as decode
    chunk = min(chunk, capacity, context * options.parallel)
    slots = min(options.parallel, chunk)
    return Settings(precision, kv_type, backend, chunk, context, capacity, slots)


def check_q8_0(options: EngineOptions, c: ModelConfig) -> None:
    if options.backend is Backend.TEXTURES:
        raise BadArgument("the texture backend has no q8_0 KV cache", "use -ctk f32, or the buffer backend")
    if c.head_dim % 32:
        cause = f"a q8_0 KV cache has a scale for every 32 dimensions, and this model's heads have {c.head_dim}"
        raise Unsupported(cause, "use -ctk f16")


def positions_in(options: EngineOptions, c: ModelConfig, kv_type: KvType, backend: Backend, gpu: Gpu) -> int:
    """The positions that the memory of the KV cache holds, in whole pages. Fewer than the context are refused."""
    default = SOFTWARE_KV_BYTES if gpu.software else KV_BYTES
    each, memory = position_bytes(c, kv_type), options.kv_memory << 20 if options.kv_memory else default
    held = min(memory // each // PAGE * PAGE, most_cells(c, kv_type, backend, gpu))
    if held < (options.context or 1):
        needed = -(-(options.context or PAGE) // PAGE) * PAGE * each
        raise DoesNotFit(
            f"a KV cache of {memory >> 20} MiB holds {held} positions",
            f"use --kv-memory {-(-needed >> 20)} or more" + (f", or -c {held} or less" if held else ""),
        )
    return held


def fitting(options: EngineOptions, settings: Settings, source: ModelSource, gpu: Gpu) -> Settings:
    """The settings with as large a KV cache as the memory allows, where its size was left to us."""
    least, limit = options.context or min(settings.context, LEAST_CONTEXT), memory_limit(gpu)
    if options.kv_memory or options.kv_positions or not limit or settings.capacity <= least:
        return settings
    if plan_memory(source, settings, gpu).peak <= limit:
        return settings
    return with_positions(settings, positions_that_fit(source, settings, gpu, limit, least) or least)


def with_positions(settings: Settings, positions: int) -> Settings:
    """The settings with a KV cache of so many positions."""
    context = min(settings.context, positions)
    return replace(settings, context=context, capacity=positions, chunk=min(settings.chunk, context))


def positions_that_fit(
    source: ModelSource, settings: Settings, gpu: Gpu, limit: int, least: int, loading: bool = True
) -> int:
    """The most positions of a smaller KV cache with which the model fits into `limit` bytes; 0 if `least` do not."""

    def peak(positions: int) -> int:
        return plan_memory(source, with_positions(settings, positions), gpu, loading).peak

    sizes = range(-(-least // PAGE) * PAGE, settings.capacity, PAGE)
    count = bisect_right(sizes, limit, key=peak)
    return sizes[count - 1] if count else 0


def load_model(
    source: Source | ModelSource,
    options: EngineOptions,
    *,
    gpu: Gpu | None = None,
    progress: Progress | None = None,
    on_plan: OnPlan | None = None,
) -> LoadedModel:
    """Open a model on a device. `gpu` is an open device to share; else one is opened, and closed with the model.

    The memory plan is made, given to `on_plan` and checked before anything is allocated.
    """
    check_process()
    times, started = LoadTimes(), time.perf_counter()
    with ExitStack() as undo:
        if not isinstance(source, ModelSource):
            source = undo.enter_context(closing(open_source(source)))
        times.open_s, started = elapsed(started)
        owns_gpu = gpu is None
        gpu = gpu or undo.enter_context(closing(Gpu.open(options.device, options.parallel)))
        settings = fitting(options, resolve(options, source, gpu), source, gpu)
        times.device_s, started = elapsed(started)
        memory = check_memory(source, settings, gpu, on_plan=on_plan)
        weights = load_source(source, settings, gpu, progress)
        times.weights_s, started = elapsed(started)
        engine = Engine(gpu, source.config, weights, settings, source.freq_factors(settings.context))
        engine.model.plan(1)
        times.compile_s, started = elapsed(started)
        undo.pop_all()
        return LoadedModel(source, gpu, options, engine.settings, weights, engine, memory, owns_gpu, times)


def plan_memory(source: ModelSource, settings: Settings, gpu: Gpu, loading: bool = True) -> MemoryPlan:
    """The memory of weights, KV cache and scratch: the code that allocates runs on a device that only counts."""
    dry = DryGpu(gpu)
    allocated = allocate_source(source, settings, dry)
    weight_bytes = dry.allocated_bytes
    cache = Engine(dry, source.config, allocated, settings, probe=False).cache
    cache_bytes = sum(map(nbytes, cache.resources()))
    scratch_bytes = dry.allocated_bytes - weight_bytes - cache_bytes
    more = loading_bytes(allocated) if loading and gpu.software else 0
    return MemoryPlan(weight_bytes, cache_bytes, scratch_bytes, settings.capacity, more)


def check_memory(
    source: ModelSource, settings: Settings, gpu: Gpu, on_plan: OnPlan | None = None, loading: bool = True
) -> MemoryPlan:
    """Pass the plan to `on_plan`, then check it. A plan over the limit is refused with the context that fits."""
    plan = plan_memory(source, settings, gpu, loading)
    if on_plan:
        on_plan(plan, gpu)
    limit = memory_limit(gpu)
    if not limit or plan.peak <= limit:
        return plan

    fits = positions_that_fit(source, settings, gpu, limit, MIN_USEFUL_CONTEXT, loading)
    ways = f"use -c {fits} or less" if fits else "use a smaller model or quantisation"
    raise DoesNotFit(
        f"the model needs {plan.peak / 2**20:,.1f} MiB and there are {limit / 2**20:,.1f} MiB",
        "use a smaller --kv-memory" if fits and settings.capacity > settings.context + PAGE else ways,
    )


def load_source(source: ModelSource, settings: Settings, gpu: Gpu, progress: Progress | None = None) -> Weights:
    """Allocate the weights and fill them."""
    weights = allocate_source(source, settings, gpu)
    target = WeightTarget.of(settings.backend, settings.precision, gpu.caps)
    if isinstance(source.file, SyntheticFile):
        source.file.fill(weights, gpu)
        wait_idle(gpu)
        return weights
    name = source.file.path
    with error_context(name):
        load_weights(weights, source.matrices, source.file.tensors, source.config, gpu, target, progress)
    return weights


def allocate_source(source: ModelSource, settings: Settings, gpu: Gpu) -> Weights:
    """The weights without data. Slabs serve fused decode in either precision."""
    target = WeightTarget.of(settings.backend, settings.precision, gpu.caps)
    in_slabs = settings.backend is Backend.BUFFERS and any(
        can_fuse(source.config, gpu.caps, int8, settings.kv_type) for int8 in (True, False)
    )
    return allocate_weights(source.matrices, source.config, gpu, target, in_slabs)


def elapsed(started: float) -> tuple[float, float]:
    """Seconds since `started`, and now."""
    now = time.perf_counter()
    return now - started, now
