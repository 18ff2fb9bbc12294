"""Writes the converted model, GGUF or packed, a few rows at a time."""

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamagpu.convert.awq_gptq import F16_OFFSETS, F32_OFFSETS, SYMMETRIC, QuantisedMatrix, to_blocks
from llamagpu.convert.gguf_header import encode_header, padding, tensor_bytes
from llamagpu.convert.packed_writer import PackedWriter
from llamagpu.convert.quantise import quantise, sum_of_squares
from llamagpu.convert.source import Blocks, Rows, Source, Tensor
from llamagpu.errors import BadFile, Unsupported
from llamagpu.files.atomic import atomic_write
from llamagpu.files.config import is_vector
from llamagpu.files.gguf_file import RawTensor
from llamagpu.files.matrices import matrix_sources
from llamagpu.files.repack import packed_bytes, repack
from llamagpu.files.storage import PackedMatrix, dequantize, fits_q6, slice_rows, to_q6

TASK_WEIGHTS = 1 << 18  # 1 MB of f32, which stays in L2; Q4_0 takes 8 ns per weight, in tasks of 1 << 14 it takes 12 ns
Progress = Callable[[str, int, int], None]  # tensor ("" at the end), bytes of the source done, bytes in all
NO_PROGRESS: Progress = lambda name, done, total: None  # noqa: E731


@dataclass(slots=True)
class Loss:
    """The error of a tensor in its new type."""

    name: str
    ggml_type: str
    weights: int
    error: float = 0.0  # sum of squared errors
    norm: float = 0.0  # sum of squared weights

    @property
    def nmse(self) -> float:
        return self.error / self.norm if self.norm else 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """A conversion: the source, the new types and how to quantise."""

    source: Source
    ggml_types: dict[str, str]  # of every tensor
    metadata: dict[str, Any]
    best: bool = False
    importance: dict[str, NDArray[np.float32]] = field(default_factory=dict)  # of the columns of each matrix
    threads: int = 0  # 0: one per core

    @property
    def workers(self) -> int:
        return self.threads or os.cpu_count() or 1

    def loss(self, name: str) -> Loss:
        return Loss(name, self.ggml_types[name], math.prod(self.source.tensors[name].shape))


def write_gguf(job: Job, path: Path, progress: Progress = NO_PROGRESS) -> list[Loss]:
    tensors = job.source.tensors
    header = encode_header(job.metadata, [(name, job.ggml_types[name], t.shape) for name, t in tensors.items()])
    sizes = {name: tensor_bytes(job.ggml_types[name], tensor.shape) for name, tensor in tensors.items()}
    losses = {name: job.loss(name) for name in tensors}
    work = (task for name, tensor in tensors.items() for task in tasks(job, tensor, losses[name]))
    done, total = 0.0, job.source.nbytes
    size = len(header) + sum(size + len(padding(size)) for size in sizes.values())
    with atomic_write(path, size) as file, thread_pool(job) as run:
        file.write(header)
        written, last = 0, ""
        for loss, blocks, error, norm in run(work):
            if loss.name != last and last:
                file.write(padding(written))
                written = 0
                job.source.drop_pages()
            last = loss.name
            file.write(np.ascontiguousarray(blocks).reshape(-1).view(np.uint8).data)
            written += blocks.nbytes
            loss.error += error
            loss.norm += norm
            done += tensors[last].nbytes * blocks.nbytes / sizes[last]
            progress(last, round(done), total)
        file.write(padding(written))
    progress("", total, total)
    return list(losses.values())


def write_packed(job: Job, path: Path, progress: Progress = NO_PROGRESS) -> list[Loss]:
    """Write the matrices of the device: fused tensors are one matrix in the file."""
    tensors = job.source.tensors
    shapes = {t.name: (job.ggml_types[t.name], t.shape) for t in tensors.values()}
    size = (16 << 20) + sum(packed_bytes(job.ggml_types[t.name], *t.matrix) for t in tensors.values())
    losses: dict[str, Loss] = {}
    done, total = 0, job.source.nbytes

    with atomic_write(path, size) as file, thread_pool(job) as run:

        def pieces(name: str) -> Iterator[RawTensor]:
            """A tensor in its new type, some rows at a time."""
            loss = losses[name] = job.loss(name)
            k = tensors[name].shape[-1]
            row = tensor_bytes(loss.ggml_type, (1, k))
            for _, blocks, error, norm in run(tasks(job, tensors[name], loss)):
                loss.error += error
                loss.norm += norm
                data = np.ascontiguousarray(blocks).reshape(-1).view(np.uint8)
                yield RawTensor(name, loss.ggml_type, (data.size // row, k), data)

        def pack(raw: RawTensor) -> PackedMatrix:
            nonlocal done
            quantised = tensors[raw.name].quantised
            if quantised and raw.ggml_type in (SYMMETRIC, F16_OFFSETS, F32_OFFSETS):
                losses[raw.name] = job.loss(raw.name)
                packed = quantised.load(raw.ggml_type)
            else:
                packed = stack(map(repack_q6, pieces(raw.name)), math.prod(raw.shape[:-1]))
            done += tensors[raw.name].nbytes
            progress(raw.name, done, total)
            return packed

        writer = PackedWriter(file, job.metadata, shapes)
        raws = {name: RawTensor(name, *entry, np.zeros(0, np.uint8)) for name, entry in shapes.items()}
        for name, tensor in tensors.items():
            if is_vector(name, tensor.shape) or name.endswith(".bias"):
                data = np.concatenate([piece.data for piece in pieces(name)])
                raws[name] = replace(raws[name], data=data)
            if is_vector(name, tensor.shape):
                writer.put(name, raws[name].data.view(np.float32))
        for matrix in matrix_sources(raws, job.source.config, pack):
            writer.put_matrix(matrix.label, matrix.load())
            job.source.drop_pages()
        writer.finish()
    progress("", total, total)
    return list(losses.values())


def repack_q6(tensor: RawTensor) -> PackedMatrix:
    """Like `repack`, but Q6_K is stored in 6 bits."""
    packed = repack(tensor)
    return to_q6(packed) if fits_q6(packed.layout) else packed


def stack(pieces: Iterator[PackedMatrix], n: int) -> PackedMatrix:
    """Concatenate the pieces to a matrix of `n` rows. Only one piece at a time is in memory beside it."""

    def like(array: NDArray[Any]) -> NDArray[Any]:
        return np.empty((n, *array.shape[1:]), array.dtype)

    first = next(pieces)
    matrix = replace(first, words=like(first.words), scales=None if first.scales is None else like(first.scales))
    row = 0
    for piece in chain([first], pieces):
        matrix.words[row : row + piece.n] = piece.words
        if matrix.scales is not None:
            matrix.scales[row : row + piece.n] = piece.scales
        row += piece.n
    return matrix


class Piece(NamedTuple):
    """Some rows of a tensor in its new type."""

    loss: Loss  # of the tensor
    blocks: NDArray[Any]
    error: float  # of these rows, as in Loss
    norm: float


Task = Callable[[], Piece]


def tasks(job: Job, tensor: Tensor, loss: Loss) -> Iterator[Task]:
    """The work on a tensor, some rows at a time, in order."""
    n, k = tensor.matrix
    step = max(1, TASK_WEIGHTS // k)
    bounds = [(start, min(start + step, n)) for start in range(0, n, step)]
    if tensor.blocks and tensor.ggml_type == loss.ggml_type:
        yield from (partial(copy_blocks, loss, tensor.blocks, start, stop) for start, stop in bounds)
    elif tensor.quantised and keeps_nibbles(tensor.quantised, loss.ggml_type):
        packed, rows = tensor.quantised.load(loss.ggml_type), tensor.open()
        yield from (partial(copy_nibbles, loss, packed, rows, start, stop) for start, stop in bounds)
    else:
        rows, importance = tensor.open(), job.importance.get(tensor.name)
        yield from (partial(quantise_rows, loss, rows, start, stop, importance, job.best) for start, stop in bounds)


def copy_blocks(loss: Loss, blocks: Blocks, start: int, stop: int) -> Piece:
    return Piece(loss, blocks(start, stop), 0.0, 0.0)


def keeps_nibbles(matrix: QuantisedMatrix, ggml_type: str) -> bool:
    """An AWQ or GPTQ matrix keeps its nibbles as Q4_1, and as Q4_0 if all zero points are 8."""
    return ggml_type == F16_OFFSETS or (ggml_type == SYMMETRIC and matrix.exact_type() == SYMMETRIC)


def copy_nibbles(loss: Loss, packed: PackedMatrix, rows: Rows, start: int, stop: int) -> Piece:
    piece, x = slice_rows(packed, start, stop), rows(start, stop)
    return Piece(loss, to_blocks(piece), sum_of_squares(dequantize(piece) - x), sum_of_squares(x))


def quantise_rows(
    loss: Loss, rows: Rows, start: int, stop: int, importance: NDArray[np.float32] | None, best: bool
) -> Piece:
    x = np.ascontiguousarray(rows(start, stop))
    finite = np.isfinite(x)
    if not finite.all():
        index = start * x.shape[1] + int(np.argmin(finite))
        raise BadFile(f"tensor {loss.name}: value {index} is NaN or infinite", "Fetch the checkpoint again.")
    with np.errstate(all="ignore"):
        blocks, error = quantise(loss.ggml_type, x, importance, best)
    if not math.isfinite(error):
        worst = float(np.abs(x).max())
        cause = f"tensor {loss.name} has a weight of {worst:g}, too large for {loss.ggml_type}"
        raise Unsupported(cause, "Try --to bf16, which holds it.")
    return Piece(loss, blocks, error, sum_of_squares(x))


@contextmanager
def thread_pool(job: Job) -> Iterator[Callable[[Iterable[Task]], Iterator[Piece]]]:
    """A function that runs tasks in threads and yields their results in order. Each thread has at most two tasks."""
    np.empty(8 << 20, np.uint8)  # makes glibc keep temporaries on its heap, see repack._in_batches
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
