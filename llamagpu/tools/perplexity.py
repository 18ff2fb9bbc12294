"""Perplexity of a text, by llama-perplexity's method: chunks of it, the second half of each counts."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamagpu.engine.generate import Llama
from llamagpu.errors import LlamaGpuError, NumericCheckFailed
from llamagpu.files.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Perplexity:
    value: float
    error: float  # standard error of `value`
    tokens: int  # that count
    chunks: int


def chunks_of(tokenizer: Tokenizer, text: str, context: int) -> list[list[int]]:
    """The text's ids, `context` at a time, each with BOS in the first place where the model wants one."""
    ids = tokenizer.encode(text, special=False)
    if len(ids) < 2 * context:
        raise LlamaGpuError(
            f"the text has {len(ids)} tokens, and at least two chunks of {context} are needed",
            "give a longer text; perplexity also takes a smaller -c (8 or more)",
        )
    chunks = [ids[start : start + context] for start in range(0, len(ids) - context + 1, context)]
    for chunk in chunks:
        if tokenizer.add_bos and tokenizer.bos_id is not None:
            chunk[0] = tokenizer.bos_id
    return chunks


def perplexity(
    llama: Llama, text: str, context: int = 512, progress: Callable[[int, int], None] | None = None
) -> Perplexity:
    """`progress` gets the chunks done and the chunks in all."""
    chunks = chunks_of(llama.tokenizer, text, context)
    logs: list[np.ndarray[Any, Any]] = []
    for i, chunk in enumerate(chunks):
        llama.model.truncate(0)
        logs.append(llama.model.log_probs(chunk)[context // 2 :])
        if progress:
            progress(i + 1, len(chunks))
    losses = -np.concatenate(logs).astype(np.float64)
    mean = losses.mean()
    if not mean < 700:  # NaN, or beyond what exp can take
        raise NumericCheckFailed(
            "the model's output is not a number", "the file may be damaged: fetch it again"
        )
    value = math.exp(mean)
    return Perplexity(value, value * float(losses.std(ddof=1)) / math.sqrt(losses.size), losses.size, len(chunks))
