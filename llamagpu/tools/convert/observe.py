"""What a model computes on the way, seen on the device: the size of each linear's inputs, for better rounding,
and the logits of every position, to compare models."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import wgpu
from numpy.typing import NDArray

from llamagpu.engine.generate import Llama
from llamagpu.engine.llama import LOGIT_BYTES, Transformer
from llamagpu.engine.weights import Layer, Matrix
from llamagpu.errors import NumericCheckFailed
from llamagpu.files.tokenizer import Tokenizer
from llamagpu.gpu.device import Dispatch, Gpu
from llamagpu.gpu.recorder import Plan
from llamagpu.gpu.shaders import Const
from llamagpu.tools.convert.source import Source
from llamagpu.tools.perplexity import chunks_of

CONTEXT = 512  # tokens in a chunk of a text, or what the model was trained with if that is less
CALIBRATION_TOKENS = 16384  # of the text, at most
LEAST = 1e-3  # of the mean: an input that the text never used still counts a little
Progress = Callable[[int, int], None]


class Watching(Gpu):
    """A device that notes what its kernels are given."""

    def __init__(self, gpu: Gpu) -> None:
        vars(self).update(vars(gpu))
        self.linears: dict[int, tuple[Any, Any]] = {}  # by dispatch: input, weights
        self.logits: Any = None  # of all rows

    def dispatch(
        self,
        kernel: str,
        parts: tuple[str, ...],
        consts: dict[str, Const],
        buffers: dict[str, Any],
        grid: Any,
    ) -> Dispatch:
        made = super().dispatch(kernel, parts, consts, buffers, grid)
        if kernel.startswith("linear"):
            self.linears[id(made)] = buffers["x"], buffers["w"]
        elif kernel == "log_prob":
            self.logits = buffers["logits"]
        return made

    def rows(self, source: Any, m: int, width: int) -> NDArray[np.float32]:
        """[m, width] of a buffer or an image."""
        if not isinstance(source, wgpu.GPUTexture):
            return self.read(source, np.float32, m * width).reshape(m, width)
        place, layout = {"texture": source}, {"bytes_per_row": 16 * source.width}
        raw = self.device.queue.read_texture(place, layout, (source.width, m, 1))
        return np.frombuffer(raw, np.float32).reshape(m, -1)[:, :width]


def watched(llama: Llama, context: int, chunk: int, fast: bool) -> tuple[Watching, Transformer]:
    """A second transformer on the same weights, for a text of `context` tokens."""
    gpu, old = Watching(llama.gpu), llama.model
    make = type(old)
    model = make(gpu, llama.config, old.weights, old.freq_factors, context, context, chunk, llama.kv_f32, fast)
    return gpu, model


def check_texts(source: Source, texts: Iterable[str], device: str | None) -> int:
    """The tokens in a chunk of text. What is wrong with a text, or the device, is said before the work begins."""
    context = min(CONTEXT, source.config.context)
    tokenizer = Tokenizer.from_gguf(source.metadata)
    for text in texts:
        chunks_of(tokenizer, text, context)
    Gpu.open(device).close()
    return context


def calibrate(llama: Llama, text: str, progress: Progress, context: int = CONTEXT) -> dict[str, NDArray[np.float32]]:
    """Per matrix, by GGUF name, the mean square of each column's input."""
    gpu, model = watched(llama, context, context, fast=False)
    chunks = chunks_of(llama.tokenizer, text, context)[: max(1, CALIBRATION_TOKENS // context)]
    names = {
        id(matrix.parts[0].words): (matrix.k, [f"blk.{i}.{tensor}.weight" for tensor in tensors])
        for i, layer in enumerate(model.weights.layers)
        for matrix, tensors in matrices(layer)
    }
    dispatches = model.body(context)
    sums: dict[str, Any] = {}
    for i, ids in enumerate(chunks):
        model.truncate(0)
        model.run(Plan([]), ids)  # puts the ids where the first dispatch wants them
        before: list[Dispatch] = []
        for dispatch in dispatches:
            x, words = gpu.linears.get(id(dispatch), (None, None))
            if id(words) in names:
                width, tensors = names[id(words)]
                model.recorder.submit([(Plan(before), len(ids), 0)])
                squares = np.square(gpu.rows(x, len(ids), width), dtype=np.float64).sum(axis=0)
                sums |= {name: sums.get(name, 0.0) + squares for name in tensors}
                before = []
            before.append(dispatch)
        progress(i + 1, len(chunks))
    return {name: floor(total / (len(chunks) * context)) for name, total in sums.items()}


def matrices(layer: Layer) -> list[tuple[Matrix, tuple[str, ...]]]:
    """The matrices of a layer and the tensors that were joined into each."""
    joined = len(layer.gate_up) == 1
    hidden = [("ffn_gate", "ffn_up")] if joined else [("ffn_gate",), ("ffn_up",)]
    return [
        (layer.qkv, ("attn_q", "attn_k", "attn_v")),
        (layer.attn_output, ("attn_output",)),
        *zip(layer.gate_up, hidden, strict=True),
        (layer.ffn_down, ("ffn_down",)),
    ]


def floor(squares: NDArray[np.float64]) -> NDArray[np.float32]:
    if not np.isfinite(squares).all():
        raise NumericCheckFailed("the model's activations are not numbers", "the source may be damaged")
    least = LEAST * float(squares.mean()) + 1e-30
    return np.clip(squares, least, None).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Quality:
    perplexity: float
    divergence: float = 0.0  # Kullback-Leibler, of the next-token distribution from the original's, in nats
    same_top: float = 1.0  # share of positions with the original's likeliest token


def compare(
    paths: Sequence[Path],
    text: str,
    progress: Progress,
    device: str | None = None,
    context: int = CONTEXT,
    most: int = 0,
) -> list[Quality]:
    """Each model on the text, the first being the original; `most` chunks, 0 for all."""
    with closing(Gpu.open(device)) as gpu:
        models = [Llama(path, device=gpu, context=context) for path in paths]
        chunks = chunks_of(models[0].tokenizer, text, context)[: most or None]
        rows = max(2, min(context, LOGIT_BYTES // (4 * models[0].config.vocab)))
        views = [watched(llama, context, rows, llama.model.fast) for llama in models]
        found = []
        for i, ids in enumerate(chunks):
            for pieces in zip(*(log_probs(*view, ids, rows) for view in views), strict=True):
                place, base = pieces[0]
                targets = np.array(ids)[place.start + 1 : place.stop + 1, None]
                found.append(np.stack([figures(base, logs, targets) for _, logs in pieces]))
            progress(i + 1, len(chunks))
    means = np.concatenate(found, axis=2).mean(axis=2)
    if not (means[:, 0] < 700).all() or not np.isfinite(means).all():
        raise NumericCheckFailed("a model's output is not a number", "the source may be damaged")
    return [Quality(math.exp(loss), divergence, same) for loss, divergence, same in means.tolist()]


def figures(base: NDArray[np.float32], logs: NDArray[np.float32], targets: NDArray[np.int64]) -> NDArray[np.float64]:
    """[3, positions]: what the target cost, divergence from the base, same likeliest token."""
    loss = -np.take_along_axis(logs, targets, axis=1)[:, 0]
    divergence = (np.exp(base) * (base - logs)).sum(axis=1)
    return np.stack([loss, divergence, base.argmax(axis=1) == logs.argmax(axis=1)], dtype=np.float64)


def log_probs(
    gpu: Watching, model: Transformer, ids: list[int], rows: int
) -> Iterator[tuple[range, NDArray[np.float32]]]:
    """[positions, vocab] of the second half of ids but the last, `rows` of ids at a time."""
    model.truncate(0)
    for start in range(0, len(ids), rows):
        piece = ids[start : start + rows]
        model.log_probs(piece)
        place = range(max(start, len(ids) // 2), min(start + len(piece), len(ids) - 1))
        if place:
            logits = gpu.rows(gpu.logits, len(piece), model.config.vocab)[place.start - start : place.stop - start]
            logits = logits - logits.max(axis=1, keepdims=True)
            yield place, logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
