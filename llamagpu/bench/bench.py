"""Measures the speed of a model on an adapter: llama-bench's cases, and where the time is spent.

Tokenising and sampling on the host are not measured: prompts are random ids, generated tokens are sampled and fed back
on the device.
"""

import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import count, groupby, pairwise
from math import prod
from pathlib import Path

import numpy as np

from llamagpu import __version__
from llamagpu.bench.cases import BenchCase, positions
from llamagpu.bench.report import Row
from llamagpu.engine import routes
from llamagpu.engine.engine import Engine
from llamagpu.engine.load import (
    LoadedModel,
    ModelSource,
    Progress,
    Source,
    check_memory,
    load_model,
    open_source,
    resolve,
)
from llamagpu.engine.options import Backend, EngineOptions, KvType, Precision
from llamagpu.engine.precision import resolve_precision
from llamagpu.engine.sequence import Sequence
from llamagpu.engine.synthetic import SyntheticFile
from llamagpu.engine.weights import Weights
from llamagpu.files.gguf_file import BLOCKS
from llamagpu.gpu.device import Gpu, map_device_lost
from llamagpu.gpu.settle import Settling
from llamagpu.gpu.timing import Span, TimedRecorder, busy_ns, copy_bandwidth, wait_idle
from llamagpu.verify.verify import kernel_set

Probe = Callable[[Engine, float], None]  # gets an engine and the copy bandwidth in bytes/s
FILE_TYPES = {
    0: "all F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K - Medium",
    11: "Q3_K - Small", 12: "Q3_K - Medium", 13: "Q3_K - Large", 14: "Q4_K - Small", 15: "Q4_K - Medium",
    16: "Q5_K - Small", 17: "Q5_K - Medium", 18: "Q6_K", 25: "IQ4_NL - 4.5 bpw", 30: "IQ4_XS - 4.25 bpw",
    32: "BF16",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class BenchOptions:
    repetitions: int = 5
    delay: float = 0.0  # seconds of rest before each case
    warmup: bool = True
    precision: Precision | None = None
    device: str | None = None


class Monitor:
    """Follows a benchmark. A method may raise an error, which ends it."""

    def opened(self, gpu: Gpu, model: "ModelFacts") -> None:
        """The adapter and the model are known, nothing is loaded."""

    def case_starts(self, case: BenchCase) -> None:
        """The case is about to run."""

    def run_starts(self, stage: str, done: int, runs: int) -> None:
        """A run of the case is about to start; `runs` of about the same length are planned, warm-ups included."""


# The model


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model as llama-bench describes it."""

    filename: str
    type: str  # "llama 1.24B Q4_K - Medium"
    size: int  # bytes of the tensors in a GGUF file
    params: int


def model_facts(source: ModelSource) -> ModelFacts:
    file, tensors = source.file, source.file.tensors.values()
    params = sum(prod(tensor.shape) for tensor in tensors)
    blocks = ((prod(tensor.shape), *BLOCKS[tensor.ggml_type]) for tensor in tensors)
    size = sum(weights // per_block * block_bytes for weights, per_block, block_bytes in blocks)
    if isinstance(file, SyntheticFile):
        name, quant = file.name, file.quant
        return ModelFacts(f"synthetic:{name}:{quant}", f"{name} {quant.upper()} (random)", size, params)
    file_type = file.metadata.get("general.file_type")
    stored = FILE_TYPES.get(file_type, "unknown") if isinstance(file_type, int) else "unknown"
    return ModelFacts(str(file.path), f"{source.config.arch} {short_count(params)} {stored}", size, params)


def short_count(params: int) -> str:
    size, unit = next((s, u) for s, u in ((1e9, "B"), (1e6, "M"), (1e3, "K"), (1, "")) if params >= s or s == 1)
    return f"{params / size:.3g}{unit}"


def open_for(source: Source, cases: Items[BenchCase]) -> ModelSource:
    """The model, with a context that holds all cases: a benchmark may exceed the training context."""
    opened = open_source(source)
    config = opened.config
    return replace(opened, config=replace(config, context=max(config.context, positions(cases))))


# Measuring


@dataclass(frozen=True, slots=True)
class EngineRun:
    """Cases that one engine runs."""

    cases: tuple[BenchCase, ...]
    options: EngineOptions


def plan_runs(cases: Items[BenchCase], options: BenchOptions, gpu: Gpu) -> list[EngineRun]:
    """Consecutive cases with the same chunk and KV type share an engine. All engines share weights and backend."""
    precision = resolve_precision(gpu, options.precision)
    default = routes.default_chunk(gpu.caps, precision is Precision.FAST)
    cases = [case if case.n_ubatch else replace(case, n_ubatch=default) for case in cases]
    # only an f32 cache can be in textures
    backend = Backend.BUFFERS if any(case.kv_type not in (None, KvType.F32) for case in cases) else None
    runs = []
    for _, same in groupby(cases, lambda case: (case.n_batch, case.n_ubatch, case.kv_type)):
        members = tuple(same)
        first = members[0]
        engine = EngineOptions(
            context=positions(members), chunk=first.chunk, kv_type=first.kv_type, precision=precision, backend=backend
        )
        runs.append(EngineRun(members, engine))
    return runs


def bench(
    source: Source,
    cases: Items[BenchCase],
    options: BenchOptions,
    monitor: Monitor | None = None,
    progress: Progress | None = None,
    probe: Probe | None = None,
) -> Iterator[Row]:
    """A row for each case of one model. `probe` gets an engine with the options of the first case."""
    monitor = monitor or Monitor()
    with map_device_lost(), closing(Gpu.open(options.device)) as gpu:
        runs = plan_runs(cases, options, gpu)
        copy = copy_bandwidth(gpu)
        gpu.peak_bytes = gpu.allocated_bytes
        started, compiled = time.perf_counter(), gpu.compile_seconds
        compiled_s = compiled  # before the present case
        with closing(open_for(source, cases)) as opened:
            facts = model_facts(opened)
            monitor.opened(gpu, facts)
            for run in runs:  # before the first row is printed
                check_memory(opened, resolve(run.options, opened, gpu), gpu)
            loaded = load_model(opened, runs[0].options, gpu=gpu, progress=progress)
            wait_idle(gpu)
            load_s = time.perf_counter() - started - loaded.times.compile_s
            engine = loaded.engine
            if probe:
                probe(engine, copy)  # it may leave the engine unfused
                engine.free()
                engine = loaded.another_engine(runs[0].options)
            for i, run in enumerate(runs):
                if i:
                    compiled = gpu.compile_seconds
                    engine = loaded.another_engine(run.options)
                for case in run.cases:
                    monitor.case_starts(case)
                    time.sleep(options.delay)
                    measured = measure(engine, case, options, monitor, compiled_s)
                    compiled_s = gpu.compile_seconds
                    times = {
                        "load_ns": round(load_s * 1e9),
                        "compile_ns": round((gpu.compile_seconds - compiled) * 1e9),
                    }
                    known = case_facts(facts, engine, case) | times | measured
                    yield known | rates(loaded, engine, case, measured["avg_ns"], copy)
                engine.free()


@dataclass(slots=True)
class Samples:
    """The measurements of one case, an entry for each repetition."""

    wall_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)  # from the start of the prompt to its first token
    gpu_ns: list[float] = field(default_factory=list)  # empty without timestamps
    spans: list[list[Span]] = field(default_factory=list)  # submissions of each repetition


def measure(engine: Engine, case: BenchCase, options: BenchOptions, monitor: Monitor, compiled_s: float = 0.0) -> Row:
    """Run the case to warm up, once or on a GPU until it has settled, then `repetitions` times.

    `compiled_s`: the time that compiling had taken before this case.
    """
    gpu = engine.gpu
    recorder = engine.recorder = TimedRecorder(gpu)
    ids = np.random.default_rng(0).integers(0, engine.config.vocab, case.n_prompt).tolist()
    first_tokens = (1 if gpu.software else 3) if ids else 0
    runs = options.repetitions + first_tokens + (1 + bool(ids)) * options.warmup
    done, sequence = count(), Sequence()

    def run(most: int, stage: str) -> float:
        """Seconds of one repetition with at most `most` sampled tokens."""
        monitor.run_starts(stage, next(done), runs)
        sequence.ids, sequence.checked = [0] * case.start, case.start  # the time does not depend on what pages hold
        wait_idle(gpu)
        began = time.perf_counter()
        if ids:
            engine.prefill(sequence, ids)
        for _ in engine.greedy(sequence, most) if most else ():
            pass
        if not most:
            wait_idle(gpu)
        return time.perf_counter() - began

    def repeat() -> Samples:
        recorder.take_spans()
        samples = Samples()
        for i in range(options.repetitions):
            samples.wall_s.append(run(most, f"run {i + 1} of {options.repetitions}"))
            spans, passes = recorder.take_spans()
            samples.spans.append(spans)
            if passes is not None:
                samples.gpu_ns.append(busy_ns(passes))
        return samples

    # the first token is sampled from the present logits; each further one takes a step
    most = case.n_gen + 1 if case.n_gen else 0
    settling = Settling()
    if options.warmup:
        run(most, "warm-up")
        settling.compiled(gpu.compile_seconds - compiled_s)
        if not gpu.software:
            settling.wait(lambda: run(most, "warm-up"))
        if ids:
            run(1, "warm-up")
    samples = settling.repeat(lambda: run(most, "warm-up"), repeat, lambda samples: samples.wall_s)
    samples.first_token_s = [run(1, "first token") for _ in range(first_tokens)]
    recorder.take_spans()
    engine.discard(sequence)
    settle = {"settled": settling.settled, "settle_ns": round(settling.seconds * 1e9)}
    return statistics_of(samples, case.tokens) | settle


def statistics_of(samples: Samples, tokens: int) -> Row:
    """The measured fields of a row; `tokens` is how many a repetition processes."""
    samples_ns = [round(wall * 1e9) for wall in samples.wall_s]
    speeds = [1e9 * tokens / ns for ns in samples_ns]
    repetitions = len(samples_ns)
    spans = [span for repetition in samples.spans for span in repetition]
    latencies = [ns for repetition in samples.spans for ns in between_tokens(repetition)]
    return {
        "test_time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "avg_ns": round(statistics.mean(samples_ns)),
        "stddev_ns": round(statistics.stdev(samples_ns)) if repetitions > 1 else 0,
        "avg_ts": statistics.mean(speeds),
        "stddev_ts": statistics.stdev(speeds) if repetitions > 1 else 0.0,
        "samples_ns": samples_ns,
        "samples_ts": [round(speed, 6) for speed in speeds],
        "median_ts": statistics.median(speeds),
        "ttft_ns": round(statistics.median(samples.first_token_s) * 1e9) if samples.first_token_s else None,
        "itl_p50_ns": round(float(np.percentile(latencies, 50))) if latencies else None,
        "itl_p95_ns": round(float(np.percentile(latencies, 95))) if latencies else None,
        "gpu_ns": round(statistics.mean(samples.gpu_ns)) if samples.gpu_ns else None,
        "encode_ns": round(sum(span.recorded - span.began for span in spans) / repetitions * 1e9),
        "submit_ns": round(sum(span.submitted - span.submitting for span in spans) / repetitions * 1e9),
        "dispatches_per_token": sum(span.dispatches for span in spans) / repetitions / tokens,
    }


def between_tokens(spans: Items[Span]) -> list[float]:
    """Nanoseconds per generated token. The tokens of one submission share its time evenly."""
    waited = [span for span in spans if span.done]
    found: list[float] = []
    for before, span in pairwise(waited):
        tokens = span.steps // 2  # a token is a step of the model and a step of sampling
        found += [(span.done - before.done) / tokens * 1e9] * tokens
    return found


def rates(loaded: LoadedModel, engine: Engine, case: BenchCase, avg_ns: float, copy: float) -> Row:
    """The bytes that the case reads, the operations that it computes, and their rates."""
    c, weights = loaded.config, loaded.weights
    windows = Counter(kind.window for kind in c.kinds if not kind.is_conv)  # convolutions read next to nothing
    layer_bytes = engine.cache.attention_bytes
    reads = kv_bytes = flops = 0
    for rows, position in case.steps():
        end = position + rows
        reads += 1
        flops += linear_flops(weights, rows)
        for window, layers in windows.items():
            kv_bytes += layers * layer_bytes * min(end, (window or end) + rows)
            seen = sum(min(p, window or p) for p in range(position + 1, end + 1))
            flops += 4 * layers * c.q_width * seen
    weight_bytes = reads * weights.token_bytes
    gbps = (weight_bytes + kv_bytes) / avg_ns
    return {
        "weight_bytes_per_token": weight_bytes / case.tokens,
        "kv_bytes_per_token": kv_bytes / case.tokens,
        "gbps": gbps,
        "copy_gbps": copy / 1e9,
        "copy_share": gbps / (copy / 1e9),
        "tflops": flops / avg_ns / 1e3,
    }


def linear_flops(weights: Weights, rows: int) -> int:
    """Operations of the matrices in a step of so many rows, of which the last one has logits."""
    in_layers = sum(matrix.used * matrix.n * matrix.k for layer in weights.layers for matrix in layer.matrices)
    return 2 * rows * in_layers + 2 * weights.output.n * weights.output.k


def case_facts(facts: ModelFacts, engine: Engine, case: BenchCase) -> Row:
    """The fields that describe the case. Some fields of llama-bench have a fixed value here."""
    gpu, kv_type = engine.gpu, str(engine.settings.kv_type)
    return {
        "build_commit": __version__, "build_number": 0, "cpu_info": cpu_name(),
        "gpu_info": gpu.name, "backends": "WebGPU", "model_filename": facts.filename, "model_type": facts.type,
        "model_size": facts.size, "model_n_params": facts.params, "n_batch": case.n_batch,
        "n_ubatch": case.n_ubatch, "n_threads": os.cpu_count() or 1, "cpu_mask": "0x0", "cpu_strict": False,
        "poll": 50, "type_k": kv_type, "type_v": kv_type, "n_gpu_layers": -1, "n_cpu_moe": 0, "split_mode": "layer",
        "main_gpu": 0, "no_kv_offload": False, "flash_attn": 1, "devices": gpu.name,
        "tensor_split": "0.00", "tensor_buft_overrides": "none", "load_mode": "mmap", "embeddings": False,
        "no_op_offload": 0, "no_host": False, "fit_target": 0, "fit_min_ctx": 0, "n_prompt": case.n_prompt,
        "n_gen": case.n_gen, "n_depth": case.n_depth, "gpu_bytes_peak": gpu.peak_bytes, "adapter": gpu.name,
        "driver": gpu.info["description"], "backend": str(gpu.info["library"]), "wgpu_version": gpu.info["version"],
        "kernel_set": kernel_set(), "precision": str(engine.model.precision),
    }  # fmt: skip


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
