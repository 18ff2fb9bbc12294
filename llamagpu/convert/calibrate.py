"""Runs models for a conversion: measures the mean square of each linear's inputs, and the quality of the result."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llamagpu.convert.source import Source
from llamagpu.engine.engine import Engine
from llamagpu.engine.options import KvType, Precision
from llamagpu.engine.routes import Linear
from llamagpu.engine.sequence import Sequence as TokenSequence
from llamagpu.engine.step_inputs import Segment
from llamagpu.errors import NumericCheckFailed
from llamagpu.files.tokenizer import Tokenizer
from llamagpu.gpu.buffers import Bindable, as_buffer, is_texture
from llamagpu.gpu.device import Dispatch, Gpu
from llamagpu.gpu.recorder import Plan, Step
from llamagpu.llama import Llama
from llamagpu.perplexity import chunks_of

CONTEXT = 512  # tokens in a chunk of a text, or the model's context if that is less
CALIBRATION_TOKENS = 16384  # of the text, at most
MIN_IMPORTANCE = 1e-3  # of the mean: inputs that are zero in the text still count a little
# The tensors of the fused matrices of a layer; other linears have one tensor of the same name.
FUSED_TENSORS = {"qkv": ("attn_q", "attn_k", "attn_v"), "gate_up": ("ffn_gate", "ffn_up")}
Progress = Callable[[int, int], None]


def check_texts(source: Source, texts: Iterable[str], device: str | None) -> int:
    """The tokens in a chunk of text. Errors of a text or of the device are raised here, before the work begins."""
    context = min(CONTEXT, source.config.context)
    tokenizer = Tokenizer.from_gguf(source.metadata)
    for text in texts:
        chunks_of(tokenizer, text, context)
    Gpu.open(device).close()
    return context


def calibrate(
    path: Path, text: str, progress: Progress, device: str | Gpu | None = None, context: int = CONTEXT
) -> dict[str, NDArray[np.float32]]:
    """For each matrix of the layers, by GGUF name, the mean square of each column's input."""
    sums: dict[str, NDArray[np.float64]] = {}
    # On every adapter the inputs of linears are f32, and a step takes a whole chunk of text.
    high, f32 = Precision.HIGH, KvType.F32
    with (
        Llama(path, device=device, context=context, chunk=context, precision=high, kv_type=f32) as llama,
        llama.scheduler.alone(context) as sequence,
    ):
        engine = llama.loaded.engine
        chunks = chunks_of(llama.tokenizer, text, context)[: max(1, CALIBRATION_TOKENS // context)]
        linears = split_at_linears(engine.model.layer_dispatches(context))
        engine.reserve(sequence, context)
        for i, ids in enumerate(chunks):
            engine.model.write_step([Segment(sequence.slot, 0, ids)])
            for before, linear in linears:
                engine.recorder.submit([Step(before, len(ids))])
                assert isinstance(linear.shape, Linear)
                inputs = read_rows(llama.gpu, linear.bindings["x"], len(ids), linear.shape.k)
                squares = np.square(inputs, dtype=np.float64).sum(axis=0)
                for tensor in FUSED_TENSORS.get(linear.op, (linear.op,)):
                    name = f"blk.{linear.layer}.{tensor}.weight"
                    sums[name] = sums.get(name, 0.0) + squares
            progress(i + 1, len(chunks))
    return {name: importance(total / (len(chunks) * context)) for name, total in sums.items()}


def split_at_linears(dispatches: Sequence[Dispatch]) -> list[tuple[Plan, Dispatch]]:
    """The first dispatch of each linear of a layer, with a plan of the dispatches between the linear before and it."""
    found: list[tuple[Plan, Dispatch]] = []
    before: list[Dispatch] = []
    seen = None
    for dispatch in dispatches:
        if isinstance(dispatch.shape, Linear) and dispatch.layer is not None and (dispatch.layer, dispatch.op) != seen:
            seen = dispatch.layer, dispatch.op  # the other shards of the matrix have the same input
            found.append((Plan(before), dispatch))
            before = []
        before.append(dispatch)
    return found


def read_rows(gpu: Gpu, binding: Bindable, m: int, width: int) -> NDArray[np.float32]:
    """[m, width] f32 of a buffer or a texture."""
    if is_texture(binding):
        rows = gpu.read_texture(binding, 0, binding.width, m).view(np.float32).reshape(m, -1)
        return rows[:, :width]
    return gpu.read(as_buffer(binding), np.float32, m * width).reshape(m, width)


def importance(squares: NDArray[np.float64]) -> NDArray[np.float32]:
    if not np.isfinite(squares).all():
        raise NumericCheckFailed("the model's activations are not numbers", "the source may be damaged")
    least = MIN_IMPORTANCE * float(squares.mean()) + 1e-30
    return np.clip(squares, least, None).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Quality:
    perplexity: float
    divergence: float = 0.0  # Kullback-Leibler, of the next-token distribution from the original's, in nats
    same_top: float = 1.0  # fraction of positions with the original's likeliest token


def compare(
    paths: Sequence[Path],
    text: str,
    progress: Progress,
    device: str | None = None,
    context: int = CONTEXT,
    most: int = 0,
) -> list[Quality]:
    """The quality of each model on the text, the first being the original; `most` chunks, 0 for all."""
    with closing(Gpu.open(device)) as gpu:
        models = [Llama(path, device=gpu, context=context) for path in paths]
        chunks = chunks_of(models[0].tokenizer, text, context)[: most or None]
        engines = [llama.loaded.engine for llama in models]
        rows = min(engine.score_rows for engine in engines)
        found = []
        for i, ids in enumerate(chunks):
            for pieces in zip(*(log_probs(engine, ids, rows) for engine in engines), strict=True):
                positions, base = pieces[0]
                targets = np.array(ids)[positions.start + 1 : positions.stop + 1, None]
                found.append(np.stack([statistics(base, logs, targets) for _, logs in pieces]))
            progress(i + 1, len(chunks))
    means = np.concatenate(found, axis=2).mean(axis=2)
    if not (means[:, 0] < 700).all() or not np.isfinite(means).all():
        raise NumericCheckFailed("a model's output is not a number", "the source may be damaged")
    return [Quality(math.exp(loss), divergence, same) for loss, divergence, same in means.tolist()]


def statistics(base: NDArray[np.float32], logs: NDArray[np.float32], targets: NDArray[np.int64]) -> NDArray[np.float64]:
    """[3, positions]: loss of the target, divergence from `base`, whether the likeliest token is the same."""
    loss = -np.take_along_axis(logs, targets, axis=1)[:, 0]
    divergence = (np.exp(base) * (base - logs)).sum(axis=1)
    return np.stack([loss, divergence, base.argmax(axis=1) == logs.argmax(axis=1)], dtype=np.float64)


def log_probs(engine: Engine, ids: list[int], rows: int) -> Iterator[tuple[range, NDArray[np.float32]]]:
    """The positions of the second half of ids without the last, and their log-probabilities [positions, vocab].

    At most `rows` ids are computed at a time.
    """
    sequence = TokenSequence()
    scoring = engine.model.score_plan(engine.score_rows)
    logits_buffer = next(d.bindings["logits"] for d in scoring.dispatches if d.kernel == "log_prob")
    try:
        for start in range(0, len(ids), rows):
            piece = ids[start : start + rows]
            engine.log_probs(sequence, piece)
            positions = range(max(start, len(ids) // 2), min(start + len(piece), len(ids) - 1))
            if positions:
                logits = read_rows(engine.gpu, logits_buffer, len(piece), engine.config.vocab)
                logits = logits[positions.start - start : positions.stop - start]
                logits = logits - logits.max(axis=1, keepdims=True)
                yield positions, logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    finally:
        engine.discard(sequence)
