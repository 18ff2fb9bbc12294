"""Dispatches to the queue: one compute pass per batch of steps.

The hot path speaks to wgpu's cffi handle (1 us a dispatch against 6 through wgpu-py's objects, which check for errors
after every call). LLAMAGPU_SAFE=1 records through the objects, so that a validation error raises where it happens.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np
import wgpu
from wgpu.backends.wgpu_native import ffi, lib

from llamagpu.errors import DeviceLost
from llamagpu.gpu.device import Dispatch, Gpu, first_line

Launch = tuple[Any, Any, int, int, int]  # pipeline and bind group handles, grid


class Plan:
    """Dispatches that run one after another. Those of a fixed grid are kept as bare handles: nothing but the calls
    themselves is left to do when they are recorded."""

    def __init__(self, dispatches: Sequence[Dispatch]) -> None:
        self.dispatches = tuple(dispatches)  # also keeps every object alive
        fixed = not any(callable(d.grid) for d in dispatches)
        self.fixed = self.at(1, 0) if fixed else None

    def __len__(self) -> int:
        return len(self.dispatches)

    def at(self, m: int, pos: int) -> list[Launch]:
        return [
            (d.pipeline._internal, d.bind_group._internal, *(d.grid(m, pos) if callable(d.grid) else d.grid))
            for d in self.dispatches
        ]


Step = tuple[Plan, int, int]  # a plan for m tokens from position pos on


AGAIN = "try again; if it happens again, update the GPU's driver"


class Pending:
    """A small buffer on its way back from the device."""

    def __init__(self, gpu: Gpu, staging: Any, index: "Future[Any]") -> None:
        self.gpu, self.staging, self.index = gpu, staging, index

    def wait(self) -> np.ndarray[Any, Any]:
        """Its words, once the submission that wrote it is through (not the ones submitted after it)."""
        handle, size = self.staging._internal, self.staging.size
        index = self.index.result()  # it has been handed in
        status, info = ffi.new("int *", -1), ffi.new("WGPUBufferMapCallbackInfo *")
        waiting[self] = status, info  # kept until the callback has been: also when a Ctrl-C ends the wait
        info.mode = lib.WGPUCallbackMode_AllowProcessEvents
        info.callback = on_mapped
        info.userdata1 = status
        lib.wgpuBufferMapAsync(handle, lib.WGPUMapMode_Read, 0, size, info[0])
        block = self.gpu.software  # on a GPU that would keep the thread that hands in the next one from the device
        while status[0] < 0:
            lib.wgpuDevicePoll(self.gpu.device._internal, block, index if block else ffi.NULL)
            if not block and status[0] < 0:
                time.sleep(5e-5)
        del waiting[self]
        if status[0] != lib.WGPUMapAsyncStatus_Success:
            raise DeviceLost(f"results could not be read back (map status {status[0]})", AGAIN)
        words = np.frombuffer(
            ffi.buffer(lib.wgpuBufferGetConstMappedRange(handle, 0, size), size), np.uint32
        ).copy()
        lib.wgpuBufferUnmap(handle)
        self.gpu.staging.append(self.staging)
        if interrupts:
            raise interrupts.pop()
        return words


def on_interrupt(kind: Any, error: BaseException, trace: Any) -> None:
    """A Ctrl-C inside on_mapped would be lost in C: the status is set all the same, and `wait` raises it."""
    values = trace.tb_frame.f_locals
    ffi.cast("int *", values["result"])[0] = values["status"]
    interrupts.append(error)


interrupts: list[BaseException] = []
waiting: dict[Pending, Any] = {}


@ffi.callback("void(WGPUMapAsyncStatus, WGPUStringView, void *, void *)", onerror=on_interrupt)  # type: ignore[untyped-decorator]
def on_mapped(status: int, message: Any, result: Any, _: Any) -> None:
    ffi.cast("int *", result)[0] = status


class Recorder:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.safe = os.environ.get("LLAMAGPU_SAFE") == "1"

    def submit(self, steps: Sequence[Step], result: Any = None, ahead: bool = False) -> Pending:
        """Record the steps in one pass and submit it; `result` is copied out for reading back. With `ahead` this is
        done when the caller may already be recording the next one: nothing else may be given to the queue before it
        has waited. (wgpu checks and encodes a pass when it is finished, which takes as long as recording it.)"""
        encoder, staging = self.record(steps, result)
        return Pending(self.gpu, staging, self.handed(ahead, self.hand_in, encoder))

    def handed(self, ahead: bool, hand_in: Callable[..., Any], *what: Any) -> "Future[Any]":
        if self.gpu.closed:
            raise DeviceLost("the model was closed while it wrote a text", "let the text end, or drop it, first")
        if ahead and not self.gpu.software:  # which needs the cores itself
            return self.gpu.worker.submit(hand_in, *what)
        done: Future[Any] = Future()
        done.set_result(hand_in(*what))
        return done

    def settle(self) -> None:
        """Until all that was submitted ahead is with the queue: also what a Ctrl-C kept from the caller."""
        with suppress(RuntimeError):  # the worker is shut down: so it has done all
            self.gpu.worker.submit(int).result()

    def record(self, steps: Sequence[Step], result: Any, stamps: Any = None) -> tuple[Any, Any]:
        """The pass in an encoder, and the buffer that `result` is copied to."""
        encoder = self.gpu.device.create_command_encoder()
        work = encoder.begin_compute_pass(timestamp_writes=stamps)
        record = record_safe if self.safe else record_raw
        for plan, m, pos in steps:
            record(work, plan, m, pos)
        work.end()
        staging = None
        if result is not None:
            staging = self.gpu.staging_for(result.size)
            encoder.copy_buffer_to_buffer(result, 0, staging, 0, result.size)
        return encoder, staging

    def hand_in(self, encoder: Any) -> Any:
        """Finish and submit; the submission's index."""
        try:
            commands = encoder.finish()
            index = ffi.new("WGPUSubmissionIndex *")
            index[0] = lib.wgpuQueueSubmitForIndex(
                self.gpu.device.queue._internal, 1, ffi.new("WGPUCommandBuffer[]", [commands._internal])
            )
        except (wgpu.GPUError, RuntimeError) as error:
            raise DeviceLost(f"the device stopped taking work: {first_line(error)}", AGAIN) from error
        return index


def record_safe(work: Any, plan: Plan, m: int, pos: int) -> None:
    for dispatch, launch in zip(plan.dispatches, plan.at(m, pos), strict=True):
        work.set_pipeline(dispatch.pipeline)
        work.set_bind_group(0, dispatch.bind_group)
        work.dispatch_workgroups(*launch[2:])


def record_raw(work: Any, plan: Plan, m: int, pos: int) -> None:
    handle = work._internal
    set_pipeline = lib.wgpuComputePassEncoderSetPipeline
    set_bind_group = lib.wgpuComputePassEncoderSetBindGroup
    launch = lib.wgpuComputePassEncoderDispatchWorkgroups
    null = ffi.NULL
    for pipeline, bind_group, x, y, z in plan.fixed or plan.at(m, pos):
        set_pipeline(handle, pipeline)
        set_bind_group(handle, 0, bind_group, 0, null)
        launch(handle, x, y, z)
