"""Writes the converted model, GGUF or packed: a few rows at a time, under another name until it is whole."""

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamagpu.errors import BadFile, Unsupported
from llamagpu.files.gguf_file import RawTensor
from llamagpu.files.gguf_writer import encode_header, padding, tensor_bytes
from llamagpu.files.packed_file import PackedWriter
from llamagpu.files.quantise import quantise, squares
from llamagpu.files.repack import Packed, dequantize, packed_bytes, repack, slice_rows
from llamagpu.files.replacing import replacing
from llamagpu.tools.convert.fourbit import HALVES, SINGLES, SYMMETRIC, FourBit, blocks_of
from llamagpu.tools.convert.source import Rows, Source, Tensor

STEP_WEIGHTS = 1 << 18  # per task: 1 MB of floats stays in L2; Q4_0 takes 8 ns a weight, 12 in steps of 1 << 14
Progress = Callable[[str, int, int], None]  # tensor ("" at the end), bytes of the source done, bytes in all
NO_PROGRESS: Progress = lambda name, done, total: None  # noqa: E731


@dataclass(slots=True)
class Loss:
    """What became of a tensor."""

    name: str
    kind: str
    weights: int
    error: float = 0.0  # sum of squares
    norm: float = 0.0  # sum of the weights' squares

    @property
    def nmse(self) -> float:
        return self.error / self.norm if self.norm else 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """What to write and how."""

    source: Source
    kinds: dict[str, str]  # of every tensor
    metadata: dict[str, Any]
    best: bool = False
    importance: dict[str, NDArray[np.float32]] = field(default_factory=dict)  # per matrix: of its columns
    threads: int = 0  # 0: one per core

    @property
    def workers(self) -> int:
        return self.threads or os.cpu_count() or 1


def write_gguf(job: Job, path: Path, progress: Progress = NO_PROGRESS) -> list[Loss]:
    tensors = job.source.tensors
    header = encode_header(job.metadata, [(name, job.kinds[name], t.shape) for name, t in tensors.items()])
    size = len(header) + sum(tensor_bytes(job.kinds[t.name], t.shape) + 31 for t in tensors.values())
    losses = {t.name: Loss(t.name, job.kinds[t.name], math.prod(t.shape)) for t in tensors.values()}
    done, total = 0.0, job.source.nbytes
    with replacing(path, size) as file, workers(job) as pool:
        file.write(header)
        written, last = 0, ""
        for loss, blocks, error, norm in pool(task for t in tensors.values() for task in tasks(job, t, losses[t.name])):
            if loss.name != last and last:
                file.write(padding(written))
                written = 0
                _forget(job.source)
            last = loss.name
            file.write(np.ascontiguousarray(blocks).reshape(-1).view(np.uint8).data)
            written += blocks.nbytes
            loss.error += error
            loss.norm += norm
            done += tensors[last].nbytes * blocks.nbytes / tensor_bytes(loss.kind, tensors[last].shape)
            progress(last, round(done), total)
        file.write(padding(written))
    progress("", total, total)
    return list(losses.values())


def write_packed(job: Job, path: Path, progress: Progress = NO_PROGRESS) -> list[Loss]:
    """Matrix by matrix: those that are joined on the device are joined here."""
    from llamagpu.engine.weights import matrix_jobs  # here: it brings wgpu along

    tensors = job.source.tensors
    shapes = {t.name: (job.kinds[t.name], t.shape) for t in tensors.values()}
    size = (16 << 20) + sum(packed_bytes(job.kinds[t.name], *t.matrix) for t in tensors.values())
    losses: dict[str, Loss] = {}
    done, total = 0, job.source.nbytes

    with replacing(path, size) as file, workers(job) as pool:

        def whole(name: str) -> RawTensor:
            loss = losses[name] = Loss(name, job.kinds[name], math.prod(tensors[name].shape))
            blocks = []
            for _, piece, error, norm in pool(tasks(job, tensors[name], loss)):
                blocks.append(piece.reshape(-1).view(np.uint8))
                loss.error += error
                loss.norm += norm
            return RawTensor(name, loss.kind, tensors[name].shape, np.concatenate(blocks))

        def pack(raw: RawTensor) -> Packed:
            nonlocal done
            four_bit = tensors[raw.name].four_bit
            if four_bit and raw.kind in (SYMMETRIC, HALVES, SINGLES):
                losses[raw.name] = Loss(raw.name, raw.kind, math.prod(raw.shape))
                packed = four_bit.load(raw.kind)
            else:
                packed = repack(whole(raw.name), job.workers)
            done += tensors[raw.name].nbytes
            progress(raw.name, done, total)
            return packed

        writer = PackedWriter(file, job.metadata, shapes)
        raws = {name: RawTensor(name, kind, shape, np.zeros(0, np.uint8)) for name, (kind, shape) in shapes.items()}
        for name in [name for name, tensor in tensors.items() if len(tensor.shape) == 1]:
            raws[name] = whole(name)
            writer.put(name, raws[name].data.view(np.float32))
        for label, make in matrix_jobs(raws, job.source.config, pack):
            writer.put_matrix(label, make())
            _forget(job.source)
        writer.finish()
    progress("", total, total)
    return list(losses.values())


def _forget(source: Source) -> None:
    if source.gguf:
        source.gguf.forget()


Piece = tuple[Loss, NDArray[Any], float, float]  # whose, blocks, sum of squared errors, of squares
Task = Callable[[], Piece]


def tasks(job: Job, tensor: Tensor, loss: Loss) -> Iterator[Task]:
    """The tensor, some rows at a time, in order."""
    n, k = tensor.matrix
    step = max(1, STEP_WEIGHTS // k)
    bounds = [(start, min(start + step, n)) for start in range(0, n, step)]
    if tensor.raw and tensor.raw.kind == loss.kind:
        blocks = tensor.raw.data.reshape(n, -1)
        yield from (partial(copied, loss, blocks[start:stop]) for start, stop in bounds)
    elif tensor.four_bit and carries(tensor.four_bit, loss.kind):
        packed, rows = tensor.four_bit.load(loss.kind), tensor.open()
        yield from (partial(carried, loss, packed, rows, start, stop) for start, stop in bounds)
    else:
        rows, importance = tensor.open(), job.importance.get(tensor.name)
        yield from (partial(encoded, loss, rows, start, stop, importance, job.best) for start, stop in bounds)


def copied(loss: Loss, blocks: NDArray[np.uint8]) -> Piece:
    return loss, blocks, 0.0, 0.0


def carries(four_bit: FourBit, kind: str) -> bool:
    """A 4-bit matrix keeps its nibbles as Q4_1; as Q4_0 only with zero points of 8."""
    return kind == HALVES or (kind == SYMMETRIC and four_bit.exact_kind() == SYMMETRIC)


def carried(loss: Loss, packed: Packed, rows: Rows, start: int, stop: int) -> Piece:
    part, x = slice_rows(packed, start, stop), rows(start, stop)
    return loss, blocks_of(part), squares(dequantize(part) - x), squares(x)


def encoded(loss: Loss, rows: Rows, start: int, stop: int, importance: NDArray[np.float32] | None, best: bool) -> Piece:
    x = np.ascontiguousarray(rows(start, stop))
    finite = np.isfinite(x)
    if not finite.all():
        place = start * x.shape[1] + int(np.argmin(finite))
        raise BadFile(f"tensor {loss.name}: value {place} is NaN or infinite", "Fetch the checkpoint again.")
    with np.errstate(all="ignore"):
        blocks, error = quantise(loss.kind, x, importance, best)
    if not math.isfinite(error):
        worst = float(np.abs(x).max())
        remedy = "Try --to q8_0." if worst < 127 * 65504 else "The checkpoint may be damaged."
        raise Unsupported(f"tensor {loss.name} has a weight of {worst:g}, too large for {loss.kind}", remedy)
    return loss, blocks, error, squares(x)


@contextmanager
def workers(job: Job) -> Iterator[Callable[[Iterable[Task]], Iterator[Piece]]]:
    """What runs tasks in threads and gives their results in order, at most two per thread ahead."""
    np.empty(8 << 20, np.uint8)  # lets glibc keep the temporaries on its heap: see repack
    pool = ThreadPoolExecutor(job.workers)

    def run(todo: Iterable[Task]) -> Iterator[Piece]:
        waiting: deque[Future[Piece]] = deque()
        for task in todo:
            waiting.append(pool.submit(task))
            if len(waiting) > 2 * job.workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    try:
        yield run
    finally:
        pool.shutdown(cancel_futures=True)
