"""Perplexity of a text by llama-perplexity's method: the second half of each chunk of the text is scored."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llamagpu.errors import LlamaGpuError, NumericCheckFailed
from llamagpu.files.tokenizer import Tokenizer
from llamagpu.llama import Llama


@dataclass(frozen=True, slots=True)
class Perplexity:
    value: float
    error: float  # standard error of `value`
    tokens: int  # scored tokens
    chunks: int


def chunks_of(tokenizer: Tokenizer, text: str, context: int) -> list[list[int]]:
    """The text's ids in chunks of `context`. BOS replaces the first id of each chunk if the model uses one."""
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
    """`progress` gets the number of chunks done and of all chunks."""
    chunks = chunks_of(llama.tokenizer, text, context)
    scored: list[NDArray[np.float32]] = []
    with llama.scheduler.alone(context) as sequence:
        for i, chunk in enumerate(chunks):
            sequence.truncate(0)
            scored.append(llama.loaded.engine.log_probs(sequence, chunk)[context // 2 :])
            if progress:
                progress(i + 1, len(chunks))
    losses = -np.concatenate(scored).astype(np.float64)
    mean = losses.mean()
    if not mean < 700:  # NaN, or too large for exp
        raise NumericCheckFailed("the model's output is not a number", "the file may be damaged: fetch it again")
    value = math.exp(mean)
    return Perplexity(value, value * float(losses.std(ddof=1)) / math.sqrt(losses.size), losses.size, len(chunks))
