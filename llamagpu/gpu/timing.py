"""Measures time on the device's clock, around passes and between dispatches, and peak bandwidth and arithmetic.

Without timestamps the host's clock is used.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamagpu.gpu.buffers import AnyBuffer, Buffer
from llamagpu.gpu.device import Dispatch, Gpu
from llamagpu.gpu.recorder import Pending, Plan, Recorder, Step, launches
from llamagpu.gpu.webgpu import BufferUsage

QUERIES = 4096  # the most that a WebGPU query set holds


class Timestamps:
    """A growing list of GPU timestamps, read back all at once."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.query_sets: list[Any] = []
        self.count = 0

    def next(self) -> tuple[Any, int]:
        """The next query: its query set and its index there. Queries 2i and 2i + 1 are in one set."""
        if self.count == len(self.query_sets) * QUERIES:
            queries = self.gpu.device.create_query_set(type="timestamp", count=QUERIES, label="timestamps")
            self.query_sets.append(queries)
        self.count += 1
        return self.query_sets[(self.count - 1) // QUERIES], (self.count - 1) % QUERIES

    def read(self) -> NDArray[np.float64]:
        """Nanoseconds of all queries, in their order. Waits for the GPU and starts again with the first query."""
        if not self.count:
            return np.zeros(0)
        device, usage = self.gpu.device, BufferUsage.QUERY_RESOLVE | BufferUsage.COPY_SRC
        encoder = device.create_command_encoder()
        buffer = device.create_buffer(size=8 * self.count, usage=usage, label="timestamps")
        for i, queries in enumerate(self.query_sets):
            used = min(QUERIES, self.count - i * QUERIES)
            if used > 0:
                encoder.resolve_query_set(queries, 0, used, buffer, 8 * i * QUERIES)
        self.gpu.submit(encoder.finish())
        ticks = self.gpu.read(buffer, np.uint64, self.count)
        self.count = 0
        # differences first: a float64 holds 2^53 ns, and a clock may have run longer
        return np.asarray((ticks - ticks.min()).astype(np.float64) * self.gpu.native.timestamp_period())


@dataclass(slots=True)
class Span:
    """One submission: its size, and the times of the host (seconds of perf_counter)."""

    steps: int
    dispatches: int
    began: float
    recorded: float
    submitted: float = 0.0
    done: float = 0.0  # when its result arrived; 0: nothing waited for it
    submitting: float = 0.0  # when the submission of the recorded pass began


class TimedPending(Pending):
    span: Span

    def wait(self) -> NDArray[np.uint32]:
        words = super().wait()
        self.span.done = time.perf_counter()
        return words


class TimedRecorder(Recorder):
    """A Recorder that stores a Span of every submission, and its begin and end on the GPU's clock."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(gpu)
        self.spans: list[Span] = []
        self.timestamps = Timestamps(gpu) if "timestamp-query" in gpu.features else None

    def submit(self, steps: Sequence[Step], *results: AnyBuffer, ahead: bool = False) -> Pending:
        began = time.perf_counter()
        encoder, staging = self.record(steps, results, self._pass_timestamps())
        recorded, count = time.perf_counter(), sum(len(step.plan) for step in steps)
        span = Span(len(steps), count, began, recorded)
        pending = TimedPending(self.gpu, staging, self._schedule(ahead, self._timed_submit, encoder, span))
        pending.span = span
        self.spans.append(span)
        return pending

    def _timed_submit(self, encoder: Any, span: Span) -> Any:
        span.submitting = time.perf_counter()
        index = self.finish_and_submit(encoder)
        span.submitted = time.perf_counter()
        return index

    def _pass_timestamps(self) -> dict[str, Any] | None:
        if self.timestamps is None:
            return None
        queries, first = self.timestamps.next()
        _, last = self.timestamps.next()
        return {"query_set": queries, "beginning_of_pass_write_index": first, "end_of_pass_write_index": last}

    def take_spans(self) -> tuple[list[Span], NDArray[np.float64] | None]:
        """The spans since the last call, and [n, 2] begin and end on the GPU in ns; None without timestamps."""
        wait_idle(self.gpu)
        spans, self.spans = self.spans, []
        return spans, None if self.timestamps is None else self.timestamps.read().reshape(-1, 2)


def wait_idle(gpu: Gpu) -> None:
    """Wait until everything that was submitted has completed; nothing is copied or mapped for it."""
    gpu.wait_idle()


def busy_ns(passes: NDArray[np.float64]) -> float:
    """Time in which at least one pass ran: two submissions may overlap at their edges."""
    total, end = 0.0, -np.inf
    for first, last in passes[np.argsort(passes[:, 0])]:
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


class Stopwatch:
    """Times steps. Each call makes one submission and waits for it."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.recorder = TimedRecorder(gpu)
        self.timestamps = Timestamps(gpu) if "timestamp-query-inside-passes" in gpu.features else None

    def pass_ns(self, steps: Sequence[Step]) -> float:
        """The time of one pass."""
        began = time.perf_counter()
        self.recorder.submit(steps)
        _, passes = self.recorder.take_spans()
        return (time.perf_counter() - began) * 1e9 if passes is None else float(passes[0, 1] - passes[0, 0])

    def dispatches_ns(self, steps: Sequence[Step]) -> tuple[NDArray[np.float64], Span]:
        """Timestamps [dispatches + 1] before, between and after the dispatches of one pass."""
        assert self.timestamps is not None
        native, began = self.gpu.native, time.perf_counter()
        encoder = self.gpu.device.create_command_encoder()
        work = encoder.begin_compute_pass()
        for step in steps:
            for dispatch in step.plan.dispatches:
                queries, index = self.timestamps.next()
                native.write_timestamp(work, queries, index)
                native.record(work, launches(step._replace(plan=Plan([dispatch]))))
        queries, index = self.timestamps.next()
        native.write_timestamp(work, queries, index)
        work.end()
        commands = encoder.finish()
        recorded = time.perf_counter()
        self.gpu.submit(commands)
        submitted = time.perf_counter()
        wait_idle(self.gpu)
        count = sum(len(step.plan) for step in steps)
        span = Span(len(steps), count, began, recorded, submitted, time.perf_counter())
        return self.timestamps.read(), span

    def repeated_ns(
        self, units: Sequence[Sequence[Dispatch]], rows: int = 1, position: int = 0, repetitions: int = 5
    ) -> float:
        """The median time of one unit, a few dispatches that belong together.

        Units repeat until 5 ms are full. Several units over clones of the data keep the data from being read from a
        cache.
        """
        software = self.gpu.software
        once = [Step(Plan(units[0]), rows, position)]
        self.pass_ns(once)  # llvmpipe compiles a kernel when it first runs
        once_ns = self.pass_ns(once)
        if software and once_ns > 2e8:  # a fifth of a second drowns the noise of one run
            return once_ns
        count = 1 if software else int(min(256, max(1, 5e6 / max(1.0, once_ns))))
        dispatches = [dispatch for i in range(count) for dispatch in units[i % len(units)]]
        chain = [Step(Plan(dispatches), rows, position)]
        warm_up(self.gpu, lambda: self.pass_ns(chain), 0.15)
        return float(np.median([self.pass_ns(chain) for _ in range(repetitions)])) / count


def warm_up(gpu: Gpu, run: Callable[[], object], seconds: float) -> None:
    """Run the work once, and on a GPU until its clocks are up."""
    end = time.perf_counter() + (0 if gpu.software else seconds)
    run()
    while time.perf_counter() < end:
        run()


def copy_bandwidth(gpu: Gpu) -> float:
    """Bytes per second, read and written, of a copy too large for any cache (256 MiB; on a CPU 16 MiB).

    By a kernel or by the driver, whichever is faster.
    """
    size = min(16 << 20 if gpu.software else 256 << 20, gpu.caps.binding_bytes // 256 * 256)
    x, y = gpu.zeros(size, "copy from"), gpu.zeros(size, "copy to")
    ns = min(driver_copy_ns(gpu, x, y) for _ in range(3))
    if not gpu.software:  # where a kernel copies a hundred times slower than the driver
        grid = (min(16384, size // 4096), 1, 1)
        copy = gpu.dispatch("copy", (), {"VEC4S": size // 16}, {"x": x, "y": y}, grid)
        ns = min(ns, Stopwatch(gpu).repeated_ns([[copy]]))
    gpu.free(x, y)
    return 2 * size / ns * 1e9


def driver_copy_ns(gpu: Gpu, x: Buffer, y: Buffer) -> float:
    count = 2 if gpu.software else 32  # enough to drown the round trip of a submission, 0.2 ms on an H200
    encoder = gpu.device.create_command_encoder()
    for _ in range(count):
        encoder.copy_buffer_to_buffer(x, 0, y, 0, x.size)
    commands = encoder.finish()
    wait_idle(gpu)
    began = time.perf_counter()
    gpu.submit(commands)
    wait_idle(gpu)
    return (time.perf_counter() - began) / count * 1e9


def peak_flops(gpu: Gpu, int8: bool) -> float:
    """Operations per second without memory accesses: f32 multiply-adds, or packed int8 dot products."""
    iterations, workgroups = (256, 8) if gpu.software else (4096, 4096)
    x = gpu.upload(np.array([0.5, 1.0, 2.0, 0.0], np.float32), "peak in")
    y = gpu.zeros(workgroups * 256 * 4, "peak out")
    consts = {"ITERATIONS": iterations, "INT8": int8}
    dispatch = gpu.dispatch("peak", (), consts, {"x": x, "y": y}, (workgroups, 1, 1))
    ns = Stopwatch(gpu).repeated_ns([[dispatch]])
    gpu.free(x, y)
    return workgroups * 256 * iterations * 64 / ns * 1e9
