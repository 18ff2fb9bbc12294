"""Time on the device's own clock: around whole passes, between the dispatches of one, and what memory and
arithmetic give at best. Without timestamps the host's clock stands in."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import wgpu
from wgpu.backends.wgpu_native import ffi, lib

from llamagpu.gpu.device import Dispatch, Gpu
from llamagpu.gpu.recorder import Pending, Plan, Recorder, Step, record_raw

QUERIES = 4096  # the most that a query set of WebGPU holds
RAMP_S = 0.6  # after idle an H200 takes half a second to raise its clocks; kernels are 2-4 times slower until then


class Stamps:
    """A row of GPU timestamps that grows as they are asked for, read back all at once."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.sets: list[Any] = []
        self.count = 0

    def take(self) -> tuple[Any, int]:
        """The next place: its query set and the index there. Pairs taken together lie in one set."""
        if self.count == len(self.sets) * QUERIES:
            self.sets.append(self.gpu.device.create_query_set(type="timestamp", count=QUERIES, label="stamps"))
        self.count += 1
        return self.sets[(self.count - 1) // QUERIES], (self.count - 1) % QUERIES

    def read(self) -> np.ndarray[Any, Any]:
        """Nanoseconds of all places taken, in their order; waits for the GPU, and frees the places."""
        if not self.count:
            return np.zeros(0)
        device, usage = self.gpu.device, wgpu.BufferUsage.QUERY_RESOLVE | wgpu.BufferUsage.COPY_SRC
        encoder = device.create_command_encoder()
        buffer = device.create_buffer(size=8 * self.count, usage=usage, label="stamps")
        for i, queries in enumerate(self.sets):
            used = min(QUERIES, self.count - i * QUERIES)
            if used > 0:
                encoder.resolve_query_set(queries, 0, used, buffer, 8 * i * QUERIES)
        device.queue.submit([encoder.finish()])
        ticks = np.frombuffer(device.queue.read_buffer(buffer), np.uint64)
        self.count = 0
        # differences first: a float64 holds 2^53 ns, and a clock may have run longer
        period = float(lib.wgpuQueueGetTimestampPeriod(device.queue._internal))
        return np.asarray((ticks - ticks.min()).astype(np.float64) * period)


@dataclass(slots=True)
class Span:
    """One submission: what it held, and when (seconds of perf_counter) the host did what."""

    steps: int
    dispatches: int
    began: float
    recorded: float
    submitted: float = 0.0
    done: float = 0.0  # its result was there; 0: nobody waited for it
    taken: float = 0.0  # when handing it in began


class TimedPending(Pending):
    span: Span

    def wait(self) -> np.ndarray[Any, Any]:
        words = super().wait()
        self.span.done = time.perf_counter()
        return words


class TimedRecorder(Recorder):
    """A Recorder that keeps a Span of every submission and its begin and end on the GPU's clock."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(gpu)
        self.spans: list[Span] = []
        self.stamps = Stamps(gpu) if "timestamp-query" in gpu.features else None

    def submit(self, steps: Sequence[Step], result: Any = None, ahead: bool = False) -> Pending:
        began = time.perf_counter()
        encoder, staging = self.record(steps, result, self.pass_stamps())
        recorded, count = time.perf_counter(), sum(len(plan) for plan, _, _ in steps)
        span = Span(len(steps), count, began, recorded)
        pending = TimedPending(self.gpu, staging, self.handed(ahead, self.timed_hand_in, encoder, span))
        pending.span = span
        self.spans.append(span)
        return pending

    def timed_hand_in(self, encoder: Any, span: Span) -> Any:
        span.taken = time.perf_counter()
        index = self.hand_in(encoder)
        span.submitted = time.perf_counter()
        return index

    def pass_stamps(self) -> dict[str, Any] | None:
        if self.stamps is None:
            return None
        queries, first = self.stamps.take()
        _, last = self.stamps.take()
        return {"query_set": queries, "beginning_of_pass_write_index": first, "end_of_pass_write_index": last}

    def finish(self) -> tuple[list[Span], np.ndarray[Any, Any] | None]:
        """The spans since the last call, and [n, 2] begin and end on the GPU in ns; None without a clock."""
        wait_idle(self.gpu)
        spans, self.spans = self.spans, []
        return spans, None if self.stamps is None else self.stamps.read().reshape(-1, 2)


def wait_idle(gpu: Gpu) -> None:
    """Until everything submitted is through; nothing is copied or mapped for it."""
    lib.wgpuDevicePoll(gpu.device._internal, True, ffi.NULL)


def busy_ns(passes: np.ndarray[Any, Any]) -> float:
    """Time in which at least one pass ran: two submissions may overlap at their edges."""
    total, end = 0.0, -np.inf
    for first, last in passes[np.argsort(passes[:, 0])]:
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


class Stopwatch:
    """Times steps, each call in a submission of its own that is waited for."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.recorder = TimedRecorder(gpu)
        self.stamps = Stamps(gpu) if "timestamp-query-inside-passes" in gpu.features else None

    def pass_ns(self, steps: Sequence[Step]) -> float:
        """The whole pass."""
        began = time.perf_counter()
        self.recorder.submit(steps)
        _, passes = self.recorder.finish()
        return (time.perf_counter() - began) * 1e9 if passes is None else float(passes[0, 1] - passes[0, 0])

    def each_ns(self, steps: Sequence[Step]) -> tuple[np.ndarray[Any, Any], Span]:
        """Timestamps [dispatches + 1] before, between and after the dispatches of one pass."""
        assert self.stamps is not None
        device, began, write = self.gpu.device, time.perf_counter(), lib.wgpuComputePassEncoderWriteTimestamp
        encoder = device.create_command_encoder()
        work = encoder.begin_compute_pass()
        for plan, m, pos in steps:
            for dispatch in plan.dispatches:
                queries, index = self.stamps.take()
                write(work._internal, queries._internal, index)
                record_raw(work, Plan([dispatch]), m, pos)
        queries, index = self.stamps.take()
        write(work._internal, queries._internal, index)
        work.end()
        commands = encoder.finish()
        recorded = time.perf_counter()
        device.queue.submit([commands])
        submitted = time.perf_counter()
        wait_idle(self.gpu)
        span = Span(len(steps), sum(len(p) for p, _, _ in steps), began, recorded, submitted, time.perf_counter())
        return self.stamps.read(), span

    def repeated_ns(self, units: Sequence[Sequence[Dispatch]], m: int = 1, pos: int = 0, reps: int = 5) -> float:
        """The median time of one unit, a few dispatches that belong together. Units are run one after the
        other until 5 ms are full; several, over copies of the data, keep it from coming out of the cache."""
        software = self.gpu.software
        alone = [(Plan(units[0]), m, pos)]
        self.pass_ns(alone)  # llvmpipe compiles when a kernel is first run
        once = self.pass_ns(alone)
        if software and once > 2e8:  # a fifth of a second drowns the noise of one run
            return once
        count = 1 if software else int(min(256, max(1, 5e6 / max(1.0, once))))
        chain = [(Plan([d for i in range(count) for d in units[i % len(units)]]), m, pos)]
        warm_up(self.gpu, lambda: self.pass_ns(chain), 0.15)
        return float(np.median([self.pass_ns(chain) for _ in range(reps)])) / count


def warm_up(gpu: Gpu, run: Callable[[], object], seconds: float = RAMP_S) -> None:
    """Run it once, and on hardware until its clocks are up."""
    end = time.perf_counter() + (0 if gpu.software else seconds)
    run()
    while time.perf_counter() < end:
        run()


def copy_bandwidth(gpu: Gpu) -> float:
    """Bytes per second, read and written, of a copy too large for any cache (256 MiB; a CPU: 16): by a kernel or
    by the driver, whichever is faster."""
    size = min(16 << 20 if gpu.software else 256 << 20, gpu.caps.binding_bytes // 256 * 256)
    x, y = gpu.zeros(size, "copy from"), gpu.zeros(size, "copy to")
    ns = min(driver_copy_ns(gpu, x, y) for _ in range(3))
    if not gpu.software:  # where a kernel copies a hundred times slower than the driver
        grid = (min(16384, size // 4096), 1, 1)
        copy = gpu.dispatch("copy", (), {"QUADS": size // 16}, {"x": x, "y": y}, grid)
        ns = min(ns, Stopwatch(gpu).repeated_ns([[copy]]))
    gpu.free(x, y)
    return 2 * size / ns * 1e9


def driver_copy_ns(gpu: Gpu, x: Any, y: Any) -> float:
    count = 2 if gpu.software else 32  # enough to drown the round trip of a submission, 0.2 ms on an H200
    encoder = gpu.device.create_command_encoder()
    for _ in range(count):
        encoder.copy_buffer_to_buffer(x, 0, y, 0, x.size)
    commands = encoder.finish()
    wait_idle(gpu)
    began = time.perf_counter()
    gpu.device.queue.submit([commands])
    wait_idle(gpu)
    return (time.perf_counter() - began) / count * 1e9


def peak_flops(gpu: Gpu, i8: bool) -> float:
    """Operations per second when memory plays no part: f32 multiply-adds, or packed int8 dot products."""
    rounds, groups = (256, 8) if gpu.software else (4096, 4096)
    x = gpu.upload(np.array([0.5, 1.0, 2.0, 0.0], np.float32), "peak in")
    y = gpu.zeros(groups * 256 * 4, "peak out")
    work = gpu.dispatch("peak", (), {"ROUNDS": rounds, "I8": i8}, {"x": x, "y": y}, (groups, 1, 1))
    ns = Stopwatch(gpu).repeated_ns([[work]])
    gpu.free(x, y)
    return groups * 256 * rounds * 64 / ns * 1e9
