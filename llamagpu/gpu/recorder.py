"""Records plans and submits them: one compute pass for each submission.

The fast path calls C functions on handles, 1 us a dispatch against 6 through wgpu-py's objects, which check for errors
after every call. LLAMAGPU_SAFE=1 records through the objects, so that with wgpu a validation error raises where it
happens.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import c_void_p
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamagpu.errors import DeviceLost
from llamagpu.gpu.buffers import AnyBuffer, BufferRange
from llamagpu.gpu.caps import Grid
from llamagpu.gpu.device import Dispatch, Gpu, first_line
from llamagpu.gpu.guard import Job
from llamagpu.gpu.webgpu import GPUError, Launch, bare, records_safely

REMEDY_RETRY = "try again; if it happens again, update the GPU's driver"
# Dispatches of the first piece and of each further one, where a step is submitted in pieces. On an H200 (2026-11-16) a
# step of 2 rows took 1.26 to 1.51 ms of wall clock in 3 to 6 pieces of other sizes, 1.72 ms whole (1B, 115 dispatches);
# 3.35 to 3.71 against 4.15 ms (8B, 227). A piece costs the host 0.1 ms. These sizes are chosen from that, not measured.
FIRST_PIECE, PIECE = 16, 40


class Plan:
    """Dispatches that run one after another. Where all grids are fixed, recording reads a list of bare handles."""

    def __init__(self, dispatches: Sequence[Dispatch]) -> None:
        self.dispatches = tuple(dispatches)  # keeps every object alive
        self.grid_functions = {dispatch.grid for dispatch in dispatches if callable(dispatch.grid)}
        self.fixed_launches = None if self.grid_functions else self.launches(1, 0)
        self.ran = False

    def __len__(self) -> int:
        return len(self.dispatches)

    @cached_property
    def pieces(self) -> "list[Plan]":
        """The plan cut into short ones, the first the shortest."""
        cuts = [0, *range(FIRST_PIECE, len(self) - PIECE // 2, PIECE), len(self)]
        return [self] if len(cuts) == 2 else [Plan(self.dispatches[a:b]) for a, b in pairwise(cuts)]

    @cached_property
    def handles(self) -> list[tuple[c_void_p, c_void_p, Any]]:
        return [(bare(d.pipeline._internal), bare(d.bind_group._internal), d.grid) for d in self.dispatches]

    def launches(self, rows: int, position: int) -> list[Launch]:
        """Layers share their grid functions, so each is called once."""
        grids: dict[Any, Grid] = {function: function(rows, position) for function in self.grid_functions}
        return [(pipeline, bind_group, *grids.get(grid, grid)) for pipeline, bind_group, grid in self.handles]


class Step(NamedTuple):
    """One run of a plan over `rows` token rows, the first of them at `position`."""

    plan: Plan
    rows: int = 1
    position: int = 0


class Pending:
    """Small buffers that are being read back from the device.

    `in_flight` keeps it alive until it has been read, also when a Ctrl-C ends the wait, and when the generation that
    waits is garbage in a reference cycle: Python would free the staging buffer first.
    """

    def __init__(self, gpu: Gpu, staging: Any, submission: Job) -> None:
        self.gpu, self.staging, self.submission = gpu, staging, submission
        if staging is not None:
            in_flight.add(self)

    def wait(self) -> NDArray[np.uint32]:
        """The buffers' words, once the submission that wrote them has completed; later submissions may still run."""
        words: NDArray[np.uint32] = self.gpu.poller.call(self._read)
        return words

    def _read(self) -> NDArray[np.uint32]:
        try:
            index = self.submission.result()
            # on a GPU a blocking poll would keep the submitting thread from the device
            data = self.gpu.native.read_staging(self.staging, index, block=self.gpu.software)
        finally:
            in_flight.discard(self)
        self.gpu.staging.append(self.staging)
        return data.view(np.uint32)


in_flight: set[Pending] = set()


class Recorder:
    """Records steps and submits them to the device's queue."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.safe = records_safely()

    def submit(self, steps: Sequence[Step], *results: AnyBuffer, ahead: bool = False) -> Pending:
        """Record the steps in one pass and submit it; `results` are copied out for reading back, one after another.

        With `ahead` a worker thread finishes and submits the pass: wgpu validates and encodes it then, which takes as
        long as recording it. Nothing else may be submitted until the caller has waited.
        """
        encoder, staging = self.record(steps, results)
        return Pending(self.gpu, staging, self._schedule(ahead, self.finish_and_submit, encoder))

    def submit_in_pieces(self, step: Step) -> None:
        """Submit the step piece by piece: the GPU runs the first ones while the others are recorded.

        A software adapter needs the cores itself.
        """
        plans = [step.plan] if self.gpu.software else step.plan.pieces
        submissions: list[Job] = []
        try:
            for plan in plans:
                submissions.append(self.submit([step._replace(plan=plan)], ahead=True).submission)
        finally:
            for submission in submissions:
                submission.result()

    def _schedule(self, ahead: bool, submit: Callable[..., Any], *arguments: Any) -> Job:
        if self.gpu.closed:
            raise DeviceLost("the model was closed while it generated", "let the generation end, or drop it, first")
        submission = self.gpu.submitter.submit(submit, *arguments)
        if not ahead or self.gpu.software:  # a software adapter needs the cores itself
            submission.result()
        return submission

    def drain(self) -> None:
        """Wait until the worker has submitted everything, also passes whose Pending was lost by a Ctrl-C."""
        with suppress(DeviceLost):  # or closed: nothing is left to submit
            self.gpu.submitter.call(int)

    def record(self, steps: Sequence[Step], results: Sequence[AnyBuffer], timestamps: Any = None) -> tuple[Any, Any]:
        """The pass in a command encoder, and the staging buffer that `results` are copied to."""
        encoder = self.gpu.device.create_command_encoder()
        work = encoder.begin_compute_pass(timestamp_writes=timestamps)
        for step in steps:
            if not step.plan.ran:
                step.plan.ran = True
                self.gpu.unproven = self.gpu.caps.subgroup > 0
            if self.safe:
                record_safe(work, step)
            else:
                self.gpu.native.record(work, launches(step))
        work.end()
        staging = None
        if results:
            staging = self.gpu.staging_buffer(sum(result.size for result in results))
            offset = 0
            for result in results:
                source, first = (result.buffer, result.offset) if isinstance(result, BufferRange) else (result, 0)
                encoder.copy_buffer_to_buffer(source, first, staging, offset, result.size)
                offset += result.size
        return encoder, staging

    def finish_and_submit(self, encoder: Any) -> Any:
        """Submit what the encoder holds; the index of the submission."""
        try:
            return self.gpu.native.submit(encoder.finish())
        except (GPUError, RuntimeError) as error:
            raise DeviceLost(f"the device stopped taking work: {first_line(error)}", REMEDY_RETRY) from error


def record_safe(work: Any, step: Step) -> None:
    for dispatch in step.plan.dispatches:
        work.set_pipeline(dispatch.pipeline)
        work.set_bind_group(0, dispatch.bind_group)
        work.dispatch_workgroups(*dispatch.grid_for(step.rows, step.position))


def launches(step: Step) -> list[Launch]:
    return step.plan.fixed_launches or step.plan.launches(step.rows, step.position)
