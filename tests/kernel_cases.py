"""Shared by the tests of kernels: which routes run on which cases, guards, steps of several sequences, int8 blocks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np
import pytest
from reference import assert_close, attention

from llamagpu.engine import baselines
from llamagpu.engine.ops import Ops
from llamagpu.engine.page_table import PageTable
from llamagpu.engine.pages import PAGE
from llamagpu.engine.routes import Route, Table
from llamagpu.engine.step_inputs import Segment, StepInputs
from llamagpu.engine.weights import Matrix, MatrixShard
from llamagpu.files.storage import dequantize
from llamagpu.gpu.buffers import AnyBuffer
from llamagpu.gpu.caps import Caps
from llamagpu.gpu.device import Dispatch, Gpu
from llamagpu.gpu.recorder import Plan, Recorder, Step
from llamagpu.verify import reference as verify_reference
from llamagpu.verify.reference import F32, Array, Bound, Floats, Weight, block_integers, random

Test = TypeVar("Test", bound=Callable[..., None])

GUARD = 77.0  # fills memory that must not be written
SLOTS = 3  # sequences of a KV cache

# A route that the adapter here cannot run is skipped when its test runs
FULL_CAPS = Caps(
    cpu=False,
    native_f16=True,
    subgroup=32,
    workgroups=65535,
    binding_bytes=1 << 30,
    shared_bytes=1 << 15,
    invocations=1024,
    storage_buffers=16,
)
MINIMUM_CAPS = replace(
    FULL_CAPS, native_f16=False, subgroup=0, shared_bytes=1 << 14, invocations=256, storage_buffers=8
)
SLOW = {"linear_gemv_batch", *baselines.KERNELS}  # take seconds to compile, or are in no plan
COVERED: set[str] = set()  # kernels with a test


class KernelCase(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def first(self) -> bool:
        """Every route runs on it, also those that differ only in tuning."""
        ...

    @property
    def main(self) -> bool:
        """Kernels in SLOW run on it, too."""
        ...

    def fits(self, route: Route[Any], caps: Caps) -> bool: ...


def covers(*kernels: str) -> Callable[[Test], Test]:
    COVERED.update(kernels)
    return lambda test: test


def runs(table: Sequence[Route[Any]], cases: Sequence[KernelCase], at_minimum: Callable[[Any], bool]) -> list[Any]:
    """A pytest parameter for every (gpu, route, case) where the route fits the case.

    A software adapter takes half a second to compile a pipeline, so that not every route runs on every case (see
    KernelCase), and on a device with minimum limits only the cases that `at_minimum` chooses.
    """
    found = []
    for case in cases:
        fitting = [r for r in table if case.fits(r, FULL_CAPS) and (case.main or r.kernel not in SLOW)]
        found += [("full", r, case) for r in (fitting if case.first else one_per_kernel(fitting))]
        if at_minimum(case):
            fitting = [r for r in fitting if case.fits(r, MINIMUM_CAPS)]
            found += [("minimum", r, case) for r in one_per_kernel(fitting)]
    return [pytest.param(gpu, route, case, id=run_id(gpu, route, case)) for gpu, route, case in found]


def run_id(gpu: str, route: Route[Any], case: KernelCase) -> str:
    tuning = "".join(f",{name.lower()}={value}" for name, value in route.consts.items() if case.first)
    return f"{gpu}-{route.kernel}{tuning}-{case.name}"


def one_per_kernel(table: Sequence[Route[Any]]) -> list[Route[Any]]:
    return list({route.kernel: route for route in reversed(table)}.values())[::-1]


def on_gpus(params: list[Any]) -> Any:
    COVERED.update(param.values[1].kernel for param in params)
    return pytest.mark.parametrize("any_gpu, route, case", params, indirect=["any_gpu"])


def only(gpu: Gpu, route: Route[Any], case: KernelCase) -> Table[Any]:
    """A table in which the route always wins; skips the test where the adapter cannot run it."""
    if not case.fits(route, gpu.caps):
        pytest.skip(f"the adapter lacks what {route.kernel} needs ({route.needs})")
    return verify_reference.only(route)


def run(gpu: Gpu, dispatches: Sequence[Dispatch], rows: int = 1, position: int = 0) -> None:
    """Recorded through wgpu-py's objects where the shaders have bounds checks, so that both ways are used."""
    recorder = Recorder(gpu)
    recorder.safe = not gpu.unchecked
    recorder.submit([Step(Plan(dispatches), rows, position)])


def fill(gpu: Gpu, buffer: AnyBuffer, *shape: int, dtype: Any = np.float32) -> None:
    gpu.write(buffer, np.full(shape, GUARD, dtype))


# Steps


def segment(slot: int, position: int, rows: int) -> Segment:
    return Segment(slot, position, [0] * rows)


class Steps:
    """The inputs of steps, one after another in the same buffer, over a KV cache of `slots` sequences.

    Their pages are in no order, and others for each step. Sequences that are past their first page share it.
    """

    def __init__(self, gpu: Gpu, positions: int = 0, slots: int = 1) -> None:
        self.inputs, self.slots, self.rng = StepInputs(gpu), slots, random("pages")
        self.pages = slots * -(-positions // PAGE) + 2
        self.table = PageTable(gpu, slots, positions, self.pages * PAGE)
        self.buffer = self.inputs.buffer
        self.ops = Ops(gpu, self.buffer, self.table.buffer)

    def write(self, *segments: Segment) -> None:
        if not self.table.pages:  # the kernels do not use a cache
            return self.inputs.write(segments)
        entries = self.rng.permutation(self.pages)[: self.slots * self.table.pages].reshape(self.slots, -1)
        sharing = [part.slot for part in segments if part.position >= PAGE]
        entries[sharing, 0] = entries[sharing[:1], 0]
        for slot, pages in enumerate(entries.tolist()):
            self.table.assign(slot, pages)
        return self.inputs.write(segments, self.table)

    def paged(self, cache: Array, segments: Sequence[Segment], unseen: float = 1e4) -> Array:
        """[slots, heads, positions, d] as [heads, cells, d], with `unseen` where no row of the step looks."""
        found = np.full((cache.shape[1], self.table.capacity, cache.shape[3]), unseen, cache.dtype)
        for part in segments:
            end = part.position + len(part.tokens)
            found[:, self.table.cells(part.slot, np.arange(end))] = cache[part.slot, :, :end]
        return found

    def write_rows(self, rows: int, position: int = 0) -> None:
        self.write(segment(0, position, rows))


def per_row(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """Slot and position of every row of a step."""
    return [(seg.slot, seg.position + i) for seg in segments for i in range(len(seg.tokens))]


def per_segment(dispatch: Dispatch, segments: Sequence[Segment]) -> Dispatch:
    """The dispatch with segments in z of its grid: ops give the grid of a step with one segment."""
    x, y, _ = dispatch.grid_for(max(len(seg.tokens) for seg in segments), max(seg.position for seg in segments))
    return replace(dispatch, grid=(x, y, len(segments)))


# Attention


def same_first_page(cache: Array) -> Array:
    """[slots, heads, positions, d] of sequences that begin alike."""
    cache[:, :, :PAGE] = cache[:1, :, :PAGE]
    return cache


def attended(q: Array, k: Array, v: Array, segments: Sequence[Segment], window: int) -> Floats:
    """[m, heads, head_dim] of the rows of a step, in float64."""
    found, first = [], 0
    for part in segments:
        rows = len(part.tokens)
        end, queries = part.position + rows, q[first : first + rows].swapaxes(0, 1).astype(np.float64)
        keys, values = (cache[part.slot, :, :end].astype(np.float64) for cache in (k, v))
        found.append(attention(queries, keys, values, np.arange(part.position, end), window))
        first += rows
    return np.concatenate(found, axis=1).swapaxes(0, 1)


# Weights


def upload(gpu: Gpu, weight: Weight, row0: int = 0) -> tuple[MatrixShard, Floats]:
    """The weights on the device, and as [n, k] float64.

    Scales stay f16 or super-blocks also where the loader would widen them because the adapter cannot convert f16: the
    kernels decode them all the same.
    """
    shard, packed = weight.upload(gpu, row0, keep_scales=True)
    return shard, dequantize(packed)


def upload_shards(gpu: Gpu, *weights: Weight) -> tuple[Matrix, Floats, Floats]:
    """A matrix with a bias, each weight a shard of it; and both in float64."""
    starts = np.cumsum([0, *(weight.n for weight in weights)]).tolist()
    uploads = [upload(gpu, weight, row0) for weight, row0 in zip(weights, starts, strict=False)]
    bias = random("bias").standard_normal(starts[-1]).astype(np.float32)
    shards = tuple(shard for shard, _ in uploads)
    matrix = Matrix(starts[-1], weights[0].k, shards, gpu.upload(bias, "bias"))
    return matrix, np.concatenate([w for _, w in uploads]), bias.astype(np.float64)


# int8 blocks


def check_blocks(got: Array, want: Array, bound: Bound = F32) -> None:
    """Each value rounded to a step of 1/127 of its block's largest; the sums are of the stored values, not `want`."""
    blocks, d = want.reshape(len(want), -1, 32), got["scale"][..., 0].astype(np.float64)
    assert_close(d, np.abs(blocks).max(axis=2) / 127, *bound, "scale")
    assert not (got["scale"][..., 0].copy().view(np.uint32) & 3).any(), "scales of more than 22 bits"
    integers = block_integers(got)
    assert (np.abs(integers * d[..., None] - blocks) <= d[..., None] * (0.5 + 100 * bound[1]) + 1e-30).all()
    low, high = integers[..., :16].sum(axis=2), integers[..., 16:].sum(axis=2)
    sums = d[..., None] * np.stack([low, high, low + high], axis=2)
    assert (np.abs(got["scale"][..., 1:] - sums) <= 1e-6 * np.abs(sums)).all()
