"""How fast is a model on this adapter? llama-bench's tests, and where the time went.

Tokenising and sampling on the host are outside: prompts are random ids, generated tokens are chosen and fed
back on the device.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import wgpu

from llamagpu import __version__
from llamagpu.engine.generate import loss_named
from llamagpu.engine.llama import Transformer
from llamagpu.engine.memory import plan_memory
from llamagpu.engine.selfcheck import use_fast
from llamagpu.engine.synthetic import parse, synthetic_config, synthetic_weights, tileable
from llamagpu.engine.tiled import TiledTransformer, load_tiles, suits_tiles
from llamagpu.engine.weights import Weights, load_weights
from llamagpu.errors import about
from llamagpu.files.config import LlamaConfig, check_tensors
from llamagpu.files.packed_file import open_model
from llamagpu.files.repack import packed_bytes, small
from llamagpu.gpu import routes
from llamagpu.gpu.device import Gpu, whole
from llamagpu.gpu.timing import Span, TimedRecorder, busy_ns, copy_bandwidth, wait_idle, warm_up
from llamagpu.tools.bench_tests import Test, positions
from llamagpu.tools.report import Row
from llamagpu.tools.verify import kernel_set

Progress = Callable[[int, int], None]
Source = Path | str  # a file, or the text after --synthetic
FILE_TYPES = {
    0: "all F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K - Medium",
    11: "Q3_K - Small", 12: "Q3_K - Medium", 13: "Q3_K - Large", 14: "Q4_K - Small", 15: "Q4_K - Medium",
    16: "Q5_K - Small", 17: "Q5_K - Medium", 18: "Q6_K", 25: "IQ4_NL - 4.5 bpw", 30: "IQ4_XS - 4.25 bpw",
    32: "BF16",
}  # fmt: skip


# A model in memory


@dataclass(frozen=True, slots=True)
class Loaded:
    filename: str
    type: str
    size: int
    params: int
    config: LlamaConfig
    weights: Weights
    freq_factors: np.ndarray[Any, Any] | None
    tiled: bool  # for a CPU adapter, on images
    seconds: float

    def transformer(self, gpu: Gpu, context: int, chunk: int, kv_type: str | None, fast: bool) -> Transformer:
        made = TiledTransformer if self.tiled else Transformer
        c, wide = self.config, wide_cache(gpu, kv_type) or self.tiled
        return made(gpu, c, self.weights, self.freq_factors, context, context, chunk, wide, fast)


def load_file(path: Path, gpu: Gpu, tests: Sequence[Test], progress: Progress | None, fast: bool) -> Loaded:
    started = time.perf_counter()
    with about(path):
        file = open_model(path)
        config = LlamaConfig.from_gguf(file.metadata, file.tensors)
        check_tensors(config, file.tensors)
        images = suits_tiles(config, file.tensors, gpu) and not fast
        tiled = images and not any(test.kv_type == "f16" for test in tests)
        for test in tests:
            wide = tiled or wide_cache(gpu, test.kv_type)
            plan_memory(config, file.tensors, gpu, positions([test]), test.chunk, wide, tiled, fast).check(gpu)
        if tiled:
            weights = load_tiles(file.tensors, config, gpu, progress)
        else:
            weights = load_weights(file.tensors, config, gpu, progress, fast)
    wait_idle(gpu)
    factors = file.tensors.get("rope_freqs.weight")
    params = sum(int(np.prod(t.shape)) for t in file.tensors.values())
    # a packed file's matrices are not in its list of tensors, only their shapes
    size = sum(t.data.nbytes or packed_bytes(t.kind, *t.shape) for t in file.tensors.values())
    kind = file.metadata.get("general.file_type")
    stored = FILE_TYPES.get(kind, "unknown") if isinstance(kind, int) else "unknown"
    described = f"{config.arch} {short_count(params)} {stored}"
    freq_factors = None if factors is None else small(factors)
    seconds = time.perf_counter() - started
    return Loaded(str(path), described, size, params, config, weights, freq_factors, tiled, seconds)


def load_synthetic(spec: str, gpu: Gpu, tests: Sequence[Test] = (), fast: bool = False) -> Loaded:
    name, quant = parse(spec)
    started, config = time.perf_counter(), synthetic_config(name)
    tiled = tileable(config, quant, gpu) and not any(test.kv_type == "f16" for test in tests) and not fast
    weights = synthetic_weights(gpu, config, quant, tiled)
    wait_idle(gpu)
    matrices = [m for x in weights.layers for m in (x.qkv, x.attn_output, *x.gate_up, x.ffn_down)]
    matrices += [weights.token_embd] + ([] if config.tied else [weights.output])
    params = sum(m.n * m.k for m in matrices) + (2 * config.layers + 1) * config.dim
    size, described = sum(m.nbytes for m in matrices), f"{name} {quant.upper()} (random)"
    seconds = time.perf_counter() - started
    return Loaded(f"synthetic:{name}:{quant}", described, size, params, config, weights, None, tiled, seconds)


def short_count(params: int) -> str:
    size, unit = next((s, u) for s, u in ((1e9, "B"), (1e6, "M"), (1e3, "K"), (1, "")) if params >= s or s == 1)
    return f"{params / size:.3g}{unit}"


def load(
    source: Source, gpu: Gpu, tests: Sequence[Test], progress: Progress | None = None, fast: bool = False
) -> Loaded:
    """A file, or the text after --synthetic."""
    if isinstance(source, Path):
        return load_file(source, gpu, tests, progress, fast)
    return load_synthetic(source, gpu, tests, fast)


def wide_cache(gpu: Gpu, kv_type: str | None) -> bool:
    return kv_type == "f32" if kv_type else not gpu.caps.half


# Measuring


@dataclass(frozen=True, slots=True)
class Settings:
    repetitions: int = 5
    delay: float = 0.0
    warmup: bool = True
    precision: str | None = None
    device: str | None = None


def bench(
    source: Source, tests: Sequence[Test], settings: Settings, check: Callable[[], None] = lambda: None,
    progress: Progress | None = None, probe: Callable[[Transformer, float], None] | None = None,
) -> Iterator[Row]:  # fmt: skip
    """A row per test of one model. `probe` gets the first transformer made, and the copy bandwidth."""
    with loss_named(), closing(Gpu.open(settings.device)) as gpu:
        fast = use_fast(gpu, settings.precision)
        tests = [t if t.n_ubatch else replace(t, n_ubatch=routes.chunk(gpu.caps, fast)) for t in tests]
        copy = copy_bandwidth(gpu)
        gpu.peak_bytes = gpu.allocated_bytes
        loaded = load(source, gpu, tests, progress, fast)
        for _, alike in groupby(tests, lambda t: (t.n_batch, t.n_ubatch, t.kv_type)):
            group = list(alike)
            context, first = positions(group), group[0]
            compiled = gpu.compile_seconds
            model = loaded.transformer(gpu, context, first.chunk, first.kv_type, fast)
            if probe:
                probe(model, copy)
            probe = None
            for test in group:
                check()
                time.sleep(settings.delay)
                measured = measure(model, test, settings, check)
                facts = model_facts(loaded, gpu, model, test) | {
                    "compile_ns": int((gpu.compile_seconds - compiled) * 1e9)
                }
                yield facts | measured | rates(loaded, model, test, measured["avg_ns"], copy)
            release(model)


def release(model: Transformer) -> None:
    model.part_layers()
    made = list(vars(model).values())
    made += [buffer for many in made if isinstance(many, list) for buffer in many]
    made += [buffer for pair in made if isinstance(pair, tuple) for buffer in pair]
    model.gpu.free(*{b for b in map(whole, made) if isinstance(b, (wgpu.GPUBuffer, wgpu.GPUTexture))})


def measure(model: Transformer, test: Test, settings: Settings, check: Callable[[], None]) -> Row:
    recorder = model.recorder = TimedRecorder(model.gpu)
    ids = np.random.default_rng(0).integers(0, model.config.vocab, test.n_prompt).tolist()

    def run(first_token_only: bool = False) -> float:
        """One repetition; seconds."""
        check()
        model.history = [0] * test.start  # the time does not depend on what the cache holds
        wait_idle(model.gpu)
        began = time.perf_counter()
        if ids:
            model.prefill(ids)
        for _ in model.greedy(1 if first_token_only else test.n_gen + 1) if test.n_gen or first_token_only else ():
            pass  # the first choice is from the logits that are there; then a step per token
        if not test.n_gen:
            wait_idle(model.gpu)
        return time.perf_counter() - began

    if settings.warmup:
        warm_up(model.gpu, run)
        if ids:
            run(first_token_only=True)
    recorder.finish()
    walls, spans, gpu_ns, latencies = [], [], [], []
    for _ in range(settings.repetitions):
        walls.append(run())
        done, passes = recorder.finish()
        spans += done
        gpu_ns += [] if passes is None else [busy_ns(passes)]
        latencies += between_tokens(done)
    first = [run(first_token_only=True) for _ in range(1 if model.gpu.software else 3)] if ids else []
    recorder.finish()
    samples = [round(wall * 1e9) for wall in walls]
    speeds = [1e9 * test.tokens / ns for ns in samples]
    reps = len(walls)
    return {
        "test_time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "avg_ns": round(statistics.mean(samples)),
        "stddev_ns": round(statistics.stdev(samples)) if reps > 1 else 0,
        "avg_ts": statistics.mean(speeds),
        "stddev_ts": statistics.stdev(speeds) if reps > 1 else 0.0,
        "samples_ns": samples,
        "samples_ts": [round(speed, 6) for speed in speeds],
        "median_ts": statistics.median(speeds),
        "ttft_ns": round(statistics.median(first) * 1e9) if first else None,
        "itl_p50_ns": round(float(np.percentile(latencies, 50))) if latencies else None,
        "itl_p95_ns": round(float(np.percentile(latencies, 95))) if latencies else None,
        "gpu_ns": round(statistics.mean(gpu_ns)) if gpu_ns else None,
        "encode_ns": round(sum(s.recorded - s.began for s in spans) / reps * 1e9),
        "submit_ns": round(sum(s.submitted - s.taken for s in spans) / reps * 1e9),
        "dispatches_per_token": sum(s.dispatches for s in spans) / reps / test.tokens,
    }


def between_tokens(spans: Sequence[Span]) -> list[float]:
    """Nanoseconds per generated token. Tokens come in batches; each shares out its time."""
    waited = [span for span in spans if span.done]
    found: list[float] = []
    for before, span in pairwise(waited):
        count = span.steps // 2  # a token is a step through the layers and a choice
        found += [(span.done - before.done) / count * 1e9] * count
    return found


def rates(loaded: Loaded, model: Transformer, test: Test, avg_ns: float, copy: float) -> Row:
    """What the test had to read and to compute, and how fast that was."""
    c, weights = loaded.config, loaded.weights
    matrices = [m for x in weights.layers for m in (x.qkv, x.attn_output, *x.gate_up, x.ffn_down)]
    per_position = 2 * c.layers * c.kv_heads * c.head_dim * model.kv_bytes
    reads = kv_bytes = flops = 0
    for m, pos in test.steps():
        reads += 1
        kv_bytes += per_position * min(pos + m, (c.sliding_window or pos + m) + m)
        flops += 2 * m * sum(x.n * x.k for x in matrices) + 2 * weights.output.n * weights.output.k
        flops += (
            4
            * c.layers
            * c.heads
            * c.head_dim
            * sum(min(p, c.sliding_window or p) for p in range(pos + 1, pos + m + 1))
        )
    weight_bytes = reads * weights.token_bytes
    return {
        "weight_bytes_per_token": weight_bytes / test.tokens,
        "kv_bytes_per_token": kv_bytes / test.tokens,
        "gbps": (weight_bytes + kv_bytes) / avg_ns,
        "copy_gbps": copy / 1e9,
        "copy_share": (weight_bytes + kv_bytes) / avg_ns / (copy / 1e9),
        "tflops": flops / avg_ns / 1e3,
    }


def model_facts(loaded: Loaded, gpu: Gpu, model: Transformer, test: Test) -> Row:
    kind = "f32" if model.kv_f32 else "f16"
    return {
        "build_commit": __version__, "build_number": 0, "cpu_info": cpu_name(),
        "gpu_info": gpu.info["device"], "backends": "WebGPU", "model_filename": loaded.filename,
        "model_type": loaded.type,
        "model_size": loaded.size, "model_n_params": loaded.params, "n_batch": test.n_batch,
        "n_ubatch": test.n_ubatch, "n_threads": os.cpu_count() or 1, "cpu_mask": "0x0", "cpu_strict": False,
        "poll": 50, "type_k": kind, "type_v": kind, "n_gpu_layers": -1, "n_cpu_moe": 0, "split_mode": "layer",
        "main_gpu": 0, "no_kv_offload": False, "flash_attn": 1, "devices": gpu.info["device"],
        "tensor_split": "0.00", "tensor_buft_overrides": "none", "load_mode": "mmap", "embeddings": False,
        "no_op_offload": 0, "no_host": False, "fit_target": 0, "fit_min_ctx": 0, "n_prompt": test.n_prompt,
        "n_gen": test.n_gen, "n_depth": test.n_depth, "gpu_bytes_peak": gpu.peak_bytes,
        "load_ns": round(loaded.seconds * 1e9), "adapter": gpu.info["device"],
        "driver": gpu.info["description"],
        "wgpu_version": wgpu.__version__, "kernel_set": kernel_set(),
        "precision": "fast" if model.fast else "high",
    }  # fmt: skip


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
